"""The C library's allocator, set for what JAX does on a CPU: glibc's on Linux; elsewhere nothing happens.

Imports nothing but the standard library, so that the peers of benchmarks/ can be given the same.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

# The names in glibc's malloc.h, in capitals with M_.
_MMAP_MAX, _TRIM_THRESHOLD, _ARENA_MAX = -4, -1, -8
_MADV_HUGEPAGE = 14  # of Linux
_HUGE_PAGE = 2 * 2**20
_GUARD = 16 * 2**20  # larger than any hole of a heap that only modules were loaded into
_LARGEST_HEAP = 2**38


@functools.cache  # settings hold for the process, and addresses are reserved once
def keep_freed_memory() -> None:
    """Makes malloc keep what is freed, and have it in huge pages. Call it before JAX is first used.

    By default every large buffer is mapped anew and its pages fault in again, 15% of a small model's step
    (benchmarks/step_time.py); and in pages of 4 KiB products that stream weights wait for their addresses' translation.
    """
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if libc is None or not hasattr(libc, "mallopt"):
        return
    for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1)):
        libc.mallopt(option, value)
    _use_huge_pages(libc)


def give_back() -> None:
    """Gives freed memory back to the system once, after something that took much and does not come again soon."""
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if libc is not None and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))


def _use_huge_pages(libc: ctypes.CDLL) -> None:
    """Gives the heap a free piece of half the memory's size, of which pages are taken 2 MiB at a time.

    Only addresses are reserved: memory is taken when something is written there. Where the system grants no such piece
    or has huge pages switched off, pages stay as they are.
    """
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2, _LARGEST_HEAP)
    piece = libc.malloc(size)
    # Stays: what is freed at the heap's very end, and is larger than any trim threshold, is given back.
    guard = libc.malloc(_GUARD) if piece else None
    if piece and guard and guard > piece:
        start = -(-piece // _HUGE_PAGE) * _HUGE_PAGE
        libc.madvise(start, (piece + size - start) // _HUGE_PAGE * _HUGE_PAGE, _MADV_HUGEPAGE)
    elif guard:
        libc.free(guard)
    if piece:
        libc.free(piece)
