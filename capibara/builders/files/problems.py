"""What was wrong with the input: counted by kind, the first of each kind with file and line."""

from __future__ import annotations

import bisect
import dataclasses
import enum
from collections.abc import Iterator, Mapping
from typing import Any, Self

from capibara.core.types import UserError

SHOWN = 20  # problems of a kind that are kept with file and line; all are counted
_MESSAGE_CHARACTERS = 300


class Kind(enum.StrEnum):
    """Kinds of problems of any file; a builder adds its own names."""

    MALFORMED = "malformed"  # it does not have the expected form, such as JSON
    TRUNCATED = "truncated"  # it ends in the middle of a line or of its compressed data
    ENCODING = "encoding"  # it is no text in UTF-8
    TOO_LONG = "too_long"  # a line exceeds the limit
    TOO_LARGE = "too_large"  # a file, or what it unpacks to, exceeds the limit
    CORRUPTED = "corrupted"  # its compressed data is wrong
    UNREADABLE = "unreadable"  # it cannot be opened, or the disk fails
    LEFT_OUT = "left_out"  # a folder has it besides the files that are read
    EMPTY = "empty"  # a file without a byte


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class Problem:
    """One skipped piece of input.

    Attributes:
      path: the file, named as the user named it.
      line: the line from 1, or the item of a list; 0: the file as a whole.
      kind: a `Kind`, or a builder's own name.
      message: the cause, on one line.
    """

    path: str
    line: int
    kind: str
    message: str

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}" if self.line else self.path
        return f"{where}: {self.kind}: {self.message}"


class Problems:
    """Counts of problems by kind, and the first `SHOWN` of each kind in the order of file and line.

    The result does not depend on the order in which problems are added or merged, so that several workers report the
    same as one.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._first: dict[str, list[Problem]] = {}

    def __bool__(self) -> bool:
        return bool(self._counts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Problems) and self.as_json() == other.as_json()

    def __iter__(self) -> Iterator[Problem]:
        """The problems that are kept, by kind, then by file and line."""
        for kind in sorted(self._first):
            yield from self._first[kind]

    @property
    def total(self) -> int:
        """The number of problems of all kinds."""
        return sum(self._counts.values())

    @property
    def left_out(self) -> int:
        """The number of those that are no fault of the input: files that are not read."""
        return sum(self._counts.get(kind, 0) for kind in (Kind.LEFT_OUT, Kind.EMPTY))

    @property
    def counts(self) -> dict[str, int]:
        """The number of problems of each kind."""
        return dict(sorted(self._counts.items()))

    def add(self, path: str, line: int, kind: str, message: str) -> None:
        """Counts a problem; see `Problem`."""
        kind = str(kind)
        self._counts[kind] = self._counts.get(kind, 0) + 1
        first = self._first.setdefault(kind, [])
        if len(first) < SHOWN or (path, line) <= (first[-1].path, first[-1].line):
            text = " ".join(message.split())
            text = text if len(text) <= _MESSAGE_CHARACTERS else f"{text[: _MESSAGE_CHARACTERS - 3]}..."
            bisect.insort(first, Problem(printable(path), line, kind, printable(text)))
            del first[SHOWN:]

    def merge(self, other: Problems) -> None:
        """Adds the problems of a part of the input, such as a worker's."""
        for kind, count in other._counts.items():
            self._counts[kind] = self._counts.get(kind, 0) + count
            self._first[kind] = sorted([*self._first.get(kind, ()), *other._first.get(kind, ())])[:SHOWN]

    def as_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads: the counts, and the first problems of each kind."""
        first = [{"path": item.path, "line": item.line, "kind": item.kind, "message": item.message} for item in self]
        return {"total": self.total, "counts": self.counts, "first": first}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The problems that `as_json` wrote.

        Raises:
          UserError: the value has another form.
        """
        result = cls()
        try:
            result._counts = {str(kind): int(count) for kind, count in value["counts"].items()}
            for item in value["first"]:
                problem = Problem(str(item["path"]), int(item["line"]), str(item["kind"]), str(item["message"]))
                bisect.insort(result._first.setdefault(problem.kind, []), problem)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UserError("the problems must have counts and first, as a manifest has them: build it again") from None
        return result

    def text(self) -> str:
        """Lines for the user: the counts, then the first problems of each kind; "" if there are none."""
        if not self:
            return ""
        counts = ", ".join(f"{count:,} {kind}" for kind, count in self.counts.items())
        lines = [f"skipped {self.total:,} {'piece' if self.total == 1 else 'pieces'} of input: {counts}"]
        for kind, count in self.counts.items():
            shown = self._first.get(kind, [])
            lines += [f"  {item}" for item in shown]
            lines += [f"  ... and {count - len(shown):,} more that are {kind}"] if count > len(shown) else []
        return "\n".join(lines)


def printable(text: str) -> str:
    """The text without characters that break a line or cannot be written in UTF-8."""
    if text.isprintable():
        return text
    return "".join(item if item.isprintable() else item.encode("unicode_escape").decode() for item in text)
