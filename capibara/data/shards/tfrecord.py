"""TFRecord files in blocks of equal bytes: the checksum of a record's length says where one begins.

A record is its length [8], the masked CRC-32C of these bytes [4], the content, and the content's own checksum [4], which is not
looked at (https://www.tensorflow.org/tutorials/load_data/tfrecord). Bytes that only look like a beginning are one in
2^32, and are found out by what follows them.
"""

from __future__ import annotations

import dataclasses
import functools
import struct

import numpy as np

from capibara.core.types import UserError
from capibara.data.shards.formats import SLACK_BYTES, Record, ShardFormat, read
from capibara.storage.remote import Entry

_HEAD, _FRAME = 12, 16  # bytes before a record's content, and around it
_MOST_BYTES = 256 << 20  # of a record
_LOOK_BYTES = 1 << 16  # searched at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class TfRecords(ShardFormat):
    """A file of the framed records that TensorFlow writes, not compressed."""

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
    """The bytes of a file from `start` on, read as far as they are asked for."""

    def __init__(self, shard: Entry, start: int, stop: int):
        self._shard, self._start = shard, start
        self._content = read(shard, start, min(stop, shard.size))

    def bytes(self, at: int, count: int) -> bytes:
        have = self._start + len(self._content)
        if at + count > have:
            wanted = min(max(at + count, have + SLACK_BYTES), self._shard.size)
            self._content += read(self._shard, have, wanted)
        return self._content[at - self._start : at - self._start + count]

    def length(self, at: int) -> int | None:
        """Of the content of the record that begins at `at`; None: none does."""
        if at + _FRAME > self._shard.size:
            return None
        head = self.bytes(at, _HEAD)
        length, check = struct.unpack("<QI", head)
        known = int(_masked(_crc(np.frombuffer(head, np.uint8, 8)[:, None]))[0])
        return length if check == known and length <= _MOST_BYTES else None

    def first_record(self, start: int, stop: int) -> int | None:
        """Where the first record begins from `start` up to `stop`; None: there is none."""
        for at in range(start, stop, _LOOK_BYTES):
            count = min(at + _LOOK_BYTES, stop) - at
            content = np.frombuffer(self.bytes(at, min(count + _HEAD - 1, self._shard.size - at)), np.uint8)
            places = len(content) - _HEAD + 1
            if places < 1:
                return None
            computed = _masked(_crc(np.stack([content[k : k + places] for k in range(8)])))
            stored = sum(content[8 + k : 8 + k + places].astype(np.uint32) << np.uint32(8 * k) for k in range(4))
            for place in np.flatnonzero(computed == stored):
                if self._goes_on(at + int(place)):
                    return at + int(place)
        return None

    def _goes_on(self, at: int) -> bool:
        """Whether what looks like a record is followed by another, or by the end."""
        length = self.length(at)
        if length is None:
            return False
        after = at + _FRAME + length
        if after > self._shard.size:
            return True  # a record that is cut short: who reads it says so
        return after == self._shard.size or _Window(self._shard, after, after + _HEAD).length(after) is not None


def _check_begin(shard: Entry) -> None:
    head = read(shard, 0, min(_HEAD, shard.size))
    if head[:2] == b"\x1f\x8b" or len(head) > 1 and head[0] == 0x78 and head[1] in (0x01, 0x5E, 0x9C, 0xDA):
        raise UserError(f"{shard.url} is compressed: its records cannot be found by position, write it uncompressed")
    if _Window(shard, 0, _HEAD).length(0) is None:
        raise UserError(f"{shard.url} is no TFRecord file: name files of one format")


def _check_end(shard: Entry) -> None:
    """The last records must end where the file does."""
    size = min(_LOOK_BYTES, shard.size)
    while True:
        begin = shard.size - size
        window = _Window(shard, begin, shard.size)
        at = window.first_record(begin, shard.size) if begin else 0
        if at is not None or not begin:
            break
        if size > _MOST_BYTES:  # no record is that long: what is not read cannot help
            raise UserError(f"{shard.url} is corrupted: its last {size:,} bytes have no record: copy it again")
        size = min(8 * size, shard.size)
    while at is not None and at < shard.size:
        length = window.length(at)
        if length is None or at + _FRAME + length > shard.size:
            raise UserError(f"{shard.url} is cut short: its last record, at byte {at:,}, is not whole: copy it again")
        at += _FRAME + length


@functools.cache
def _table() -> np.ndarray:
    """[256] uint32: CRC-32C (Castagnoli, reflected) of every byte."""
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = np.where(values & 1, (values >> 1) ^ np.uint32(0x82F63B78), values >> 1)
    return values


def _crc(columns: np.ndarray) -> np.ndarray:
    """[n] uint32 of [8, n] bytes: the checksum of each column."""
    table, value = _table(), np.full(columns.shape[1], 0xFFFFFFFF, np.uint32)
    for row in columns:
        value = table[(value ^ row) & 0xFF] ^ (value >> np.uint32(8))
    return ~value


def _masked(crc: np.ndarray) -> np.ndarray:
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)
