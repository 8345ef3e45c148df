"""Threads for many files at once."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

_MOST = 16

T = TypeVar("T")
R = TypeVar("R")


def each(fn: Callable[[T], R], items: Sequence[T] | Iterable[T]) -> list[R]:
    """`fn` of every item, in threads; a fault is raised when all that were under way have ended, and no more begin."""
    items = list(items)
    found: dict[int, R] = {}
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

    helpers = [_pool().submit(some) for _ in range(min(_MOST, 2 * (os.cpu_count() or 1), len(items)) - 1)]
    try:
        some()
    finally:
        # What has not begun finds nothing left; to wait for it could be for ever, where `fn` comes here as well.
        begun = [helper for helper in helpers if not helper.cancel()]
        concurrent.futures.wait(begun)
    for helper in begun:
        helper.result()
    return [found[index] for index in range(len(items))]


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(_MOST, "capibara-files")
