"""Runs a verb on this machine, in one process or several, and restarts it after a failure."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Self

from capibara.jobs import workers
from capibara.jobs.guard import Guard
from capibara.jobs.workers import Health, Worker, meaning
from capibara.multihost import exits
from capibara.multihost.signals import Signals

_PAUSES_S = (1.0, 2.0, 5.0, 15.0, 60.0)  # before the first, second, ... restart; the last for all further ones
# Names a file that permits `train --start_over` to rename the run folder once, not again after a restart.
PERMIT = "CAPIBARA_START_OVER"
TO_ANYONE, _LOWEST_PORT = "/proc/sys/net/ipv4/ip_local_port_range", 10_000
_WELL_S = 10.0  # a command that has run this long is restarted after the first pause again


@dataclasses.dataclass(frozen=True, kw_only=True)
class Supervisor:
    """Runs a command and restarts it until it succeeds.

    Exit code 0 is success; after exit code 2, a mistake in the user's input, a restart would not help. After any other
    code the command is restarted: `train` resumes from its last verified checkpoint. If one of several processes ends, the
    others are stopped and all are restarted. A worker that is stopped (SIGSTOP) is continued; if that fails, or if a
    worker sends no heartbeats, it counts as hung. All worker processes end with the launcher, even if that is killed.

    Attributes:
      command: program and arguments.
      processes: how many to start; several are connected by jax.distributed on loopback.
      restarts: the largest number of restarts.
      grace_s: seconds that processes have to save and end after SIGTERM before they are killed.
      crash_grace_s: seconds that the others have to end after one has crashed.
      stopped_s: seconds that a worker may be stopped before it is continued.
      silent_s: seconds without a heartbeat after which a training worker counts as hung.
      pauses_s: seconds before the first, second, ... restart of a command that runs for less than 10 s.
      say: called with each line of the log.
    """

    command: Sequence[str]
    processes: int = 1
    restarts: int = 3
    grace_s: float = 300.0
    crash_grace_s: float = 3.0
    stopped_s: float = 3.0
    silent_s: float = 30.0
    pauses_s: Sequence[float] = _PAUSES_S
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)

    def run(self) -> int:
        """Runs the command to its end; returns its exit code, or 128 + the signal that stopped the launcher."""
        with _Signals() as stop, Guard() as guard, tempfile.TemporaryDirectory(prefix="capibara-launch-") as folder:
            permit = os.path.join(folder, "start_over")
            open(permit, "w").close()
            restarts = in_a_row = 0
            while True:
                began_s = time.monotonic()
                code = self._once(stop, guard, permit)
                if stop.number is not None:
                    return 128 + stop.number
                if code in (0, exits.EXIT_USER_ERROR):
                    return code
                lived_s = time.monotonic() - began_s
                lived = f"after {lived_s:.0f} s with {meaning(code)}"
                if restarts == self.restarts:
                    self.say(f"ended {lived}; not restarted: --restarts={self.restarts} are used up")
                    return code if code > 0 else 128 - code
                in_a_row = 0 if lived_s > _WELL_S else in_a_row
                pause_s = self.pauses_s[min(in_a_row, len(self.pauses_s) - 1)]
                restarts, in_a_row = restarts + 1, in_a_row + 1
                self.say(f"ended {lived}; restart {restarts} of {self.restarts} in {pause_s:g} s")
                stop.wait(pause_s)
                if stop.number is not None:
                    return 128 + stop.number

    def script(self) -> str:
        """The commands that it starts, a line each; PORT stands for a free one."""
        address = "127.0.0.1:PORT" if self.processes > 1 else None
        lines = []
        for index in range(self.processes):
            variables = [f"{name}={value}" for name, value in self._environment(index, address).items()]
            lines.append(f"{' '.join([*variables, shlex.join(self.command)])}{' &' * (self.processes > 1)}\n")
        return "".join(lines)

    def _once(self, stop: _Signals, guard: Guard, permit: str) -> int:
        """Runs all processes until one has failed, all have ended or a signal arrived; returns the exit code."""
        started: list[Worker] = []
        stop.workers = started
        grace_s = 0.0  # if the start itself fails
        try:
            address = free_address() if self.processes > 1 else None
            for index in range(self.processes):
                started.append(Worker(index, self.command, {PERMIT: permit, **self._environment(index, address)}))
                guard.watch([worker.pid for worker in started], self.grace_s)
            code = self._watch(started, stop)
            grace_s = self.grace_s if code is None else 0.0 if code == _GIVEN_UP else self.crash_grace_s
            return 0 if code is None else exits.EXIT_HUNG if code == _GIVEN_UP else code
        finally:
            left = workers.end(started, grace_s, self.crash_grace_s, hurry=lambda: stop.interrupts > 1)
            guard.watch(left, 0.0)
            if left:
                self.say(f"process {left[0]} does not end even after SIGKILL: it waits for a device or a file system")

    def _watch(self, started: Sequence[Worker], stop: _Signals) -> int | None:
        """Waits; returns the exit code, _GIVEN_UP for a worker that hangs, or None if a signal arrived."""
        health, ended_s = Health(started, self.stopped_s, self.silent_s, self.say), None
        while not stop.wait(workers.LOOK_S):
            codes = [worker.code for worker in started]
            if failed := [code for code in codes if code]:
                return exits.EXIT_USER_ERROR if exits.EXIT_USER_ERROR in failed else failed[0]
            if None not in codes:
                return 0
            why = health.look()
            if why is None and codes.count(None) < len(codes):
                ended_s = ended_s or time.monotonic()
                late = time.monotonic() - ended_s > self.grace_s
                why = f"process {codes.index(None)} still runs {self.grace_s:g} s after another ended" if late else None
            if why is not None:
                self.say(f"{why}: all are ended")
                return _GIVEN_UP
        return None

    def _environment(self, index: int, address: str | None) -> dict[str, str]:
        if address is None:
            return {}
        count = str(self.processes)
        return {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": count, "JAX_PROCESS_ID": str(index)}


_GIVEN_UP = 1 << 8  # larger than any exit code


class _Signals(Signals):
    """Within `with`, SIGTERM and SIGINT only set `number`; `interrupts` counts the latter.

    Ctrl-Z stops the launcher and `workers` together, and they continue together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.interrupts = 0
        self.workers: list[Worker] = []

    def __enter__(self) -> Self:
        super().__enter__()
        if os.getpgrp() != os.getsid(0):  # else no shell could continue us
            self._before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._on_ctrl_z)
        return self

    def _on(self, number: int, _: object) -> None:
        self.number = self.number or number
        self.interrupts += number == signal.SIGINT
        self._received.set()

    def _on_ctrl_z(self, *_: object) -> None:
        for worker in self.workers:
            worker.send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for worker in self.workers:
            worker.send(signal.SIGCONT)


def free_address() -> str:
    """A free address on loopback, at a port outside the range of ephemeral ports.

    An ephemeral port could be taken by a connection of another process before the worker listens there.
    """
    ports = []
    with contextlib.suppress(OSError), open(TO_ANYONE, encoding="ascii") as file:
        lowest, highest = map(int, file.read().split())
        ports = [*range(_LOWEST_PORT, lowest), *range(highest + 1, 2**16)]
    while True:
        port = random.choice(ports) if ports else 0
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return f"127.0.0.1:{free.getsockname()[1]}"
