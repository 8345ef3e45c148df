"""The texts of one request while they are generated: of the engine, or one answer that is made of several."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

from capibara.inference.calls.dialect import Dialect
from capibara.inference.calls.served_tool import ServedTool
from capibara.inference.engine.reading import TokenScores
from capibara.inference.engine.requests.stream import Completion, Finish, Item, Piece, ProcessLost, Stream
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.server.service.http_errors import SOON, Refusal, lost_process

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class RequestedText:
    """One requested text.

    It has the prompt's ids, the sampling, the end token ids, how many of the likeliest tokens to return, the adapter,
    None for the model alone, the ids of special tokens that are spelled in the text, the salt of the prefix cache, how a
    chat's answer is read, whether the prompt ends inside a thought, the scores of the prompt's tokens, None if they are not
    asked for, the tool that the server calls itself, None without one, and how several texts become its answer, None if it
    is the answer.
    """

    ids: Sequence[int]
    sampling: Sampling
    ends: tuple[int, ...] = ()
    likeliest: int = 0
    adapter: str | None = None
    spelled: tuple[int, ...] = ()
    salt: str = ""
    dialect: Dialect | None = None
    thinks: bool = False
    scores: TokenScores | None = None
    tool: ServedTool | None = None
    course: Course | None = None


class Course(abc.ABC):
    """How several texts of the model, drawn one after the other or together, become the answer to a request."""

    @property
    @abc.abstractmethod
    def texts(self) -> int:
        """The most texts that are drawn together."""

    @abc.abstractmethod
    def items(self, ask: RequestedText, answer: LongAnswer) -> AsyncIterator[Piece | Completion]:
        """The pieces of the answer and, last, its completion.

        Args:
          ask: the text that is asked first.
          answer: draws texts.
        """


def shutting_down() -> Refusal:
    """The error for requests after a signal, or whose texts did not finish in time."""
    return Refusal(503, "the server is shutting down", code="shutting_down", headers=SOON)


class Answers(abc.ABC):
    """The texts of one request: iterates over (index, piece) and, last for each text, (index, completion).

    It belongs to an event loop.

    Attributes:
      deadline_s: by time.monotonic.
      texts: how many wait or run; of an answer that is made of several, the most that are drawn together, until it ends.

    Raises (during iteration):
      Refusal: the deadline has passed, or the texts were cancelled.
      Exception: the engine's error.
    """

    deadline_s: float
    texts: int

    @abc.abstractmethod
    def __aiter__(self) -> AsyncIterator[tuple[int, Piece | Completion]]: ...

    @abc.abstractmethod
    def cancel(self) -> None:
        """Cancels the texts; frees their slots."""

    async def all(self) -> list[Completion]:
        """The complete texts, in order."""
        completions = {index: item async for index, item in self if isinstance(item, Completion)}
        return [completions[index] for index in range(len(completions))]


class StreamedTexts(Answers):
    """Texts of the engine, whose thread adds items.

    Args:
      streams: one per text.
      deadline_s: by time.monotonic.
      ended: called when a text ends, for any reason.
    """

    def __init__(self, streams: Sequence[Stream], deadline_s: float, ended: Callable[[StreamedTexts, Item], None]):
        self.deadline_s, self.texts = deadline_s, len(streams)
        self._streams, self._ended = streams, ended
        self._arrived: asyncio.Queue[tuple[int, Item]] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        for index, stream in enumerate(streams):
            stream.forward(functools.partial(self._from_engine, loop, index))

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece | Completion]]:
        left = len(self._streams)
        while left:
            try:
                async with asyncio.timeout(self.deadline_s - time.monotonic()):
                    index, item = await self._arrived.get()
            except TimeoutError:
                self.cancel()
                raise Refusal(504, "the text took too long: ask for fewer tokens", code="timeout") from None
            if isinstance(item, BaseException):
                self.cancel()
                raise lost_process() if isinstance(item, ProcessLost) else item
            if isinstance(item, Completion):
                if item.finish is Finish.CANCELLED:
                    raise shutting_down()
                left -= 1
            yield index, item

    def cancel(self) -> None:
        for stream in self._streams:
            stream.cancel()

    def _from_engine(self, loop: asyncio.AbstractEventLoop, index: int, item: Item) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits any more
            loop.call_soon_threadsafe(self._take, index, item)

    def _take(self, index: int, item: Item) -> None:
        self._arrived.put_nowait((index, item))
        if not isinstance(item, Piece):
            self.texts -= 1
            self._ended(self, item)


class LongAnswer(Answers):
    """One answer that a course makes of several texts.

    Args:
      ask: the text that is asked first.
      course: how they become the answer.
      deadline_s: by time.monotonic.
      draw: submits texts, with a deadline.
      ended: called when it ends, for any reason, perhaps again.
    """

    def __init__(
        self,
        ask: RequestedText,
        course: Course,
        deadline_s: float,
        draw: Callable[[Sequence[RequestedText], float], Answers],
        ended: Callable[[Answers], None],
    ):
        self.deadline_s, self.texts = deadline_s, course.texts
        self._ask, self._course, self._draw, self._ended = ask, course, draw, ended
        self._drawn: Answers | None = None
        self._cancelled = False

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece | Completion]]:
        try:
            async for item in self._course.items(self._ask, self):
                yield 0, item
        finally:
            self._ended(self)

    def cancel(self) -> None:
        self._cancelled = True
        if self._drawn is not None:
            self._drawn.cancel()
        self._ended(self)

    def draw(self, asks: Sequence[RequestedText]) -> Answers:
        """Submits texts; raises Refusal: it was cancelled."""
        self._check()
        self._drawn = self._draw(asks, self.deadline_s)
        return self._drawn

    async def call(self, pool: Executor, function: Callable[[], T]) -> T:
        """Calls a function in a thread of a pool; raises Refusal: it took too long, or the answer was cancelled."""
        self._check()
        try:
            async with asyncio.timeout(self.deadline_s - time.monotonic()):
                return await asyncio.get_running_loop().run_in_executor(pool, function)
        except TimeoutError:
            self.cancel()
            raise Refusal(504, "the answer took too long: ask for less", code="timeout") from None

    def _check(self) -> None:
        """Raises Refusal if it was cancelled."""
        if self._cancelled:
            raise shutting_down()
