"""Runs programs that a model wrote, each in a process of its own that can do little.

What it is for: programs with mistakes. It limits a program's time, memory, processes and files, cuts off the network
and other processes where the machine lets us, gives it an empty folder, no input and none of our environment, and takes
another user for it where we are root.

What it does not promise: to hold whoever attacks it. The kernel is the same; a program reads what its user may read
(ours, unless we are root). Where we are root and Python's library lies where root alone may read (under /root, say),
the program keeps the right to read, and so it reads ALL files of the machine, secrets among them. Where we are not root
it may also write and remove what is ours. The limit of memory is one of each process; many small files fill a disk; on
systems other than Linux there are only the limits. For programs of a model that you do not trust use a virtual machine
or a container with nothing in it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from capibara.config import configurable
from capibara.types import UserError

_JAIL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "jail.py")
_SPARE_S = 10.0  # for the supervisor to end by itself
_SHOWN = 300


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Limits of a program.

    Attributes:
      seconds: of the clock, and of CPU time of each of its processes.
      memory_mib: of address space, each process.
      file_mib: largest file that it writes.
      processes: processes and threads at a time.
      workers: programs that run at a time; None: one for each core.
    """

    seconds: float = 5.0
    memory_mib: int = 1024
    file_mib: int = 8
    processes: int = 16
    workers: int | None = None

    def __post_init__(self) -> None:
        for name in ("seconds", "memory_mib", "file_mib", "processes"):
            if not getattr(self, name) > 0:
                raise UserError(f"Sandbox.{name} is {getattr(self, name)}, must be above 0")
        if self.workers is not None and self.workers < 1:
            raise UserError(f"Sandbox.workers is {self.workers}, must be at least 1, or None for one a core")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
      passed: it came to its end without an error.
      reason: why it did not: the last line of its errors, or what it ran out of; empty where it did.
      network: whether it could reach one.
    """

    passed: bool
    reason: str
    network: bool


def run(program: str, limits: Sandbox = Sandbox()) -> Outcome:
    """Runs a Python program, with the packages of this interpreter."""
    folder = tempfile.mkdtemp(prefix="capibara-")
    inside = os.path.join(folder, "inside")
    try:
        os.mkdir(inside)
        os.chmod(folder, 0o711)  # another user comes through, and sees nothing
        path, errors = os.path.join(inside, "program.py"), os.path.join(folder, "errors")
        with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(program)
        sizes = (limits.memory_mib * 2**20, limits.file_mib * 2**20, limits.processes)
        argv = [sys.executable, "-I", "-B", _JAIL, path, str(limits.seconds), *map(str, sizes)]
        with open(errors, "wb") as stderr:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, env=_environment(inside),
                cwd=inside, start_new_session=True,
            )  # fmt: skip
            said = _finished(process, limits.seconds + _SPARE_S)
        return _outcome(said, _last_line(errors))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_all(programs: Sequence[str], limits: Sandbox = Sandbox()) -> list[Outcome]:
    """Runs programs side by side.

    Raises:
      UserError: not even an empty one comes to its end.
    """
    empty = run("", limits)
    if not empty.passed:
        raise UserError(f"no program runs in the sandbox ({empty.reason}): raise Sandbox.seconds or Sandbox.memory_mib")
    if empty.network:
        logging.getLogger(__name__).warning("this machine does not let programs be cut off from its network")
    with concurrent.futures.ThreadPoolExecutor(limits.workers or os.cpu_count()) as pool:
        return list(pool.map(lambda program: run(program, limits), programs))


def _finished(process: subprocess.Popen, seconds: float) -> bytes:
    """What it wrote; nothing of it outlives this call."""
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        return b""
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()


def _outcome(said: bytes, error: str) -> Outcome:
    try:
        found = json.loads(said)
    except ValueError:
        return Outcome(passed=False, reason=error or "the sandbox was killed", network=True)
    reason = found["reason"]
    if not found["passed"] and error and reason in ("exit code 1", "ended before its last line"):
        reason = error
    return Outcome(passed=found["passed"], reason=reason, network=found["network"])


def _last_line(path: str) -> str:
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - 4096))
        lines = file.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:_SHOWN] if lines else ""


def _environment(folder: str) -> dict[str, str]:
    """None of our own: it may hold secrets."""
    return {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"} | dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
    )
