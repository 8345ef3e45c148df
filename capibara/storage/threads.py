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
    """Calls `fn` on every item, in threads; after an error no new call starts, and it is raised once the others end."""
    items = list(items)
    found: dict[int, R] = {}
    left, failed = iter(range(len(items))), threading.Event()

    def some() -> None:
        # One job for each thread, not for each item: during training, scheduling small jobs costs more than they do.
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
        # Do not wait for jobs that have not started: they find no items left, and if `fn` calls `each` too, they may
        # never start.
        begun = [helper for helper in helpers if not helper.cancel()]
        concurrent.futures.wait(begun)
    for helper in begun:
        helper.result()
    return [found[index] for index in range(len(items))]


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(_MOST, "capibara-files")
