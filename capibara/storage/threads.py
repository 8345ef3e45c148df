"""Threads for many files at once."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

_MOST = 16

T = TypeVar("T")
R = TypeVar("R")


def each(fn: Callable[[T], R], items: Sequence[T] | Iterable[T]) -> list[R]:
    """Calls `fn` on every item, in threads; after an error no new call starts, and it is raised once the others end.

    Where no thread can be started, as in a save that ends while the interpreter exits (Python 3.12 and later), the calling
    thread does all of it.
    """
    items = list(items)
    result: dict[int, R] = {}
    left, failed = iter(range(len(items))), threading.Event()

    def some() -> None:
        # One job for each thread, not for each item: during training, scheduling small jobs costs more than they do.
        for index in left:
            if failed.is_set():
                return
            try:
                result[index] = fn(items[index])
            except BaseException:
                failed.set()
                raise

    with _Helpers(some) as helpers:
        helpers.start(min(_MOST, 2 * (os.cpu_count() or 1), len(items)) - 1)
        some()
    return [result[index] for index in range(len(items))]


class _Helpers:
    """Threads that do a job beside the caller; leaving its `with` waits for them and raises what one of them raised."""

    def __init__(self, job: Callable[[], None]):
        self._job, self._changed = job, threading.Condition()
        self._running, self._closed = 0, False
        self._errors: list[BaseException] = []

    def start(self, count: int) -> None:
        """Starts as many as it can, `count` at most."""
        with contextlib.suppress(RuntimeError):
            for _ in range(count):
                # A submission that raises may be queued all the same: so the futures are not what is waited for.
                _pool().submit(self._help)

    def _help(self) -> None:
        with self._changed:
            if self._closed:  # it has started too late: nothing is left
                return
            self._running += 1
        try:
            self._job()
        except BaseException as error:
            self._errors.append(error)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def __enter__(self) -> _Helpers:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # Those that have not started are not waited for: if `fn` calls `each` too, they may never start.
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._running)
        if error is None and self._errors:
            raise self._errors[0]


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(_MOST, "capibara-files")
