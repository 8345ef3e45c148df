"""Counts what XLA compiles in this process, and how long it takes."""

from __future__ import annotations

import functools
import threading

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"  # reading from a persistent cache included


class _Compiles:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count, self._total_s = 0, 0.0

    def add(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _EVENT:
            with self._lock:
                self._count += 1
                self._total_s += duration_secs

    def read(self) -> tuple[int, float]:
        with self._lock:
            return self._count, self._total_s


@functools.cache
def _compiles() -> _Compiles:
    created = _Compiles()
    jax.monitoring.register_event_duration_secs_listener(created.add)
    return created


def count() -> tuple[int, float]:
    """Compilations, and their seconds, since the first call in this process."""
    return _compiles().read()
