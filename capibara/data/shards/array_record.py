"""ArrayRecord files by byte ranges: a block is some adjacent chunks, which the library array_record reads and verifies.

The library checks the hashes of a chunk's header and data, but only opens local files, and trusts the sizes that a chunk
declares. So the footer and the chunks' headers are read here first, to find and bound what is read, and the library gets the
bytes of a file in a bucket in a sparse file in memory. The layout is Riegeli's
(https://github.com/google/riegeli/blob/master/doc/riegeli_records_file_format.md): pages of 64 KiB, each with a header of
24 bytes that interrupts the chunk there; chunks have a header of 40 bytes, then the records' sizes and values. The last
64 KiB contain a record with the position of the footer's chunk (array_record/cpp/array_record_writer.cc).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import struct
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from capibara.core import extras, limits
from capibara.core.types import UserError
from capibara.data.shards.formats import Record, ShardFormat, read
from capibara.data.text.protobuf import Malformed, fields, varint
from capibara.storage import stores
from capibara.storage.store import Entry

_PAGE, _PAGE_HEADER, _CHUNK_HEADER = 1 << 16, 24, 40
_MAGIC = 0x71930E704FDAE05E
MOST_BYTES = 1 << 30  # largest size of a chunk, and of a block's records when unpacked
_MOST_RECORDS = 1 << 26  # of a block: each costs memory, also an empty one
_CODECS = {ord("z"): "zstd", ord("b"): "brotli", ord("s"): "snappy"}
_RECORDS, _TRANSPOSED = ord("r"), ord("t")
_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"  # random access
_DAMAGE = (Malformed, IndexError, struct.error)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayRecords(ShardFormat):
    """ArrayRecord files of grain, TFDS and array_record, with any compression, but not transposed."""

    @property
    def name(self) -> str:
        return "array_record"

    def blocks(self, shard: Entry) -> np.ndarray:
        layout = _layout(shard)
        starts, at = [], None
        for begin in layout.begins[:-1].tolist():
            if at is None or begin - at >= self.block_bytes:
                starts.append(begin)
                at = begin
        stops = [*starts[1:], int(layout.begins[-1])]
        return np.array(list(zip(starts, stops, strict=False)), np.int64).reshape(-1, 2)

    def records(self, shard: Entry, start: int, stop: int) -> list[tuple[int, Record]]:
        layout = _layout(shard)
        first, last = np.searchsorted(layout.begins, (start, stop)).tolist()
        try:
            if layout.begins[first] != start or layout.begins[last] != stop:
                raise Malformed("its footer has changed")
            values = _records(shard, layout, first, last)
        except _DAMAGE as error:
            raise _corrupted(shard, start, error) from None
        counts = np.diff(layout.firsts[first : last + 1])
        # A record's position is that of its chunk plus its number in it.
        numbers = np.arange(len(values)) - np.repeat(layout.firsts[first:last] - layout.firsts[first], counts)
        return list(zip((np.repeat(layout.begins[first:last], counts) + numbers).tolist(), values, strict=True))


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Where the chunks of a file are, by its footer.

    Attributes:
      begins: [n + 1] int64, the position of each chunk, and of the footer's.
      firsts: [n + 1] int64, the number of each chunk's first record, and of all records.
      end: of a file in a bucket, its bytes from the footer on, which the library reads before any chunk.
    """

    begins: np.ndarray
    firsts: np.ndarray
    end: bytes


@functools.lru_cache(maxsize=256)
def _layout(shard: Entry) -> _Layout:
    """Raises UserError if a file is cut short or corrupted at its end, or is of another kind."""
    footer = _footer_position(shard)
    try:
        entries = [_footer_entry(record) for record in _chunk(shard, footer, shard.size)[1:]]
        begins = [*(begin for begin, _ in entries), footer]
        if sorted(set(begins)) != begins:
            raise Malformed("its chunks are not in order")
        end = b"" if stores.of(shard.url).has_local_paths else read(shard, footer, shard.size)
        layout = _Layout(np.array(begins, np.int64), np.cumsum([0, *(count for _, count in entries)]), end)
        with _opened(shard, layout, footer, b"") as reader:  # the library verifies the footer
            if reader.num_records() != layout.firsts[-1]:
                raise Malformed("its footer does not say how many records it has")
    except _DAMAGE as error:
        raise _corrupted(shard, footer, error) from None
    return layout


def _records(shard: Entry, layout: _Layout, first: int, last: int) -> list[bytes]:
    """The records of the chunks from number `first` to `last`, which the library verifies.

    Raises:
      Malformed: they are corrupted, or too large.
    """
    start, stop = int(layout.begins[first]), int(layout.begins[last])
    if stop - start > 2 * MOST_BYTES:
        raise Malformed(f"a chunk of {stop - start:,} bytes")
    is_local, unpacked = stores.of(shard.url).has_local_paths, 0
    content = b"" if is_local else read(shard, start, stop)  # a local file is read by the library
    for chunk in range(first, last):
        begin, count = int(layout.begins[chunk]), int(layout.firsts[chunk + 1] - layout.firsts[chunk])
        end = _end(begin, _CHUNK_HEADER)
        head = _header(_plain(read(shard, begin, end) if is_local else content[begin - start : end - start], begin))
        if head.kind == _TRANSPOSED:
            raise Malformed("its chunks are transposed, write them without 'transpose'")
        if head.kind != _RECORDS or head.records != count or count > _MOST_RECORDS:
            raise Malformed(f"a chunk of {head.records:,} records at byte {begin:,}, {count:,} by the footer")
        unpacked += head.unpacked
        if unpacked > MOST_BYTES:
            raise Malformed(f"more than {MOST_BYTES:,} bytes unpacked")
    with _opened(shard, layout, start, content) as reader:
        try:
            values: list[bytes] = reader.read(int(layout.firsts[first]), int(layout.firsts[last]))
        except (RuntimeError, IndexError) as error:
            raise Malformed(limits.cause(error, 300).removeprefix("Corrupted Riegeli/records file: ")) from None
    return values


@contextlib.contextmanager
def _opened(shard: Entry, layout: _Layout, start: int, content: bytes) -> Iterator[Any]:
    """The library's reader of a file; of one in a bucket it has the end, and `content` from position `start` on."""
    if stores.of(shard.url).has_local_paths:
        yield _local_reader(shard)
        return
    with _sparse_file() as (file, path):
        os.ftruncate(file, shard.size)
        os.pwrite(file, layout.end, int(layout.begins[-1]))
        os.pwrite(file, content, start)
        yield _new_reader(path)


@functools.lru_cache(maxsize=64)
def _local_reader(shard: Entry) -> Any:
    """The library's reader of a file on this machine, which any thread may use."""
    return _new_reader(shard.url)


def _new_reader(path: str) -> Any:
    module = extras.require("array_record.python.array_record_module", why="ArrayRecord files")
    reader = module.ArrayRecordReader(path, _OPTIONS)
    if not reader.ok():  # it raises nothing: a file with a corrupted end would have no records
        raise Malformed("its end is corrupted")
    return reader


@contextlib.contextmanager
def _sparse_file() -> Iterator[tuple[int, str]]:
    """The descriptor and path of a file that needs no more room than what is written to it, on Linux in memory."""
    if not hasattr(os, "memfd_create"):
        with tempfile.NamedTemporaryFile() as file:
            yield file.fileno(), file.name
        return
    descriptor = os.memfd_create("array_record")
    try:
        yield descriptor, f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _corrupted(shard: Entry, at: int, why: object) -> UserError:
    place = re.search(r"chunk at (\d+)", str(why))
    at = int(place[1]) if place else at
    return UserError(f"{shard.url} is corrupted at byte {at:,} ({why}): copy it again")


def _footer_position(shard: Entry) -> int:
    """The position of the footer's chunk, which lists all others."""
    if shard.size < 2 * _PAGE or shard.size % _PAGE:
        raise UserError(f"{shard.url} is no ArrayRecord file, or cut short ({shard.size:,} bytes): copy it again")
    at = shard.size - _PAGE
    try:
        (first, *_) = _chunk(shard, at, shard.size)
        result = dict(fields(first))
    except (Malformed, IndexError, ValueError, struct.error):
        result = {}
    footer = result.get(1)
    if result.get(2) != _MAGIC or not isinstance(footer, int) or not 0 < footer < at:
        raise UserError(
            f"{shard.url} is no ArrayRecord file, or cut short (no end mark in its last page): copy it again"
        )
    return footer


def _footer_entry(record: bytes) -> tuple[int, int]:
    """The position of a chunk and the number of its records, from a message ArrayRecordFooter."""
    result = dict(fields(record))
    at, count = result.get(1, 0), result.get(3, 0)
    if not isinstance(at, int) or not isinstance(count, int):
        raise Malformed("a chunk's position is no number")
    return at, count


def _chunk(shard: Entry, at: int, limit: int) -> list[bytes]:
    """The records of one chunk that begins at `at`; its hashes are not verified."""
    head = _header(_plain(read(shard, at, min(_end(at, _CHUNK_HEADER), limit)), at))
    if head.kind != _RECORDS:
        raise Malformed("a chunk of another type")
    end = _end(at, _CHUNK_HEADER + head.size)
    if end > limit:
        raise Malformed("a chunk is longer than the file")
    return _values(_plain(read(shard, at, end), at)[_CHUNK_HEADER:], head.records)


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


class _Header(NamedTuple):
    """A chunk's header: bytes of its data, its type, the number of its records, and their bytes."""

    size: int
    kind: int
    records: int
    unpacked: int


def _header(plain: bytes) -> _Header:
    _, size, _, kind, unpacked = struct.unpack_from("<5Q", plain)
    if size > MOST_BYTES:
        raise Malformed(f"a chunk of {size:,} bytes")
    return _Header(size, kind & 0xFF, kind >> 8, unpacked)


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
    if size > MOST_BYTES:
        raise Malformed(f"{size:,} bytes unpacked")
    pyarrow = extras.require("pyarrow", extra="parquet", why="compressed ArrayRecord files")
    try:
        return pyarrow.Codec(_CODECS[codec]).decompress(data[begin:], decompressed_size=size).to_pybytes()
    except (OSError, ValueError) as error:
        raise Malformed(limits.cause(error)) from None
