"""Hashes files in the same pass that reads them."""

from __future__ import annotations

import sys

import numpy as np
import xxhash

from capibara.storage import stores
from capibara.storage.store import Path

_PIECE = 1 << 18  # bytes that are hashed at a time, still in the processor's cache
_ALIGNED = 64  # bytes; JAX on a CPU then needs no copy


def hash_of(data: bytes | memoryview | np.ndarray) -> str:
    """The 128-bit XXH3 hash, as xxh128sum prints it: faster than reading, and detects random corruption."""
    return xxhash.xxh3_128_hexdigest(data.data if isinstance(data, np.ndarray) else data)


def file_hash(path: Path) -> str:
    """`hash_of` a file's bytes."""
    return first_hash(path, None)[1]


def first_hash(path: Path, size: int | None) -> tuple[int, str]:
    """The number of bytes among a file's first `size` (None: all), and their hash; uses little memory."""
    digest, piece, left = (
        xxhash.xxh3_128(),
        memoryview(bytearray(_PIECE)),
        sys.maxsize if size is None else size,
    )
    started = left
    with stores.of(path).open(path) as file:
        while left and (count := file.readinto(piece[: min(left, _PIECE)])):
            digest.update(piece[:count])
            left -= count
    return started - left, digest.hexdigest()


def read_hashed(path: Path, size: int) -> tuple[np.ndarray, str]:
    """A file's bytes and their hash, in one pass.

    Args:
      path: the file.
      size: number of bytes to read; a longer file is cut off.

    Returns:
      uint8 [size], shorter if the file is, aligned for the devices; and the hash.
    """
    content, digest, begin = empty(size), xxhash.xxh3_128(), 0
    view = memoryview(content.data)
    with stores.of(path).open(path) as file:
        while begin < size and (count := file.readinto(view[begin : begin + _PIECE])):
            digest.update(view[begin : begin + count])
            begin += count
    return content[:begin], digest.hexdigest()


def empty(size: int) -> np.ndarray:
    """uint8 [size], uninitialised, aligned for the devices."""
    room = np.empty(size + _ALIGNED, np.uint8)
    begin = -room.ctypes.data % _ALIGNED
    return room[begin : begin + size]
