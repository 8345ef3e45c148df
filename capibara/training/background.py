"""Work beside the training loop that must not be lost."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  its hook at the interpreter's end must be older than ours: the newest runs first
import contextlib
import threading
from collections.abc import Callable, Iterator


class Task:
    """A thread whose fault is raised where it is waited for."""

    def __init__(self, fn: Callable[[], None], name: str):
        self._fn, self._error = fn, None
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Waits, whatever comes out."""
        self._thread.join()

    def wait(self) -> None:
        """Waits, and raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._fn()
        except BaseException as error:
            self._error = error


@contextlib.contextmanager
def before_exit(finish: Callable[[], None]) -> Iterator[None]:
    """Within it, an interpreter that ends calls `finish` while threads can still be started.

    atexit is too late for that, and threads that are waited for at the end cannot start others any more, as TensorStore
    and asyncio do: a save would be lost without a word.
    """
    wanted = [True]

    def at_exit() -> None:
        if wanted[0]:
            finish()

    threading._register_atexit(at_exit)
    try:
        yield
    finally:
        wanted[0] = False
