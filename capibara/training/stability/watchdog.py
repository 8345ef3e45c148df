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
from typing import NamedTuple

from capibara.config import configurable
from capibara.core.exits import EXIT_HUNG
from capibara.core.multihost import peers
from capibara.core.types import UserError

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
    """When a run counts as hung. Of a limit that is None there is none.

    Attributes:
      factor: how many times the usual step a step takes, the median of the last 64; None: nothing counts as hung.
      at_least_s: seconds that it takes besides, however short the usual step; None: 300, and 60 where `launch` starts the
        run again.
      start_s: seconds from before the compile until it is known what a step usually takes: compiling, restoring, and each
        of the first steps; of what is looked at one by one before the first step, such as a reference pass, each part.
      evaluation_s: seconds that each batch of an evaluation, each sample, and each part of a rollout takes.
      save_s: seconds that a save holds the run up.
    """

    factor: float | None = 20.0
    at_least_s: float | None = None
    start_s: float | None = 3600.0
    evaluation_s: float | None = 1800.0
    save_s: float | None = 3600.0

    def __post_init__(self) -> None:
        if self.factor is not None and self.factor <= 1:
            raise UserError(f"Watch.factor is {self.factor}, must be above 1, or None for no watchdog")
        for name in ("at_least_s", "start_s", "evaluation_s", "save_s"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise UserError(f"Watch.{name} is {value}, must be above 0, or None")


class _Phase(NamedTuple):
    """What the run is at beside its steps, and which limit of Watch that has."""

    what: str
    limit: str


_START = _Phase("the start", "start_s")


class Watchdog:
    """Within `with`, a thread that ends the process with EXIT_HUNG where the run hangs; all stacks go to stderr first.

    The same thread tells the launcher, if there is one, from the first step on that this process lives: a thread that holds
    Python's lock for ever stops it too. Time in which the whole process was stopped does not count.

    Args:
      watch: what counts as hung.
      every: steps between those at which the loop waits for the devices: only these have a time of their own.
    """

    def __init__(self, watch: Watch, every: int = 1):
        self._watch, self._every = watch, every
        self._launcher, self._speaks = _launcher(), False
        default_s = _AT_LEAST_S if self._launcher is None else _AT_LEAST_LAUNCHED_S
        self._at_least_s = default_s if watch.at_least_s is None else watch.at_least_s
        self._lost_s = 0.0  # in which this process was stopped
        self._times: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._phase: _Phase | None = _START  # None: steps
        self._since_s = self._now_s()  # when the steps, or the part of the phase, at hand began
        self._timed = False  # whether the steps at hand began with the one before
        self._steps = 0
        self._last_step: int | None = None
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
        self._phase, self._speaks = None, True
        self._steps, self._last_step = self._steps + 1, step
        if self._steps % self._every == 0:
            now_s = self._now_s()
            if self._timed:
                self._times.append(now_s - self._since_s)
            self._since_s, self._timed = now_s, True

    def advance(self) -> None:
        """Says that a part of what takes long is done, such as a batch of an evaluation."""
        if self._phase is not None:
            self._since_s = self._now_s()

    @contextlib.contextmanager
    def allowing(self, what: str, limit: str) -> Iterator[None]:
        """Within it the run is at something else than its steps.

        Args:
          what: named in the error.
          limit: the field of Watch that limits each part of it.
        """
        with self._at(what, limit):
            yield
        self._since_s, self._timed, self._steps = self._now_s(), False, 0

    @contextlib.contextmanager
    def left_out(self, what: str, limit: str) -> Iterator[None]:
        """As `allowing`, between two steps: what it takes is no part of their time."""
        since_s, began_s = self._since_s, self._now_s()
        with self._at(what, limit):
            yield
        self._since_s = since_s + self._now_s() - began_s

    def ending(self) -> None:
        """No step comes any more: what is left is to wait for the last save."""
        self._phase, self._since_s = _Phase("the last save", "save_s"), self._now_s()

    @contextlib.contextmanager
    def _at(self, what: str, limit: str) -> Iterator[None]:
        before, self._since_s = self._phase, self._now_s()
        self._phase = _Phase(what, limit)
        yield
        self._since_s = self._now_s()  # first: the limit of what comes now may be shorter
        self._phase = before

    @property
    def limit_s(self) -> float | None:
        """Seconds after which what is at hand counts as hung; None: it never does."""
        if self._watch.factor is None:
            return None
        if (phase := self._phase_at_hand) is not None:
            return getattr(self._watch, phase.limit)
        return max(self._at_least_s, self._watch.factor * statistics.median(self._times))

    @property
    def _phase_at_hand(self) -> _Phase | None:
        """None: steps, of which it is known what they usually take."""
        return self._phase or (_START if len(self._times) < _FEWEST else None)

    def _look(self) -> None:
        watch, looked_s = self._watch, time.monotonic()
        limits_s = [self._at_least_s, watch.start_s, watch.evaluation_s, watch.save_s]
        pause_s = min([_BEAT_S, *(limit_s / _LOOKS for limit_s in limits_s if limit_s)])
        while not self._ended.wait(pause_s):
            self._lost_s += max(0.0, time.monotonic() - looked_s - 2 * pause_s)
            looked_s = time.monotonic()
            if self._launcher is not None and self._speaks:
                _tell(self._launcher, b".")
            # The limit first: what begins meanwhile begins after that, and its own may be shorter.
            limit_s, now_s = self.limit_s, self._now_s()
            if limit_s is not None and now_s - self._since_s > limit_s:
                self._end(now_s - self._since_s)

    def _now_s(self) -> float:
        return time.monotonic() - self._lost_s

    def _end(self, waited_s: float) -> None:
        after = "" if self._last_step is None else f" after step {self._last_step}"
        phase, ends = self._phase_at_hand, "this run hangs and ends; start it again to resume"
        if phase is None:
            usual_s = statistics.median(self._times)
            found = (
                f"nothing has come of the devices for {waited_s:.0f} s{after}, where {usual_s:.2g} s are usual: {ends} "
                "(Watch.factor, Watch.at_least_s)"
            )
        else:
            found = f"{phase.what}{after} has not come on for {waited_s:.0f} s: {ends} (Watch.{phase.limit})"
        print(f"error: {found}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        peers.tell(EXIT_HUNG, found)
        peers.end(EXIT_HUNG)


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
