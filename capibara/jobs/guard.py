"""Ends the worker processes of a launcher that was killed, also those that are stopped or stuck.

When the launcher is gone the kernel sends the workers SIGTERM (prctl), but a stopped process does not receive it and a
stuck one ignores it. So a small guard process waits for the launcher's end and ends the workers. It is run as a file and
imports nothing of capibara, so that it starts at once and needs little memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

LOOK_S = 0.2
_LEFT_S = 5.0  # for the others to end after one worker has ended
_IDLE_S = 15.0  # without CPU time: the worker is not saving a checkpoint
_IDLE_SHARE = 0.02  # of a CPU; a worker that uses less is idle
_THAWS = 3  # how often a stopped worker is continued
_START_S = 10.0
_SCAN_SHARE = 50.0  # the pause after a scan of all processes, as a multiple of its duration


@dataclasses.dataclass(frozen=True)
class Stat:
    """A process in /proc: its state ("T": stopped, "t": by a debugger), group, start time and CPU ticks."""

    pid: int
    state: str
    group: int
    start: int
    ticks: int


def stat_of(pid: int) -> Stat | None:
    """Reads /proc for a process; None: there is no such process, or no /proc."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return Stat(pid, fields[0], int(fields[2]), int(fields[19]), int(fields[11]) + int(fields[12]))
    except (OSError, ValueError, IndexError):
        return None


def members(groups: Sequence[int]) -> list[Stat]:
    """The running processes of these groups; empty without /proc."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    result = filter(None, (stat_of(int(name)) for name in names if name.isdigit()))
    return [stat for stat in result if stat.group in groups and stat.state not in "ZX"]


class Members:
    """Tracks the processes of some groups.

    Known processes are checked at each call. New ones are found by a scan of all processes of the machine, which may be
    many: scans are limited to a small share of the time.
    """

    def __init__(self, groups: Sequence[int]):
        self._groups, self._known, self._next_s = list(groups), set(groups), 0.0

    def look(self) -> list[Stat]:
        """The processes that are still running."""
        began_s = time.monotonic()
        if began_s < self._next_s:
            result = [stat for stat in map(stat_of, sorted(self._known)) if stat is not None]
            return [stat for stat in result if stat.group in self._groups and stat.state not in "ZX"]
        result = members(self._groups)
        now_s = time.monotonic()
        self._known = {*self._groups, *(stat.pid for stat in result)}
        self._next_s = now_s + _SCAN_SHARE * (now_s - began_s)
        return result


def send(groups: Sequence[int], *numbers: int) -> None:
    """Sends signals to all processes of these groups."""
    for group in groups:
        for number in numbers:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter on macOS if all have ended
                os.killpg(group, number)


class Guard:
    """The launcher's side: within `with` a guard process runs, which ends the groups passed to `watch`.

    The guard is not a child of the launcher, whose only children are the workers.
    """

    def __init__(self) -> None:
        self._pipe: int | None = None

    def __enter__(self) -> Guard:
        read, write = os.pipe()
        try:
            command = [sys.executable, "-I", "-S", os.path.abspath(__file__)]
            silent = subprocess.DEVNULL
            starting = subprocess.Popen(command, stdin=read, stdout=silent, stderr=silent, start_new_session=True)
            try:
                starting.wait(_START_S)
            except subprocess.TimeoutExpired:
                starting.kill()
            self._pipe = write
        except OSError:  # the process limit is reached: only the workers' prctl is left
            os.close(write)
        finally:
            os.close(read)
        return self

    def __exit__(self, *_: object) -> None:
        self._tell(None)
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def watch(self, groups: Sequence[int], grace_s: float) -> None:
        """Makes the guard end these process groups after the launcher, at most `grace_s` seconds after SIGTERM."""
        stats = [(group, stat_of(group)) for group in groups]
        self._tell({"groups": [(group, stat.start if stat else 0) for group, stat in stats], "grace_s": grace_s})

    def _tell(self, message: dict[str, object] | None) -> None:
        if self._pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # the guard was killed
                os.write(self._pipe, json.dumps(message).encode() + b"\n")


class _Ending:
    """Ends the worker groups of a launcher that is gone, within a time limit."""

    def __init__(self, groups: Sequence[tuple[int, int]], grace_s: float):
        self._groups, now_s = dict(groups), time.monotonic()
        self._until_s = now_s + grace_s
        self._left_s: float | None = None  # time left, set once a worker has ended
        self._thaws, self._busy_s, self._ticks = 0, now_s, 0
        self._members = Members(list(self._groups))

    def run(self) -> None:
        """Returns when all processes have ended."""
        if not sys.platform.startswith("linux"):
            send(self._mine(), signal.SIGTERM)  # on Linux the kernel has sent it already
        while (groups := self._mine()) and (alive := self._alive(groups)):
            self._thaw(alive)
            self._look(alive, groups)
            time.sleep(LOOK_S)

    def _mine(self) -> list[int]:
        """The groups whose number was not reused by other processes meanwhile."""
        result = [(group, start, stat_of(group)) for group, start in self._groups.items()]
        return [group for group, start, stat in result if stat is None or not start or stat.start == start]

    def _alive(self, groups: Sequence[int]) -> list[Stat]:
        if os.path.isdir("/proc/self"):
            return [stat for stat in self._members.look() if stat.group in groups]
        alive = []
        for group in groups:
            with contextlib.suppress(OSError):
                os.killpg(group, 0)
                alive.append(Stat(group, "R", group, 0, 0))
        return alive

    def _thaw(self, alive: Sequence[Stat]) -> None:
        """Continues stopped processes, which only then receive SIGTERM; kills one that is stopped again and again."""
        if stopped := [stat.pid for stat in alive if stat.state == "T"]:
            self._thaws += 1
            for pid in stopped:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT if self._thaws <= _THAWS else signal.SIGKILL)

    def _look(self, alive: Sequence[Stat], groups: Sequence[int]) -> None:
        """Shortens the time limit, which allows for a save, once a worker has ended or all are idle."""
        now_s, there = time.monotonic(), {stat.pid for stat in alive}
        if self._left_s is None and not there.issuperset(self._groups):
            self._left_s = now_s + _LEFT_S
        ticks, waits = sum(stat.ticks for stat in alive), any(stat.state == "D" for stat in alive)
        used_s = abs(ticks - self._ticks) / os.sysconf("SC_CLK_TCK")
        if waits or used_s > _IDLE_SHARE * (now_s - self._busy_s):
            self._busy_s, self._ticks = now_s, ticks
        idle = os.path.isdir("/proc/self") and now_s - self._busy_s > _IDLE_S
        if idle or now_s >= min(self._until_s, self._left_s or self._until_s):
            send(groups, signal.SIGKILL)


def main() -> None:
    """Waits until the launcher closes the pipe at standard input, after "null" if it has ended normally."""
    if os.fork():
        os._exit(0)
    os.chdir("/")
    groups, grace_s = [], 0.0
    for line in sys.stdin:
        message = json.loads(line)
        if message is None:
            return
        groups, grace_s = message["groups"], message["grace_s"]
    _Ending(groups, grace_s).run()


if __name__ == "__main__":
    main()
