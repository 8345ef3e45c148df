"""Background threads whose errors are not lost and whose work finishes before the interpreter exits."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  registers its exit hook before ours: the newest hook runs first
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

from capibara.core.types import TryAgain


class Task:
    """A daemon thread whose exception is raised by `wait`; where no thread can be started any more, the caller runs it.

    The caller must wait for it, also before the interpreter exits (`before_exit`): as a daemon it does not keep the process
    alive.
    """

    def __init__(self, fn: Callable[[], None], name: str):
        self._fn = fn
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter exits
            self._run()

    @property
    def done(self) -> bool:
        """Whether the thread has ended, with or without an error."""
        return not self._thread.is_alive()

    def join(self, limit_s: float) -> bool:
        """Waits without raising its exception; returns whether the thread has ended in time."""
        if not self.done:
            self._thread.join(limit_s)
        return self.done

    def wait(self, limit_s: float) -> None:
        """Waits for the thread and raises its exception, if there was one.

        Raises:
          TryAgain: it has not ended in time.
        """
        if not self.join(limit_s):
            raise TryAgain(
                f"{self._thread.name} has not ended within {limit_s:g} s: a file system or another process does not "
                "answer; run the command again"
            )
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._fn()
        except BaseException as error:
            self._error = error


class Worker:
    """A thread that calls submitted functions one after the other; it starts with the first of them."""

    def __init__(self, name: str):
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, fn: Callable[[], None]) -> None:
        """Queues a function. If one raises, Python prints the traceback, and the next submission starts a new thread."""
        self._queue.put(fn)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def close(self, limit_s: float) -> bool:
        """Waits until all functions were called; returns False if that takes longer than `limit_s` seconds."""
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (fn := self._queue.get()) is not None:
            fn()


@contextlib.contextmanager
def before_exit(finish: Callable[[], None]) -> Iterator[None]:
    """A context in which an exiting interpreter calls `finish` while the threads of executors still run.

    Python 3.11 can also start threads then, later versions cannot: what `finish` waits for has to do without
    (storage.threads.each, Task). atexit runs too late: a save would be lost silently.
    """
    armed = [True]

    def at_exit() -> None:
        if armed[0]:
            finish()

    threading._register_atexit(at_exit)  # type: ignore[attr-defined]  # typeshed leaves private functions out
    try:
        yield
    finally:
        armed[0] = False
