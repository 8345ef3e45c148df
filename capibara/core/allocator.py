"""Tunes glibc's allocator for JAX on a CPU, which does nothing on other systems, and Python's garbage collector.

Imports only the standard library, so that the peers of benchmarks/ can use the same settings.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import sys
from collections.abc import Iterator

# Options of glibc's mallopt (malloc.h), where their names begin with M_.
_MMAP_MAX, _TRIM_THRESHOLD, _ARENA_MAX = -4, -1, -8
_MADV_HUGEPAGE = 14  # Linux
_HUGE_PAGE = 2 * 2**20
_GUARD = 16 * 2**20  # larger than any hole in the heap after the imports
_LARGEST_HEAP = 2**38


@functools.cache  # settings hold for the process, and addresses are reserved once
def keep_freed_memory() -> None:
    """Makes malloc keep freed memory, in huge pages. Call it before JAX is first used.

    By default malloc maps every large buffer anew, and its page faults take 15% of a small model's step
    (benchmarks/step_time.py). With pages of 4 KiB, matrix products that stream weights also wait for TLB misses.
    """
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if libc is None or not hasattr(libc, "mallopt"):
        return
    for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1)):
        libc.mallopt(option, value)
    _use_huge_pages(libc)


def give_back() -> None:
    """Returns freed memory to the system once, after a phase that needed much more memory than the next one."""
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if libc is not None and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Keeps the garbage collector off, for short work on objects that stay; also a decorator.

    Importing JAX and Flax makes a million objects, which the collector looks through again and again: a seventh of the CPU
    time of `capibara plan`.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _use_huge_pages(libc: ctypes.CDLL) -> None:
    """Extends the heap by a free block of half the physical memory that is backed by huge pages (2 MiB).

    Only addresses are reserved; memory is used when something is written there. If the system refuses the block or huge
    pages are off, nothing changes.
    """
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2, _LARGEST_HEAP)
    piece = libc.malloc(size)
    # The guard is never freed: a free block at the heap's end that exceeds the trim threshold would be returned.
    guard = libc.malloc(_GUARD) if piece else None
    if piece and guard and guard > piece:
        start = -(-piece // _HUGE_PAGE) * _HUGE_PAGE
        libc.madvise(start, (piece + size - start) // _HUGE_PAGE * _HUGE_PAGE, _MADV_HUGEPAGE)
    elif guard:
        libc.free(guard)
    if piece:
        libc.free(piece)
