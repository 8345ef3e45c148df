"""Worker processes that do many tasks, a few at a time."""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Self, TypeVar

from capibara.core.types import TryAgain

T = TypeVar("T")

_AHEAD = 2  # tasks per worker that are sent in advance


class Workers:
    """Processes for the tasks of several steps; a context manager.

    Args:
      count: processes; 0: this one.
      module: what the processes import at their start, which is that of the context; None: they start with the first tasks.
    """

    def __init__(self, count: int, module: str | None = None):
        self._count, self._module = count, module
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self._count:
            context = multiprocessing.get_context("spawn")
            self._pool = concurrent.futures.ProcessPoolExecutor(self._count, context, _begin, (self._module,))
            for _ in range(self._count if self._module else 0):
                self._pool.submit(_nothing)  # a process starts with each task until there are enough
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)  # after an error, too: nobody writes beside the run that resumes

    def each(self, run: Callable[[T], None], tasks: Iterable[T], on_done: Callable[[], None]) -> None:
        """Runs a function on every task.

        Args:
          run: can be pickled; a worker has one copy for all tasks, which may keep what it has loaded.
          tasks: its arguments, in any order.
          on_done: called in this process after each task.

        Raises:
          TryAgain: a worker was killed.
        """
        if self._pool is None:
            for task in tasks:
                run(task)
                on_done()
            return
        pool, remaining, packed = self._pool, iter(tasks), pickle.dumps(run)
        try:
            waiting = {pool.submit(_call, packed, task) for task in itertools.islice(remaining, _AHEAD * self._count)}
            while waiting:
                done, waiting = concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
                for item in done:
                    item.result()
                    on_done()
                waiting |= {pool.submit(_call, packed, task) for task in itertools.islice(remaining, len(done))}
        except BrokenProcessPool:
            raise TryAgain(
                "a worker process was killed, perhaps for its memory: run the same command again, with fewer --num_workers"
            ) from None


def _begin(module: str | None) -> None:
    # The workers are the parallelism: libraries would each start as many threads as there are cores.
    for name in ("RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends without a traceback: the parent says why
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if module:
        importlib.import_module(module)


def _nothing() -> None:
    """A task that starts a process."""


def _end_with_parent() -> None:
    """Ends this process with the parent: it must not write beside the run that resumes."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "it is a worker"
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


@functools.lru_cache(1)
def _loaded(packed: bytes) -> Callable[[Any], None]:
    return pickle.loads(packed)


def _call(packed: bytes, task: object) -> None:
    _loaded(packed)(task)
