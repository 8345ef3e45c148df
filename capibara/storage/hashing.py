"""Hashes of files, read in one pass with their bytes; and threads that do so for many."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
import xxhash

from capibara.storage import stores
from capibara.storage.stores import Path

_PIECE = 1 << 18  # bytes that are hashed at a time: still in the processor's cache when they are
_ALIGNED = 64  # bytes: what JAX takes over on a CPU without a copy
_MOST_THREADS = 16

T = TypeVar("T")
R = TypeVar("R")


def hash_of(data: bytes | memoryview | np.ndarray) -> str:
    """XXH3 with 128 bits, as the command xxh128sum prints it: hashed faster than read, it finds what chance does."""
    return xxhash.xxh3_128_hexdigest(data)


def file_hash(path: Path) -> str:
    """`hash_of` a file's bytes."""
    return first_hash(path, None)[1]


def first_hash(path: Path, size: int | None) -> tuple[int, str]:
    """How many of a file's first `size` bytes (None: of all) there are, and their hash; little of it is held."""
    digest, piece, left = (
        xxhash.xxh3_128(),
        memoryview(np.empty(_PIECE, np.uint8)),
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
    view = memoryview(content)
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


def each(fn: Callable[[T], R], items: Sequence[T] | Iterable[T]) -> list[R]:
    """`fn` of every item, in threads; a fault is raised when all that were under way have ended, and no more begin."""
    items = list(items)
    found: list[R | None] = [None] * len(items)
    left, failed = iter(range(len(items))), threading.Event()

    def some() -> None:
        # A job a thread, not one an item: beside training, the handing out of small ones costs more than they do.
        for index in left:
            if failed.is_set():
                return
            try:
                found[index] = fn(items[index])
            except BaseException:
                failed.set()
                raise

    helpers = [_pool().submit(some) for _ in range(min(_MOST_THREADS, 2 * (os.cpu_count() or 1), len(items)) - 1)]
    try:
        some()
    finally:
        # What has not begun finds nothing left; to wait for it could be for ever, where `fn` comes here as well.
        begun = [helper for helper in helpers if not helper.cancel()]
        concurrent.futures.wait(begun)
    for helper in begun:
        helper.result()
    return found


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(_MOST_THREADS, "capibara-files")
