"""Compiles programs in a thread of its own, while others run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax

from capibara.core.types import PyTree

_log = logging.getLogger(__name__)


class Task(NamedTuple):
    """What to compile: a key, equal for equal programs, and a function that compiles them for later calls of jax.jit's."""

    key: Hashable
    compile: Callable[[], object]


class Compiler:
    """Compiles tasks in a thread, those that requests wait for before all others; thread-safe.

    Until `start` all programs count as compiled: each is compiled by its first call, in the caller's thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._compiled: set[Hashable] = set()
        self._wanted: dict[Hashable, Task] = {}
        self._later: dict[Hashable, Task] = {}
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def started(self) -> bool:
        """Whether programs are compiled in the thread."""
        return self._thread is not None

    @property
    def left(self) -> int:
        """Number of tasks that are not compiled yet."""
        with self._changed:
            return len(self._wanted) + len(self._later)

    def compile(self, task: Task) -> None:
        """Compiles a task in the caller's thread."""
        task.compile()
        with self._changed:
            self._compiled.add(task.key)

    def add(self, task: Task) -> None:
        """Compiles a task in the thread, after all that requests wait for."""
        with self._changed:
            if task.key not in self._compiled:
                self._later.setdefault(task.key, task)
                self._changed.notify_all()

    def is_compiled(self, task: Task) -> bool:
        """Whether its programs run at once; if not, they are compiled next."""
        with self._changed:
            if self._thread is None or task.key in self._compiled:
                return True
            self._later.pop(task.key, None)
            self._wanted.setdefault(task.key, task)
            self._changed.notify_all()
            return False

    def start(self) -> None:
        """Starts the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="compiler", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread, after the task that it compiles."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                task.compile()
            except Exception as error:  # the call of the program raises it again, where faults are handled
                _log.warning("a program for %s does not compile ahead of its requests: %r", task.key, error)
            with self._changed:
                self._compiled.add(task.key)
                self._wanted.pop(task.key, None)
                self._changed.notify_all()
            del task  # else it would hold its requests until there is another one

    def _next(self) -> Task | None:
        """The next task, which stays among those that are wanted until it is compiled; None: the thread ends."""
        with self._changed:
            while not (self._closing or self._wanted or self._later):
                self._changed.wait()
            if self._closing:
                return None
            if self._wanted:
                return next(iter(self._wanted.values()))
            task = self._later.pop(next(iter(self._later)))
            self._wanted[task.key] = task
            return task


def compiled_outputs(program: jax.stages.Wrapped, *args: object) -> PyTree:
    """Compiles a program for later calls with such arguments; returns the shapes and shardings of its outputs."""
    lowered = program.lower(*args)
    shardings = lowered.compile().output_shardings
    # Outputs are bound to devices as arguments are; another binding would be another program.
    if not any(getattr(shape_of(x), "sharding", None) for x in jax.tree.leaves(args)):
        return lowered.out_info
    return jax.tree.map(lambda x, on: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), lowered.out_info, shardings)


def shape_of(x: object) -> Any:
    """The shape of an array on devices, with its sharding if it is bound to them; anything else as it is."""
    if not isinstance(x, jax.Array):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if x.committed else None)
