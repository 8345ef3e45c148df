"""Reads metrics.jsonl from a position on, while a run appends to it, in any store."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from capibara.core import limits
from capibara.core.types import UserError
from capibara.monitoring.metrics_file.loggers import AGAIN, parse
from capibara.storage import stores

BLOCK_BYTES = 1 << 20
_AGAIN_BYTES = tuple(f'"event": "{name}"'.encode() for name in AGAIN)


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
    """A position in metrics.jsonl, at the begin of a line.

    Attributes:
      byte: bytes before it.
      line: lines before it.
    """

    byte: int = 0
    line: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A line of metrics.jsonl.

    Attributes:
      number: of the line, from 0.
      record: its fields; None: it is incomplete, of a run that was killed.
      is_void: a later start or roll-back repeats its step.
    """

    number: int
    record: dict[str, Any] | None
    is_void: bool


class Tail:
    """The lines of a growing metrics.jsonl.

    Args:
      path: the file; it need not exist yet.
      position: where to begin.

    Attributes:
      position: after the last line that was read.
    """

    def __init__(self, path: str, position: Position = Position()):
        self._path, self.position = path, position
        self._again: list[tuple[int, int]] = []  # (line, step) of starts and roll-backs that lie ahead
        self._scanned = position  # up to here

    def read(self) -> list[Line]:
        """The next complete lines, some thousands at most; empty: there are none yet.

        Of lines that are void already when they are read, `is_void` says so.
        """
        self._scan()
        result = []
        content = self._complete(self.position, BLOCK_BYTES)
        for number, text in enumerate(content, self.position.line):
            record = _parsed(text)
            void = record is not None and any(number < line and record["step"] > step for line, step in self._again)
            result.append(Line(number, record, void))
        self.position = _after(self.position, content)
        self._again = [item for item in self._again if item[0] >= self.position.line]
        return result

    def remaining(self) -> int:
        """Complete lines after the position."""
        return sum(len(content) for _, content in self._blocks(self.position))

    def _scan(self) -> None:
        """Finds the starts and roll-backs that lie ahead."""
        for first, content in self._blocks(self._scanned):
            for number, text in enumerate(content, first.line):
                if not any(name in text for name in _AGAIN_BYTES) or (record := _parsed(text)) is None:
                    continue
                if record["kind"] == "event" and record.get("event") in AGAIN:
                    self._again.append((number, record["step"]))
            self._scanned = _after(first, content)

    def _blocks(self, position: Position) -> Iterator[tuple[Position, list[bytes]]]:
        """The complete lines after a position, in blocks, each with the position of its begin."""
        while content := self._complete(position, BLOCK_BYTES):
            yield position, content
            position = _after(position, content)

    def _complete(self, position: Position, most: int) -> list[bytes]:
        """The complete lines of the next block; empty: there are none."""
        store = stores.of(self._path)
        try:
            size = store.size(self._path)
        except FileNotFoundError:
            return []
        stop = min(size, position.byte + most)
        if stop <= position.byte:
            return []
        block = store.read_range(self._path, position.byte, stop)
        end = block.rfind(b"\n")
        if end < 0 and len(block) >= limits.LINE_BYTES:
            raise UserError(
                f"{self._path} has a line of more than {limits.LINE_BYTES:,} bytes at byte {position.byte:,}: remove it"
            )
        if end < 0:
            return self._complete(position, 2 * most) if stop < size else []
        return block[:end].split(b"\n")


def is_within(path: str, position: Position) -> bool:
    """Whether a file has a line's begin at the position: not if another file has taken its place."""
    try:
        return position.byte == 0 or stores.of(path).read_range(path, position.byte - 1, position.byte) == b"\n"
    except (OSError, UserError):
        return False


def _after(position: Position, content: list[bytes]) -> Position:
    return Position(position.byte + sum(len(text) + 1 for text in content), position.line + len(content))


def _parsed(text: bytes) -> dict[str, Any] | None:
    return parse(text.decode("utf-8", errors="replace"))
