"""Hashes of files, read in one pass with their bytes."""

from __future__ import annotations

import sys

import numpy as np
import xxhash

from capibara.storage import stores
from capibara.storage.store import Path

_PIECE = 1 << 18  # bytes that are hashed at a time: still in the processor's cache when they are
_ALIGNED = 64  # bytes: what JAX takes over on a CPU without a copy


def hash_of(data: bytes | memoryview | np.ndarray) -> str:
    """XXH3 with 128 bits, as the command xxh128sum prints it: hashed faster than read, it finds what chance does."""
    return xxhash.xxh3_128_hexdigest(data.data if isinstance(data, np.ndarray) else data)


def file_hash(path: Path) -> str:
    """`hash_of` a file's bytes."""
    return first_hash(path, None)[1]


def first_hash(path: Path, size: int | None) -> tuple[int, str]:
    """How many of a file's first `size` bytes (None: of all) there are, and their hash; little of it is held."""
    digest, piece, left = (
        xxhash.xxh3_128(),
        memoryview(bytearray(_PIECE)),
        sys.maxsize if size is None else size,
    )
    begun = left
    with stores.of(path).open(path) as file:
        while left and (count := file.readinto(piece[: min(left, _PIECE)])):
            digest.update(piece[:count])
            left -= count
    return begun - left, digest.hexdigest()


def read_hashed(path: Path, size: int) -> tuple[np.ndarray, str]:
    """A file's bytes and their hash, in one pass.

    Args:
      path: the file.
      size: its bytes; of a longer file these are the first.

    Returns:
      uint8 [size], or shorter where the file is, aligned for the devices; and the hash.
    """
    content, digest, begin = empty(size), xxhash.xxh3_128(), 0
    view = memoryview(content.data)
    with stores.of(path).open(path) as file:
        while begin < size and (count := file.readinto(view[begin : begin + _PIECE])):
            digest.update(view[begin : begin + count])
            begin += count
    return content[:begin], digest.hexdigest()


def empty(size: int) -> np.ndarray:
    """uint8 [size] of any content, aligned for the devices."""
    room = np.empty(size + _ALIGNED, np.uint8)
    begin = -room.ctypes.data % _ALIGNED
    return room[begin : begin + size]
