"""Prefetches items in a background thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_END = object()
_LOOK_S = 1.0
_CLOSE_S = 30.0  # more than the time to make one batch


class Prefetcher:
    """Iterator over `open_items()`, which a background thread calls and reads.

    `next` raises an exception of the thread after the items that precede it.
    """

    def __init__(self, open_items: Callable[[], Iterator[Any]], size: int):
        """Starts the thread, which keeps up to `size` items; 0: no thread, `next` makes each item."""
        self._open_items = open_items
        self._items: Iterator[Any] | None = None
        self._failure: BaseException | None = None
        self._first: list[Any] = []  # made by `wait_first` where there is no thread
        self._first_there = threading.Event()
        self._first_failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        if size:
            self._queue: queue.Queue[Any] = queue.Queue(size)
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._run, name="capibara-data", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._failure is not None:
            raise self._failure
        if self._thread is None:
            return self._first.pop() if self._first else self._make_next()
        item, failure = self._next(self._thread)
        if item is _END:
            self._failure = failure or StopIteration()
            raise self._failure
        return item

    def wait_first(self, limit_s: float | None) -> bool:
        """Waits until the first item is made, which stays there for `next`; False: it is not yet, after the time limit.

        Raises the exception that came in its place, or StopIteration if there is no item.
        """
        if self._thread is None:
            self._first = self._first or [self._make_next()]
            return True
        there = self._first_there.wait(limit_s)
        if self._first_failure is not None:
            raise self._first_failure
        return there

    def _make_next(self) -> Any:
        if self._items is None:
            self._items = self._open_items()
        return next(self._items)

    def _next(self, thread: threading.Thread) -> tuple[Any, BaseException | None]:
        while True:
            alive = thread.is_alive()
            try:
                return self._queue.get(timeout=_LOOK_S if alive else 0.0)
            except queue.Empty:
                if not alive:  # and it has put nothing since the check
                    return _END, RuntimeError("the thread that makes batches has ended without an error")

    def close(self) -> None:
        """Stops the thread and drops prefetched items; after a time limit it leaves a stuck thread behind."""
        if self._thread is None:
            _close(self._items)
            self._items = None
            return
        self._stop.set()
        limit_s = time.monotonic() + _CLOSE_S
        while self._thread.is_alive():
            self._drain()
            self._thread.join(timeout=0.05)
            if time.monotonic() > limit_s:
                logging.getLogger(__name__).warning(
                    "the data thread does not stop within %.0f s: not waiting", _CLOSE_S
                )
                break
        self._drain()
        self._thread = None

    def _drain(self) -> None:
        try:
            while True:
                self._queue.get_nowait()
        except queue.Empty:
            pass

    def _run(self) -> None:
        items, failure = None, None
        try:
            items = self._open_items()
            for item in items:
                self._first_there.set()
                if not self._put(item):
                    return
        except BaseException as error:  # raised by `next`
            failure = error
        finally:
            _close(items)
        if not self._first_there.is_set():
            self._first_failure = failure or StopIteration()
            self._first_there.set()
        self._put(_END, failure)

    def _put(self, item: object, failure: BaseException | None = None) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put((item, failure), timeout=0.2)
                return True
            except queue.Full:
                continue
        return False


def _close(items: object) -> None:
    close = getattr(items, "close", None)
    if close is not None:
        close()
