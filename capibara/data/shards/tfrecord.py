"""TFRecord files in blocks of equal size: the first record of a block is found by the checksum of its length.

A record is its length [8 bytes], the masked CRC-32C of the length [4], the content, and the content's checksum [4]
(https://www.tensorflow.org/tutorials/load_data/tfrecord). Both are verified. A false match of the search has a probability of
2^-32 per byte and is detected by what follows it; a first record that it misses, as its length is corrupted, by what
precedes the one that it finds.
"""

from __future__ import annotations

import dataclasses
import functools
import struct

import google_crc32c
import numpy as np

from capibara.core.types import UserError
from capibara.data.shards.formats import SLACK_BYTES, Record, ShardFormat, read
from capibara.storage.store import Entry

_HEAD, _FOOT, _FRAME = 12, 4, 16  # bytes before a record's content, after it, and in total
_MASK = 0xA282EAD8
MOST_BYTES = 256 << 20  # largest size of a record
_LOOK_BYTES = 1 << 16  # bytes searched at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class TfRecords(ShardFormat):
    """Uncompressed TFRecord files."""

    @property
    def name(self) -> str:
        return "tfrecord"

    def blocks(self, shard: Entry) -> np.ndarray:
        if shard.size:
            _check_begin(shard)
            _check_end(shard)
        return self.byte_blocks(shard)

    def records(self, shard: Entry, start: int, stop: int) -> list[tuple[int, Record]]:
        # The bytes before are needed to prove that no record is missed.
        window = _Window(shard, max(0, start - SLACK_BYTES), stop + SLACK_BYTES)
        at = start if start == 0 else window.first_record(start, stop)
        if start and not window.is_preceded(start, at, stop):
            raise _corrupted(shard, start, "no record before it ends where the next begins")
        result: list[tuple[int, Record]] = []
        while at is not None and at < stop:
            length = window.length(at)
            if length is None:
                raise _corrupted(shard, at, "the length of a record has another checksum")
            if at + _FRAME + length > shard.size:
                raise UserError(f"{shard.url} is cut short: the record at byte {at:,} has {length:,}: copy it again")
            content = window.read(at + _HEAD, length + _FOOT)
            record, check = content[:length], content[length:]
            if int.from_bytes(check, "little") != masked(google_crc32c.value(record)):
                raise _corrupted(shard, at, "a record has another checksum")
            result.append((at, record))
            at += _FRAME + length
        return result


def _corrupted(shard: Entry, at: int, why: str) -> UserError:
    return UserError(f"{shard.url} is no TFRecord file, or corrupted, at byte {at:,} ({why}): copy it again")


def masked(crc: int) -> int:
    """A checksum as TFRecord files store it."""
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


class _Window:
    """The bytes of a file from `start` on, read as needed."""

    def __init__(self, shard: Entry, start: int, stop: int):
        self._shard, self._start = shard, start
        self._content = read(shard, start, min(stop, shard.size))

    def read(self, at: int, count: int) -> bytes:
        have = self._start + len(self._content)
        if at + count > have:
            stop = min(max(at + count, have + SLACK_BYTES), self._shard.size)
            self._content += read(self._shard, have, stop)
        return self._content[at - self._start : at - self._start + count]

    def length(self, at: int) -> int | None:
        """The length of the content of the record at position `at`; None: no record begins there."""
        if at + _FRAME > self._shard.size:
            return None
        head = self.read(at, _HEAD)
        length, check = struct.unpack("<QI", head)
        return length if check == masked(google_crc32c.value(head[:8])) and length <= MOST_BYTES else None

    def first_record(self, start: int, stop: int) -> int | None:
        """The position of the first record that begins in [start, stop), by what follows it; None: there is none."""
        for at in range(start, stop, _LOOK_BYTES):
            count = min(at + _LOOK_BYTES, stop) - at
            content = np.frombuffer(self.read(at, min(count + _HEAD - 1, self._shard.size - at)), np.uint8)
            offsets = len(content) - _HEAD + 1
            if offsets < 1:
                return None
            computed = _masked(_crc(np.stack([content[k : k + offsets] for k in range(8)])))
            stored = sum(content[8 + k : 8 + k + offsets].astype(np.uint32) << np.uint32(8 * k) for k in range(4))
            for offset in np.flatnonzero(computed == stored):
                if self._is_followed(at + int(offset)):
                    return at + int(offset)
        return None

    def _is_followed(self, at: int) -> bool:
        """Whether the supposed record at position `at` is followed by another, or by the end of the file."""
        length = self.length(at)
        if length is None:
            return False
        after = at + _FRAME + length
        if after > self._shard.size:
            return True  # a record that is cut short: reading it raises the error
        return after == self._shard.size or _Window(self._shard, after, after + _HEAD).length(after) is not None

    def is_preceded(self, start: int, first: int | None, stop: int) -> bool:
        """Whether a record that begins before `start` ends at `first`, or at `stop` or later if `first` is None.

        So there is no other one between, whose length is corrupted.
        """
        low, high = (stop, self._shard.size) if first is None else (first, first)
        reach = SLACK_BYTES
        while True:
            begin = max(0, start - reach)
            # A head may extend beyond `start`.
            content = np.frombuffer(self._before(begin, min(start + 7, self._shard.size)), np.uint8)
            offsets = start - begin
            if len(content) < offsets + 7:
                offsets = len(content) - 7
            ends = np.arange(begin + _FRAME, begin + _FRAME + max(0, offsets), dtype=np.int64)
            ends += np.lib.stride_tricks.sliding_window_view(content, 8).copy().view("<i8")[: len(ends), 0]
            for offset in np.flatnonzero((ends >= low) & (ends <= high))[::-1].tolist():
                if _Window(self._shard, begin + offset, begin + offset + _HEAD).length(begin + offset) is not None:
                    return True
            if not begin or reach > MOST_BYTES:
                return False
            reach *= 8

    def _before(self, begin: int, stop: int) -> bytes:
        """Bytes that may begin before the window."""
        if begin >= self._start:
            return self.read(begin, stop - begin)
        return read(self._shard, begin, stop)


def _check_begin(shard: Entry) -> None:
    head = read(shard, 0, min(_HEAD, shard.size))
    if head[:2] == b"\x1f\x8b" or len(head) > 1 and head[0] == 0x78 and head[1] in (0x01, 0x5E, 0x9C, 0xDA):
        raise UserError(f"{shard.url} is compressed: its records cannot be found by position, write it uncompressed")
    if _Window(shard, 0, _HEAD).length(0) is None:
        raise UserError(f"{shard.url} is no TFRecord file: name files of one format")


def _check_end(shard: Entry) -> None:
    """Raises UserError unless the last record ends at the end of the file."""
    size = min(_LOOK_BYTES, shard.size)
    while True:
        begin = shard.size - size
        window = _Window(shard, begin, shard.size)
        at = window.first_record(begin, shard.size) if begin else 0
        if at is not None or not begin:
            break
        if size > MOST_BYTES:  # a record would have begun within so many bytes
            raise UserError(f"{shard.url} is corrupted: its last {size:,} bytes have no record: copy it again")
        size = min(8 * size, shard.size)
    while at is not None and at < shard.size:
        length = window.length(at)
        if length is None or at + _FRAME + length > shard.size:
            raise UserError(f"{shard.url} is cut short: its last record, at byte {at:,}, is incomplete: copy it again")
        at += _FRAME + length


@functools.cache
def _table() -> np.ndarray:
    """[256] uint32: CRC-32C (Castagnoli, reflected) of every byte."""
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = np.where(values & 1, (values >> 1) ^ np.uint32(0x82F63B78), values >> 1)
    return values


def _crc(columns: np.ndarray) -> np.ndarray:
    """CRC-32C of each column of [8, n] bytes: [n] uint32."""
    table, value = _table(), np.full(columns.shape[1], 0xFFFFFFFF, np.uint32)
    for row in columns:
        value = table[(value ^ row) & 0xFF] ^ (value >> np.uint32(8))
    return ~value


def _masked(crc: np.ndarray) -> np.ndarray:
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(_MASK)
