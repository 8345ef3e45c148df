"""Ends what a launcher has started when the launcher itself is gone: a stopped or stuck process would outlive it.

The kernel sends the workers SIGTERM then (prctl), which a stopped process does not take and a stuck one does not obey. So
a small process beside the launcher waits for its end and sees to the rest. It is run as a file, and imports nothing of
capibara: it must be there at once and hold little memory.
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
_LEFT_S = 5.0  # that the others have when one worker has ended
_IDLE_S = 15.0  # without any use of a processor: nobody saves like that
_IDLE_SHARE = 0.02  # of one processor, below which a worker does nothing but look at its watch
_THAWS = 3  # how often one that is stopped is continued
_START_S = 10.0
_SCAN_SHARE = 50.0  # how much longer than a look at all processes there is none


@dataclasses.dataclass(frozen=True)
class Stat:
    """What /proc says of a process: its state ("T": stopped, "t": by a debugger), its group, its start, its CPU ticks."""

    pid: int
    state: str
    group: int
    start: int
    ticks: int


def stat_of(pid: int) -> Stat | None:
    """None: there is no such process, or no /proc to say so."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return Stat(pid, fields[0], int(fields[2]), int(fields[19]), int(fields[11]) + int(fields[12]))
    except (OSError, ValueError, IndexError):
        return None


def members(groups: Sequence[int]) -> list[Stat]:
    """The processes of these groups that have not ended; without /proc none."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    found = filter(None, (stat_of(int(name)) for name in names if name.isdigit()))
    return [stat for stat in found if stat.group in groups and stat.state not in "ZX"]


class Members:
    """The processes of some groups, looked at again and again.

    Those that are known are looked at each time; new ones are looked for among all processes of the machine, of which there
    may be very many: that takes a small share of the time.
    """

    def __init__(self, groups: Sequence[int]):
        self._groups, self._known, self._next_s = list(groups), set(groups), 0.0

    def look(self) -> list[Stat]:
        """Those that have not ended."""
        began_s = time.monotonic()
        if began_s < self._next_s:
            found = [stat for stat in map(stat_of, sorted(self._known)) if stat is not None]
            return [stat for stat in found if stat.group in self._groups and stat.state not in "ZX"]
        found = members(self._groups)
        now_s = time.monotonic()
        self._known = {*self._groups, *(stat.pid for stat in found)}
        self._next_s = now_s + _SCAN_SHARE * (now_s - began_s)
        return found


def send(groups: Sequence[int], *numbers: int) -> None:
    """Signals to all processes of these groups."""
    for group in groups:
        for number in numbers:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter on macOS, where all have ended
                os.killpg(group, number)


class Guard:
    """The launcher's end of it: within `with` a guard is there, which knows the groups given to `watch`.

    The guard is nobody's child, so that whoever counts the launcher's children finds the workers alone.
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
        except OSError:  # no more processes: the workers' own prctl is left
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
        """From now on these process groups end with us; `grace_s` seconds after SIGTERM at the latest."""
        stats = [(group, stat_of(group)) for group in groups]
        self._tell({"groups": [(group, stat.start if stat else 0) for group, stat in stats], "grace_s": grace_s})

    def _tell(self, message: dict[str, object] | None) -> None:
        if self._pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # somebody has killed the guard
                os.write(self._pipe, json.dumps(message).encode() + b"\n")


class _Ending:
    """The processes of a launcher that is gone, and for how long they may still be there."""

    def __init__(self, groups: Sequence[tuple[int, int]], grace_s: float):
        self._groups, now_s = dict(groups), time.monotonic()
        self._until_s = now_s + grace_s
        self._left_s: float | None = None  # once a worker has ended
        self._thaws, self._busy_s, self._ticks = 0, now_s, 0
        self._members = Members(list(self._groups))

    def run(self) -> None:
        """Until all have ended."""
        if not sys.platform.startswith("linux"):
            send(self._mine(), signal.SIGTERM)  # on Linux the kernel has done that
        while (groups := self._mine()) and (alive := self._alive(groups)):
            self._thaw(alive)
            self._look(alive, groups)
            time.sleep(LOOK_S)

    def _mine(self) -> list[int]:
        """The groups whose number has not gone to somebody else meanwhile."""
        found = [(group, start, stat_of(group)) for group, start in self._groups.items()]
        return [group for group, start, stat in found if stat is None or not start or stat.start == start]

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
        """A stopped process takes SIGTERM only when it is continued; one that is stopped over and over is killed."""
        if stopped := [stat.pid for stat in alive if stat.state == "T"]:
            self._thaws += 1
            for pid in stopped:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT if self._thaws <= _THAWS else signal.SIGKILL)

    def _look(self, alive: Sequence[Stat], groups: Sequence[int]) -> None:
        """Where a worker has ended, or none does anything, the long time that a save may take is not needed."""
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
    """Waits for the end of whoever holds the other end of standard input; None is their last word where all is well."""
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
