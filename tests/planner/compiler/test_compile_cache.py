"""Cached compile results: how a child can end, what is cached, and that no process stays behind. Children are fakes."""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from capibara.core.types import UserError
from capibara.planner.compiler import compile_cache as verdicts
from capibara.planner.compiler import hlo
from capibara.planner.compiler.compile import Compiled
from capibara.planner.compiler.compile_cache import Outcome, verdict
from capibara.planner.hardware import slices
from capibara.planner.report import report

COSTS = hlo.Costs(matmul_flops=2e12, collective_bytes=Counter({"all-gather": 8.0}), cycles=3e6, kernels=Counter(k=1.0))
FITS = Compiled(True, 3 * 2**30, 41.5, 15 * 2**30, argument_bytes=2**30, chip="v5e", costs=COSTS)
TOO_BIG = Compiled(False, 20 * 2**30, 3.0, 15 * 2**30)
KEY = {"model": {"layers": 4}, "slice": "v5e-16", "flags": {"a": "true"}}
REPOSITORY = pathlib.Path(verdicts.__file__).resolve().parents[3]


def python(code):
    return [sys.executable, "-S", "-c", code]


def says(report=FITS, before=""):
    """A child that ends with a report."""
    return python(f"{before}\nprint({json.dumps(report.to_json())!r})")


NEVER = python("raise SystemExit('ran')")


def alive(pid):
    """Whether a process runs; a zombie does not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def all_end(*pids):
    for _ in range(100):
        if not any(map(alive, pids)):
            return True
        time.sleep(0.05)
    return False


def sleeper(file):
    """A child that starts a grandchild, writes down both process ids, and sleeps like it."""
    return python(
        "import os, subprocess, sys, time\n"
        f"grandchild = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(file)!r} + '.tmp', 'w').write(f'{{os.getpid()}} {{grandchild.pid}}')\n"
        f"os.replace({str(file)!r} + '.tmp', {str(file)!r})\n"
        "time.sleep(60)"
    )


def pids_of(file):
    for _ in range(200):
        if file.exists():
            return [int(pid) for pid in file.read_text().split()]
        time.sleep(0.05)
    raise AssertionError("the child did not start")


def test_what_is_held_beside_the_step_counts_and_is_not_cached(tmp_path):
    first = verdict(says(), KEY, deadline_s=60, cache_dir=tmp_path)
    assert first.with_held(0) is first
    more = first.with_held(2**30)
    assert (more.outcome, more.compiled.peak_bytes, more.held_bytes) == (Outcome.FITS, 4 * 2**30, 2**30)
    much = first.beside(12 * 2**30 + 1)
    assert much.outcome is Outcome.DOES_NOT_FIT and not much.compiled.fits
    lines = list(report.verdict_lines(much, slices.parse("v5e-16")))
    assert "does not fit: it needs 15.00 GiB" in lines[0] and "12.00 GiB of that are held beside the step" in lines[1]
    assert any("1.00 GiB of that are held" in line for line in report.verdict_lines(more, slices.parse("v5e-16")))
    again = verdict(NEVER, KEY, deadline_s=60, cache_dir=tmp_path)
    assert again.cached and again.held_bytes == 0 and again.compiled.peak_bytes == 3 * 2**30
    failed = dataclasses.replace(first, compiled=None)
    assert failed.beside(1) is failed


@pytest.mark.parametrize(("report", "outcome"), [(FITS, Outcome.FITS), (TOO_BIG, Outcome.DOES_NOT_FIT)])
def test_a_report_is_a_verdict_and_is_cached_whole(tmp_path, report, outcome):
    first = verdict(says(report), KEY, deadline_s=20, cache_dir=tmp_path)
    assert (first.outcome, first.compiled, first.cached) == (outcome, report, False)
    again = verdict(NEVER, KEY, deadline_s=20, cache_dir=tmp_path)
    assert again == dataclasses.replace(first, cached=True)
    assert again.versions["jax"] and again.date.startswith("20")


def test_what_decides_the_program_decides_the_entry(tmp_path, monkeypatch):
    verdict(says(), KEY, deadline_s=20, cache_dir=tmp_path)
    assert verdict(NEVER, dict(reversed(KEY.items())), deadline_s=20, cache_dir=tmp_path).cached
    assert not verdict(says(), KEY | {"slice": "v5e-32"}, deadline_s=20, cache_dir=tmp_path).cached
    assert not verdict(says(TOO_BIG), KEY, deadline_s=20, cache_dir=tmp_path, fresh=True).cached
    replaced = verdict(NEVER, KEY, deadline_s=20, cache_dir=tmp_path)
    assert replaced.cached and replaced.outcome is Outcome.DOES_NOT_FIT
    with monkeypatch.context() as changed:
        changed.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=65536")
        assert not verdict(says(), KEY, deadline_s=20, cache_dir=tmp_path).cached
    with monkeypatch.context() as changed:
        changed.setattr(verdicts.extras, "version", lambda package: "0.0.99")
        assert not verdict(says(), KEY, deadline_s=20, cache_dir=tmp_path).cached


def compiles(program, report=FITS):
    """A child that names its program, and then takes a while."""
    return says(report, f"import time; print('PROGRAM {program}', flush=True); time.sleep(0.8)")


def test_a_program_that_was_compiled_before_is_not_compiled_again(tmp_path, monkeypatch):
    def ask(command, key=KEY, **options):
        return verdict(command, key, deadline_s=20, cache_dir=tmp_path, **options)

    first = ask(compiles("3f9a"))
    never_ends = python("import time; print('PROGRAM 3f9a', flush=True); time.sleep(60)")
    with monkeypatch.context() as changed:  # our code, which lowers to the same program
        changed.setattr(verdicts, "source_digest", lambda: "other")
        again = ask(never_ends)
        assert again == dataclasses.replace(first, cached=True)
        assert ask(NEVER) == again  # kept under what was asked as well
    assert ask(never_ends, KEY | {"z_loss": 0.0}).cached
    assert not ask(compiles("77c1", TOO_BIG), KEY | {"z_loss": 1.0}).cached
    assert not ask(compiles("3f9a", TOO_BIG), KEY | {"z_loss": 2.0}, fresh=True).cached
    assert ask(never_ends, KEY | {"z_loss": 3.0}).outcome is Outcome.DOES_NOT_FIT  # what fresh found
    with monkeypatch.context() as changed:
        changed.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=65536")
        assert not ask(compiles("3f9a")).cached
    with monkeypatch.context() as changed:  # who reads the compiler's figures
        changed.setattr(verdicts, "READERS", ("planner/compiler/hlo.py",))
        assert not ask(compiles("3f9a"), KEY | {"z_loss": 4.0}).cached
    for package in ("jax", "jaxlib", "libtpu"):
        with monkeypatch.context() as changed:
            other = {package: "0.0.99"}
            changed.setattr(verdicts.extras, "version", lambda name, other=other: other.get(name, "1.0"))
            assert not ask(compiles("3f9a")).cached
    with monkeypatch.context() as changed:
        changed.setattr(verdicts, "FORMAT", 99)
        assert not ask(compiles("3f9a")).cached


def test_a_verdict_keeps_the_date_and_the_versions_of_its_compile(tmp_path, monkeypatch):
    verdict(compiles("3f9a"), KEY, deadline_s=20, cache_dir=tmp_path)
    for path in tmp_path.iterdir():
        entry = json.loads(path.read_text())
        entry["date"], entry["versions"]["flax"] = "2026-01-02", "0.0.1"
        path.write_text(json.dumps(entry))
    monkeypatch.setattr(verdicts, "source_digest", lambda: "other")
    for command in (compiles("3f9a", TOO_BIG), NEVER):
        again = verdict(command, KEY, deadline_s=20, cache_dir=tmp_path)
        assert (again.cached, again.date, again.versions["flax"]) == (True, "2026-01-02", "0.0.1")


def test_a_compiler_that_the_user_names_is_known_by_its_file(tmp_path, monkeypatch):
    library, cache = tmp_path / "libtpu.so", tmp_path / "cache"
    library.write_bytes(b"one")
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(library))
    found = verdict(says(), KEY, deadline_s=20, cache_dir=cache)
    assert found.versions["libtpu"].startswith(f"{library} (3 bytes, changed ")
    assert verdict(NEVER, KEY, deadline_s=20, cache_dir=cache).cached
    library.write_bytes(b"another")
    assert not verdict(says(), KEY, deadline_s=20, cache_dir=cache).cached


def test_a_status_that_cannot_be_told_is_no_fault_of_the_compiler(tmp_path):
    def gone(*_):
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        verdict(says(), KEY, deadline_s=20, cache_dir=tmp_path, status=gone)


@pytest.mark.parametrize("end", ["raise SystemExit('error: no such chip')", "import time; time.sleep(60)"])
def test_the_program_of_a_compile_that_fails_has_no_verdict(tmp_path, end):
    failing = python(f"print('PROGRAM 3f9a', flush=True)\n{end}")
    assert verdict(failing, KEY, deadline_s=1, cache_dir=tmp_path).compiled is None
    assert list(tmp_path.iterdir()) == []
    assert not verdict(compiles("3f9a"), KEY, deadline_s=20, cache_dir=tmp_path).cached


def test_the_digest_of_the_sources_follows_those_that_decide_the_program(tmp_path):
    def digest(name, **files):
        for path, text in files.items():
            file = tmp_path / name / (path.replace("__", "/") + ".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return verdicts.source_digest(tmp_path / name)

    base = digest("base", models__decoder="x", sharding__plan="y", planner__search="z")
    assert digest("same", models__decoder="x", sharding__plan="y", planner__search="other") == base
    assert digest("model", models__decoder="x2", sharding__plan="y") != base
    assert digest("told", models__decoder='"""What."""\nx  # why', sharding__plan="(y)", planner__search="z") == base
    assert digest("moved", models__encoder="x", sharding__plan="y") != base
    assert digest("step", models__decoder="x", sharding__plan="y", training__step="s") != base
    assert verdicts.source_digest() == verdicts.source_digest(REPOSITORY / "capibara")
    assert all((REPOSITORY / "capibara" / source).exists() for source in verdicts.SOURCES)
    assert set(verdicts.READERS) < set(verdicts.SOURCES)


@pytest.mark.parametrize("damage", ["cut", "empty", "other entry", "no report", "no peak", "not text", "deep"])
def test_a_spoiled_entry_is_compiled_again(tmp_path, damage):
    verdict(says(), KEY, deadline_s=20, cache_dir=tmp_path)
    [path] = tmp_path.iterdir()
    text = path.read_text()
    spoiled = {
        "cut": text[: len(text) // 2],
        "empty": "",
        "other entry": text.replace('"v5e-16"', '"v5e-64"'),
        "no report": text.replace('"fits": true', '"fits": "perhaps"'),
        "no peak": text.replace(f'"peak_bytes": {FITS.peak_bytes}', '"peak_bytes": null'),
        "deep": "[" * 200_000,
    }
    path.write_bytes(b"\xff\xfe\x00" if damage == "not text" else spoiled[damage].encode())
    again = verdict(says(TOO_BIG), KEY, deadline_s=20, cache_dir=tmp_path)
    assert again.outcome is Outcome.DOES_NOT_FIT and not again.cached
    assert verdict(NEVER, KEY, deadline_s=20, cache_dir=tmp_path).cached


def test_a_cache_that_cannot_be_written_costs_no_verdict(tmp_path):
    (tmp_path / "file").touch()
    assert verdict(says(), KEY, deadline_s=20, cache_dir=tmp_path / "file" / "cache").outcome is Outcome.FITS


def test_the_cache_lies_where_the_user_keeps_caches(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(verdicts.default_cache_dir()) == "/somewhere/capibara/verdicts"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert verdicts.default_cache_dir() == pathlib.Path.home() / ".cache/capibara/verdicts"


TRACEBACK = """import sys
print('''Traceback (most recent call last):
  File "child.py", line 3, in <module>
jax.errors.JaxRuntimeError: INTERNAL: Mosaic failed to compile the kernel
The MLIR operation involved:
W0000 00:00:1 log.cc:1] something
--------------------
For simplicity, JAX has removed its internal frames from the traceback.''', file=sys.stderr)
sys.exit(1)"""


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (python(TRACEBACK), "jax.errors.JaxRuntimeError: INTERNAL: Mosaic failed to compile the kernel"),
        (python("import sys; print('error: no slice v9', file=sys.stderr); sys.exit(2)"), "no slice v9"),
        (python("import os; os.abort()"), "signal SIGABRT: it printed nothing"),
        (python("import os; os.kill(os.getpid(), 9)"), "the compiler was killed: .*not have enough memory"),
        (python("print('good morning')"), "the command's last line is no report: 'good morning'"),
        (python("print('[1, 2]')"), "the command's last line is no report"),
        (python("print('{\"fits\": true}')"), "the command's last line is no report"),
        (python(""), "the command printed nothing"),
        (says(before="import atexit, os; atexit.register(os._exit, 7)"), "exit code 7: it printed nothing"),
        (["/no/such/program"], "cannot run /no/such/program: No such file"),
    ],
)
def test_a_failure_has_one_line_and_is_not_cached(tmp_path, command, message):
    found = verdict(command, KEY, deadline_s=20, cache_dir=tmp_path)
    assert found.outcome is Outcome.FAILED and found.compiled is None and "\n" not in found.message
    assert re.match(message, found.message), found.message
    assert not list(tmp_path.iterdir())


def test_at_the_deadline_all_processes_end_and_nothing_is_cached(tmp_path):
    told = []
    begin = time.monotonic()
    cache = tmp_path / "cache"
    # Time enough for two interpreters to start on a busy machine: the child is killed as it sleeps, not as it starts.
    found = verdict(
        sleeper(tmp_path / "pids"), KEY, deadline_s=2.5, cache_dir=cache, status=lambda *what: told.append(what)
    )
    assert found.outcome is Outcome.TIMED_OUT and found.compiled is None and "after --deadline=2.5 s" in found.message
    assert time.monotonic() - begin < 20
    assert len(told) >= 2 and told[0][1] == "starting" and told[-1][0] >= 2
    assert all_end(*pids_of(tmp_path / "pids"))
    assert not cache.exists()


def test_a_child_that_ends_takes_its_helpers_along(tmp_path):
    start = "import subprocess, sys; sleep = 'import time; time.sleep(60)'\n"
    start += "p = subprocess.Popen([sys.executable, '-S', '-c', sleep])\n"
    start += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid))"
    assert verdict(says(before=start), KEY, deadline_s=20, cache_dir=tmp_path).outcome is Outcome.FITS
    assert all_end(*pids_of(tmp_path / "pid"))


def test_an_interrupt_ends_all_processes(tmp_path):
    def interrupt(elapsed_s, phase):
        if (tmp_path / "pids").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verdict(sleeper(tmp_path / "pids"), KEY, deadline_s=50, cache_dir=tmp_path, status=interrupt)
    assert all_end(*pids_of(tmp_path / "pids"))


@pytest.mark.parametrize("how", [signal.SIGKILL])  # SIGTERM ends Python just as suddenly
def test_when_the_parent_is_killed_all_processes_end(tmp_path, how):
    code = (
        "from capibara.planner.compiler.compile_cache import verdict\n"
        f"verdict({sleeper(tmp_path / 'pids')!r}, {{}}, deadline_s=50, cache_dir={str(tmp_path)!r})"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        pids = pids_of(tmp_path / "pids")
    finally:
        parent.send_signal(how)
        parent.wait()
    assert all_end(*pids)


def test_phases_are_told_as_they_come(tmp_path):
    told = []
    wait = "import time; print('PHASE lowering', flush=True); time.sleep(0.6); print('PHASE compiling', flush=True)"
    command = says(before=f"{wait}; time.sleep(0.6)")
    found = verdict(command, KEY, deadline_s=20, cache_dir=tmp_path, status=lambda *what: told.append(what))
    assert found.outcome is Outcome.FITS
    assert [phase for _, phase in told if phase != "starting"] == ["lowering", "compiling"]
    assert [s for s, _ in told] == sorted(s for s, _ in told)


def test_what_a_child_says_is_what_is_read(capsys, tmp_path):
    verdicts.announce("lowering")
    verdicts.announce_program("3f9a")
    verdicts.report(FITS)
    phase, program, line = capsys.readouterr().out.splitlines()
    assert (phase, program) == ("PHASE lowering", "PROGRAM 3f9a") and Compiled.from_json(json.loads(line)) == FITS


def test_a_child_sees_no_chips_and_no_lock(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    names = ("ALLOW_MULTIPLE_LIBTPU_LOAD", "JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "TPU_SKIP_MDS_QUERY")
    show = python(f"import os; raise SystemExit('error: ' + repr([os.environ.get(n) for n in {names}]))")
    found = verdict(show, KEY, deadline_s=20, cache_dir=tmp_path)
    assert found.message == "['1', 'cpu', None, '1']"


def test_concurrent_writers_leave_one_whole_entry(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        runs = [pool.submit(verdict, says(), KEY, deadline_s=50, cache_dir=tmp_path, fresh=True) for _ in range(8)]
        assert {run.result().outcome for run in runs} == {Outcome.FITS}
    assert len(list(tmp_path.iterdir())) == 1
    assert verdict(NEVER, KEY, deadline_s=20, cache_dir=tmp_path).compiled == FITS


def test_a_deadline_must_be_positive(tmp_path):
    with pytest.raises(UserError, match=r"--deadline=0 must be positive: .* try --deadline=1800"):
        verdict(NEVER, KEY, deadline_s=0, cache_dir=tmp_path)
