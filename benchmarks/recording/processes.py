"""Runs sessions of cells in child processes with limits, twice, and keeps what both runs have."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
LIMIT_S, MEMORY_BYTES, FILE_BYTES, PROCESSES = 5, 1 << 30, 1 << 20, 32
HEAP_MB = 256  # of node, which reserves far more addresses than it uses
_UNSTABLE = re.compile(r"0x[0-9a-f]{6,}")
_REFUSED = re.compile(r"is not allowed here|can't start new thread|^interrupted$|^not authorized$")

Execution = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sandbox:
    """How children run.

    Attributes:
      python: the interpreter of Python's cells.
      limit_s: processor time of a session, in seconds.
      memory_bytes: addresses that a session may use.
    """

    python: str = sys.executable
    limit_s: int = LIMIT_S
    memory_bytes: int = MEMORY_BYTES

    @property
    def _limits(self) -> dict[str, int]:
        return {
            "RLIMIT_CPU": self.limit_s,
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_FSIZE": FILE_BYTES,
            "RLIMIT_NPROC": PROCESSES,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
        }

    def of_python(self, sessions: Sequence[Sequence[str]], imports: Sequence[str] = ()) -> list[list[Execution]]:
        """The executions of each session, up to one that does not end within the limits; `imports` are there already."""
        given = {"limits": self._limits, "imports": imports, "sessions": sessions}
        command = [self.python, "-s", "-P", "-X", "utf8", str(HERE / "child_python.py")]
        return self._executed(command, given, len(sessions))

    def of_sql(
        self, sessions: Sequence[Sequence[str]], tables: Sequence[str] = (), setup: str = ""
    ) -> list[list[Execution]]:
        """The executions of each session by SQLite, on tables of CSV files and those that `setup` makes."""
        limits = self._limits | {"RLIMIT_CPU": self.limit_s * (1 + len(sessions))}
        given = {"limits": limits, "tables": tables, "setup": setup, "sessions": sessions}
        command = [sys.executable, "-I", "-S", "-X", "utf8", str(HERE / "child_sql.py")]
        return self._executed(command, given, len(sessions))

    def of_javascript(self, cells: Sequence[str], package: str, name: str) -> list[Execution]:
        """The executions of a session by node; `name` is what its cells require the package by."""
        values = {"t": self.limit_s, "f": FILE_BYTES // 512, "n": 64, "c": 0}
        limits = " && ".join(f"ulimit -{name} {value}" for name, value in values.items())
        node = f"node --experimental-permission --allow-fs-read=* --random_seed=1 --max-old-space-size={HEAP_MB}"
        command = ["sh", "-c", f'{limits} && exec {node} "$0"', str(HERE / "child_javascript.js")]
        return self._executed(command, {"package": package, "name": name, "cells": cells}, 1)[0]

    def _executed(self, command: Sequence[str], given: dict[str, Any], count: int) -> list[list[Execution]]:
        found: list[list[Execution]] = [[] for _ in range(count)]
        with tempfile.TemporaryDirectory() as folder:
            for line in _output(command, json.dumps(given), folder, 6 * self.limit_s * count + 60).splitlines():
                try:
                    place, one = json.loads(line)
                except ValueError:  # a process was killed in the middle
                    continue
                found[place].append(one)
        return found


def _output(command: Sequence[str], given: str, folder: str, timeout_s: float) -> str:
    environment = {"PYTHONHASHSEED": "0", "HOME": folder, "TMPDIR": folder, "TZ": "UTC", "LC_ALL": "C.UTF-8"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "NO_COLOR": "1"}
    environment["PATH"] = os.environ["PATH"] if command[0] == "sh" else os.defpath
    pipe = subprocess.PIPE
    child = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, cwd=folder, env=environment, text=True,
        encoding="utf-8", errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        return child.communicate(given, timeout_s)[0]
    except subprocess.TimeoutExpired as error:
        _kill(child)
        output = error.stdout or b""
        return output if isinstance(output, str) else output.decode("utf-8", "replace")
    finally:
        _kill(child)


def _kill(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def reproduced(
    cells: Sequence[str], first: Sequence[Execution], second: Sequence[Execution]
) -> list[tuple[str, Execution]]:
    """The cells of a session, each with its execution, that ended the same in two runs, and not by these limits.

    Where such a cell is omitted, so are later ones for lack of a name that it did not set.
    """
    found, omitted = [], False
    for code, one, other in zip(cells, first, second):
        text, error = json.dumps(one), one["error"]
        if one != other or _UNSTABLE.search(text) or (error and _REFUSED.search(error["value"])):
            omitted = True
        elif not (omitted and error and error["name"] in ("NameError", "ReferenceError")):
            found.append((code, one))
    return found
