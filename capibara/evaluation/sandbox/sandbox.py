"""Runs programs that a model wrote beside their tests, each in processes that can do little.

**The verdict** comes from outside the program. Its tests run in a process of their own (`dialogue`), which alone says
whether they passed; the program's process never has the tests' text, nor a descriptor that the verdict goes through.
Whatever a program does to its own process (exit, write to descriptors, walk frames, replace builtins or `assert`,
use ctypes) is done to itself. Values cross as plain data, which nothing executes.

**What holds a program**, the first of these that the machine lets us have; the log says which:

- bubblewrap (Debian's package of that name): a root with Python and the system's libraries read-only, and nothing of
  the user's; its own /tmp, /dev/shm, /proc, System V memory; no network; no rights.
- namespaces: the same, made by `private_root`, without another program.
- limits: a folder on the disk, another user where we are root, and nothing private. Files and System V memory of that
  user are removed afterwards. Where we are not root the program is ours in all it does: it reads and writes what we may.

In all of them time, memory, processes and files are limited, and none of our environment is seen.

What is not promised: the kernel is the same, so a hole in it is a way out; for programs of somebody who attacks you use
a virtual machine. The limit of memory is one of each process. Tests can only judge what they look at: one that calls a
method of a class which the program defines, or compares two such objects, believes the program. And a text that has
program and tests in one (`run` of a str) is parted where its last `check` or assertions begin: what stands there and is
the program's own is taken for a test. Give `Program` where they are apart.
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
from capibara.evaluation.sandbox import parting, private_root, wire

_HERE = os.path.dirname(os.path.abspath(__file__))
_SCRIPTS = ("jail", "wire", "dialogue", "parting", "private_root")
_holders: dict[Sandbox, Outcome] = {}
_SPARE_S = 10.0  # for the supervisor to end by itself
_SHOWN = 300


class Holder(enum.StrEnum):
    """What holds programs; AUTO is the first of the others that works."""

    AUTO = "auto"
    BUBBLEWRAP = "bubblewrap"
    NAMESPACES = "namespaces"
    LIMITS = "limits"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Limits of a program.

    Attributes:
      seconds: of the clock, and of CPU time of each of its processes.
      memory_mib: of address space, each process.
      file_mib: largest file that it writes.
      disk_mib: all files in each of its folders (/tmp, /dev/shm), where those are its own.
      processes: processes and threads at a time.
      workers: programs that run at a time; None: one for each core.
      holder: what holds them.
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
                raise UserError(f"Sandbox.{name} is {getattr(self, name)}, must be above 0")
        if self.workers is not None and self.workers < 1:
            raise UserError(f"Sandbox.workers is {self.workers}, must be at least 1, or None for one a core")


@dataclasses.dataclass(frozen=True)
class Program:
    """A program and its tests.

    Attributes:
      code: the program's text; it runs first, in a process of its own.
      tests: their text; empty: the program passes where it comes to its end.
      setup: what the task runs before both.
      prompt: of the task: the imports, functions, classes and values in it are the tests' own, if it is a text of Python.
        They take names from here before they take the program's.
      entry: the function that the task asks for: always the program's.
    """

    code: str
    tests: str = ""
    setup: str = ""
    prompt: str = ""
    entry: str = ""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
      passed: it came to its end without an error, and so did its tests.
      reason: why it did not: the last line of its errors, or what it ran out of; empty where it did.
      network: whether it could reach one.
      holder: what held it: bubblewrap, namespaces or limits.
    """

    passed: bool
    reason: str
    network: bool
    holder: str = dataclasses.field(default="", compare=False)


def run(program: Program | str, limits: Sandbox = Sandbox()) -> Outcome:
    """Runs a Python program and its tests, with the packages of this interpreter."""
    bubblewrap = _bubblewrap(limits)
    return _run(program, limits, bubblewrap)


def run_all(programs: Sequence[Program | str], limits: Sandbox = Sandbox()) -> list[Outcome]:
    """Runs programs side by side.

    Raises:
      UserError: not even an empty one comes to its end.
    """
    by = holder(limits)
    log = logging.getLogger(__name__)
    log.info("%d programs are held by %s", len(programs), by.holder)
    if by.network:
        log.warning("this machine does not let programs be cut off from its network")
    if by.holder == Holder.LIMITS:
        log.warning("programs see this machine's files: install bubblewrap, or run where namespaces are allowed")
    with concurrent.futures.ThreadPoolExecutor(limits.workers or os.cpu_count()) as pool:
        outcomes = list(pool.map(lambda program: run(program, limits), programs))
    if unjudged := [one.reason for one in outcomes if wire.CANNOT_CROSS in one.reason]:
        log.warning(
            "%d of %d programs failed for their tests: %s; PassAtK.separate = False judges such tests",
            len(unjudged), len(outcomes), unjudged[0],
        )  # fmt: skip
    return outcomes


def holder(limits: Sandbox = Sandbox()) -> Outcome:
    """What holds programs on this machine, as the outcome of an empty one; looked at once.

    Raises:
      UserError: not even that comes to its end.
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
    """A program out of a text that ends in its tests, as `run` takes it (see `parting`)."""
    code, tests = parting.parted(text)
    return Program(code=code, tests=tests)


def _run(program: Program | str, limits: Sandbox, bubblewrap: str | None) -> Outcome:
    folder = tempfile.mkdtemp(prefix="capibara-")
    try:
        os.chmod(folder, 0o711)  # another user comes through, and sees nothing
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
            said = _finished(process, json.dumps(job).encode("ascii"), limits.seconds + _SPARE_S)
        return _outcome(said, _last_line(errors), bubblewrap is not None)
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
    """What a program sees of this machine's files: the system's libraries, Python and its packages."""
    python = [sys.base_prefix, sys.prefix, sys.base_exec_prefix, sys.exec_prefix]
    packages = [*site.getsitepackages(), os.path.dirname(os.path.realpath(sys.executable))]
    found = private_root.system_paths()
    for path in map(os.path.realpath, (*python, *packages)):
        if os.path.isdir(path) and path != "/" and not any(os.path.commonpath((path, one)) == one for one in found):
            found.append(path)
    return found


def _bubblewrapped(bubblewrap: str, options: dict[str, object]) -> list[str]:
    """The arguments of bwrap to run `jail` in there, with its last argument."""
    size, shown = str(options["disk_bytes"]), options["shown"]
    assert isinstance(shown, list)
    argv = [bubblewrap, "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
    argv += ["--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    if os.getuid():
        argv += ["--unshare-user", "--unshare-net"]
    else:  # to take an id that owns nothing; `jail` has left the network, where bwrap would give a loopback
        argv += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    for name, value in _environment(private_root.WORK).items():
        argv += ["--setenv", name, value]
    for folder in ("/tmp", "/var/tmp"):
        argv += ["--perms", "1777", "--size", size, "--tmpfs", folder]
    argv += ["--perms", "0777", "--dir", private_root.WORK, "--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    argv += ["--perms", "1777", "--size", size, "--tmpfs", "/dev/shm"]
    for parent in sorted({parent for path in shown for parent in _parents(path)}):
        argv += ["--perms", "0755", "--dir", parent]  # bwrap's own would be closed to the program's user
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
    """The files that run in processes of their own, compiled where we may write them: that halves the time to start."""
    found = {name: os.path.join(_HERE, f"{name}.py") for name in _SCRIPTS}
    if sys.dont_write_bytecode:
        return found
    try:
        return {name: py_compile.compile(path, doraise=True) or path for name, path in found.items()}
    except OSError:  # an installation that is not ours to write
        return found


def _bubblewrap(limits: Sandbox) -> str | None:
    """The path of bwrap where it is to be used.

    Raises:
      UserError: it is asked for by name, and does not work.
    """
    if limits.holder in (Holder.NAMESPACES, Holder.LIMITS):
        return None
    path, why = _probed(shutil.which("bwrap"))
    if path is None and limits.holder == Holder.BUBBLEWRAP:
        raise UserError(f"Sandbox.holder is bubblewrap, which does not work here ({why}): install it, or use 'auto'")
    return path


@functools.cache
def _probed(path: str | None) -> tuple[str | None, str]:
    """bwrap, if it runs a program here, and why it does not."""
    if path is None:
        return None, "there is no bwrap"
    found = _run(Program(code=""), Sandbox(), path)
    if found.passed:
        return path, ""
    logging.getLogger(__name__).warning("bubblewrap does not work here (%s): namespaces hold programs", found.reason)
    return None, found.reason


def _finished(process: subprocess.Popen, job: bytes, seconds: float) -> bytes:
    """What it wrote; nothing of it outlives this call."""
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


def _outcome(said: bytes, error: str, bubblewrap: bool) -> Outcome:
    try:
        found = json.loads(said)
    except ValueError:
        return Outcome(passed=False, reason=error or "the sandbox was killed", network=True)
    reason = found["reason"]
    if not found["passed"] and error and reason in ("exit code 1", "ended before its last line"):
        reason = error
    holder = "bubblewrap" if bubblewrap else "namespaces" if found["files"] else "limits"
    return Outcome(passed=found["passed"], reason=reason, network=found["network"], holder=holder)


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
