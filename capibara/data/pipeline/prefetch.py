"""A background thread that keeps a few items ready."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_END = object()
_LOOK_S = 1.0
_CLOSE_S = 30.0  # longer than it takes to make one batch


class Prefetcher:
    """Iterator over `open_items()`, which is called and read in a background thread.

    An exception of the thread is raised by `next`, in its place among the items.
    """

    def __init__(self, open_items: Callable[[], Iterator[Any]], size: int):
        """Starts the thread; `size` 0 starts none and makes each item when it is asked for."""
        self._open_items = open_items
        self._items: Iterator[Any] | None = None
        self._failure: BaseException | None = None
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
            if self._items is None:
                self._items = self._open_items()
            return next(self._items)
        item, failure = self._next(self._thread)
        if item is _END:
            self._failure = failure or StopIteration()
            raise self._failure
        return item

    def _next(self, thread: threading.Thread) -> tuple[Any, BaseException | None]:
        while True:
            alive = thread.is_alive()
            try:
                return self._queue.get(timeout=_LOOK_S if alive else 0.0)
            except queue.Empty:
                if not alive:  # and it has put nothing since
                    return _END, RuntimeError("the thread that makes batches has ended without a word")

    def close(self) -> None:
        """Stops the thread; what it had ready is dropped. One that waits for a file system is left to it."""
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
                logging.getLogger(__name__).warning("the data does not stop within %.0f s: it is left behind", _CLOSE_S)
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
                if not self._put(item):
                    return
        except BaseException as error:  # handed to the consumer, whatever it is
            failure = error
        finally:
            _close(items)
        self._put(_END, failure)

    def _put(self, item: Any, failure: BaseException | None = None) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put((item, failure), timeout=0.2)
                return True
            except queue.Full:
                continue
        return False


def _close(items: Any) -> None:
    close = getattr(items, "close", None)
    if close is not None:
        close()
