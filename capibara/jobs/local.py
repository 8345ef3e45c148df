"""Runs a verb on this machine, in one process or several, and starts it again when it dies."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from capibara import cli

_PAUSES_S = (1.0, 2.0, 5.0, 15.0, 60.0)  # before a restart; the last one for all further ones
_LOOK_S = 0.1
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Supervisor:
    """Keeps a command running until it has ended well.

    An end with exit code 0 is well; with 2, a mistake in what was given, no restart would mend it. After any other the
    command is started again: `train` carries on from its last verified checkpoint. Where one of several processes
    ends, the others are stopped, and all are started again.

    Attributes:
      command: program and arguments.
      processes: how many; more than one are joined by jax.distributed on loopback.
      restarts: at most.
      grace_s: seconds that processes have to end after SIGTERM before they are killed.
      pauses_s: seconds before the first, second, ... restart.
      say: told what happens, a line each.
    """

    command: Sequence[str]
    processes: int = 1
    restarts: int = 3
    grace_s: float = 300.0
    pauses_s: Sequence[float] = _PAUSES_S
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)

    def run(self) -> int:
        """Runs it to its end; returns its exit code, or 128 + the signal that stopped us."""
        with _Signals() as stop:
            restarts = 0
            while True:
                began_s = time.monotonic()
                code = self._once(stop)
                if stop.number is not None:
                    return 128 + stop.number
                if code in (0, cli.EXIT_USER_ERROR):
                    return code
                lived = f"after {time.monotonic() - began_s:.0f} s with {_meaning(code)}"
                if restarts == self.restarts:
                    self.say(f"ended {lived}; not started again: --restarts={self.restarts} are used up")
                    return code if code > 0 else 128 - code
                pause_s = self.pauses_s[min(restarts, len(self.pauses_s) - 1)]
                restarts += 1
                self.say(f"ended {lived}; restart {restarts} of {self.restarts} in {pause_s:g} s")
                if stop.wait(pause_s):
                    return 128 + stop.number

    def _once(self, stop: _Signals) -> int:
        """Runs all processes until one has failed, all have ended or we are told to stop; the exit code that counts."""
        children: list[subprocess.Popen] = []
        try:
            address = free_address() if self.processes > 1 else None
            for index in range(self.processes):
                children.append(self._start(index, address))
            while not stop.wait(_LOOK_S):
                codes = [child.poll() for child in children]
                failed = [code for code in codes if code]
                if failed or None not in codes:
                    return failed[0] if failed else 0
            return 0
        finally:
            _end(children, self.grace_s)

    def _start(self, index: int, address: str | None) -> subprocess.Popen:
        environment = dict(os.environ)
        if address is not None:
            environment |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(self.processes)}
            environment |= {"JAX_PROCESS_ID": str(index)}
        # A group of its own: ctrl-C comes to us, who pass it on once.
        return subprocess.Popen(
            list(self.command), env=environment, process_group=0, preexec_fn=_die_with_parent(os.getpid())
        )


class _Signals:
    """Within `with`, SIGTERM and SIGINT only set `number`."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._came = threading.Event()

    def __enter__(self) -> _Signals:
        self._before = {number: signal.signal(number, self._on) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> bool:
        """Whether a signal has come within so many seconds."""
        return self._came.wait(seconds)

    def _on(self, number: int, _: object) -> None:
        self.number = self.number or number
        self._came.set()


def _end(children: Sequence[subprocess.Popen], grace_s: float) -> None:
    """Asks all that still run to end, and kills those that do not."""
    running = [child for child in children if child.poll() is None]
    for child in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
    limit_s = time.monotonic() + grace_s
    for child in running:
        try:
            child.wait(max(0.0, limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


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


def _meaning(code: int) -> str:
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}{' (it hung)' if code == cli.EXIT_HUNG else ''}"


def free_address() -> str:
    """An address on loopback that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"
