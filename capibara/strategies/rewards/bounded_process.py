"""Processes of a script that answers requests, none of which takes longer or more memory than it may."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import time
from typing import Any

from capibara.core.types import UserError

_START_S = 120.0  # to import what the script needs on a busy machine
_PROCESSES = 4
_TRIES = 2  # something else than the request may have ended the process


class BoundedProcess:
    """A process of a script, started with the first request and again after one that it did not answer.

    The script writes the line "ready", then for each line of JSON that it reads one with the answer. It limits its memory itself.

    Args:
      script: its path.
      package: what the script imports, for errors.
    """

    def __init__(self, script: str, package: str) -> None:
        self._script, self._package = script, package
        self._process: subprocess.Popen[bytes] | None = None
        self._read = b""

    def ask(self, request: dict[str, object], seconds: float) -> Any:
        """The answer; None: there was none in so many seconds.

        Raises:
          UserError: the process does not start.
        """
        line: bytes | None = b""
        until = time.monotonic() + seconds
        for _ in range(_TRIES):
            if (line := self._line_of(request, until)) != b"":
                break
        return json.loads(line) if line else None

    def _line_of(self, request: dict[str, object], until: float) -> bytes | None:
        """The line of an answer; empty: the process has ended, None: it does not answer in time. It is closed then."""
        try:
            if self._process is None:
                self._process, self._read = self._started(), b""
                start = time.monotonic()
                if self._line(start + _START_S) != b"ready":
                    raise UserError(f"{self._package} does not start in a process of its own: python -m pip check")
                until += time.monotonic() - start
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._line(until)
        except OSError:
            line = b""
        except UserError:
            self.close()
            raise
        if not line:
            self.close()
        return line

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(OSError):
                self._process.communicate()
            self._process = None

    def _started(self) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, "-I", self._script], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
        )

    def _line(self, until: float) -> bytes | None:
        """The next line; empty: the process has ended, None: the line does not come until then."""
        assert self._process is not None and self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._read:
            if not select.select([descriptor], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            if not (part := os.read(descriptor, 4096)):
                return b""
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return line


class BoundedProcesses:
    """Several processes of a script, for threads that ask at the same time; they end with this one.

    Args:
      name: of the script beside this file.
      package: what the script imports, for errors.
    """

    def __init__(self, name: str, package: str):
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
        self._idle: queue.LifoQueue[BoundedProcess] = queue.LifoQueue()
        self._all = [BoundedProcess(script, package) for _ in range(min(_PROCESSES, os.cpu_count() or 1))]
        for process in self._all:
            self._idle.put(process)
        atexit.register(self.close)

    def ask(self, request: dict[str, object], seconds: float) -> Any:
        """The answer of one of them; None: there was none in so many seconds."""
        process = self._idle.get()
        try:
            return process.ask(request, seconds)
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """Ends the processes."""
        for process in self._all:
            process.close()
