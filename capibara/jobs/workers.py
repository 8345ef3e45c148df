"""The processes that a launcher starts: how each begins, whether it is well, and how it ends."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from capibara.core import exits
from capibara.jobs import guard

LOOK_S = 0.1
BEAT = "CAPIBARA_BEAT"  # "FD:PID", where a worker tells its launcher, process PID, that it lives
_HEALTH_S = 0.5  # between two looks at what the system says of the workers
_THAWS, _STAYS_S = 3, 2.0  # a worker that did not run for that long after each of so many SIGCONT is given up
_REAP_S = 10.0  # after SIGKILL; a process that waits for a device takes it later
_PR_SET_PDEATHSIG = 1


class Worker:
    """One process in a group of its own, with all that it starts.

    Args:
      index: which of the workers.
      command: program and arguments.
      environment: beside ours.
    """

    def __init__(self, index: int, command: Sequence[str], environment: Mapping[str, str]):
        self.index = index
        self.beats, write = os.pipe()
        os.set_blocking(self.beats, False)
        os.set_blocking(write, False)
        try:
            # A group of its own: ctrl-C comes to us, who pass it on once. Such a group is stopped where it reads from
            # the terminal, so it has none to read from.
            self._process = subprocess.Popen(
                list(command),
                env={**os.environ, **environment, BEAT: f"{write}:{os.getpid()}"},
                stdin=subprocess.DEVNULL if os.isatty(0) else None,
                process_group=0,
                pass_fds=(write,),
                preexec_fn=_die_with_parent(os.getpid()),
            )
        except BaseException:
            os.close(self.beats)
            raise
        finally:
            os.close(write)

    @property
    def pid(self) -> int:
        """Its process id, which is the number of its group."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code, minus the signal's number where one ended it; None: it runs.

        It is not waited for: until `reap` nobody else gets its number, nor that of its group.
        """
        if self._process.returncode is not None or not hasattr(os, "waitid"):
            return self._process.poll()
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def send(self, *numbers: int) -> None:
        """Signals to its group."""
        if self._process.returncode is None:
            guard.send([self.pid], *numbers)

    def reap(self) -> bool:
        """Kills whatever is left of its group and waits for its end; False: it does not come."""
        self.send(signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.close(self.beats)
        try:
            self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            return False
        return True


@dataclasses.dataclass
class Health:
    """Finds out which workers are stopped or silent; those that are stopped it continues.

    A group that is stopped (SIGSTOP, or a read from the terminal) is continued after `stopped_s`: nothing is lost by
    that, where ending it would cost all workers what they did since their last checkpoint. One that does not stay
    continued is given up. What a debugger holds is left alone. Time in which we did not run ourselves (a machine that
    was suspended, a whole job that was stopped) does not count.

    Attributes:
      workers: all of them.
      stopped_s: seconds that a worker may be stopped.
      silent_s: seconds that one may be silent that has said before that it lives.
      say: called with each line about what was found.
    """

    workers: Sequence[Worker]
    stopped_s: float
    silent_s: float
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._looked_s = time.monotonic()
        self._members = guard.Members([worker.pid for worker in self.workers])
        self._stopped_s = collections.defaultdict[int, float](float)  # by the worker's index
        self._silent_s: dict[int, float] = {}  # of those that have told us that they live
        self._thawed_s: dict[int, float] = {}
        self._thaws = collections.Counter[int]()  # of each, those in a row that did not help

    def look(self) -> str | None:
        """Why a worker is given up, None: all are well or may still become so."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _HEALTH_S:
            return None
        passed_s, self._looked_s = min(now_s - self._looked_s, 2 * _HEALTH_S), now_s
        states = self._members.look()
        for worker in self.workers:
            mine = [stat for stat in states if stat.group == worker.pid]
            stopped = [stat.pid for stat in mine if stat.state == "T"]
            held = any(stat.state in "Tt" for stat in mine)
            why = self._stopped(worker, stopped, passed_s, now_s) or self._silent(worker, 0.0 if held else passed_s)
            if why is not None:
                return f"process {worker.index} (pid {worker.pid}) {why}"
        return None

    def _stopped(self, worker: Worker, stopped: Sequence[int], passed_s: float, now_s: float) -> str | None:
        index = worker.index
        if not stopped:
            self._stopped_s[index] = 0.0
            return None
        if not self._stopped_s[index]:  # it was not a moment ago
            stayed = now_s - self._thawed_s.get(index, -math.inf) > _STAYS_S
            self._thaws[index] = 0 if stayed else self._thaws[index]
        if self._thaws[index] >= _THAWS:
            return f"is stopped again and again (SIGSTOP): continued {_THAWS} times"
        self._stopped_s[index] += passed_s
        if self._stopped_s[index] < self.stopped_s:
            return None
        which = "" if worker.pid in stopped else f", or rather process {stopped[0]} that it started,"
        self.say(f"process {index} (pid {worker.pid}){which} was stopped (SIGSTOP) for {self.stopped_s:g} s: continued")
        self._thawed_s[index], self._stopped_s[index] = now_s, 0.0
        self._thaws[index] += 1
        _continue(stopped)
        return None

    def _silent(self, worker: Worker, passed_s: float) -> str | None:
        try:
            said = os.read(worker.beats, 1 << 16)
            self._silent_s[worker.index] = 0.0
            if not said or said.endswith(b"-"):  # it has nothing more to say
                del self._silent_s[worker.index]
        except BlockingIOError:
            if worker.index in self._silent_s:
                self._silent_s[worker.index] += passed_s
        if self._silent_s.get(worker.index, 0.0) < self.silent_s:
            return None
        return f"has shown no sign of life for {self.silent_s:g} s"


def end(workers: Sequence[Worker], grace_s: float, crash_grace_s: float, hurry: Callable[[], bool]) -> list[int]:
    """Asks all that still run to end, and kills those that do not, with all that any of them has started.

    Args:
      workers: all of them.
      grace_s: seconds that they have, for a save.
      crash_grace_s: seconds that are left once one has ended badly, or `hurry` says so: there will be no save.
      hurry: asked again and again.

    Returns:
      The process ids of those that even SIGKILL has not ended.
    """
    began_s, short_s = time.monotonic(), None
    members = guard.Members([worker.pid for worker in workers])
    for worker in workers:
        if worker.code is None:
            worker.send(signal.SIGTERM, signal.SIGCONT)  # what is stopped takes the first when it goes on
    while None in (codes := [worker.code for worker in workers]):
        now_s = time.monotonic()
        badly = any(code not in (None, 0, 128 + signal.SIGTERM, 128 + signal.SIGINT) for code in codes)
        if short_s is None and (badly or hurry()):
            short_s = now_s + crash_grace_s
        if now_s >= min(began_s + grace_s, short_s or began_s + grace_s):
            break
        _continue(stat.pid for stat in members.look() if stat.state == "T")
        time.sleep(LOOK_S)
    return [worker.pid for worker in workers if not worker.reap()]


def _continue(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """What a child does first, on Linux: it asks for SIGTERM when its parent, however that is ended, is no more."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it was quicker
            os.kill(os.getpid(), signal.SIGTERM)

    return ask


def meaning(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        known = -code in signal.Signals.__members__.values()  # real-time signals have no names
        return f"signal {signal.Signals(-code).name if known else -code}"
    return f"exit code {code}{' (it hung)' if code == exits.EXIT_HUNG else ''}"
