"""The result of a request: pieces of text as they are generated, and finally the whole."""

from __future__ import annotations

import dataclasses
import enum
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any


class Finish(enum.StrEnum):
    """Why a text ended: at an end token or a stop string, at its length limit, or cancelled."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclasses.dataclass(frozen=True)
class Piece:
    """One more token.

    Attributes:
      text: the text that it completes; may be empty.
      token: its id; None: the rest of the text that was held back at the end.
      log_probability: natural logarithm, from the model itself: before temperature, limits and penalty.
      likeliest: (id, log probability) of the likeliest tokens, as many as requested.
      drawn: log probability under the distribution it was drawn from: after temperature, limits and penalty; 0 for
        greedy.
      lead: white space between the prompt and a text that begins with this piece; tokenizers drop it at the beginning of
        a text.
      at_s: time of arrival, by time.monotonic.
    """

    text: str
    token: int | None
    log_probability: float = 0.0
    likeliest: tuple[tuple[int, float], ...] = ()
    drawn: float = 0.0
    lead: str = ""
    at_s: float = dataclasses.field(default_factory=time.monotonic, compare=False)


@dataclasses.dataclass(frozen=True)
class Decode:
    """One of the texts that beam search found.

    Attributes:
      text: without the prompt.
      tokens: its tokens, without the end token.
      score: its rank.
      finish: why it ended.
      lead: white space between the prompt and the text, as in `Piece`.
    """

    text: str
    tokens: tuple[int, ...]
    score: float
    finish: Finish
    lead: str = ""


@dataclasses.dataclass(frozen=True)
class Completion:
    """A complete text.

    Attributes:
      text: without the prompt.
      pieces: one per token, except the end token.
      finish: why it ended.
      prompt_tokens: prompt tokens that the model read.
      unread: those that it did not, beyond its length: a decoder's first ones, an encoder's last ones.
      cached_tokens: those of them found in the prefix cache.
      waited_s: from the request to its first token.
      elapsed_s: from the request to its end.
      ending: the end token, which has no text; None: it did not end with one.
      stop: the stop string that ended it; None: none did.
      decodes: the results of beam search, as many as requested, the best one (this text) last as in T5X; otherwise
        empty.
    """

    text: str
    pieces: tuple[Piece, ...]
    finish: Finish
    prompt_tokens: int
    unread: int
    cached_tokens: int
    waited_s: float
    elapsed_s: float
    ending: Piece | None = None
    stop: str | None = None
    decodes: tuple[Decode, ...] = ()

    @property
    def end(self) -> int | None:
        """The end token."""
        return None if self.ending is None else self.ending.token

    @property
    def end_drawn(self) -> float:
        """`Piece.drawn` of the end token; 0 without one."""
        return 0.0 if self.ending is None else self.ending.drawn

    @property
    def tokens(self) -> list[int]:
        return [piece.token for piece in self.pieces if piece.token is not None]

    @property
    def lead(self) -> str:
        """White space between the prompt and the text, as in `Piece`."""
        return "".join(piece.lead for piece in self.pieces)

    @property
    def drawn(self) -> list[float]:
        """`Piece.drawn` of each token."""
        return [piece.drawn for piece in self.pieces if piece.token is not None]


def of_search(completion: Completion) -> dict[str, Any]:
    """Results of beam search as JSON values: the text's score, and all texts if several were requested."""
    decodes = completion.decodes
    if not decodes:
        return {}
    each = [{"text": item.text, "score": item.score, "finish": str(item.finish)} for item in decodes]
    return {"score": decodes[-1].score} | ({"decodes": each} if len(each) > 1 else {})


class ProcessLost(Exception):
    """Another process of the engine's mesh is gone, and the texts that it computed with this one."""


Item = Piece | Completion | BaseException
"""Items of a stream: pieces, then the complete text, or the engine's error."""


class Stream:
    """The pieces of one request, as an iterator; `result` waits for the complete text.

    Args:
      drive: makes the engine work if it has no thread of its own; returns False if it has one.

    Attributes:
      on_end: called once, when the text or an error has been delivered.
    """

    def __init__(self, drive: Callable[[], bool]):
        self._drive = drive
        self._arrived: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._give: Callable[[Item], None] = self._arrived.put
        self._giving = threading.Lock()
        self._pieces: list[Piece] = []
        self._end: Completion | BaseException | None = None
        self._began_s = time.monotonic()
        self.cancelled = self._ended = False
        self.on_end: Callable[[], None] = lambda: None
        self.unread = 0  # of the prompt's tokens, as in Completion

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
        """Ends the text early; thread-safe."""
        self.cancelled = True

    def result(self) -> Completion:
        """Waits for the complete text.

        Raises:
          Exception: the engine's error.
        """
        for _ in self:
            pass
        if isinstance(self._end, BaseException):
            raise self._end
        assert self._end is not None, "the iterator ends with one of them"
        return self._end

    def forward(self, to: Callable[[Item], None]) -> None:
        """Passes all items, received and future ones, to `to` instead of the iterator, from the engine's thread.

        `to` must not block: it would stop all texts.
        """
        with self._giving:
            while not self._arrived.empty():
                to(self._arrived.get())
            self._give = to

    def put(self, piece: Piece) -> None:
        """For the engine: adds a piece."""
        self._pieces.append(piece)
        self._deliver(piece)

    def end(
        self,
        finish: Finish,
        prompt_tokens: int,
        cached_tokens: int,
        ending: Piece | None = None,
        decodes: tuple[Decode, ...] = (),
        stop: str | None = None,
    ) -> None:
        """For the engine: ends the text."""
        now = time.monotonic()
        self._deliver(
            Completion(
                text="".join(piece.text for piece in self._pieces),
                pieces=tuple(self._pieces),
                finish=finish,
                prompt_tokens=prompt_tokens,
                unread=self.unread,
                cached_tokens=cached_tokens,
                waited_s=(self._pieces[0].at_s if self._pieces else now) - self._began_s,
                elapsed_s=now - self._began_s,
                ending=ending,
                stop=stop,
                decodes=decodes,
            )
        )

    def fail(self, error: BaseException) -> None:
        """For the engine: ends the stream with an error."""
        self._deliver(error)

    def _deliver(self, item: Item) -> None:
        with self._giving:
            if not self._ended:
                self._ended = isinstance(item, BaseException)
                try:
                    self._give(item)
                    self._ended = not isinstance(item, Piece)  # only then: if that raises, the error is delivered
                finally:
                    if self._ended:
                        self.on_end()
