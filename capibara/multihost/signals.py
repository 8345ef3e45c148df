"""Ctrl-C and SIGTERM that wait for a place where what runs can be left.

A KeyboardInterrupt may be raised between any two instructions: after a lock was taken and before the block that gives it back
has begun, or in code of a library that catches every exception.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self


class Signals:
    """Within `with`, the first SIGTERM or SIGINT only sets `number`; a second SIGINT interrupts at once.

    Only the main thread can have handlers; in another thread no signal is seen.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._received = threading.Event()
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> bool:
        """Waits up to so many seconds; returns whether a signal has arrived."""
        return self._received.wait(seconds)

    def pause(self, seconds: float) -> None:
        """Waits so many seconds.

        Raises:
          KeyboardInterrupt: SIGINT has arrived, before or meanwhile.
          SystemExit: SIGTERM has arrived; with the code that shells report.
        """
        if self.wait(seconds):
            assert self.number is not None, "it has arrived"
            raise KeyboardInterrupt if self.number == signal.SIGINT else SystemExit(128 + self.number)

    def _on(self, number: int, _: FrameType | None) -> None:
        if self.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = self.number or number
        self._received.set()
