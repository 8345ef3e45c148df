"""Ctrl-C and SIGTERM end a run after the current step, with a checkpoint; longer work, such as evaluation, is aborted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
import numpy as np


class Interrupted(Exception):
    """The run was signalled to stop during long work that can be repeated, such as an evaluation."""


class StopRequest:
    """Within `with`, the first SIGINT or SIGTERM only sets `signal_number`; a second SIGINT interrupts at once.

    Args:
      agree_every: with several hosts, steps between two exchanges of whether one was signalled, since each host must run
        the same number of steps. An exchange waits for the devices.
    """

    def __init__(self, agree_every: int = 1) -> None:
        self._agree_every = agree_every
        self.signal_number: int | None = None
        self._agreed: int | None = None  # with several hosts: the signal on which all have agreed
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
        """The signal because of which to stop after `step`, or None; the same on every host, and for all later steps."""
        return self._agreed_signal(step, self._agree_every)

    def check(self, done: int, every: int = 1) -> None:
        """Raises if the run is to stop; call it before each part of long work, on every host.

        Args:
          done: the number of finished parts.
          every: with several hosts, parts between two exchanges.

        Raises:
          Interrupted: the run is to stop.
        """
        if self._agreed_signal(done, every) is not None:
            raise Interrupted

    def _agreed_signal(self, count: int, every: int) -> int | None:
        if jax.process_count() == 1:
            return self.signal_number
        if self._agreed is not None or count % every:
            return self._agreed
        from jax.experimental import multihost_utils

        signals = multihost_utils.process_allgather(np.int32(self.signal_number or 0))
        self._agreed = int(np.max(signals)) or None
        return self._agreed

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.signal_number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_number = number
