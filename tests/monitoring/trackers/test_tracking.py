"""The process that feeds trackers beside training: whatever a tracker does, training goes its way and nothing is lost."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from capibara import config
from capibara.core.types import UserError
from capibara.monitoring.defaults import Monitoring
from capibara.monitoring.metrics_file.loggers import MetricsFile
from capibara.monitoring.system.sampler import SystemMetrics
from capibara.monitoring.trackers import state, tracking
from capibara.monitoring.trackers.clients.plain import JsonlTracker, PrintTracker
from capibara.monitoring.trackers.tracking import Tracking
from capibara.training.base.callbacks import Callback
from tests.monitoring.trackers.runs import RUN, TOKEN, Odd, sent


class Said(Callback):
    """Notes the lines for the user."""

    def __init__(self):
        self.lines = []

    def on_status(self, text):
        self.lines.append(text)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def deaf():
    """The port of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server.getsockname()[1]


def begun(folder, trackers, start=0, finish_s=1.0):
    said = Said()
    monitoring = Monitoring(callbacks=(MetricsFile(),), more=(said,), trackers=trackers)
    callbacks = monitoring.build(SystemMetrics(every_s=0.0), Tracking(finish_s=finish_s))
    callbacks.on_train_begin(dataclasses.replace(RUN, model_dir=str(folder), start_step=start))
    return callbacks, said.lines


def losses(path):
    found = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {one["step"]: one["metrics"]["train/loss"] for one in found if "train/loss" in one.get("metrics", {})}


def wait_for(what, within_s=120.0):
    limit_s = time.monotonic() + within_s
    while not (found := what()):
        assert time.monotonic() < limit_s
        time.sleep(0.02)
    return found


def children():
    """Processes that this one has started and that feed trackers."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline") as command, open(f"/proc/{name}/stat") as stat:
            parent = int(stat.read().rpartition(")")[2].split()[1])
            if parent == os.getpid() and "import tracker_process" in command.read():
                found.append(int(name))
    return found


def test_all_arrives_by_the_end_and_the_process_ends(folder, tmp_path):
    path = tmp_path / "all.jsonl"
    callbacks, said = begun(folder, (JsonlTracker(path=str(path)), PrintTracker()), finish_s=20.0)
    assert wait_for(children)
    for step in range(1, 4):
        callbacks.on_step(step, {"loss": 1.0 + step})
    begin_s = time.monotonic()
    callbacks.on_train_end(3, "finished")
    assert time.monotonic() - begin_s < 15.0
    assert losses(path) == {1: 2.0, 2: 3.0, 3: 4.0}
    assert said == ["step 1 train/loss=2", "step 2 train/loss=3", "step 3 train/loss=4"]
    assert json.loads(path.read_text().splitlines()[-1])["finished"] == "finished"
    assert not children()


def test_a_tracker_of_the_users_own_module(tmp_path):
    """Found beside the Gin file that imports it, in the process of the trackers, too."""
    (tmp_path / "my_tracker.py").write_text(
        textwrap.dedent("""
        import dataclasses
        from capibara.config import configurable
        from capibara.monitoring.trackers.tracker import Tracker

        @configurable
        @dataclasses.dataclass(kw_only=True)
        class Lines(Tracker):
            path: str = "lines.txt"

            def log(self, moment, metrics):
                with open(self.path, "a") as file:
                    print(moment.step, metrics["train/loss"], file=file)
        """)
    )
    (tmp_path / "run.gin").write_text("import my_tracker\nMonitoring.trackers = (@Lines(),)\nLines.path = 'out.txt'\n")
    code = """
    import dataclasses
    from capibara import config
    from capibara.monitoring.defaults import Monitoring
    from capibara.monitoring.system.sampler import SystemMetrics
    from tests.monitoring.trackers.runs import RUN
    config.parse(["run.gin"], ["SystemMetrics.every_s = 0", "Monitoring.callbacks = (@MetricsFile(),)"])
    callbacks = config.build(Monitoring).build(config.build(SystemMetrics))
    callbacks.on_train_begin(dataclasses.replace(RUN, model_dir="run"))
    callbacks.on_step(1, {"loss": 2.5})
    callbacks.on_train_end(1, "finished")
    """
    checkout = os.path.abspath(__file__).removesuffix("/tests/monitoring/trackers/test_tracking.py")
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": checkout},
        check=True,
    )
    assert (tmp_path / "out.txt").read_text() == "1 2.5\n"


@pytest.mark.parametrize("how", ["sleep", "connect", "raise", "import"])
def test_a_tracker_that_is_of_no_use(folder, tmp_path, deaf, how):
    """Training waits a limited time at its end, and nothing is lost: the line that it prints at the end says how."""
    path = tmp_path / "all.jsonl"
    odd = Odd(how=how, port=deaf)
    callbacks, said = begun(folder, (odd, JsonlTracker(path=str(path))))
    spent_s = 0.0
    for step in range(1, 201):
        begin_s = time.perf_counter()
        callbacks.on_step(step, {"loss": 1.0 + step})
        spent_s += time.perf_counter() - begin_s
        time.sleep(0.005)
    assert spent_s < 0.2  # 1 ms a step, most of it metrics.jsonl
    wait_for(lambda: losses(path))
    begin_s = time.monotonic()
    callbacks.on_train_end(200, "finished")
    assert time.monotonic() - begin_s < 4.0
    assert len(losses(path)) == 200
    failures = {"raise": "ConnectionError: no server at", "import": "ModuleNotFoundError: No module named 'a_client"}
    fails = [line for line in said if line.startswith("odd fails: ")]
    assert len(fails) == (how in failures) and all(failures[how] in line and "\n" not in line for line in fails)
    assert TOKEN not in str(said) and "my-secret-key" not in str(said)
    assert said[-1] == (
        f"odd has not got the last 202 lines of metrics.jsonl; this sends what is missing: capibara track {folder} --to=Odd "
        "--trust_config"
    )
    assert not children()
    odd.how = "well"
    assert sent([odd], folder) == ([], {})


def test_a_process_that_is_killed_is_started_again(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "RESTART_S", 0.05)
    path = tmp_path / "all.jsonl"
    callbacks, said = begun(folder, (JsonlTracker(path=str(path)),), finish_s=20.0)
    callbacks.on_step(1, {"loss": 2.0})
    wait_for(lambda: losses(path))
    for step in range(2, 4):
        os.kill(wait_for(children)[0], signal.SIGKILL)
        callbacks.on_step(step, {"loss": 1.0 + step})
        wait_for(lambda: step in losses(path))
    os.kill(wait_for(children)[0], signal.SIGKILL)
    callbacks.on_step(4, {"loss": 5.0})
    callbacks.on_train_end(4, "finished")
    assert losses(path) == {1: 2.0, 2: 3.0, 3: 4.0, 4: 5.0}
    assert said == ["the process of the trackers ended (signal 9): it is started again"]
    assert state.read(str(folder), "jsonl").is_finished


def test_one_that_ends_its_process_again_and_again(folder, monkeypatch):
    monkeypatch.setattr(tracking, "RESTART_S", 0.05)
    callbacks, said = begun(folder, (Odd(how="kill"),))
    callbacks.on_step(1, {"loss": 2.0})
    wait_for(lambda: said)
    time.sleep(1.0)
    callbacks.on_train_end(1, "finished")
    assert said[0] == "the process of the trackers ended (signal 9): it is started again"
    assert len(said) == 2 and said[1].startswith("odd has not got the last 3 lines")


@pytest.mark.parametrize("how", ["error", "killed"])
def test_a_run_that_fails_leaves_all_that_it_wrote(folder, tmp_path, how):
    """The process sees that the run is gone, sends the rest, and ends."""
    path = tmp_path / "all.jsonl"
    code = f"""
    import os, pathlib
    from tests.monitoring.trackers import test_tracking
    from capibara.monitoring.trackers.clients.plain import JsonlTracker
    callbacks, _ = test_tracking.begun({str(folder)!r}, (JsonlTracker(path={str(path)!r}),), finish_s=20.0)
    callbacks.on_step(1, {{"loss": 2.0}})
    # Before its first line arrives, the process may not have its request: it would end, and the next start sends the lines.
    test_tracking.wait_for(lambda: test_tracking.losses(pathlib.Path({str(path)!r})))
    for step in range(2, 101):
        callbacks.on_step(step, {{"loss": 1.0 + step}})
    if {how!r} == "killed":
        os.kill(os.getpid(), 9)
    callbacks.close()
    print(test_tracking.children()[0])
    """
    checkout = os.path.abspath(__file__).removesuffix("/tests/monitoring/trackers/test_tracking.py")
    environment = {**os.environ, "PYTHONPATH": checkout}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=checkout, env=environment, timeout=60)
    wait_for(lambda: state.read(str(folder), "jsonl").is_finished)
    assert losses(path) == {step: 1.0 + step for step in range(1, 101)}
    assert json.loads(path.read_text().splitlines()[-1])["finished"] == "crashed"


def test_the_next_start_waits_for_the_process_of_the_last_one(folder, tmp_path):
    path = tmp_path / "all.jsonl"
    first, _ = begun(folder, (JsonlTracker(path=str(path)),), finish_s=20.0)
    first.on_step(1, {"loss": 2.0})
    wait_for(lambda: losses(path))
    first.on_step(2, {"loss": 3.0})
    first.close()
    second, said = begun(folder, (JsonlTracker(path=str(path)),), start=1, finish_s=20.0)
    second.on_step(2, {"loss": 30.0})
    second.on_train_end(2, "finished")
    assert losses(path) == {1: 2.0, 2: 30.0} and said == []
    assert not children()


def test_what_cannot_work_is_refused_before_training():
    with pytest.raises(UserError, match="fed from the metrics file: add @MetricsFile"):
        Monitoring(callbacks=(), trackers=(PrintTracker(),)).build()
    with pytest.raises(UserError, match=r"Monitoring.trackers .* must be tuple\[Tracker, ...\]"):
        Monitoring(trackers=(MetricsFile(),))
    with pytest.raises(UserError, match="finish_s is -1"):
        tracking.Tracking(finish_s=-1.0)

    @config.configurable
    @dataclasses.dataclass(kw_only=True)
    class OfAFunction(PrintTracker):
        pass

    with pytest.raises(UserError, match="has OfAFunction of this script.* module of its own"):
        Monitoring(trackers=(OfAFunction(),)).build()


def test_without_trackers_there_is_no_process(folder):
    callbacks, said = begun(folder, ())
    callbacks.on_step(1, {"loss": 2.0})
    callbacks.on_train_end(1, "finished")
    assert not children() and not (folder / "trackers").exists()
