"""TFRecord files in blocks of equal size: the first record of a block is found by the checksum of its length.

A record is its length [8 bytes], the masked CRC-32C of the length [4], the content, and the content's checksum [4], which is
not verified (https://www.tensorflow.org/tutorials/load_data/tfrecord). A false match has a probability of 2^-32 per byte
and is detected by what follows it.
"""

from __future__ import annotations

import dataclasses
import functools
import struct

import numpy as np

from capibara.core.types import UserError
from capibara.data.shards.formats import SLACK_BYTES, Record, ShardFormat, read
from capibara.storage.store import Entry

_HEAD, _FRAME = 12, 16  # bytes before a record's content, and in total around it
_MOST_BYTES = 256 << 20  # largest size of a record
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
        window = _Window(shard, start, stop + SLACK_BYTES)
        at = start if start == 0 else window.first_record(start, stop)
        found: list[tuple[int, Record]] = []
        while at is not None and at < stop:
            length = window.length(at)
            if length is None:
                raise UserError(f"{shard.url} is no TFRecord file, or corrupted, at byte {at:,}: copy it again")
            if at + _FRAME + length > shard.size:
                raise UserError(f"{shard.url} is cut short: the record at byte {at:,} has {length:,}: copy it again")
            found.append((at, window.bytes(at + _HEAD, length)))
            at += _FRAME + length
        return found


class _Window:
    """The bytes of a file from `start` on, read as needed."""

    def __init__(self, shard: Entry, start: int, stop: int):
        self._shard, self._start = shard, start
        self._content = read(shard, start, min(stop, shard.size))

    def bytes(self, at: int, count: int) -> bytes:
        have = self._start + len(self._content)
        if at + count > have:
            stop = min(max(at + count, have + SLACK_BYTES), self._shard.size)
            self._content += read(self._shard, have, stop)
        return self._content[at - self._start : at - self._start + count]

    def length(self, at: int) -> int | None:
        """The length of the content of the record at position `at`; None: no record begins there."""
        if at + _FRAME > self._shard.size:
            return None
        head = self.bytes(at, _HEAD)
        length, check = struct.unpack("<QI", head)
        known = int(_masked(_crc(np.frombuffer(head, np.uint8, 8)[:, None]))[0])
        return length if check == known and length <= _MOST_BYTES else None

    def first_record(self, start: int, stop: int) -> int | None:
        """The position of the first record that begins in [start, stop); None: there is none."""
        for at in range(start, stop, _LOOK_BYTES):
            count = min(at + _LOOK_BYTES, stop) - at
            content = np.frombuffer(self.bytes(at, min(count + _HEAD - 1, self._shard.size - at)), np.uint8)
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
        if size > _MOST_BYTES:  # a record would have begun within so many bytes
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
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)
