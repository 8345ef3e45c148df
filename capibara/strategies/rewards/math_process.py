"""Processes in which formulas are read, so that none of them takes longer or more memory than it may."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import queue
import select
import subprocess
import sys
import time

from capibara.core.types import UserError

_SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "math_worker.py")
_START_S = 120.0  # to import SymPy on a busy machine
_PROCESSES = 4


class MathProcess:
    """A process of `math_worker`, started with the first request and again after one that it did not answer."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._read = b""

    def ask(self, request: dict[str, object], seconds: float) -> bool:
        """The answer; False: there was none in so many seconds.

        Raises:
          UserError: the process does not start.
        """
        try:
            if self._process is None:
                self._process, self._read = _started(), b""
                if self._line(_START_S) != b"ready":
                    raise UserError("math-verify does not start in a process of its own: python -m pip check")
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._line(seconds)
        except OSError:  # it has ended
            line = b""
        except UserError:
            self.close()
            raise
        if not line:
            self.close()
        return line == b"true"

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(OSError):
                self._process.communicate()
            self._process = None

    def _line(self, seconds: float) -> bytes:
        """The next line; empty: it did not come in time, or the process has ended."""
        assert self._process is not None and self._process.stdout is not None
        until, descriptor = time.monotonic() + seconds, self._process.stdout.fileno()
        while b"\n" not in self._read:
            ready = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))[0]
            part = os.read(descriptor, 4096) if ready else b""
            if not part:
                return b""
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return line


class MathProcesses:
    """Several processes, for threads that ask at the same time."""

    def __init__(self, count: int):
        self._idle: queue.LifoQueue[MathProcess] = queue.LifoQueue()
        self._all = [MathProcess() for _ in range(count)]
        for process in self._all:
            self._idle.put(process)

    def equal(self, right: str, answer: str, seconds: float, boxed: bool) -> bool:
        """Whether an answer's last formula equals a record's answer; with `boxed`, only one in a box counts."""
        return self._ask({"right": right, "answer": answer, "boxed": boxed}, seconds)

    def readable(self, right: str, seconds: float) -> bool:
        """Whether a record's answer is a formula."""
        return self._ask({"right": right}, seconds)

    def close(self) -> None:
        """Ends the processes."""
        for process in self._all:
            process.close()

    def _ask(self, request: dict[str, object], seconds: float) -> bool:
        process = self._idle.get()
        try:
            return process.ask(request, seconds)
        finally:
            self._idle.put(process)


@functools.cache
def verifying() -> MathProcesses:
    """Those of this process."""
    processes = MathProcesses(min(_PROCESSES, os.cpu_count() or 1))
    atexit.register(processes.close)
    return processes


def _started() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", _SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
