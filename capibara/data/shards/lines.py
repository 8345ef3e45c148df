"""JSON lines and texts in blocks of equal size: a line belongs to the block in which it begins.

So the blocks of a file are known without reading it, and each block can be read on its own.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from capibara.core import limits
from capibara.core.types import UserError
from capibara.data.shards.formats import SLACK_BYTES, Record, ShardFormat, read
from capibara.data.text import plain
from capibara.storage.store import Entry


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonLines(ShardFormat):
    """One JSON record per line."""

    @property
    def name(self) -> str:
        return "jsonl"

    def blocks(self, shard: Entry) -> np.ndarray:
        if shard.size and (line := _last_line(shard)):
            try:
                limits.parse_json(line, finite=False)
            except ValueError as error:
                raise UserError(
                    f"{plain.origin(shard.url)} is cut short: its last line is incomplete ({limits.cause(error)}): copy it again"
                ) from None
        return self.byte_blocks(shard)

    def records(self, shard: Entry, start: int, stop: int) -> list[tuple[int, Record]]:
        at, content = whole_lines(shard, start, stop)
        result: list[tuple[int, Record]] = []
        for line in content.split(b"\n"):
            if line and not line.isspace():
                result.append((at, line))
            at += len(line) + 1
        return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextLines(ShardFormat):
    """Texts, split at line ends.

    Attributes:
      document_bytes: smallest size of a document in bytes; a block's last one may be smaller.
    """

    document_bytes: int

    @property
    def name(self) -> str:
        return "text"

    def blocks(self, shard: Entry) -> np.ndarray:
        return self.byte_blocks(shard)

    def records(self, shard: Entry, start: int, stop: int) -> list[tuple[int, Record]]:
        at, content = whole_lines(shard, start, stop)
        result: list[tuple[int, Record]] = []
        begin = 0
        while begin < len(content):
            end = content.find(b"\n", begin + self.document_bytes - 1) + 1 or len(content)
            result.append((at + begin, content[begin:end]))
            begin = end
        return result


def whole_lines(shard: Entry, start: int, stop: int) -> tuple[int, bytes]:
    """The lines of a file that begin in [start, stop), after the position of the first of them.

    Raises:
      UserError: a line is longer than limits.LINE_BYTES.
    """
    begin = max(0, start - 1)  # include the byte before `start`: a line end means that a line begins there
    content = read(shard, begin, min(stop + SLACK_BYTES, shard.size))
    first = content.find(b"\n") + 1 if start else 0
    if start and (not first or begin + first >= stop):
        return stop, b""  # the range is inside a line that begins before it
    last = stop - 1 - begin  # the first line end from here on ends the last line
    more = SLACK_BYTES
    while (end := content.find(b"\n", last)) < 0 and begin + len(content) < shard.size:
        last, at = len(content), begin + len(content)
        content += read(shard, at, min(at + more, shard.size))
        limits.check_line(begin + len(content) - stop, f"{plain.origin(shard.url)} at byte {stop:,}")
        more *= 2
    return begin + first, content[first : end + 1 if end >= 0 else len(content)]


def _last_line(shard: Entry) -> bytes:
    """The bytes after the last line end of a file."""
    size = min(SLACK_BYTES, shard.size)
    while True:
        tail = read(shard, shard.size - size, shard.size)
        end = tail.rfind(b"\n")
        if end >= 0 or size == shard.size:
            return tail[end + 1 :].strip()
        limits.check_line(size, f"{plain.origin(shard.url)}: its last line")
        size = min(4 * size, shard.size)
