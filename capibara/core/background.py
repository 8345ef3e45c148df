"""Work beside the training loop that must not be lost."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  its hook at the interpreter's end must be older than ours: the newest runs first
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

from capibara.core.types import TryAgain


class Task:
    """A thread whose fault is raised where it is waited for.

    Whoever starts it waits for it, also before the interpreter ends (`before_exit`): one that never ends does not keep the
    process alive.
    """

    def __init__(self, fn: Callable[[], None], name: str):
        self._fn = fn
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def join(self, limit_s: float) -> bool:
        """Waits, whatever comes out; whether it has ended in time."""
        self._thread.join(limit_s)
        return self.done

    def wait(self, limit_s: float) -> None:
        """Waits, and raises what it raised.

        Raises:
          TryAgain: it has not ended in time.
        """
        if not self.join(limit_s):
            raise TryAgain(
                f"{self._thread.name} has not ended for {limit_s:g} s: a file system or a peer does not answer; run the "
                "command again"
            )
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._fn()
        except BaseException as error:
            self._error = error


class Worker:
    """A thread that does what it is given, one after the other; it starts with the first of it."""

    def __init__(self, name: str):
        self._name = name
        self._given: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, fn: Callable[[], None]) -> None:
        """Hands over what is to be done; an exception of it is shown as that of any thread, and the next is done."""
        self._given.put(fn)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def close(self, limit_s: float) -> bool:
        """Waits until all is done; False: that takes longer."""
        if self._thread is None:
            return True
        self._given.put(None)
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (fn := self._given.get()) is not None:
            fn()


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

    threading._register_atexit(at_exit)  # type: ignore[attr-defined]  # typeshed leaves private functions out
    try:
        yield
    finally:
        wanted[0] = False
