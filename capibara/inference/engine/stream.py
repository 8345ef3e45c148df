"""What a request gives back: pieces of text as they come, and in the end the whole."""

from __future__ import annotations

import dataclasses
import enum
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any


class Finish(enum.StrEnum):
    """Why a text ended: an end token or a stop string came, it became as long as it may, or nobody wants it."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclasses.dataclass(frozen=True)
class Piece:
    """One token more.

    Attributes:
      text: what it makes certain of the text; may be empty.
      token: its id; None: what was held back of the text before it ended.
      log_probability: natural logarithm, of the model itself: before temperature, limits and penalty.
      likeliest: (id, log probability) of the likeliest tokens, as many as were asked for.
      drawn: log probability in what it was drawn from: after temperature, limits and penalty; 0 where it was not drawn.
      at_s: when it came, by time.monotonic.
    """

    text: str
    token: int | None
    log_probability: float = 0.0
    likeliest: tuple[tuple[int, float], ...] = ()
    drawn: float = 0.0
    at_s: float = dataclasses.field(default_factory=time.monotonic, compare=False)


@dataclasses.dataclass(frozen=True)
class Decode:
    """One of the texts that a search found.

    Attributes:
      text: without the prompt.
      tokens: of it, without the end token.
      score: by which it is ranked.
      finish: why it ended.
    """

    text: str
    tokens: tuple[int, ...]
    score: float
    finish: Finish


@dataclasses.dataclass(frozen=True)
class Completion:
    """A whole text.

    Attributes:
      text: without the prompt.
      pieces: one for each token (the end token is none of them).
      finish: why it ended.
      prompt_tokens: tokens of the prompt that the model read.
      cached_tokens: those of them that were read before, for another request.
      waited_s: from the request to its first token.
      elapsed_s: from the request to its end.
      end: the end token that came; None: none did.
      end_drawn: its log probability, as `Piece.drawn`.
      decodes: what a search found, as many as were asked for, the best (this text) last as T5X has them; without a
        search: none.
    """

    text: str
    pieces: tuple[Piece, ...]
    finish: Finish
    prompt_tokens: int
    cached_tokens: int
    waited_s: float
    elapsed_s: float
    end: int | None = None
    end_drawn: float = 0.0
    decodes: tuple[Decode, ...] = ()

    @property
    def tokens(self) -> list[int]:
        return [piece.token for piece in self.pieces if piece.token is not None]

    @property
    def drawn(self) -> list[float]:
        """Of each of the tokens `Piece.drawn`."""
        return [piece.drawn for piece in self.pieces if piece.token is not None]


def of_search(completion: Completion) -> dict[str, Any]:
    """What a search found, as JSON values: the score of the text, and where more texts were asked for all of them."""
    decodes = completion.decodes
    if not decodes:
        return {}
    each = [{"text": one.text, "score": one.score, "finish": str(one.finish)} for one in decodes]
    return {"score": decodes[-1].score} | ({"decodes": each} if len(each) > 1 else {})


Item = Piece | Completion | BaseException
"""Of a stream: pieces, then the whole text, or what stopped the engine."""


class Stream:
    """The pieces of one request, as an iterator; `result` waits for the whole.

    Args:
      drive: makes the engine go on where nobody else does; gives False where it goes on by itself.
    """

    def __init__(self, drive: Callable[[], bool]):
        self._drive = drive
        self._arrived: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._give: Callable[[Item], None] = self._arrived.put
        self._giving = threading.Lock()
        self._pieces: list[Piece] = []
        self._end: Completion | BaseException | None = None
        self._began_s = time.monotonic()
        self.cancelled = self._failed = False

    def __iter__(self) -> Iterator[Piece]:
        while True:
            while self._arrived.empty() and self._end is None and self._drive():
                pass
            if self._end is not None:
                return
            item = self._arrived.get()
            if not isinstance(item, Piece):
                self._end = item
                if isinstance(item, BaseException):
                    raise item
                return
            yield item

    def cancel(self) -> None:
        """Ends the text where it is, soon; from any thread."""
        self.cancelled = True

    def result(self) -> Completion:
        """The whole text, when it is there.

        Raises:
          Exception: what stopped the engine.
        """
        for _ in self:
            pass
        if isinstance(self._end, BaseException):
            raise self._end
        assert self._end is not None, "the iterator ends with one of both"
        return self._end

    def forward(self, to: Callable[[Item], None]) -> None:
        """Calls `to` with all that has come and, from the engine's thread, all that comes, in place of the iterator.

        It must not wait: nobody's text goes on meanwhile.
        """
        with self._giving:
            while not self._arrived.empty():
                to(self._arrived.get())
            self._give = to

    def put(self, piece: Piece) -> None:
        """For the engine: one more."""
        self._pieces.append(piece)
        self._hand_on(piece)

    def end(
        self,
        finish: Finish,
        prompt_tokens: int,
        cached_tokens: int,
        end: int | None = None,
        end_drawn: float = 0.0,
        decodes: tuple[Decode, ...] = (),
    ) -> None:
        """For the engine: that was all."""
        now = time.monotonic()
        self._hand_on(
            Completion(
                text="".join(piece.text for piece in self._pieces),
                pieces=tuple(self._pieces),
                finish=finish,
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
                waited_s=(self._pieces[0].at_s if self._pieces else now) - self._began_s,
                elapsed_s=now - self._began_s,
                end=end,
                end_drawn=end_drawn,
                decodes=decodes,
            )
        )

    def fail(self, error: BaseException) -> None:
        """For the engine: nothing comes any more."""
        self._hand_on(error)

    def _hand_on(self, item: Item) -> None:
        with self._giving:
            if not self._failed:
                self._failed = isinstance(item, BaseException)
                self._give(item)
