"""The text of a model, read while it arrives.

A function that reads it is a generator: it yields an event where a part of the text is understood, and None where it
needs more text. Its value is what `yield from` returns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")

_LONGEST_HEAD = 512  # characters of a call before its arguments: its name, and an id
_SPACES = re.compile(r"\s*")


class Content(NamedTuple):
    """A piece of the answer."""

    text: str


class Reasoning(NamedTuple):
    """A piece of a thought."""

    text: str


class Call(NamedTuple):
    """A call begins; `id` is the model's, if its form has one that the template needs."""

    name: str
    id: str | None = None


class Arguments(NamedTuple):
    """A piece of the last call's arguments, which are JSON."""

    text: str


class CallEnd(NamedTuple):
    """The last call is complete."""


class Broken(NamedTuple):
    """The last call is malformed or cut off.

    `text` is all of it as the model wrote it, `rest` the part of which no event came before.
    """

    text: str
    rest: str


Event: TypeAlias = Content | Reasoning | Call | Arguments | CallEnd | Broken
Steps: TypeAlias = Generator[Event | None, None, T]


class Malformed(Exception):
    """The text is not in the expected form."""


class Text:
    """A text that arrives in pieces.

    Attributes:
      at: index of the next character to read.
      ended: whether no more text arrives.
    """

    def __init__(self) -> None:
        self.at, self.ended = 0, False
        self._text = ""
        self._streamed: int | None = None

    def add(self, text: str) -> None:
        """Adds the next piece."""
        self._text += text

    def part(self, start: int, end: int | None = None) -> str:
        """The text from one index to another, by default to the next character to read."""
        return self._text[start : self.at if end is None else end]

    def forget(self) -> None:
        """Drops what was read; indices change."""
        self._text, self.at = self._text[self.at :], 0

    def more(self) -> Steps[bool]:
        """Waits for more text; False: there is none."""
        if self.ended:
            return False
        yield from self._stream()
        yield None
        return True

    def streamed(self, steps: Steps[None]) -> Steps[None]:
        """Yields what `steps` reads as arguments, as soon as it is read."""
        self._streamed = self.at
        try:
            yield from steps
            yield from self._stream()
        finally:
            self._streamed = None

    def _stream(self) -> Steps[None]:
        if self._streamed is not None and self._streamed < self.at:
            start, self._streamed = self._streamed, self.at
            yield Arguments(self.part(start))

    def peek(self, offset: int = 0) -> Steps[str]:
        """A character that is not read yet; empty: the text ends before it."""
        while self.at + offset >= len(self._text):
            if not (yield from self.more()):
                return ""
        return self._text[self.at + offset]

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Reads as much as matches a pattern that matches each prefix of what it matches."""
        start = self.at
        while True:
            match = pattern.match(self._text, self.at)
            assert match is not None, "it matches the empty text"
            self.at = match.end()
            if self.at < len(self._text) or not (yield from self.more()):
                return self.part(start)

    def spaces(self) -> Steps[str]:
        """Reads white space."""
        return (yield from self.run(_SPACES))

    def starts(self, *literals: str) -> Steps[str]:
        """The longest of the literals that comes next; empty: none. Reads nothing."""
        size = max(map(len, literals))
        while True:
            rest = self._text[self.at : self.at + size]
            longer = any(len(rest) < len(literal) and literal.startswith(rest) for literal in literals)
            if not longer or not (yield from self.more()):
                return max((literal for literal in literals if rest.startswith(literal)), key=len, default="")

    def take(self, *literals: str) -> Steps[str]:
        """Reads the longest of the literals that comes next; empty: none."""
        literal = yield from self.starts(*literals)
        self.at += len(literal)
        return literal

    def expect(self, *literals: str) -> Steps[str]:
        """Reads one of the literals.

        Raises:
          Malformed: none comes next.
        """
        literal = yield from self.take(*literals)
        if not literal:
            raise Malformed
        return literal

    def until(self, literals: tuple[str, ...], event: Callable[[str], Event], forget: bool = False) -> Steps[str]:
        """Reads up to the first of the literals, and that; yields the text before it. Empty: the text ends first.

        Args:
          literals: that are looked for.
          event: of a piece of the text before.
          forget: what was read is not needed again.
        """
        while True:
            places = [
                (place, -len(literal)) for literal in literals if (place := self._text.find(literal, self.at)) >= 0
            ]
            end, size = min(places, default=(self._before_partial(literals), 0))
            if size == 0 and self.ended:
                end = len(self._text)
            if end > self.at:
                piece, self.at = self._text[self.at : end], end
                yield event(piece)
            if size:
                self.at -= size
                return self.part(end)
            if forget:
                self.forget()
            if not (yield from self.more()):
                if self.at == len(self._text):
                    return ""

    def _before_partial(self, literals: tuple[str, ...]) -> int:
        """Where a literal may begin at the end of the text; else the text's end."""
        size = max(map(len, literals), default=1) - 1
        starts = range(max(self.at, len(self._text) - size), len(self._text))
        return next(
            (start for start in starts if any(literal.startswith(self._text[start:]) for literal in literals)),
            len(self._text),
        )

    def head(self, *stops: str, most: int | None = _LONGEST_HEAD) -> Steps[str]:
        """Reads a text up to the first of the literals, which is not read.

        Args:
          stops: the literals.
          most: the longest text in characters; None: any.

        Raises:
          Malformed: it is too long, or the text ends first.
        """
        start = scanned = self.at
        size = max(map(len, stops))
        while True:
            places = [place for stop in stops if (place := self._text.find(stop, scanned)) >= 0]
            self.at = min(places, default=len(self._text))
            if most is not None and self.at - start > most + size:
                self.at = start + most + size + 1  # the same however the text arrives: another call may follow
                raise Malformed
            if places:
                return self.part(start)
            scanned = max(scanned, len(self._text) - size)
            if not (yield from self.more()):
                raise Malformed
