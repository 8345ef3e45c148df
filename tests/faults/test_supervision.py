"""Workers that are stopped or stuck, launchers that are killed, locks that are held, clocks that jump."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import pytest
from etils import epath

from capibara.checkpoints import lease as lease_module
from capibara.checkpoints.lease import NAME, Lease
from capibara.checkpoints.manager import Checkpointing, CheckpointReader
from capibara.core.types import UserError
from capibara.jobs import guard, workers
from capibara.jobs.local import Supervisor
from capibara.monitoring.metrics_file import loggers
from capibara.training.base.callbacks import RunInfo
from capibara.training.stability.watchdog import Watch, Watchdog

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]

# What each worker does: it writes down its process id for every start, and then what the test says.
WORKER = """
import os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
index = os.environ.get("JAX_PROCESS_ID", "0")
with open(folder / f"pids{index}", "a") as file:
    file.write(f"{os.getpid()}\\n")
first = len((folder / f"pids{index}").read_text().split()) == 1
def sleep(seconds):
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        time.sleep(0.02)
"""


def command(folder, code):
    return [sys.executable, "-S", "-c", WORKER + code, str(folder)]


def supervise(folder, code, **options):
    lines = []
    options = {"processes": 2, "restarts": 1, "pauses_s": (0.01,)} | options
    began_s = time.monotonic()
    ended = Supervisor(command=command(folder, code), say=lines.append, **options).run()
    return ended, lines, time.monotonic() - began_s


def launcher(folder, code, own_group=False, **options):
    """A launcher in a process of its own, and, as a shell starts it, in a group of its own."""
    made = f"Supervisor(command={command(folder, code)!r}, **{options!r})"
    program = f"import sys; from capibara.jobs.local import Supervisor; sys.exit({made}.run())"
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    return subprocess.Popen([sys.executable, "-c", program], env=environment, process_group=0 if own_group else None)


def wait_for(what, within_s=120.0):
    """What `what` gives once that is true."""
    limit_s = time.monotonic() + within_s
    while not (found := what()):
        assert time.monotonic() < limit_s, f"nothing within {within_s} s"
        time.sleep(0.02)
    return found


def pids(folder, *names):
    """The process ids in these files, once each has one; else nothing."""
    found = [(folder / name).read_text().split() if (folder / name).exists() else [] for name in names]
    return [int(one[-1]) for one in found] if all(found) else []


def runs(pid):
    stat = guard.stat_of(pid)
    return stat is not None and stat.state not in "ZX"


def state(pid):
    return guard.stat_of(pid).state


@pytest.mark.fault(56)
def test_a_stopped_worker_is_continued_and_nothing_is_lost(tmp_path):
    code = "if index == '1': os.kill(os.getpid(), signal.SIGSTOP)\nsleep(0.2)"
    ended, lines, took_s = supervise(tmp_path, code, stopped_s=0.5)
    assert ended == 0 and took_s < 15
    (line,) = lines
    assert line == f"process 1 (pid {pids(tmp_path, 'pids1')[0]}) was stopped (SIGSTOP) for 0.5 s: continued"


@pytest.mark.fault(56)
def test_one_that_is_stopped_again_and_again_is_ended_with_its_peers(tmp_path):
    code = (
        "if first and index == '1':\n"
        "    while True: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "sleep(60 if first else 0.1)"
    )
    ended, lines, took_s = supervise(tmp_path, code, stopped_s=0.5)
    assert ended == 0 and took_s < 20, lines
    assert [line.rpartition(": ")[2] for line in lines[:3]] == ["continued"] * 3
    assert "is stopped again and again (SIGSTOP)" in lines[3] and lines[3].endswith("all are ended")
    assert "with exit code 75 (it hung); restart 1 of 1" in lines[4]
    for name in ("pids0", "pids1"):
        assert not any(runs(int(pid)) for pid in (tmp_path / name).read_text().split())


@pytest.mark.fault(56)
@pytest.mark.parametrize("how", ["stopped", "stuck"])
def test_after_a_crash_the_others_have_seconds(tmp_path, how):
    """SIGTERM does nothing to either: the long grace is for a save, which there cannot be."""
    frozen = "os.kill(os.getpid(), signal.SIGSTOP)" if how == "stopped" else "pass"
    code = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"if first and index == '1':\n    (folder / 'ready').touch()\n    {frozen}\n    sleep(120)\n"
        "while not (folder / 'ready').exists(): sleep(0.02)\n"
        "sleep(0.3)\n"
        "if first: os.abort()"
    )
    ended, lines, took_s = supervise(tmp_path, code, grace_s=300.0, crash_grace_s=1.0)
    assert ended == 0 and took_s < 60 and "with signal SIGABRT; restart 1 of 1" in lines[-1], lines


@pytest.mark.fault(56)
def test_what_a_crashed_worker_has_started_ends_with_it(tmp_path):
    code = (
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(300)'])\n"
        "(folder / f'child{index}').write_text(f'{child.pid}')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended, _, _ = supervise(tmp_path, code, processes=1, restarts=0)
    assert ended == 128 + signal.SIGKILL
    wait_for(lambda: not runs(pids(tmp_path, "child0")[0]))


@pytest.mark.fault(56)
@pytest.mark.parametrize("how", ["stopped", "stuck", pytest.param("its child", marks=pytest.mark.heavy)])
def test_no_orphan_where_the_launcher_is_killed(tmp_path, how):
    """One worker has died, the other takes no SIGTERM, and then the launcher goes."""
    last = {
        "stopped": "signal.signal(signal.SIGTERM, signal.SIG_DFL)\nos.kill(os.getpid(), signal.SIGSTOP)\nsleep(300)",
        "stuck": "sleep(300)",
        "its child": "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(300)'])\n"
        "(folder / 'pids1').write_text(f'{child.pid}')\nsleep(300)",
    }[how]
    code = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"if index == '1':\n    {last.replace(chr(10), chr(10) + '    ')}\n"
        "sleep(300)"
    )
    supervisor = launcher(tmp_path, code, processes=2, stopped_s=60.0)
    dead, other = wait_for(lambda: pids(tmp_path, "pids0", "pids1"))
    if how == "stopped":
        wait_for(lambda: state(other) == "T")
    supervisor.send_signal(signal.SIGSTOP)  # so that it does not see what comes next
    os.kill(dead, signal.SIGKILL)
    supervisor.kill()
    supervisor.wait(300)
    wait_for(lambda: not runs(other), within_s=30)


@pytest.mark.heavy
@pytest.mark.fault(56)
def test_one_that_saves_when_its_launcher_is_killed_has_the_time_for_it(tmp_path):
    """Longer than one that is stuck has."""
    code = (
        "def save(*_):\n"
        "    until_s = time.monotonic() + 6\n"
        "    while time.monotonic() < until_s: pass\n"
        "    (folder / 'saved').write_text('x')\n"
        "    os._exit(143)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "(folder / 'ready').write_text('x')\n"
        "sleep(300)"
    )
    supervisor = launcher(tmp_path, code)
    wait_for((tmp_path / "ready").exists)
    supervisor.kill()
    supervisor.wait(300)
    wait_for((tmp_path / "saved").exists)


@pytest.mark.fault(56)
def test_one_without_a_sign_of_life_is_ended(tmp_path):
    """As where a thread holds Python's lock for ever, or the system has frozen the process: it is not seen as stopped."""
    code = (
        "pipe = int(os.environ['CAPIBARA_BEAT'].partition(':')[0])\n"
        "os.write(pipe, b'.')\n"
        "sleep(60 if first and index == '1' else 0.5)\n"
        "os.write(pipe, b'-')\n"
        "sleep(1.5)"
    )
    ended, lines, took_s = supervise(tmp_path, code, silent_s=1.0)
    assert ended == 0 and took_s < 20
    assert "has sent no heartbeat for 1 s: all are ended" in lines[0] and "exit code 75" in lines[1], lines


@pytest.fixture
def sleeper():
    """A process in a group of its own, which does nothing."""
    process = subprocess.Popen(["sleep", "60"], process_group=0)
    yield process
    process.kill()
    process.wait(300)


@pytest.mark.fault(56)
def test_time_in_which_the_launcher_did_not_run_does_not_count(sleeper, monkeypatch):
    """A machine that was suspended: no worker was stopped or silent for longer than the launcher has seen."""
    now_s, lines, (read, write) = [0.0], [], os.pipe()
    monkeypatch.setattr(workers, "time", types.SimpleNamespace(monotonic=lambda: now_s[0]))
    quiet = types.SimpleNamespace(index=1, pid=2**30, beats=read)
    os.set_blocking(read, False)
    stopped = types.SimpleNamespace(index=0, pid=sleeper.pid, beats=read)
    health = workers.Health([quiet, stopped], stopped_s=3.0, silent_s=5.0, say=lines.append)
    sleeper.send_signal(signal.SIGSTOP)
    wait_for(lambda: state(sleeper.pid) == "T")
    os.write(write, b".")
    for now_s[0] in (1.0, 5000.0):
        assert health.look() is None and lines == [] and state(sleeper.pid) == "T"
    now_s[0] = 5001.0
    assert health.look() is None and "was stopped (SIGSTOP) for 3 s: continued" in lines[0]
    for now_s[0] in (5002.0, 5003.0):
        assert health.look() is None
    now_s[0] = 5004.0
    assert "process 1 (pid 1073741824) has sent no heartbeat for 5 s" in health.look()
    os.close(read)
    os.close(write)


@pytest.mark.fault(56)
def test_a_guard_leaves_a_process_alone_that_has_the_number_of_a_worker(sleeper):
    """The worker has ended long ago, and the system has given its number to somebody else."""
    start = guard.stat_of(sleeper.pid).start
    guard._Ending([(sleeper.pid, start - 1)], grace_s=0.0).run()
    assert runs(sleeper.pid)
    guard._Ending([(sleeper.pid, start)], grace_s=0.0).run()
    assert sleeper.wait(300) == -signal.SIGKILL


@pytest.mark.fault(56)
def test_ctrl_z_stops_the_workers_too_and_they_go_on_with_the_launcher(tmp_path):
    """Nobody is continued behind the user's back."""
    code = "signal.signal(signal.SIGTERM, lambda *_: os._exit(143))\nsleep(300)"
    supervisor = launcher(tmp_path, code, own_group=True, processes=2, stopped_s=0.5)
    workers = wait_for(lambda: pids(tmp_path, "pids0", "pids1"))
    time.sleep(0.3)
    supervisor.send_signal(signal.SIGTSTP)
    wait_for(lambda: [state(pid) for pid in (supervisor.pid, *workers)] == ["T"] * 3)
    time.sleep(1.2)
    assert [state(pid) for pid in workers] == ["T"] * 2
    supervisor.send_signal(signal.SIGCONT)
    wait_for(lambda: "T" not in [state(pid) for pid in workers])
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(300) == 143
    assert not any(map(runs, workers))


@pytest.mark.fault(56)
def test_a_second_ctrl_c_does_not_wait_for_what_is_stuck(tmp_path):
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsleep(300)"
    supervisor = launcher(tmp_path, code, crash_grace_s=0.5)
    (worker,) = wait_for(lambda: pids(tmp_path, "pids0"))
    time.sleep(0.3)
    for _ in range(2):
        supervisor.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert supervisor.wait(300) == 130 and not runs(worker)


@pytest.mark.heavy
@pytest.mark.fault(56)
@pytest.mark.parametrize("launched", ["alive", "killed"])
def test_a_run_of_two_is_back_where_one_is_frozen_and_the_other_aborts(shell, launched):
    run = shell.folder / f"frozen_{launched}"
    flags = ("--gin_file=tiny.gin", "--emulate=2", f"--gin.MODEL_DIR={run.name}", "--gin.Checkpointing.every=2")
    start = ("local", "--processes=2", "--restarts=1", "--", "train", *flags, "--gin.TRAIN_STEPS=1000000")
    supervisor = shell.start("launch", *start)
    wait_for(lambda: len(steps_of(run)) > 8, within_s=120)
    first, other = children(supervisor.pid)
    os.kill(other, signal.SIGSTOP)
    if launched == "killed":
        supervisor.send_signal(signal.SIGSTOP)
    os.kill(first, signal.SIGABRT)
    began_s, before = time.monotonic(), len(steps_of(run))
    if launched == "killed":
        supervisor.kill()
        supervisor.communicate()
        wait_for(lambda: not runs(first) and not runs(other), within_s=30)
        supervisor = shell.start("launch", *start)
    wait_for(lambda: len(steps_of(run)) > before, within_s=60)
    took_s = time.monotonic() - began_s
    supervisor.send_signal(signal.SIGTERM)
    out, _ = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 143 and re.search("resuming from step|resuming from step", out)
    assert took_s < 30


@pytest.mark.heavy
@pytest.mark.fault(56)
def test_data_workers_end_with_a_run_that_is_killed(shell):
    """Without a launcher, too: nobody is left to tell them."""
    run = shell.folder / "killed"
    flags = ("--gin_file=tiny.gin", "--emulate=2", "--gin.MODEL_DIR=killed", "--gin.TRAIN_STEPS=1000000")
    process = shell.start("train", *flags, "--gin.Dataset.workers=2")
    wait_for(lambda: len(steps_of(run)) > 3, within_s=120)
    started = [child for task in os.listdir(f"/proc/{process.pid}/task") for child in children(process.pid, task)]
    assert len(started) >= 2 and all(map(runs, started))
    process.kill()
    process.communicate()
    wait_for(lambda: not any(map(runs, started)), within_s=20)


SLEEPY = """
import os, signal, sys, threading, time
from capibara.training.stability.watchdog import Watch, Watchdog
with Watchdog(Watch(factor=5.0, at_least_s=1.0)) as dog:
    for step in range(10):
        time.sleep(0.02)
        dog.beat(step)
    print("ready", flush=True)
    for step in range(10, 40):
        time.sleep(0.02)
        dog.beat(step)
    print("steps again", flush=True)
"""


@pytest.mark.fault(56)
def test_a_run_that_was_stopped_itself_does_not_count_as_hung():
    """As after ctrl-Z and fg, or where a whole job was suspended: the watchdog's own time stood still too."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    process = subprocess.Popen([sys.executable, "-c", SLEEPY], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "steps again\n")


@pytest.mark.fault(56)
def test_a_worker_tells_its_launcher_that_it_lives_and_when_it_is_done(monkeypatch):
    read, write = os.pipe()
    monkeypatch.setenv("CAPIBARA_BEAT", f"{write}:{os.getppid()}")
    with Watchdog(Watch(at_least_s=0.1)) as dog:
        time.sleep(0.2)
        os.set_blocking(read, False)
        with pytest.raises(BlockingIOError):  # nothing while it compiles, which may hold Python's lock for long
            os.read(read, 1000)
        os.set_blocking(read, True)
        dog.beat(1)
        said = b""
        while not said.startswith(b".."):
            said += os.read(read, 1000)
    said += os.read(read, 1000)
    assert said.strip(b".") == b"-" and said.endswith(b".-")
    monkeypatch.setenv("CAPIBARA_BEAT", f"{write}:1")  # inherited from another's worker
    with Watchdog(Watch(at_least_s=0.1)) as dog:
        assert dog._launcher is None
    os.close(write)
    assert os.read(read, 1000) == b""
    os.close(read)


def steps_of(run):
    """The steps that a run has logged, those that were made twice too."""
    if not (run / "metrics.jsonl").exists():
        return []
    return [record["step"] for record in loggers.all_records(str(run / "metrics.jsonl")) if record["kind"] == "train"]


def children(pid, thread=None):
    """The process ids of the children that a thread of a process (the main one) has started, the oldest first."""
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{thread or pid}/children").read_text().split()]


HOLDER = """
import fcntl, os, signal, sys, time
descriptor = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(descriptor, fcntl.LOCK_EX)
if sys.argv[2] == "its child" and os.fork():
    os._exit(0)
with open(sys.argv[1] + "/pid.new", "w") as file:
    file.write(str(os.getpid()))
os.rename(sys.argv[1] + "/pid.new", sys.argv[1] + "/pid")
if sys.argv[2] != "busy":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(300)
"""


@pytest.fixture
def holding(tmp_path):
    """how -> the process id of one that holds the lock of the folder."""
    started = []

    def hold(how):
        process = subprocess.Popen([sys.executable, "-S", "-c", HOLDER, str(tmp_path), how])
        pid = wait_for(lambda: pids(tmp_path, "pid"))[0]
        started.extend([pid, process])
        if how != "busy":
            wait_for(lambda: state(pid) == "T")
        return pid

    yield hold
    os.kill(started[0], signal.SIGKILL)
    started[1].wait(300)


@pytest.mark.fault(55)
@pytest.mark.parametrize("how", ["stopped", "busy", "its child"])
def test_a_lock_that_is_not_given_back_names_its_holder(tmp_path, holding, monkeypatch, how):
    monkeypatch.setattr(lease_module, "LOCK_S", 0.5)
    pid, began_s = holding(how), time.monotonic()
    with pytest.raises(UserError) as error:
        Lease(epath.Path(tmp_path))
    assert 0.5 <= time.monotonic() - began_s < 5
    words = "continue it (kill -CONT " if how != "busy" else "wait for it or end it"
    assert f"{tmp_path} is locked by process {pid} on {socket.gethostname()}" in str(error.value)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.fault(55)
def test_a_lock_that_comes_free_in_time_is_waited_for(tmp_path, holding):
    pid = holding("stopped")
    began_s = time.monotonic()
    killing = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {pid}"])
    Lease(epath.Path(tmp_path)).release()
    assert time.monotonic() - began_s >= 0.4
    killing.wait()


@pytest.mark.fault(55)
def test_the_holder_of_a_lease_ends_in_time_where_its_lock_is_held(tmp_path, holding, monkeypatch):
    monkeypatch.setattr(lease_module, "LOCK_S", 0.3)
    lease = Lease(epath.Path(tmp_path), stale_after_s=0.6)
    holding("stopped")
    time.sleep(0.3)  # its thread waits for the lock by now
    began_s = time.monotonic()
    lease.check()
    lease.release()
    assert time.monotonic() - began_s < 5
    assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()  # left to the next one, who finds us dead


@pytest.mark.fault(55)
def test_a_pipe_with_the_name_of_the_lease_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / NAME)
    lease = Lease(epath.Path(tmp_path))
    lease.check()
    lease.release()


JUMPS_S = (3600.0, -3600.0, 60 * 86400.0, -400 * 86400.0, 5 * 86400.0)  # poll() takes no more than 24 days


@pytest.fixture
def jumping(monkeypatch):
    """time.time jumps with every call, in all threads, whoever's they are."""
    now, turn = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: now() + JUMPS_S[next(turn) % len(JUMPS_S)])


@pytest.mark.fault(57)
@pytest.mark.parametrize("broken", [False, True], ids=["the clock", "the clock and the disk"])
def test_tensorboard_files_are_written_and_closed_whatever_the_clock_does(
    tmp_path, jumping, monkeypatch, broken, caplog
):
    """More events than a queue holds; all are there, no thread is left, and a disk that fails ends the events alone."""
    threads = set(threading.enumerate())
    run = run_info(tmp_path)
    for _ in range(2):  # of two starts in the same second neither has the other's file
        callback = loggers.TensorBoard()
        callback.on_train_begin(run)
        if broken:
            monkeypatch.setattr(callback._events._writer, "write_event", failing)
        for step in range(1, 60):
            callback.on_step(step, {"loss": 1.0 / step})
            callback.on_checkpoint(step)
        callback.on_train_end(59, "finished")
    assert set(threading.enumerate()) <= threads
    assert ("is not written any more (OSError: [Errno 5]" in caplog.text) == broken
    files = sorted((tmp_path / "tensorboard").iterdir())
    assert len(files) == 2 and (broken or all(file.read_bytes().count(b"train/loss") == 59 for file in files))


def failing(event):
    raise OSError(errno.EIO, "Input/output error")


def run_info(folder):
    values = dict.fromkeys((field.name for field in dataclasses.fields(RunInfo)), 1)
    return RunInfo(**values | {"model_dir": str(folder), "start_step": 0, "config": "", "device_kind": "cpu"})


# What every Python process of a run does when it starts: its clock jumps with every call, a thread that is no daemon
# waits for ever, and a logger's thread ends at its first line.
JUMPY = """
import itertools, threading, time
now, turn = time.time, itertools.count()
time.time = lambda: now() + JUMPS_S[next(turn) % len(JUMPS_S)]
threading.Thread(target=threading.Event().wait, name="a logger that waits").start()
threading.Thread(target=lambda: 1 / 0, name="a logger that is dead").start()
"""


@pytest.mark.heavy
@pytest.mark.fault(57)
def test_a_run_saves_and_ends_where_the_clock_jumps_and_threads_are_left(shell):
    (shell.folder / "jumpy").mkdir()
    (shell.folder / "jumpy" / "sitecustomize.py").write_text(JUMPY.replace("JUMPS_S", repr(JUMPS_S)))
    path = {"PYTHONPATH": f"{shell.folder / 'jumpy'}{os.pathsep}{CHECKOUT}"}
    flags = ("--gin_file=tiny.gin", "--emulate=2", "--gin.MODEL_DIR=jumpy_run", "--gin.Checkpointing.every=2")
    began_s = time.monotonic()
    done = shell.run("train", *flags, **path)
    assert done.code == 0, done.err
    assert "a logger that waits does not end within 10 s" in done.err and time.monotonic() - began_s < 90
    with CheckpointReader(str(shell.folder / "jumpy_run"), Checkpointing()) as reader:
        assert reader.verified_step() == 6 and not reader.corrupted
    steps = [r["step"] for r in loggers.read_metrics(str(shell.folder / "jumpy_run")) if r["kind"] == "train"]
    assert steps == [1, 2, 3, 4, 5, 6]


JUMPING_LIBRARY = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static const long jumps[] = {3600, -3600, 60 * 86400L, -400 * 86400L, 5 * 86400L};
static long jump(void) { static unsigned turn; return jumps[__sync_fetch_and_add(&turn, 1) / 50 % 5]; }
int clock_gettime(clockid_t clock, struct timespec *at) {
  int result = syscall(SYS_clock_gettime, clock, at);
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) at->tv_sec += jump();
  return result;
}
int gettimeofday(struct timeval *at, void *zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec, at->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
"""


@pytest.mark.heavy
@pytest.mark.fault(57)
def test_a_run_saves_and_ends_where_the_clock_jumps_for_compiled_code_too(shell):
    """Orbax, TensorStore and JAX have threads of their own, which ask the system."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler here")
    source, library = shell.folder / "jump.c", shell.folder / "jump.so"
    source.write_text(JUMPING_LIBRARY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    flags = ("--gin_file=tiny.gin", "--emulate=2", "--gin.MODEL_DIR=jumps", "--gin.Checkpointing.every=2")
    began_s = time.monotonic()
    for steps in (6, 10):
        done = shell.run("train", *flags, f"--gin.TRAIN_STEPS={steps}", LD_PRELOAD=str(library))
        assert done.code == 0, done.err
    assert time.monotonic() - began_s < 120
    with CheckpointReader(str(shell.folder / "jumps"), Checkpointing()) as reader:
        assert reader.verified_step() == 10 and reader.steps() == [6, 8, 10]


@pytest.mark.fault(57)
def test_a_save_that_never_ends_does_not_keep_the_process(tmp_path):
    """A file system that does not answer: the exit code says that the save is lost."""
    code = (
        "import jax, sys, threading\n"
        "from capibara.checkpoints import manager as checkpoints\n"
        "from capibara.core.background import Task\n"
        "checkpoints.restoring.TASK_LIMIT_S = 0.5\n"
        "made = checkpoints.Checkpoints(sys.argv[1], checkpoints.Checkpointing())\n"
        "made._saving = Task(threading.Event().wait, 'capibara-save')\n"
    )
    began_s = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    argv = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "error: capibara-save has not ended within 0.5 s" in done.stderr, done.stderr
    assert time.monotonic() - began_s < 30 and not (tmp_path / "checkpoints" / NAME).exists()
