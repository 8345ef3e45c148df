"""Runs untrusted programs of a model and their tests, in isolated processes with limits.

**The verdict** comes from outside the program. The tests run in a separate process (`dialogue`), which alone decides
whether they pass; the program's process never has the tests' text, nor a file descriptor that carries the verdict. Whatever
a program does in its own process (exit, write to descriptors, walk frames, replace builtins or `assert`, use ctypes) only
affects itself. Values are exchanged as plain data, which is never executed.

**The isolation** is the first of these that works on the machine; the log says which:

- bubblewrap (the Debian package): a root directory with Python and the system's libraries, read-only, and no files of the
  user; private /tmp, /dev/shm, /proc and System V memory; no network; no privileges.
- namespaces: the same, made by `private_root`, without an external program.
- limits: a folder on the disk, and another user if we are root; nothing else is private. Files and System V memory of that
  user are removed afterwards. If we are not root, the program can read and write whatever we can.

In all of them time, memory, processes and files are limited, and our environment variables are hidden.

Not guaranteed: the kernel is shared, so a vulnerability in it is a way out; for programs of an attacker use a virtual
machine. The memory limit applies to each process separately. Tests can only check what they look at: a test that calls a
method of a class that the program defines, or compares two such objects, trusts the program. A text that contains program
and tests (`run` of a str) is split where its last `check` or assertions begin; the program's own assertions there count as
tests. Use `Program` to pass them separately.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import enum
import functools
import json
import logging
import os
import py_compile
import shutil
import signal
import site
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.sandbox import private_root, program_text, wire

_HERE = os.path.dirname(os.path.abspath(__file__))
_SCRIPTS = ("jail", "wire", "dialogue", "program_text", "private_root")
_holders: dict[Sandbox, Outcome] = {}
_SPARE_S = 10.0  # additional time for the supervisor to end by itself
_SHOWN = 300
_END_BYTES = 2**16  # of a program's standard error


class Holder(enum.StrEnum):
    """The isolation of programs; AUTO: the first of the others that works."""

    AUTO = "auto"
    BUBBLEWRAP = "bubblewrap"
    NAMESPACES = "namespaces"
    LIMITS = "limits"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Limits and isolation of programs.

    Attributes:
      seconds: wall-clock time, and CPU time of each process.
      memory_mib: address space of each process.
      file_mib: size of a file.
      disk_mib: size of all files in each private folder (/tmp, /dev/shm).
      processes: number of processes and threads.
      workers: number of programs that run at a time; None: one per core.
      holder: the isolation.
    """

    seconds: float = 5.0
    memory_mib: int = 1024
    file_mib: int = 8
    disk_mib: int = 64
    processes: int = 16
    workers: int | None = None
    holder: Holder = Holder.AUTO

    def __post_init__(self) -> None:
        for name in ("seconds", "memory_mib", "file_mib", "disk_mib", "processes"):
            if not getattr(self, name) > 0:
                raise UserError(f"Sandbox.{name} is {getattr(self, name)}, must be above 0: leave it out")
        if self.workers is not None and self.workers < 1:
            raise UserError(f"Sandbox.workers is {self.workers}, must be at least 1, or None for one a core")


@dataclasses.dataclass(frozen=True)
class Program:
    """A program and its tests.

    Attributes:
      code: the program's text; it runs first, in its own process.
      tests: text of the tests; empty: the program passes if it runs to its end without an error.
      setup: text that runs before each of them.
      prompt: the task's prompt. If it is Python, the tests use its imports, functions, classes and values rather than the
        program's.
      entry: name of the function that the task asks for; the tests always use the program's.
    """

    code: str
    tests: str = ""
    setup: str = ""
    prompt: str = ""
    entry: str = ""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a program.

    Attributes:
      passed: whether the program and its tests ran to their end without an error.
      reason: why it did not pass: the last line of its errors, or the limit that it exceeded; empty if it passed.
      network: whether it had access to the network.
      holder: its isolation: bubblewrap, namespaces or limits.
      errors: the end of what it wrote to its standard error.
    """

    passed: bool
    reason: str
    network: bool
    holder: str = dataclasses.field(default="", compare=False)
    errors: str = dataclasses.field(default="", compare=False)


def run(program: Program | str, limits: Sandbox = Sandbox()) -> Outcome:
    """Runs a Python program and its tests, with the packages of this interpreter."""
    bubblewrap = _bubblewrap(limits)
    return _run(program, limits, bubblewrap)


def run_all(programs: Sequence[Program | str], limits: Sandbox = Sandbox()) -> list[Outcome]:
    """Runs programs in parallel.

    Raises:
      UserError: not even an empty program runs.
    """
    by = holder(limits)
    log = logging.getLogger(__name__)
    log.info("%d programs are isolated by %s", len(programs), by.holder)
    if by.network:
        log.warning("programs have access to this machine's network, which cannot be taken from them here")
    if by.holder == Holder.LIMITS:
        log.warning("programs can read this machine's files: install bubblewrap, or run where namespaces are allowed")
    with concurrent.futures.ThreadPoolExecutor(limits.workers or os.cpu_count()) as pool:
        outcomes = list(pool.map(lambda program: run(program, limits), programs))
    if unjudged := [outcome.reason for outcome in outcomes if wire.CANNOT_CROSS in outcome.reason]:
        log.warning(
            "%d of %d programs failed because of their tests: %s; PassAtK.separate = False supports such tests",
            len(unjudged), len(outcomes), unjudged[0],
        )  # fmt: skip
    return outcomes


def holder(limits: Sandbox = Sandbox()) -> Outcome:
    """The isolation of programs on this machine, as the outcome of an empty program, which runs once.

    Raises:
      UserError: not even an empty program runs.
    """
    if limits not in _holders:
        empty = run("", limits)
        if not empty.passed:
            raise UserError(
                f"no program runs in the sandbox ({empty.reason}): raise Sandbox.seconds or Sandbox.memory_mib"
            )
        _holders[limits] = empty
    return _holders[limits]


def parted(text: str) -> Program:
    """Splits a text that ends with its tests into a Program (see `program_text`)."""
    code, tests = program_text.split(text)
    return Program(code=code, tests=tests)


def _run(program: Program | str, limits: Sandbox, bubblewrap: str | None) -> Outcome:
    folder = tempfile.mkdtemp(prefix="capibara-")
    try:
        os.chmod(folder, 0o711)  # another user may enter, but not list it
        for name in ("inside", "tests"):
            os.mkdir(os.path.join(folder, name))
        errors = os.path.join(folder, "errors")
        options = _options(limits, folder)
        if bubblewrap is not None:
            options["bubblewrap"] = _bubblewrapped(bubblewrap, options)
        argv = [sys.executable, "-I", "-B", _scripts()["jail"], json.dumps(options)]
        with open(errors, "wb") as stderr:
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=_environment(folder),
                cwd=folder, start_new_session=True,
            )  # fmt: skip
            job = {"text": program} if isinstance(program, str) else dataclasses.asdict(program)
            output = _finished(process, json.dumps(job).encode("ascii"), limits.seconds + _SPARE_S)
        return _outcome(output, _end(errors), bubblewrap is not None)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _options(limits: Sandbox, folder: str) -> dict[str, object]:
    """The arguments of `jail`."""
    return {
        "seconds": limits.seconds, "memory_bytes": limits.memory_mib * 2**20, "file_bytes": limits.file_mib * 2**20,
        "disk_bytes": limits.disk_mib * 2**20, "processes": limits.processes, "folder": folder, "shown": _shown(),
        "bubblewrap": [], "namespaces": limits.holder != Holder.LIMITS,
    }  # fmt: skip


@functools.cache
def _shown() -> list[str]:
    """The files of this machine that a program sees: the system's libraries, Python and its packages."""
    python = [sys.base_prefix, sys.prefix, sys.base_exec_prefix, sys.exec_prefix]
    packages = [*site.getsitepackages(), os.path.dirname(os.path.realpath(sys.executable))]
    result = private_root.system_paths()
    for path in map(os.path.realpath, (*python, *packages)):
        if os.path.isdir(path) and path != "/" and not any(os.path.commonpath((path, item)) == item for item in result):
            result.append(path)
    return result


def _bubblewrapped(bubblewrap: str, options: dict[str, object]) -> list[str]:
    """The command line of bwrap that runs `jail` inside it."""
    size, shown = str(options["disk_bytes"]), options["shown"]
    assert isinstance(shown, list)
    argv = [bubblewrap, "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
    argv += ["--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    if os.getuid():
        argv += ["--unshare-user", "--unshare-net"]
    else:  # so that it can take an unused id; `jail` has already left the network, bwrap would add a loopback
        argv += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    for name, value in _environment(private_root.WORK).items():
        argv += ["--setenv", name, value]
    for folder in ("/tmp", "/var/tmp"):
        argv += ["--perms", "1777", "--size", size, "--tmpfs", folder]
    argv += ["--perms", "0777", "--dir", private_root.WORK, "--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    argv += ["--perms", "1777", "--size", size, "--tmpfs", "/dev/shm"]
    for parent in sorted({parent for path in shown for parent in _parents(path)}):
        argv += ["--perms", "0755", "--dir", parent]  # by default the program's user could not enter it
    for path in shown:
        argv += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    for name, path in _scripts().items():
        argv += ["--ro-bind", path, f"/judge/{name}{os.path.splitext(path)[1]}"]
    argv += ["--remount-ro", "/", "--chdir", private_root.WORK, "--"]
    inside = json.dumps(options | {"shown": [], "folder": private_root.WORK})
    jail = f"/judge/jail{os.path.splitext(_scripts()['jail'])[1]}"
    return [*argv, sys.executable, "-I", "-B", jail, inside, "inside"]


def _parents(path: str) -> list[str]:
    parent = os.path.dirname(path)
    return [] if parent == "/" else [*_parents(parent), parent]


@functools.cache
def _scripts() -> dict[str, str]:
    """The scripts that run in separate processes, compiled if possible, which halves their start-up time."""
    result = {name: os.path.join(_HERE, f"{name}.py") for name in _SCRIPTS}
    if sys.dont_write_bytecode:
        return result
    try:
        return {name: py_compile.compile(path, doraise=True) or path for name, path in result.items()}
    except OSError:  # the installation is read-only
        return result


def _bubblewrap(limits: Sandbox) -> str | None:
    """The path of bwrap; None: it is not to be used.

    Raises:
      UserError: Sandbox.holder is bubblewrap, and it does not work.
    """
    if limits.holder in (Holder.NAMESPACES, Holder.LIMITS):
        return None
    path, why = _probed(shutil.which("bwrap"))
    if path is None and limits.holder == Holder.BUBBLEWRAP:
        raise UserError(f"Sandbox.holder is bubblewrap, which does not work here ({why}): install it, or use 'auto'")
    return path


@functools.cache
def _probed(path: str | None) -> tuple[str | None, str]:
    """The path of bwrap if it can run a program here, otherwise None and the reason."""
    if path is None:
        return None, "bwrap is not installed"
    result = _run(Program(code=""), Sandbox(), path)
    if result.passed:
        return path, ""
    logging.getLogger(__name__).warning("bubblewrap does not work here (%s): using namespaces", result.reason)
    return None, result.reason


def _finished(process: subprocess.Popen, job: bytes, seconds: float) -> bytes:
    """Waits for a process and returns its output; kills it and its children at the end."""
    try:
        return process.communicate(job, timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        return b""
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()


def _outcome(output: bytes, errors: str, bubblewrap: bool) -> Outcome:
    lines = errors.strip().splitlines()
    error = lines[-1][:_SHOWN] if lines else ""
    try:
        result = json.loads(output)
    except ValueError:
        return Outcome(passed=False, reason=error or "the sandbox was killed", network=True, errors=errors)
    reason = result["reason"]
    if not result["passed"] and error and reason in ("exit code 1", "ended before its last line"):
        reason = error
    holder = "bubblewrap" if bubblewrap else "namespaces" if result["files"] else "limits"
    return Outcome(result["passed"], reason, result["network"], holder, errors)


def _end(path: str) -> str:
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - _END_BYTES))
        return file.read().decode("utf-8", "replace")


def _environment(folder: str) -> dict[str, str]:
    """The program's environment variables: none of our own, which may contain secrets."""
    return {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"} | dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
    )
