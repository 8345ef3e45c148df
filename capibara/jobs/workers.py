"""The worker processes of a launcher: start, health checks, end."""

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

from capibara.jobs import guard
from capibara.multihost import exits

LOOK_S = 0.1
BEAT = "CAPIBARA_BEAT"  # "FD:PID": the file descriptor at which a worker sends heartbeats to its launcher, process PID
_HEALTH_S = 0.5  # between two health checks
_THAWS, _STAYS_S = 3, 2.0  # a worker that does not keep running for so long after any of so many SIGCONT is given up
_REAP_S = 10.0  # wait after SIGKILL; a process that waits for a device dies later
_PR_SET_PDEATHSIG = 1


class Worker:
    """A process, and its children, in a process group of its own.

    Args:
      index: of the worker, from 0.
      command: program and arguments.
      environment: variables in addition to ours.
    """

    def __init__(self, index: int, command: Sequence[str], environment: Mapping[str, str]):
        self.index = index
        self.beats, write = os.pipe()
        os.set_blocking(self.beats, False)
        os.set_blocking(write, False)
        try:
            # A group of its own, so that ctrl-C reaches only the launcher, which forwards it once. Reading from the
            # terminal would stop such a group, so its stdin is closed.
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
        """Its process id, which is also the id of its group."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code, or minus the signal's number; None: it runs.

        The process is not reaped here: until `reap` its process id and group id cannot be reused.
        """
        if self._process.returncode is not None or not hasattr(os, "waitid"):
            return self._process.poll()
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status

    def send(self, *numbers: int) -> None:
        """Sends signals to its group."""
        if self._process.returncode is None:
            guard.send([self.pid], *numbers)

    def reap(self) -> bool:
        """Kills what is left of its group and waits for the process; returns False if it does not die."""
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
    """Finds workers that are stopped or silent, and continues those that are stopped.

    A group that is stopped (SIGSTOP, or a read from the terminal) is continued after `stopped_s`: ending it would cost all
    workers their steps since the last checkpoint. One that does not stay continued is given up. A process that a debugger
    has stopped is left alone. Time in which the launcher itself did not run (a suspended machine, a stopped job) does not
    count.

    Attributes:
      workers: all workers.
      stopped_s: seconds that a worker may be stopped.
      silent_s: seconds between heartbeats, for a worker that has sent one.
      say: called with each line of the log.
    """

    workers: Sequence[Worker]
    stopped_s: float
    silent_s: float
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._looked_s = time.monotonic()
        self._members = guard.Members([worker.pid for worker in self.workers])
        self._stopped_s = collections.defaultdict[int, float](float)  # by the worker's index
        self._silent_s: dict[int, float] = {}  # for workers that have sent a heartbeat
        self._thawed_s: dict[int, float] = {}
        self._thaws = collections.Counter[int]()  # unsuccessful SIGCONTs in a row, by index

    def look(self) -> str | None:
        """Checks all workers; returns why one is given up, or None."""
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
        which = "" if worker.pid in stopped else f", that is its child process {stopped[0]},"
        self.say(f"process {index} (pid {worker.pid}){which} was stopped (SIGSTOP) for {self.stopped_s:g} s: continued")
        self._thawed_s[index], self._stopped_s[index] = now_s, 0.0
        self._thaws[index] += 1
        _continue(stopped)
        return None

    def _silent(self, worker: Worker, passed_s: float) -> str | None:
        try:
            read = os.read(worker.beats, 1 << 16)
            self._silent_s[worker.index] = 0.0
            if not read or read.endswith(b"-"):  # it sends no more heartbeats
                del self._silent_s[worker.index]
        except BlockingIOError:
            if worker.index in self._silent_s:
                self._silent_s[worker.index] += passed_s
        if self._silent_s.get(worker.index, 0.0) < self.silent_s:
            return None
        return f"has sent no heartbeat for {self.silent_s:g} s"


def end(workers: Sequence[Worker], grace_s: float, crash_grace_s: float, hurry: Callable[[], bool]) -> list[int]:
    """Sends SIGTERM to all running workers, and kills those that do not end, with all their children.

    Args:
      workers: all workers.
      grace_s: seconds that they have to save and end.
      crash_grace_s: seconds that they have once one has failed or `hurry` returns True: there will be no save.
      hurry: polled.

    Returns:
      The process ids of workers that did not die even by SIGKILL.
    """
    began_s, short_s = time.monotonic(), None
    members = guard.Members([worker.pid for worker in workers])
    for worker in workers:
        if worker.code is None:
            worker.send(signal.SIGTERM, signal.SIGCONT)  # a stopped process receives the first when it continues
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
    """A function for a child to call first, on Linux: the kernel is to send it SIGTERM when its parent ends."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent has already ended
            os.kill(os.getpid(), signal.SIGTERM)

    return ask


def meaning(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        known = -code in signal.Signals.__members__.values()  # real-time signals have no names
        return f"signal {signal.Signals(-code).name if known else -code}"
    return f"exit code {code}{' (it hung)' if code == exits.EXIT_HUNG else ''}"
