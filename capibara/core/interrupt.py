"""Ctrl-C and SIGTERM end a run after the step at hand, with a checkpoint; what takes longer than a step is left."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
import numpy as np


class Interrupted(Exception):
    """The run was told to stop in the middle of what takes long, and can be done again."""


class StopRequest:
    """Within `with`, the first SIGINT or SIGTERM only sets `signal_number`; a second SIGINT interrupts at once.

    Args:
      agree_every: where there are several hosts, they ask each other every so many steps whether one was signalled:
        each must do the same number of steps. It costs a wait for the devices.
    """

    def __init__(self, agree_every: int = 1) -> None:
        self._agree_every = agree_every
        self.signal_number: int | None = None
        self._agreed: int | None = None  # where there are several hosts
        self._previous: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # only there can handlers be set
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def agreed(self, step: int) -> int | None:
        """The signal for which to stop after `step`, or None; the same on every host, and from then on at any step."""
        return self._found(step, self._agree_every)

    def check(self, done: int, every: int = 1) -> None:
        """Within what takes long, before each of its parts, alike on every host.

        Args:
          done: the parts that were done.
          every: where there are several hosts, they ask each other every so many parts.

        Raises:
          Interrupted: the run is to stop.
        """
        if self._found(done, every) is not None:
            raise Interrupted

    def _found(self, count: int, every: int) -> int | None:
        if jax.process_count() == 1:
            return self.signal_number
        if self._agreed is not None or count % every:
            return self._agreed
        from jax.experimental import multihost_utils

        asked = multihost_utils.process_allgather(np.int32(self.signal_number or 0))
        self._agreed = int(np.max(asked)) or None
        return self._agreed

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.signal_number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_number = number
