"""Reads ArrayRecord files by byte ranges: the footer has the positions of their chunks; a block is some adjacent chunks.

The library array_record only opens local files. The layout is Riegeli's
(https://github.com/google/riegeli/blob/master/doc/riegeli_records_file_format.md): pages of 64 KiB, each with a header of
24 bytes that interrupts the chunk there; chunks have a header of 40 bytes, then the records' sizes and values. The last
64 KiB contain a record with the position of the footer's chunk (array_record/cpp/array_record_writer.cc).
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator

import numpy as np

from capibara.core import extras, limits
from capibara.core.types import UserError
from capibara.data.shards.formats import Record, ShardFormat, read
from capibara.data.shards.protobuf import Malformed, fields, varint
from capibara.storage.store import Entry

_PAGE, _PAGE_HEADER, _CHUNK_HEADER = 1 << 16, 24, 40
_MAGIC = 0x71930E704FDAE05E
_CODECS = {ord("z"): "zstd", ord("b"): "brotli", ord("s"): "snappy"}
_MOST_BYTES = 1 << 30  # largest size of a chunk, and of a block's records when unpacked
_RECORDS, _TRANSPOSED = ord("r"), ord("t")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayRecords(ShardFormat):
    """ArrayRecord files of grain, TFDS and array_record, with any compression, but not transposed."""

    @property
    def name(self) -> str:
        return "array_record"

    def blocks(self, shard: Entry) -> np.ndarray:
        footer = _footer_position(shard)
        try:
            chunk = _chunk(shard, footer, shard.size)
            begins = [_footer_entry(record) for record in chunk[1:]]
        except (Malformed, IndexError, struct.error) as error:
            raise _corrupted(shard, footer, error) from None
        begins.append(footer)
        if sorted(set(begins)) != begins:
            raise _corrupted(shard, footer, "its chunks are not in order")
        starts, at = [], None
        for begin in begins[:-1]:
            if at is None or begin - at >= self.block_bytes:
                starts.append(begin)
                at = begin
        return np.array(list(zip(starts, [*starts[1:], footer], strict=False)), np.int64).reshape(-1, 2)

    def records(self, shard: Entry, start: int, stop: int) -> list[tuple[int, Record]]:
        try:
            return [(at, record) for at, record in _records(shard, start, stop)]
        except (Malformed, IndexError, struct.error) as error:
            raise _corrupted(shard, start, error) from None


def _corrupted(shard: Entry, at: int, why: object) -> UserError:
    return UserError(f"{shard.url} is corrupted at byte {at:,} ({why}): copy it again")


def _footer_position(shard: Entry) -> int:
    """The position of the footer's chunk, which lists all others."""
    if shard.size < 2 * _PAGE or shard.size % _PAGE:
        raise UserError(f"{shard.url} is no ArrayRecord file, or cut short ({shard.size:,} bytes): copy it again")
    at = shard.size - _PAGE
    try:
        (first, *_) = _chunk(shard, at, shard.size)
        found = dict(fields(first))
    except (Malformed, IndexError, ValueError, struct.error):
        found = {}
    footer = found.get(1)
    if found.get(2) != _MAGIC or not isinstance(footer, int) or not 0 < footer < at:
        raise UserError(
            f"{shard.url} is no ArrayRecord file, or cut short (no end mark in its last page): copy it again"
        )
    return footer


def _footer_entry(record: bytes) -> int:
    """The position of a chunk, from a message ArrayRecordFooter."""
    at = dict(fields(record)).get(1, 0)
    if not isinstance(at, int):
        raise Malformed("a chunk's position is no number")
    return at


def _records(shard: Entry, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """The records of the chunks from `start` to `stop`, each with the position of its chunk plus its number in it."""
    if stop - start > 2 * _MOST_BYTES:
        raise Malformed(f"a chunk of {stop - start:,} bytes")
    content = read(shard, start, stop)
    at, unpacked = start, 0
    while at < stop:
        number = at
        values, at = _parsed(content, start, at)
        unpacked += sum(map(len, values))
        if unpacked > _MOST_BYTES:
            raise Malformed(f"more than {_MOST_BYTES:,} bytes unpacked")
        for record in values:
            yield number, record
            number += 1


def _chunk(shard: Entry, at: int, limit: int) -> list[bytes]:
    """The records of one chunk that begins at `at`."""
    head_end = min(at + _CHUNK_HEADER + 2 * _PAGE_HEADER, limit)
    size = _header(_plain(read(shard, at, head_end), at))[0]
    pages = (size + _CHUNK_HEADER) // (_PAGE - _PAGE_HEADER) + 2
    stop = min(at + _CHUNK_HEADER + size + pages * _PAGE_HEADER, limit)
    return _parsed(read(shard, at, stop), at, at)[0]


def _plain(content: bytes, at: int) -> bytes:
    """Removes the page headers from bytes that begin at position `at` of the file."""
    parts, begin = [], 0
    while begin < len(content):
        inside = (at + begin) % _PAGE
        if inside < _PAGE_HEADER:  # a header, or the rest of one
            begin += _PAGE_HEADER - inside
            inside = _PAGE_HEADER
        parts.append(content[begin : begin + _PAGE - inside])
        begin += _PAGE - inside
    return b"".join(parts)


def _end(at: int, count: int) -> int:
    """The position after `count` bytes from `at`, not counting page headers."""
    while count:
        inside = at % _PAGE
        if inside < _PAGE_HEADER:
            at += _PAGE_HEADER - inside
            inside = _PAGE_HEADER
        step = min(count, _PAGE - inside)
        at, count = at + step, count - step
    return at


def _header(plain: bytes) -> tuple[int, int, int]:
    """Parses a chunk's header: the size of its data in bytes, its type, and the number of its records."""
    _, size, _, kind, _ = struct.unpack_from("<5Q", plain)
    if size > _MOST_BYTES:
        raise Malformed(f"a chunk of {size:,} bytes")
    return size, kind & 0xFF, kind >> 8


def _parsed(content: bytes, start: int, at: int) -> tuple[list[bytes], int]:
    """Parses the chunk at position `at`; returns its records and its end. `content` begins at position `start`."""
    head = _plain(content[at - start : _end(at, _CHUNK_HEADER) - start], at)
    size, kind, count = _header(head)
    end = _end(at, _CHUNK_HEADER + size)
    if end - start > len(content):
        raise Malformed("a chunk is longer than its block")
    if kind == _TRANSPOSED:
        raise Malformed("its chunks are transposed, write them without 'transpose'")
    if kind != _RECORDS:
        return [], end  # a signature or padding
    return _values(_plain(content[at - start : end - start], at)[_CHUNK_HEADER:], count), end


def _values(data: bytes, count: int) -> list[bytes]:
    """The records of a chunk's data."""
    codec = data[0]
    size, begin = varint(data, 1)
    sizes = _unpacked(data[begin : begin + size], codec)
    values = _unpacked(data[begin + size :], codec)
    records, at, size_at = [], 0, 0
    for _ in range(count):
        length, size_at = varint(sizes, size_at)
        records.append(values[at : at + length])
        at += length
    if at != len(values):
        raise Malformed(f"records of {at:,} bytes in {len(values):,}")
    return records


def _unpacked(data: bytes, codec: int) -> bytes:
    if not codec:
        return data
    if codec not in _CODECS:
        raise Malformed(f"unknown compression {codec}")
    size, begin = varint(data, 0)
    if size > _MOST_BYTES:
        raise Malformed(f"{size:,} bytes unpacked")
    pyarrow = extras.require("pyarrow", extra="parquet", why="compressed ArrayRecord files")
    try:
        return pyarrow.Codec(_CODECS[codec]).decompress(data[begin:], decompressed_size=size).to_pybytes()
    except (OSError, ValueError) as error:
        raise Malformed(limits.cause(error)) from None
