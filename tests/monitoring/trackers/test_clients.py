"""The trackers of W&B, MLflow and Comet: with stand-ins for their clients here, with the real ones in TRACKERS_PYTHON.

`make test-peer PEER=trackers PEER_PYTHON=PATH`, where PATH is a python with capibara, wandb, mlflow and comet_ml.
"""

import collections
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import textwrap
import time
import types

import pytest

from capibara.core.types import UserError
from capibara.monitoring.trackers.clients.comet import CometTracker
from capibara.monitoring.trackers.clients.mlflow import MlflowTracker
from capibara.monitoring.trackers.clients.weights_and_biases import WandbTracker
from capibara.monitoring.trackers.tracker import Moment, Refused, TrackedRun
from tests.monitoring.trackers.runs import PNG, TOKEN, lived, sent

PYTHON = os.environ.get("TRACKERS_PYTHON")
CHECKOUT = pathlib.Path(__file__).parents[3]
real = pytest.mark.skipif(not PYTHON, reason="TRACKERS_PYTHON names no python with the clients")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def two_starts(tracker, folder):
    """A run that is interrupted at step 3 and resumes at step 2; returns the lines for the user."""
    metrics = lived(folder, [1, 2, 3], reason=None)
    (folder / "loss_curve.png").write_bytes(PNG % b"picture")
    metrics.on_facts(0, {"git": {"commit": "a" * 40, "dirty": True}, "host": "here"})
    metrics.on_evaluate(3, {"loss": 0.5})
    metrics.on_sample(3, "def ", f"f(x): return {TOKEN}")
    metrics.on_train_end(3, "interrupted")
    first = sent([tracker], folder)
    lived(folder, [3, 4], start=2, loss=10.0)
    second = sent([tracker], folder)
    assert first[1] == second[1] == {}
    return first[0] + second[0]


class FakeWandb(types.ModuleType):
    """W&B as far as the tracker knows it: steps never go back, and a run that resumes knows its next step."""

    def __init__(self):
        super().__init__("wandb")
        self.runs, self.inits = {}, []

    Settings = staticmethod(lambda **settings: settings)
    Table = staticmethod(lambda columns, data: ("table", columns, data))
    Html = staticmethod(lambda text, inject: ("html", text))
    Image = staticmethod(lambda path, caption: ("image", os.path.getsize(path), caption))

    def init(self, **options):
        self.inits.append(options)
        run = self.runs.setdefault(options["id"], FakeRun(options["id"]))
        assert options["resume"] == "allow"
        return run


class FakeRun:
    def __init__(self, name):
        self.id, self.url, self.step = name, f"https://wandb/runs/{name}", 0
        self.config, self.summary, self.rows, self.axes, self.ends = FakeConfig(), {}, {}, {}, []

    def define_metric(self, name, step_metric=None, **_):
        self.axes[name] = step_metric

    def log(self, values, step):
        assert step >= self.step, "W&B drops what goes back"
        self.step = step
        self.rows.setdefault(step, {}).update(values)

    def finish(self, exit_code):
        self.ends.append(exit_code)
        self.step += 1


class FakeConfig(dict):
    def update(self, values, allow_val_change):
        assert allow_val_change
        super().update(values)


def test_wandb(folder, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    said = two_starts(WandbTracker(project="mine", entity="us", tags=("a",), base_url="http://here"), folder)
    (run,) = fake.runs.values()
    assert said == [f"wandb: {run.url}"] * 2
    one, two = fake.inits
    assert one["id"] == two["id"] and (one["project"], one["entity"], one["name"], one["tags"]) == (
        "mine",
        "us",
        "run",
        ["a"],
    )
    assert one["settings"]["base_url"] == "http://here" and one["settings"]["console"] == "off"
    assert run.config["Trainer.steps"] == 100 and run.config["git"]["dirty"] is True
    assert run.axes["train/*"] == "train/step" and run.axes["eval/*"] == "eval/step"
    logged = [(row["train/step"], row["train/loss"]) for _, row in sorted(run.rows.items()) if "train/loss" in row]
    assert logged == [(1, 2.0), (2, 3.0), (3, 4.0), (3, 13.0), (4, 14.0)]
    values = {name: value for _, row in sorted(run.rows.items()) for name, value in row.items()}
    assert values["eval/loss"] == 0.5 and values["eval/step"] == 3
    assert values["sample/def "] == ("table", ["step", "prompt", "text"], [[3, "def ", "def f(x): return [hidden]"]])
    assert values["picture/loss_curve.png"] == ("image", len(PNG % b"picture"), "step 4")
    assert values["text/config.gin"][1].startswith("<pre>Trainer.steps = 100\n")
    assert run.ends == [255, 0] and run.summary == {"end": "finished", "rolled_back_to": 2}
    assert all(abs(row["_timestamp"] - time.time()) < 60 for row in run.rows.values())
    assert TOKEN not in str(vars(run))


def test_wandb_gets_no_line_twice_after_its_process_was_killed(folder, monkeypatch):
    """It sends in the background, so its position is that of its last end; the server says what it has."""
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    lived(folder, [1, 2, 3])
    sent([WandbTracker()], folder)
    (run,) = fake.runs.values()
    before = {step: {**row} for step, row in run.rows.items()}
    state = folder / "trackers" / "wandb.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"position": 0, "line": 0, "finished": False}))
    (folder / "loss_curve.png").write_bytes(PNG % b"picture")
    sent([WandbTracker()], folder)
    assert {step: row for step, row in run.rows.items() if step in before} == before
    assert [[*row] for step, row in run.rows.items() if step not in before] == [
        ["picture/loss_curve.png", "_timestamp"]
    ]


class MlflowError(Exception):
    """As MLflow's own, whose status is 400 for what it does not take, and 500 for whatever its client does not know."""

    def __init__(self, status):
        super().__init__(f"it is refused with {status} {TOKEN}")
        self.get_http_status_code = lambda: status


class FileError(OSError):
    """As that of requests, by which MLflow's client moves files."""

    def __init__(self, status):
        super().__init__(f"it is refused with {status} {TOKEN}")
        self.response = types.SimpleNamespace(status_code=status)


Metric = collections.namedtuple("Metric", "key value timestamp step")


class FakeMlflow:
    """A store of MLflow: parameters cannot change, and a request has limits."""

    def __init__(self):
        self.experiments, self.runs, self.sent, self.refuses = {}, {}, [], lambda what: None

    def modules(self):
        named = {name: types.ModuleType(name) for name in ("mlflow", "mlflow.tracking", "mlflow.entities")}
        named["mlflow.tracking"].MlflowClient = lambda tracking_uri: self
        named["mlflow.entities"].Metric = Metric
        named["mlflow.entities"].Param = lambda key, value: (key, value)
        return named

    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id=name) if name in self.experiments else None

    def create_experiment(self, name):
        self.experiments[name] = []
        return name

    def create_run(self, experiment, tags, run_name):
        run = types.SimpleNamespace(tags=dict(tags), name=run_name, params={}, metrics=set(), files={}, status="")
        self.runs[name := f"run{len(self.runs)}"] = run
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=name))

    def search_runs(self, experiments, condition, max_results):
        uid = re.search("'(.*)'", condition)[1]
        found = [name for name, run in self.runs.items() if run.tags["capibara.uid"] == uid]
        return [types.SimpleNamespace(info=types.SimpleNamespace(run_id=name)) for name in found]

    def get_run(self, name):
        return types.SimpleNamespace(data=self.runs[name])

    def update_run(self, name, status):
        self.runs[name].status = status

    def log_batch(self, name, metrics=(), params=()):
        assert len(metrics) <= 1000 and len(params) <= 100
        for metric in metrics:
            self._check(metric.key)
        self.runs[name].metrics |= {*metrics}
        self.sent += metrics
        for key, value in params:
            assert self.runs[name].params.setdefault(key, value) == value

    def set_tag(self, name, key, value):
        self.runs[name].tags[key] = value

    def _check(self, what, error=MlflowError):
        if status := self.refuses(what):
            raise error(status)

    def log_text(self, name, text, file):
        self._check(file, FileError)
        self.runs[name].files[file] = text

    def log_artifact(self, name, path, folder):
        self._check(folder, FileError)
        self.runs[name].files[f"{folder}/{os.path.basename(path)}"] = os.path.getsize(path)

    def set_terminated(self, name, status):
        self.runs[name].status = status


@pytest.fixture
def mlflow(monkeypatch):
    fake = FakeMlflow()
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return fake


def test_mlflow(folder, mlflow):
    said = two_starts(MlflowTracker(uri="http://here:5000/", experiment="mine"), folder)
    (run,) = mlflow.runs.values()
    assert said == ["mlflow: http://here:5000/#/experiments/mine/runs/run0"] * 2
    assert run.params["Trainer.steps"] == "100" and run.status == "FINISHED" and run.name == "run"
    logged = sorted((step, value) for key, value, _, step in run.metrics if key == "train/loss")
    assert logged == [(1, 2.0), (2, 3.0), (3, 4.0), (3, 13.0), (4, 14.0)]
    assert run.tags["mlflow.source.git.commit"] == "a" * 40 and run.tags["end"] == "finished"
    assert run.files["samples/000000003-def.txt"] == "def f(x): return [hidden]"
    assert run.files["pictures/loss_curve.png"] > 7 and "Trainer.steps = 100" in run.files["config.gin"]
    assert TOKEN not in str(vars(run))


def test_mlflow_gets_no_metric_twice(folder, mlflow):
    lived(folder, [1, 2, 3])
    sent([MlflowTracker()], folder)
    assert [(step, value) for key, value, _, step in mlflow.sent if key == "train/loss"] == [
        (1, 2.0),
        (2, 3.0),
        (3, 4.0),
    ]


def test_mlflow_finds_a_run_whose_creation_was_not_noted(folder, mlflow):
    lived(folder, [*range(1, 1500)])
    sent([MlflowTracker()], folder)
    (folder / "trackers" / "mlflow.json").unlink()
    sent([MlflowTracker()], folder)
    (run,) = mlflow.runs.values()
    assert len(run.metrics) == 1499  # those that were sent again are the same


@pytest.mark.parametrize("status", [400, 413])
def test_what_mlflow_refuses_is_skipped_and_said(folder, mlflow, status):
    metrics = lived(folder, [1, 2, 3], reason=None)
    for step in range(4, 600):
        metrics.on_step(
            step, {"loss": 1.0, **({"odd": 1.0} if step % 2 else {}), **({"rare": 1.0} if step == 300 else {})}
        )
    metrics.on_sample(600, "def ", "x")
    metrics.on_train_end(600, "finished")
    (folder / "loss_curve.png").write_bytes(PNG % b"picture")
    odd = {"train/odd": 400, "train/rare": 400, "samples/000000600-def.txt": status, "pictures": status}
    mlflow.refuses = odd.get
    calls = []
    log_batch = mlflow.log_batch
    mlflow.log_batch = lambda name, **what: (calls.append(what), log_batch(name, **what))
    said, unsent = sent([MlflowTracker()], folder)
    assert not unsent and sorted(said) == [
        f"mlflow does not take loss_curve.png of step 600: it is refused with {status} [hidden]; skipped",
        f"mlflow does not take sample/def of step 600: it is refused with {status} [hidden]; skipped",
        "mlflow does not take the metric train/odd; skipped: it is refused with 400 [hidden]",
        "mlflow does not take the metric train/rare; skipped: it is refused with 400 [hidden]",
    ]
    (run,) = mlflow.runs.values()
    assert sorted(metric.step for metric in run.metrics if metric.key == "train/loss") == [*range(1, 600)]
    assert {metric.key for metric in run.metrics} == {"train/loss"} and run.status == "FINISHED"
    assert len(calls) < 100  # a metric that is refused a few times is not tried again


@pytest.mark.parametrize("status", [400, 404, 429, 500, None])
@pytest.mark.parametrize("steps", [3, 60])
def test_a_service_that_takes_nothing_is_down(folder, mlflow, status, steps):
    """Nothing is lost: what it did not take is sent when it does. None: it does not answer at all.

    MLflow answers 400 for everything of a run that was deleted.
    """
    lived(folder, [*range(1, steps + 1)])

    def refuses(what):
        if status is None and what.startswith("train"):
            raise ConnectionError("no answer")
        return status if what.startswith("train") else None

    mlflow.refuses = refuses
    said, unsent = sent([MlflowTracker()], folder)
    assert unsent["mlflow"] > steps and len(said) == 1 and said[0].startswith("mlflow fails: ")
    mlflow.refuses = lambda what: None
    assert sent([MlflowTracker()], folder) == ([], {})
    (run,) = mlflow.runs.values()
    assert len(run.metrics) == steps


def test_a_parameter_that_changes_is_a_tag(folder, mlflow):
    lived(folder, [1], reason="interrupted")
    sent([MlflowTracker()], folder)
    lived(folder, [2], start=1)
    (folder / "config.gin").write_text("Trainer.steps = 200\n")
    sent([MlflowTracker()], folder)
    (run,) = mlflow.runs.values()
    assert run.params["Trainer.steps"] == "100" and run.tags["changed.Trainer.steps"] == "200"


class FakeComet(types.ModuleType):
    """An experiment of Comet that notes its calls."""

    def __init__(self):
        super().__init__("comet_ml")
        self.starts, self.calls, self.url = [], [], "https://comet/x"
        self.ExperimentConfig = lambda **options: options

    def start(self, **options):
        self.starts.append(options)
        return self

    def get_key(self):
        return self.starts[-1]["experiment_key"]

    def flush(self):
        return True

    def __getattr__(self, name):
        if name.startswith("log_") or name == "end":
            return lambda *args, **options: self.calls.append((name, args, options))
        raise AttributeError(name)


def test_comet(folder, monkeypatch):
    fake = FakeComet()
    monkeypatch.setitem(sys.modules, "comet_ml", fake)
    said = two_starts(CometTracker(project="mine", workspace="us"), folder)
    assert said == ["comet: https://comet/x"] * 2
    one, two = fake.starts
    assert one["experiment_key"] == two["experiment_key"] and len(one["experiment_key"]) == 32 and one["online"]
    assert one["mode"] == "get_or_create" and one["experiment_config"]["log_code"] is False
    metrics = [(options["step"], args[0]) for name, args, options in fake.calls if name == "log_metrics"]
    assert (3, {"eval/loss": 0.5}) in metrics and (3, {"train/loss": 13.0}) in metrics
    texts = [(args[0], options["metadata"]) for name, args, options in fake.calls if name == "log_text"]
    assert texts == [("def f(x): return [hidden]", {"prompt": "def "})]
    others = {key: value for name, args, _ in fake.calls if name == "log_others" for key, value in args[0].items()}
    assert json.loads(others["git"])["commit"] == "a" * 40
    assert [name for name, _, _ in fake.calls].count("end") == 2
    assert any(name == "log_image" and options["name"] == "loss_curve.png" for name, _, options in fake.calls)
    assert TOKEN not in str(fake.calls)


def test_what_is_written_for_later_upload_does_not_count_as_sent(monkeypatch):
    assert [WandbTracker().label, WandbTracker(mode="offline").label] == ["wandb", "wandb-offline"]
    assert [CometTracker().label, CometTracker(mode="offline").label] == ["comet", "comet-offline"]
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("COMET_MODE", "OFFLINE")
    assert (WandbTracker().label, WandbTracker(mode="online").label) == ("wandb-offline", "wandb")
    assert CometTracker().label == "comet-offline"


@pytest.mark.parametrize(
    ("tracker", "module"), [(WandbTracker, "wandb"), (MlflowTracker, "mlflow"), (CometTracker, "comet_ml")]
)
def test_a_client_that_is_not_installed(folder, monkeypatch, tracker, module):
    monkeypatch.setitem(sys.modules, module, None)
    lived(folder, [1])
    said, unsent = sent([tracker()], folder)
    (line,) = said
    extra = module.removesuffix("_ml")
    assert line.endswith(f'[{extra}]"') and "\n" not in line
    assert [*unsent.values()] == [3]


def test_mistakes_in_the_options_are_one_line():
    for make in (
        lambda: WandbTracker(mode="on"),
        lambda: WandbTracker(project=""),
        lambda: CometTracker(mode="on"),
        lambda: CometTracker(project=" "),
        lambda: MlflowTracker(experiment=""),
        lambda: MlflowTracker(uri="http://me:secret-word@here"),
        lambda: WandbTracker(base_url="http://me:secret-word@here"),
        lambda: CometTracker(server="http://me:secret-word@here"),
    ):
        with pytest.raises(UserError) as error:
            make()
        assert "\n" not in str(error.value) and "secret-word" not in str(error.value)


def read_back(client, folder, *address):
    """What the real client has kept of `two_starts`."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1"}
    script = [PYTHON, str(CHECKOUT / "tests/monitoring/trackers/real_clients.py"), client, str(folder), *address]
    done = subprocess.run(script, capture_output=True, text=True, env=environment, cwd=folder.parent, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    found = json.loads(lines[0].removeprefix("RESULT "))
    assert found["unsent"] == {} and TOKEN not in json.dumps(found)
    return found


@real
def test_wandb_itself_offline(folder):
    found = read_back("wandb", folder)
    assert len(found["ids"]) == 1 and found["ids"][0][1] == "mine"
    rows = found["history"]
    assert [(row["train/step"], row["train/loss"]) for row in rows if "train/loss" in row] == [
        (1, 2), (2, 3), (3, 4), (3, 13), (4, 14)
    ]  # fmt: skip
    assert [row["_step"] for row in rows] == sorted(row["_step"] for row in rows)
    assert found["summary"]["eval/loss"] == 0.5 and found["summary"]["end"] == "finished"
    assert found["config"]["Trainer.steps"] == 100 and found["config"]["git"]["dirty"] is True
    assert found["tables"] == [
        {"columns": ["step", "prompt", "text"], "data": [[3, "def ", "def f(x): return [hidden]"]]}
    ]
    pictures = [name for name in found["files"] if name.endswith(".png")]
    assert len(pictures) == 2 and any("config.gin" in name for name in found["files"])


def of_mlflow(found):
    assert found["status"] == "FINISHED" and found["params"]["Trainer.steps"] == "100"
    assert found["metrics"]["train/loss"] == [[1, 2.0], [2, 3.0], [3, 4.0], [3, 13.0], [4, 14.0]]
    assert found["metrics"]["eval/loss"] == [[3, 0.5]]
    assert found["artifacts"]["samples/000000003-def.txt"] == "def f(x): return [hidden]"
    assert "pictures/loss_curve.png" in found["artifacts"] and "Trainer.steps" in found["artifacts"]["config.gin"]
    assert found["tags"]["mlflow.source.git.commit"] == "a" * 40 and found["tags"]["rolled_back_to"] == "2"


@real
def test_mlflow_itself_with_a_local_store(folder):
    of_mlflow(read_back("mlflow", folder, f"sqlite:///{folder.parent}/mlflow.db"))


@real
def test_mlflow_itself_with_a_server(folder):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = [
        "--backend-store-uri",
        f"sqlite:///{folder.parent}/mlflow.db",
        "--artifacts-destination",
        str(folder.parent / "a"),
    ]
    command = [PYTHON, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", *store]
    with open(folder.parent / "server.log", "w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder.parent, start_new_session=True)
    try:
        limit_s = time.monotonic() + 90
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < limit_s and server.poll() is None, (folder.parent / "server.log").read_text()
                time.sleep(0.2)
        of_mlflow(read_back("mlflow", folder, f"http://127.0.0.1:{port}"))
    finally:
        os.killpg(server.pid, 15)
        server.wait(20)


@real
def test_comet_itself_offline(folder):
    found = read_back("comet", folder)
    assert len({*found["keys"]}) == 1 and len(found["keys"]) == 2
    payloads = [message["payload"] for message in found["messages"]]
    metrics = [payload["metric"] for payload in payloads if "metric" in payload]
    losses = [(one["step"], one["metricValue"]) for one in metrics if one["metricName"] == "train/loss"]
    assert losses == [(1, 2.0), (2, 3.0), (3, 4.0), (3, 13.0), (4, 14.0)]
    uploads = [(payload["upload_type"], payload["file_path"]) for payload in payloads if "upload_type" in payload]
    assert {kind for kind, _ in uploads} == {"asset", "text-sample", "visualization"}
    assert all(os.path.basename(path) in found["names"] for _, path in uploads)
    others = {payload["key"]: payload["value"] for payload in payloads if "key" in payload}
    assert others["end"] == "finished" and json.loads(others["git"])["dirty"] is True


@real
@pytest.mark.parametrize(
    "tracker", ["WandbTracker(base_url='{}')", "MlflowTracker(uri='{}')", "CometTracker(server='{}')"]
)
def test_a_server_that_never_answers_costs_training_nothing(folder, tracker):
    """The real clients against a socket that accepts and is silent: what 400 steps of 5 ms wait for callbacks, and the end."""
    code = """
    import sys, time
    from capibara.monitoring.trackers.clients.comet import CometTracker
    from capibara.monitoring.trackers.clients.mlflow import MlflowTracker
    from capibara.monitoring.trackers.clients.weights_and_biases import WandbTracker
    from tests.monitoring.trackers import test_tracking

    def steps(trackers, folder):
        callbacks, said = test_tracking.begun(folder, trackers, finish_s=2.0)
        waited_s, begin_cpu_s = [], time.process_time()
        for step in range(400):
            time.sleep(0.005)  # the devices work
            begin_s = time.perf_counter()
            callbacks.on_step(step, {"loss": 1.0})
            waited_s.append(time.perf_counter() - begin_s)
        cpu_s, begin_s = time.process_time() - begin_cpu_s, time.perf_counter()
        callbacks.on_train_end(400, "finished")
        return sorted(waited_s)[200], cpu_s, time.perf_counter() - begin_s, said

    alone_s, alone_cpu_s, _, _ = steps((), sys.argv[1] + "/alone")
    waited_s, cpu_s, end_s, said = steps((TRACKER,), sys.argv[1] + "/tracked")
    print("RESULT", (waited_s - alone_s) / 0.005, (cpu_s - alone_cpu_s) / 2.0, end_s, said[-1])
    """
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        code = textwrap.dedent(code).replace("TRACKER", tracker.format(address), 1)
        environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "WANDB_API_KEY": "0" * 40, "COMET_API_KEY": "0" * 40}
        command = [PYTHON, "-c", code, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=CHECKOUT, timeout=120)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), done.stderr[-3000:])
    print(line)
    _, waited, cpu, end_s, said = line.split(" ", 4)
    assert "has not got the last 402 lines of metrics.jsonl; this sends what is missing: capibara track" in said
    assert float(end_s) < 4.0
    assert float(waited) < 0.01 and float(cpu) < 0.02  # shares of a step: at the median; of the CPU of all


@pytest.fixture
def mlflow_run(folder, mlflow):
    """A tracker of MLflow that has started, with the lines for the user."""
    said = []
    run = TrackedRun(
        name="run", folder=str(folder), uid="a" * 32, run_id=None, config={}, config_text="", scratch=str(folder),
        say=said.append,
    )  # fmt: skip
    tracker = MlflowTracker()
    tracker.start(run)
    return tracker, run, said


def test_a_new_start_of_mlflow_tries_again_what_was_refused(mlflow, mlflow_run):
    tracker, run, said = mlflow_run
    for refuses in ({"odd": 400}.get, lambda what: None):
        mlflow.refuses = refuses
        tracker.start(run)
        for step in range(5):
            tracker.log(Moment(step, 1.0, step), {"odd": 1.0, "loss": 1.0})
        tracker.flush()
    assert sum(metric.key == "odd" for metric in mlflow.sent) == 5 and len(said) == 1


def test_a_request_of_refused_metrics_alone_is_no_outage(mlflow, mlflow_run):
    tracker, _, said = mlflow_run
    mlflow.refuses = {"odd": 400}.get
    for step in range(1000):
        tracker.log(Moment(step, 1.0, step), {"loss": 1.0})
    for step in range(9):
        tracker.log(Moment(step, 1.0, step), {"odd": 1.0})
    assert tracker.flush() and len(said) == 1
    assert len(mlflow.sent) == 1000
    for step in range(20):  # as a live run, which is looked at each second
        tracker.log(Moment(step, 1.0, step), {"odd": 1.0})
        assert tracker.flush()


def test_a_run_that_was_deleted_in_mlflow_fails_soon(mlflow, mlflow_run):
    tracker, _, _ = mlflow_run
    tracker.log(Moment(0, 1.0, 0), {"loss": 1.0})
    tracker.flush()
    mlflow.refuses = lambda what: 400
    with pytest.raises(Refused):
        for step in range(1, 5):
            tracker.log(Moment(step, 1.0, step), {f"loss/{step}": 1.0, "grad_norm": 1.0})
            tracker.flush()
    assert step <= 3


def test_a_metric_of_which_some_values_were_refused_is_sent_again(mlflow, mlflow_run):
    """MLflow refuses values before 1970, for example."""
    tracker, _, said = mlflow_run
    mlflow.refuses = lambda what: 400 if what == "x" and mlflow.is_bad else None
    for mlflow.is_bad in (True, False):
        for step in range(32):
            tracker.log(Moment(step, 1.0, step), {"x": 1.0, "loss": 1.0})
        tracker.flush()
    assert sum(metric.key == "x" for metric in mlflow.sent) == 32 and len(said) == 1
