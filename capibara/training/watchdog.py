"""A run that hangs (a peer that stopped, a driver, a file system) says where, and ends, so that it can be started again."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import faulthandler
import os
import stat
import statistics
import sys
import threading
import time
from collections.abc import Iterator

from capibara.cli import EXIT_HUNG
from capibara.config import configurable
from capibara.types import UserError

_WINDOW = 64  # steps whose times count
_JOIN_S = 5.0  # for a thread that only looks
_FEWEST = 5  # steps before there is a usual time
_LOOKS = 10  # in the shortest time that can pass before a step counts as hung
_BEAT_S = 1.0  # at most between two looks
_AT_LEAST_S, _AT_LEAST_LAUNCHED_S = 300.0, 60.0
_BEAT = "CAPIBARA_BEAT"  # "FD:PID": a pipe to the launcher, process PID, that wants to hear that we live


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Watch:
    """When a step counts as hung.

    Attributes:
      factor: how many times the usual step it takes, the median of the last 64; None: nothing counts as hung.
      at_least_s: seconds that it takes besides, however short the usual step; None: 300, and 60 where `launch` starts the
        run again.
    """

    factor: float | None = 20.0
    at_least_s: float | None = None

    def __post_init__(self):
        if self.factor is not None and self.factor <= 1:
            raise UserError(f"Watch.factor is {self.factor}, must be above 1, or None for no watchdog")
        if self.at_least_s is not None and self.at_least_s <= 0:
            raise UserError(f"Watch.at_least_s is {self.at_least_s}, must be above 0")


class Watchdog:
    """Within `with`, a thread that ends the process with EXIT_HUNG where a step hangs; all stacks go to stderr first.

    The same thread tells the launcher, if there is one, that this process lives: a thread that holds Python's lock for
    ever stops it too. Time in which the whole process was stopped is no part of a step's.

    Args:
      watch: when a step counts as hung.
      every: steps between those at which the loop waits for the devices: only these have a time of their own.
    """

    def __init__(self, watch: Watch, every: int = 1):
        self._watch, self._every = watch, every
        self._launcher = _launcher()
        default_s = _AT_LEAST_S if self._launcher is None else _AT_LEAST_LAUNCHED_S
        self._at_least_s = default_s if watch.at_least_s is None else watch.at_least_s
        self._lost_s = 0.0  # in which this process was stopped
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
            self._thread.join(_JOIN_S)
        if self._launcher is not None:
            _tell(self._launcher, b"-")

    def beat(self, step: int) -> None:
        """Says that `step` was handed to the devices, and every `every` of them that they have done it."""
        self._steps, self._last_step = self._steps + 1, step
        if self._steps % self._every == 0:
            now_s = self._now_s()
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
        began_s = self._now_s()
        yield
        if since_s is not None:
            self._since_s = since_s + self._now_s() - began_s

    @property
    def limit_s(self) -> float | None:
        """Seconds after which the steps at hand count as hung; None: it is not known yet what is usual."""
        if self._watch.factor is None or len(self._times) < _FEWEST:
            return None
        return max(self._at_least_s, self._watch.factor * statistics.median(self._times))

    def _look(self) -> None:
        pause_s, looked_s = min(self._at_least_s / _LOOKS, _BEAT_S), time.monotonic()
        while not self._ended.wait(pause_s):
            self._lost_s += max(0.0, time.monotonic() - looked_s - 2 * pause_s)
            looked_s = time.monotonic()
            if self._launcher is not None:
                _tell(self._launcher, b".")
            since_s, limit_s, now_s = self._since_s, self.limit_s, self._now_s()
            if since_s is not None and limit_s is not None and now_s - since_s > limit_s:
                self._end(now_s - since_s)

    def _now_s(self) -> float:
        return time.monotonic() - self._lost_s

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


def _launcher() -> int | None:
    """The pipe to the launcher; None: this process was not started by one."""
    pipe, _, pid = os.environ.get(_BEAT, "").partition(":")
    if pipe.isdigit() and pid == str(os.getppid()):  # what a worker has started inherits the variable, not the pipe
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(int(pipe)).st_mode):
                os.set_inheritable(int(pipe), False)
                return int(pipe)
    return None


def _tell(pipe: int, word: bytes) -> None:
    """A "." means that we live, "-" that nothing more will be said."""
    with contextlib.suppress(OSError):  # nobody reads it: then it is full, or its other end is closed
        os.write(pipe, word)
