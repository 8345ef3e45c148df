"""A run that hangs (a peer that stopped, a driver, a file system) says where, and ends, so that it can be started again."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import faulthandler
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator

from capibara.cli import EXIT_HUNG
from capibara.config import configurable
from capibara.types import UserError

_WINDOW = 64  # steps whose times count
_FEWEST = 5  # steps before there is a usual time
_LOOKS = 10  # in the shortest time that can pass before a step counts as hung


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Watch:
    """When a step counts as hung.

    Attributes:
      factor: how many times the usual step it takes, the median of the last 64; None: nothing counts as hung.
      at_least_s: seconds that it takes besides, however short the usual step.
    """

    factor: float | None = 20.0
    at_least_s: float = 300.0

    def __post_init__(self):
        if self.factor is not None and self.factor <= 1:
            raise UserError(f"Watch.factor is {self.factor}, must be above 1, or None for no watchdog")
        if self.at_least_s <= 0:
            raise UserError(f"Watch.at_least_s is {self.at_least_s}, must be above 0")


class Watchdog:
    """Within `with`, a thread that ends the process with EXIT_HUNG where a step hangs; all stacks go to stderr first.

    Args:
      watch: when a step counts as hung.
      every: steps between those at which the loop waits for the devices: only these have a time of their own.
    """

    def __init__(self, watch: Watch, every: int = 1):
        self._watch, self._every = watch, every
        self._times: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._since_s: float | None = None  # when the steps at hand began; None: nothing is watched
        self._steps, self._last_step = 0, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="capibara-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._watch.factor is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def beat(self, step: int) -> None:
        """Says that `step` was handed to the devices, and every `every` of them that they have done it."""
        self._steps, self._last_step = self._steps + 1, step
        if self._steps % self._every == 0:
            now_s = time.monotonic()
            if self._since_s is not None:
                self._times.append(now_s - self._since_s)
            self._since_s = now_s

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within it nothing counts as hung: evaluations and saves take their time."""
        self._since_s = None
        try:
            yield
        finally:
            self._steps = 0

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """As `paused`, between two steps: what it takes is no part of their time, and the watch goes on after it."""
        since_s, self._since_s = self._since_s, None
        began_s = time.monotonic()
        yield
        if since_s is not None:
            self._since_s = since_s + time.monotonic() - began_s

    @property
    def limit_s(self) -> float | None:
        """Seconds after which the steps at hand count as hung; None: it is not known yet what is usual."""
        if self._watch.factor is None or len(self._times) < _FEWEST:
            return None
        return max(self._watch.at_least_s, self._watch.factor * statistics.median(self._times))

    def _look(self) -> None:
        while not self._ended.wait(self._watch.at_least_s / _LOOKS):
            since_s, limit_s = self._since_s, self.limit_s
            if since_s is not None and limit_s is not None and time.monotonic() - since_s > limit_s:
                self._end(time.monotonic() - since_s)

    def _end(self, waited_s: float) -> None:
        usual_s = statistics.median(self._times)
        print(
            f"error: nothing has come of the devices for {waited_s:.0f} s after step {self._last_step}, where {usual_s:.2g} s "
            f"are usual: this run hangs and ends; start it again to carry on (Watch.factor, Watch.at_least_s)",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        os._exit(EXIT_HUNG)
