"""JSON lines and texts, in blocks of equal bytes: a line belongs to the block that it begins in.

So no file has to be read through to know where its blocks are, and each can be read by itself.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from capibara.core import limits
from capibara.core.types import UserError
from capibara.data.shards.formats import SLACK_BYTES, Record, ShardFormat, read
from capibara.storage.remote import Entry


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonLines(ShardFormat):
    """A record a line."""

    @property
    def name(self) -> str:
        return "jsonl"

    def blocks(self, shard: Entry) -> np.ndarray:
        if shard.size and (line := _last_line(shard)):
            try:
                limits.parse_json(line, finite=False)
            except ValueError as error:
                raise UserError(
                    f"{shard.url} is cut short: its last line is not whole ({limits.cause(error)}): copy it again"
                ) from None
        return self.byte_blocks(shard)

    def records(self, shard: Entry, start: int, stop: int) -> list[tuple[int, Record]]:
        at, content = whole_lines(shard, start, stop)
        found: list[tuple[int, Record]] = []
        for line in content.split(b"\n"):
            if line and line != b"\r":
                found.append((at, line))
            at += len(line) + 1
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextLines(ShardFormat):
    """Texts, cut at line ends.

    Attributes:
      document_bytes: of a document, at least; a block's last one has what is left.
    """

    document_bytes: int

    @property
    def name(self) -> str:
        return "text"

    def blocks(self, shard: Entry) -> np.ndarray:
        return self.byte_blocks(shard)

    def records(self, shard: Entry, start: int, stop: int) -> list[tuple[int, Record]]:
        at, content = whole_lines(shard, start, stop)
        found: list[tuple[int, Record]] = []
        begin = 0
        while begin < len(content):
            end = content.find(b"\n", begin + self.document_bytes - 1) + 1 or len(content)
            found.append((at + begin, content[begin:end]))
            begin = end
        return found


def whole_lines(shard: Entry, start: int, stop: int) -> tuple[int, bytes]:
    """The lines of a file that begin from `start` up to `stop`, and where the first of them begins.

    Raises:
      UserError: one is longer than limits.LINE_BYTES.
    """
    begin = max(0, start - 1)  # with the byte that says whether a line begins at `start`
    content = read(shard, begin, min(stop + SLACK_BYTES, shard.size))
    first = content.find(b"\n") + 1 if start else 0
    if start and (not first or begin + first >= stop):
        return stop, b""  # all of it is in one line, which began before
    last = stop - 1 - begin  # a line end from here on is the last line's
    more = SLACK_BYTES
    while (end := content.find(b"\n", last)) < 0 and begin + len(content) < shard.size:
        last, at = len(content), begin + len(content)
        content += read(shard, at, min(at + more, shard.size))
        limits.check_line(begin + len(content) - stop, f"{shard.url} at byte {stop:,}")
        more *= 2
    return begin + first, content[first : end + 1 if end >= 0 else len(content)]


def _last_line(shard: Entry) -> bytes:
    """What comes after the last line end of a file."""
    size = min(SLACK_BYTES, shard.size)
    while True:
        tail = read(shard, shard.size - size, shard.size)
        end = tail.rfind(b"\n")
        if end >= 0 or size == shard.size:
            return tail[end + 1 :].strip()
        limits.check_line(size, f"{shard.url}: its last line")
        size = min(4 * size, shard.size)
