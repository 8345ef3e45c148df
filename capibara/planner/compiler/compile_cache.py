"""Compiles in a child process, with a deadline and progress, and caches the TPU compiler's results.

The child is any command. On its standard output it reports its phase with `announce`, the program that it is about to
compile with `announce_program`, and the result with `report`: lines such as "PHASE lowering" and "PROGRAM 3f9a..", and
last a line of JSON, that of compile.Compiled.

A result is cached under two keys: the request (configuration, slice and our source code), which is known at once, and
the lowered program, which is known after seconds: changed code that lowers to the same program is not recompiled.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import datetime
import enum
import functools
import hashlib
import importlib.util
import inspect
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from capibara.core import devices, extras
from capibara.core.types import Dataclass, UserError
from capibara.planner.compiler.compile import Compiled
from capibara.planner.hardware import topology

PHASE = "PHASE "
PROGRAM = "PROGRAM "
FORMAT = 2  # of cache entries: increase it when their contents change
_STATUS_EVERY_S = 2.0
_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax")
# Source files that decide how a lowered program is compiled.
_COMPILER_PACKAGES = ("jax", "jaxlib", "libtpu")
# Those that decide the figures read from a compiled program: the readers, and the slice's devices.
READERS = (
    "planner/compiler/assignment.py",
    "planner/compiler/compile.py",
    "planner/compiler/hlo.py",
    "planner/compiler/hbm_peak.py",
    "planner/hardware/chips.py",
    "planner/hardware/slices.py",
    "planner/hardware/topology.py",
)
# Those that decide the program and the figures read from it.
SOURCES = (
    "models",
    "kernels",
    "objectives",
    "training",
    "optim",
    "sharding",
    "cli/prove.py",
    "core/types.py",
    "core/tree.py",
    "core/devices.py",
    "data/dataset.py",
    "data/packing/packing.py",
    "planner/compiler/proof.py",
    "planner/hardware/xla_flags.py",
    *READERS,
)
# Environment variables that change what is compiled, or how.
_VARIABLES = ("LIBTPU_INIT_ARGS", "TPU_LIBRARY_PATH", "XLA_FLAGS")
_NOT_OF_PROGRAMS = ("JAX_PLATFORMS", "JAX_COMPILATION_CACHE", "JAX_PERSISTENT")  # prefixes of irrelevant JAX options
# Leads the process group of a compile. Its input ends when this process ends, for any reason; then it kills the group.
_GUARD = ("/bin/sh", "-c", "read _; kill -9 0")
_ERROR = re.compile(r"(?:[\w.]*(?:Error|Exception|Exit|Interrupt)|error)\b.*:")
# Log lines (glog's "W0000 00:00:17..."), and the text that JAX appends to tracebacks.
_NOISE = re.compile(r"[IWE]\d{4} |-+$|For simplicity, JAX has removed|WARNING|See https?://")


class Outcome(enum.StrEnum):
    """The outcome of a compile."""

    FITS = "fits"
    DOES_NOT_FIT = "does not fit"
    TIMED_OUT = "timed out"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The compile result of one step on one slice.

    Attributes:
      outcome: how the compile ended.
      compiled: the compiler's report, without the HLO, if the step fits or does not fit; else None.
      elapsed_s: seconds of the child process, or of the one that made the cached result.
      message: why it failed or was stopped, in one line.
      cached: whether it was read from the cache.
      date: when it was made, as YYYY-MM-DD.
      versions: package -> version, for the packages that affect compilation.
      held_bytes: the part of `compiled.peak_bytes` that a device holds beside the step.
    """

    outcome: Outcome
    compiled: Compiled | None
    elapsed_s: float
    message: str | None = None
    cached: bool = False
    date: str = ""
    versions: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    held_bytes: int = 0

    def with_held(self, held_bytes: int) -> Verdict:
        """The result for a device that holds `held_bytes` beside the step."""
        if self.compiled is None or not held_bytes:
            return self
        peak = None if self.compiled.peak_bytes is None else self.compiled.peak_bytes + held_bytes
        fits = self.compiled.fits and peak is not None and peak <= (self.compiled.limit_bytes or math.inf)
        compiled = dataclasses.replace(self.compiled, peak_bytes=peak, fits=fits)
        return dataclasses.replace(self, outcome=_outcome(compiled), compiled=compiled, held_bytes=held_bytes)


def verdict(
    command: Sequence[str],
    key: Mapping[str, object],
    *,
    deadline_s: float,
    cache_dir: str | os.PathLike[str] | None = None,
    status: Callable[[float, str], None] = lambda elapsed_s, phase: None,
    fresh: bool = False,
) -> Verdict:
    """The cached result of `key`, or that of running `command`.

    However this ends (return, exception, ctrl-C, or death of this process), all processes of the command are killed,
    except those that leave its process group.

    Args:
      command: program and arguments; it ends with `report`.
      key: JSON values that identify what the command compiles: the whole configuration, the slice, the XLA options.
        Package versions, our own source code and the environment's compiler flags are added to it.
      deadline_s: seconds after which the command is killed.
      cache_dir: where results are cached; None: `default_cache_dir()`.
      status: called with the elapsed seconds and the command's phase, every few seconds and at every new phase.
      fresh: compile even if a result is cached; the new one replaces it.

    Raises:
      UserError: the deadline is not positive.
    """
    if not deadline_s > 0:  # rejects NaN too
        raise UserError(
            f"--deadline={deadline_s:g} must be positive: a compile takes 40 s to some minutes, try --deadline=1800"
        )
    identity = _identity(key)
    cache = pathlib.Path(cache_dir) if cache_dir is not None else default_cache_dir()
    if not fresh and (cached := _read(cache, identity)):
        return cached

    def of_program(program: str) -> Verdict | None:
        return None if fresh else _read(cache, _program_identity(program, identity))

    result, program = _run(command, deadline_s, status, of_program)
    if not result.cached:
        today = datetime.date.today().isoformat()
        result = dataclasses.replace(result, date=today, versions=identity["versions"])
    if result.compiled is not None:
        _write(cache, identity, result)
        if program and not result.cached:
            _write(cache, _program_identity(program, identity), result)
    return result


def announce_program(fingerprint: str) -> None:
    """Reports, in the child, the fingerprint of the program that it compiles next."""
    print(f"{PROGRAM}{fingerprint}", flush=True)


def announce(phase: str) -> None:
    """Reports, in the child, its current phase: "lowering", "compiling"."""
    print(f"{PHASE}{phase}", flush=True)


def report(compiled: Compiled) -> None:
    """Reports the result, in the child, as the last thing it prints."""
    print(json.dumps(compiled.to_json()), flush=True)


def default_cache_dir() -> pathlib.Path:
    """capibara/verdicts in XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(base) / "capibara" / "verdicts"


def source_digest(package: pathlib.Path | None = None) -> str:
    """SHA-256 of our code that decides the program, without comments and layout; specific to the Python version.

    Args:
      package: the folder of capibara; None: the imported one.
    """
    return _source_digest(package or pathlib.Path(__file__).resolve().parents[2], SOURCES)


@functools.cache
def _source_digest(package: pathlib.Path, sources: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for source in sources:
        result = package / source
        for path in sorted(result.rglob("*.py")) if result.is_dir() else [result]:
            content = _statements(path.read_text(encoding="utf-8")).encode() if path.exists() else b""
            digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def users_digest(config: Dataclass) -> dict[str, str]:
    """Module -> SHA-256 of its code, for all modules outside the package that define classes of a configuration.

    Args:
      config: a dataclass of dataclasses.
    """
    result: dict[str, str] = {}
    waiting: list[object] = [config]
    while waiting:
        item = waiting.pop()
        if isinstance(item, (tuple, list)):
            waiting += item
        elif dataclasses.is_dataclass(item):
            waiting += [getattr(item, field.name) for field in dataclasses.fields(item) if hasattr(item, field.name)]
            module = sys.modules.get(type(item).__module__)
            if module is not None and module.__name__.partition(".")[0] != "capibara":
                with contextlib.suppress(OSError, TypeError, SyntaxError):  # a class without a source file
                    code = _statements(inspect.getsource(module))
                    result[module.__name__] = hashlib.sha256(code.encode()).hexdigest()
    return dict(sorted(result.items()))


def _statements(source: str) -> str:
    """A module's code without comments, docstrings and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            body[:] = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    return ast.unparse(tree)


def _identity(key: Mapping[str, object]) -> dict[str, Any]:
    """All that a result depends on, as JSON values."""
    library = _own_library()
    identity = {
        "format": FORMAT,
        "key": dict(key),
        "versions": {package: extras.version(package) for package in _PACKAGES} | library,
        "source": source_digest(),
        "environment": {
            name: value
            for name, value in os.environ.items()
            if _affects_compilation(name) and value and (library or name != "TPU_LIBRARY_PATH")
        },
    }
    return json.loads(_canonical(identity))  # as it will be read back: tuples become lists


def _program_identity(program: str, identity: Mapping[str, Any]) -> dict[str, Any]:
    """All that the result for a lowered program depends on."""
    return {
        "format": FORMAT,
        "program": program,
        "versions": {package: identity["versions"][package] for package in _COMPILER_PACKAGES},
        "source": _source_digest(pathlib.Path(__file__).resolve().parents[2], READERS),
        "environment": identity["environment"],
    }


def _affects_compilation(variable: str) -> bool:
    return variable in _VARIABLES or (variable.startswith("JAX_") and not variable.startswith(_NOT_OF_PROGRAMS))


def _own_library() -> dict[str, str]:
    """The version of a TPU compiler that the user selects by its path instead of the package's: the file's metadata."""
    path = os.environ.get("TPU_LIBRARY_PATH")
    package = importlib.util.find_spec("libtpu")
    # libtpu sets the variable itself, to its own path.
    if not path or (package and os.path.dirname(path) in (package.submodule_search_locations or ())):
        return {}
    try:
        result = os.stat(path)
    except OSError:
        return {"libtpu": path}
    return {"libtpu": f"{path} ({result.st_size} bytes, changed {result.st_mtime_ns})"}


def _canonical(values: Mapping[str, object]) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _entry_path(identity: Mapping[str, object], cache_dir: pathlib.Path) -> pathlib.Path:
    return cache_dir / f"{hashlib.sha256(_canonical(identity).encode()).hexdigest()}.json"


def _read(cache_dir: pathlib.Path, identity: Mapping[str, object]) -> Verdict | None:
    """The cache entry; None if it is missing, incomplete or of another key."""
    try:
        entry = json.loads(_entry_path(identity, cache_dir).read_text(encoding="utf-8"))
        if entry["identity"] != identity:
            return None
        compiled = Compiled.from_json(entry["compiled"])
        elapsed_s, date, versions = float(entry["elapsed_s"]), str(entry["date"]), dict(entry["versions"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return Verdict(_outcome(compiled), compiled, elapsed_s, cached=True, date=date, versions=versions)


def _write(cache_dir: pathlib.Path, identity: Mapping[str, object], result: Verdict) -> None:
    """Writes the entry atomically; if that fails, the next compile is repeated, but this result stands."""
    path = _entry_path(identity, cache_dir)
    assert result.compiled is not None
    entry = {
        "identity": identity,
        "date": result.date,
        "elapsed_s": result.elapsed_s,
        "versions": dict(result.versions),
        "compiled": result.compiled.to_json(),
    }
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            try:
                json.dump(entry, file, indent=1)
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise


def _outcome(compiled: Compiled) -> Outcome:
    return Outcome.FITS if compiled.fits else Outcome.DOES_NOT_FIT


def _run(
    command: Sequence[str],
    deadline_s: float,
    status: Callable[[float, str], None],
    of_program: Callable[[str], Verdict | None],
) -> tuple[Verdict, str | None]:
    """(the result, the fingerprint of the program if the child named one).

    If `of_program` knows the result of that program, the child is ended.
    """
    begin_s = time.monotonic()
    child_says = _ChildOutput(status, of_program)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with contextlib.ExitStack() as running:
            try:
                child = running.enter_context(_child(command, out, err))
            except OSError as error:
                message = f"cannot run {command[0]}: {error.strerror}"
                return Verdict(Outcome.FAILED, None, time.monotonic() - begin_s, message), None
            ended = _follow(child, out, begin_s, deadline_s, child_says)
        lines, errors = _lines(out), _lines(err)
    elapsed_s = time.monotonic() - begin_s
    if child_says.known:
        return child_says.known, child_says.program
    if not ended:
        message = (
            f"stopped after --deadline={deadline_s:g} s: a compile takes 40 s to some minutes, try --deadline=1800"
        )
        return Verdict(Outcome.TIMED_OUT, None, elapsed_s, message), None
    return _verdict_of(child.returncode, lines, errors, elapsed_s), child_says.program


def _verdict_of(returncode: int, lines: Sequence[str], errors: Sequence[str], elapsed_s: float) -> Verdict:
    """The result of a child that has ended by itself."""
    if returncode:
        return Verdict(Outcome.FAILED, None, elapsed_s, _why(returncode, errors))
    try:
        compiled = Compiled.from_json(json.loads(lines[-1]))
    except (IndexError, TypeError, ValueError):
        last = f"the command's last line is no report: {lines[-1][:120]!r}" if lines else "the command printed nothing"
        return Verdict(Outcome.FAILED, None, elapsed_s, last)
    return Verdict(_outcome(compiled), compiled, elapsed_s)


@contextlib.contextmanager
def _child(command: Sequence[str], out: IO[bytes], err: IO[bytes]) -> Iterator[subprocess.Popen]:
    """Runs the command; on exit it and all its descendants are killed."""
    with contextlib.ExitStack() as undo:
        silent = subprocess.DEVNULL
        guard = subprocess.Popen(_GUARD, stdin=subprocess.PIPE, stdout=silent, stderr=silent, process_group=0)
        undo.callback(_end, guard)
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=_environment(),
            process_group=guard.pid,
        )
        undo.pop_all()
    try:
        yield child
    finally:
        _end(guard)
        child.wait()


def _end(guard: subprocess.Popen) -> None:
    """Kills the guard's process group. Its id cannot be reused before the guard is waited for."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter on macOS, if all have ended
        os.killpg(guard.pid, signal.SIGKILL)
    assert guard.stdin is not None
    guard.stdin.close()
    guard.wait()


def _environment() -> dict[str, str]:
    """Our environment, changed so that the compiler looks for no chips, other processes or cached programs."""
    absent = {} if devices.has_tpu() else topology.WITHOUT_TPU
    environment = {**absent, **os.environ, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    return environment


class _ChildOutput:
    """What a child has printed so far.

    Attributes:
      phase: its current phase.
      program: the fingerprint of what it compiles; None: not reported yet.
      known: the cached result of that program, if there is one.
    """

    def __init__(self, status: Callable[[float, str], None], of_program: Callable[[str], Verdict | None]):
        self.phase = "starting"
        self.program: str | None = None
        self.known: Verdict | None = None
        self._status, self._of_program, self._told_s = status, of_program, -_STATUS_EVERY_S

    def process(self, elapsed_s: float, lines: Sequence[str]) -> None:
        """Processes new lines; calls `status` when the phase is new or was last reported some time ago."""
        phases = [line.removeprefix(PHASE).strip() for line in lines if line.startswith(PHASE)]
        if phases or elapsed_s - self._told_s >= _STATUS_EVERY_S:
            self.phase, self._told_s = phases[-1] if phases else self.phase, elapsed_s
            self._status(elapsed_s, self.phase)
        for line in lines:
            if line.startswith(PROGRAM):
                self.program = line.removeprefix(PROGRAM).strip()
                self.known = self._of_program(self.program)


def _follow(child: subprocess.Popen, out: IO[bytes], begin_s: float, deadline_s: float, says: _ChildOutput) -> bool:
    """Waits until the child ends or its program's result is known; returns False at the deadline."""
    read = 0
    while True:
        elapsed_s = time.monotonic() - begin_s
        ended = child.poll() is not None
        # pread: the child writes at the file offset, which both processes share.
        text = os.pread(out.fileno(), 1 << 20, read)
        whole = text[: text.rfind(b"\n") + 1]
        read += len(whole)
        says.process(elapsed_s, whole.decode(errors="replace").splitlines())
        if ended or says.known:
            return True
        if elapsed_s >= deadline_s:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(min(0.2, deadline_s - elapsed_s))


def _lines(file: IO[bytes]) -> list[str]:
    """The last non-empty lines of a file."""
    size = os.fstat(file.fileno()).st_size
    text = os.pread(file.fileno(), 1 << 20, max(0, size - (1 << 20))).decode(errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


def _why(returncode: int, errors: Sequence[str]) -> str:
    """One line on why a child failed: the last error that it names, else the last line that is not a log line."""
    if returncode == -signal.SIGKILL:
        return "the compiler was killed: this machine may not have enough memory for it"
    useful = [line for line in errors if not _NOISE.match(line)]
    named = [line for line in useful if _ERROR.match(line)]
    last = (named or useful or errors or ["it printed nothing"])[-1]
    how = f"signal {signal.Signals(-returncode).name}" if returncode < 0 else f"exit code {returncode}"
    return last.removeprefix("error: ")[:300] if named else f"{how}: {last[:300]}"
