"""Sweeps from the command line: on this machine, and as jobs on a cluster that is a server on loopback."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import types

import pytest

from capibara.cli import launch
from capibara.cli.launching import sweep as verb
from capibara.cli.launching import trial_runs
from capibara.jobs.managing.records import Records
from capibara.jobs.sweeps.local import LocalLauncher
from capibara.jobs.sweeps.study import Study
from capibara.multihost import exits
from capibara.training.metrics import evaluation_metrics

HERE = pathlib.Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "jobs" / "systems"), str(HERE.parent / "jobs" / "sweeps")]
from fake_kubernetes import FakeKubernetes  # noqa: E402
from trial_hosts import Hosts, live  # noqa: E402

CHECKOUT = HERE.parents[1]
RATES = "--vary=LEARNING_RATE = [0.001, 0.01, 0.1]"
GRID = (RATES, "--search=grid")
LOCAL = ("local", "run.gin", "--poll=0.02")
RUN = """
include "runs/pretrain.gin"
include "models/tiny.gin"
include "tasks/stdlib.gin"
MODEL_DIR = "runs/mine"
TRAIN_STEPS = 4
BATCH_SIZE = 4
LENGTH = 64
LEARNING_RATE = 1e-3
DecoderConfig.num_layers = 1
Evaluation.every = 2
Evaluation.max_batches = 1
Checkpointing.every = 2
Anomalies.most_in_a_row = 1
"""
# A trial that needs no time: its loss depends on the learning rate.
STUB = """
import json, os, sys, time
folder, rate = sys.argv[1], float(sys.argv[2])
os.makedirs(folder, exist_ok=True)
if rate > 1:
    sys.exit("error: the learning rate is too high")
with open(f"{folder}/metrics.jsonl", "a", buffering=1) as file:
    print(json.dumps({"kind": "event", "step": 0, "event": "start"}), file=file)
    print(json.dumps({"kind": "eval", "step": 1, "loss": 1 / rate}), file=file)
    while os.path.exists("hold"):
        time.sleep(0.01)
    print(json.dumps({"kind": "event", "step": 1, "event": "end", "reason": "finished"}), file=file)
"""


@pytest.fixture(autouse=True)
def cwd(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAPIBARA_STATE", str(tmp_path / "jobs.sqlite"))
    (tmp_path / "run.gin").write_text(RUN)
    return tmp_path


@pytest.fixture
def stub(monkeypatch):
    """Trials of this machine are stubs; after a failure they are not restarted."""

    def command(self, trial):
        return [sys.executable, "-S", "-c", STUB, trial.model_dir, trial.bindings["LEARNING_RATE"]]

    monkeypatch.setattr(LocalLauncher, "command", command)


@pytest.fixture
def cluster(tmp_path, monkeypatch, gs):
    with FakeKubernetes(gone_after_s=(0.0, 0.05)) as server:
        server.write_kubeconfig(tmp_path / "kubeconfig")
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        yield server


def run(*argv):
    return exits.run_verb(launch.main, ["sweep", *argv])


def gke(folder, *more):
    """The arguments of a sweep on the cluster; all tests share a bucket."""
    storage = f"--storage=gs://bucket/{folder.name}"
    return ("gke", "run.gin", "--slice=v5e-8", "--image=i", "--poll=0.05", storage, *more)


def states(folder="sweeps/run"):
    return [str(trial.state) for trial in Study.load(folder).trials]


def wait_for(condition, most_s=300):
    until_s = time.monotonic() + most_s
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("moon", "run.gin"), "launch sweep has no 'moon': places are gce, gke, local"),
        (("lcal", "run.gin"), "did you mean local?"),
        (LOCAL, "--vary is not set"),
        ((*LOCAL, RATES), "--trials is not set, and --search is random"),
        ((*LOCAL, RATES, "--trials=4"), "--trials=4 must be at most 3: --vary has no more combinations"),
        ((*LOCAL, *GRID, RATES), "--vary=LEARNING_RATE = ... is there twice"),
        ((*LOCAL, "--vary=LEARNING_RATE = []", "--search=grid"), "the list is empty"),
        ((*LOCAL, "--vary=LEARNING_RATE = log(0, 1)", "--trials=2"), "the low end of log is 0, must be above 0"),
        ((*LOCAL, "--vary=LEARNING_RATE = log(1, 0.1)", "--trials=2"), "must be below the high end"),
        ((*LOCAL, "--vary=LERNING_RATE = [1, 2]", "--search=grid"), "did you mean LEARNING_RATE?"),
        ((*LOCAL, "--vary=a/Optimizer.b1 = [0.8, 0.9]", "--search=grid"), "a/Optimizer.b1 has no effect on the run"),
        ((*LOCAL, "--vary=Trainer.sead = [1, 2]", "--search=grid"), "did you mean seed?"),
        ((*LOCAL, "--vary=Moe.num_experts = [4, 8]", "--search=grid"), "Moe.num_experts is bound but nothing uses it"),
        ((*LOCAL, "--vary=BATCH_SIZE = [0, -4]", "--search=grid"), "Plan.batch_size is 0, must be at least 1"),
        ((*LOCAL, "--vary=MODEL_DIR = ['a']", "--search=grid"), "the sweep itself sets MODEL_DIR"),
        ((*LOCAL, *GRID, "--gin.LEARNING_RATE=1"), "LEARNING_RATE is varied, and set by a flag to one value"),
        ((*LOCAL, *GRID, "--metric=loss"), "--metric=loss must be eval/NAME or train/NAME"),
        ((*LOCAL, *GRID, "--metric=eval/los"), "--metric=eval/los is not reported: did you mean eval/loss?"),
        ((*LOCAL, *GRID, "--metric=eval/unigram_bits_per_byte"), "is not reported"),
        ((*LOCAL, *GRID, "--metric=train/los"), "--metric=train/los is not reported: did you mean train/loss?"),
        ((*LOCAL, *GRID, "--gin.Evaluation.every=0"), "needs evaluations, and Evaluation.every is 0"),
        ((*LOCAL, *GRID, "--early_stop=halving"), "add --early_stop_after=STEP"),
        ((*LOCAL, *GRID, "--goal=minimum"), "invalid choice: 'minimum'"),
        ((*LOCAL, *GRID, "--parallel=0"), "--parallel=0 must be at least 1"),
        ((*LOCAL, *GRID, "--give_up_after=0"), "--give_up_after=0 must be at least 1"),
        ((*LOCAL, *GRID, "--poll=0"), "--poll is 0, must be above 0"),
        ((*LOCAL, *GRID, "--grace=nan"), "--grace=nan must be at least 0"),
        ((*LOCAL, *GRID, "--slice=v5e-8"), "unknown flag --slice"),
        ((*LOCAL, *GRID, "--sweep_file=none.gin"), "no Gin file none.gin"),
        (("local", "none.gin", *GRID), "no Gin file none.gin"),
        (gke(HERE, *GRID, "--stage"), "unknown flag --stage"),
        (gke(HERE, *GRID, "--sweep_dir=here"), "--sweep_dir=here is on this machine, where the jobs do not run"),
        (gke(HERE, *GRID, f"--name={'n' * 37}"), "must have at most 36 characters"),
        (gke(HERE, "--vary=Plan.slice = ['v5e-8']", "--search=grid"), "launch a sweep for each --slice"),
        (
            (*LOCAL, f"--vary=Trainer.init_from = ['hf_{'a' * 34}']", "--search=grid"),
            "a value that looks like a secret",
        ),
        (("gke", "run.gin", *GRID, "--image=i", "--slice=v5e-8"), "--storage is not set"),
        (("gke", "run.gin", *GRID, "--image=i", "--storage=gs://b"), "--slice is not set"),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(tmp_path, capsys, argv, message):
    assert run(*argv) == exits.EXIT_USER_ERROR
    err = capsys.readouterr().err
    assert message in err and err.startswith("error: ") and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("jobs.sqlite")] == ["run.gin"]


def test_a_value_that_no_run_can_have_is_no_mistake_of_the_others(stub):
    assert run(*LOCAL, "--vary=BATCH_SIZE = [0, 4]", RATES, "--search=grid", "--parallel=6") == 0


def test_the_metrics_that_evaluations_report():
    sums = types.SimpleNamespace(nll=1.0, correct=1.0, weight=1.0)
    assert {*evaluation_metrics(sums, 1.0)} == {*trial_runs.EVALUATED}


def test_trials_run_and_the_table_and_the_picture_are_there(stub, capsys, tmp_path):
    assert run(*LOCAL, *GRID, "--parallel=2") == 0
    shown = capsys.readouterr()
    rows = [line.split() for line in shown.out.splitlines()]
    assert rows == [
        ["trial", "LEARNING_RATE", "eval/loss", "step", "state"],
        ["002", "0.1", "10", "1", "done"],
        ["001", "0.01", "100", "1", "done"],
        ["000", "0.001", "1000", "1", "done"],
    ]
    assert "trial 000 is started: LEARNING_RATE = 0.001" in shown.err
    assert "best: trial 002 done, eval/loss 10 at step 1: LEARNING_RATE = 0.1, in " in shown.err
    assert (tmp_path / "sweeps/run/results.txt").read_text() == shown.out
    assert (tmp_path / "sweeps/run/results.png").read_bytes().startswith(b"\x89PNG")

    assert run(*LOCAL, *GRID, "--parallel=2", "--json") == 0  # the same command again
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found["best"] == "002" and "is started" not in shown.err
    assert json.loads((tmp_path / "sweeps/run/results.json").read_text()) == found


def test_a_trial_that_fails_is_in_the_table_with_its_reason(stub, capsys):
    rates = "--vary=LEARNING_RATE = [0.001, 9.0, 0.1]"
    assert run(*LOCAL, rates, "--search=grid") == 0
    assert states() == ["done", "failed", "done"]
    assert "trial 001: exit code 1, see " in (out := capsys.readouterr().out) and "the learning rate is too high" in out


def test_the_first_trials_all_fail(stub, capsys):
    bad = (*LOCAL, "--vary=LEARNING_RATE = [2.0, 3.0, 4.0, 5.0]", "--search=grid")
    assert run(*bad, "--give_up_after=2") == exits.EXIT_USER_ERROR
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1].startswith("error: the first 2 trials have failed; trial 000: exit code 1, see ")
    assert shown.out.count("failed") == 2 and states() == ["failed"] * 2
    assert run(*bad, "--give_up_after=9") == exits.EXIT_FAULT
    assert capsys.readouterr().err.splitlines()[-1] == "error: no trial has ended well" and states() == ["failed"] * 4


def test_another_sweep_does_not_take_its_folder(stub, capsys, tmp_path):
    assert run(*LOCAL, *GRID) == 0
    assert run(*LOCAL, *GRID, "--goal=maximize") == exits.EXIT_USER_ERROR
    assert "the sweep in this folder has goal minimize, not maximize" in capsys.readouterr().err
    assert run(*LOCAL, *GRID, "--gin.TRAIN_STEPS=9") == exits.EXIT_USER_ERROR
    assert "has run less, not --gin_bindings=TRAIN_STEPS = 9" in capsys.readouterr().err
    (tmp_path / "run.gin").write_text(f"{RUN}Trainer.seed = 1\n")
    assert run(*LOCAL, *GRID) == exits.EXIT_USER_ERROR
    assert "the Gin files or modules have changed since this sweep began" in capsys.readouterr().err
    assert run(*LOCAL, *GRID, "--sweep_dir=other") == 0 and states("other") == ["done"] * 3


def test_a_second_process_shows_the_table_and_leaves_the_sweep_to_the_first(stub, capsys):
    assert run(*LOCAL, *GRID) == 0
    table = capsys.readouterr().out
    with Study.load("sweeps/run").folder.locked():
        assert run(*LOCAL, *GRID) == exits.EXIT_USER_ERROR
    shown = capsys.readouterr()
    assert shown.out == table and "is run by " in shown.err.splitlines()[-1]


def test_no_trial_starts_with_other_files(stub, capsys, tmp_path):
    (tmp_path / "hold").touch()
    done = []
    thread = threading.Thread(target=lambda: done.append(run_in_thread(*LOCAL, *GRID)))
    thread.start()
    wait_for(lambda: (tmp_path / "sweeps/run/trials/000/metrics.jsonl").exists())
    (tmp_path / "run.gin").write_text("TRAIN_STEPS = 1")
    (tmp_path / "hold").unlink()
    wait_for(lambda: "cannot be started" in capsys.readouterr().err)
    assert not (tmp_path / "sweeps/run/trials/001").exists()
    (tmp_path / "run.gin").write_text(RUN)
    thread.join(60)
    assert done == [0] and states() == ["done"] * 3


def run_in_thread(*argv):
    """Without the handler of SIGTERM, which only the main thread can set."""
    args = verb.flags.parse_arguments(verb._parser("local", None), argv[1:])
    return verb._local(args)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_sweep_prints_its_results_and_resumes(stub, capsys, tmp_path, number, code):
    (tmp_path / "hold").touch()

    def interrupt():
        wait_for(lambda: "eval" in read(tmp_path / "sweeps/run/trials/001/metrics.jsonl"))
        wait_for(lambda: [len(trial.points) for trial in Study.load("sweeps/run").trials] == [1, 1])
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        ended = run(*LOCAL, *GRID, "--parallel=2")
    except SystemExit as error:  # as a process with SIGTERM ends
        ended = error.code
    thread.join()
    assert ended == code
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["state", "running", "running"]
    (tmp_path / "hold").unlink()
    assert run(*LOCAL, *GRID, "--parallel=2") == 0 and states() == ["done"] * 3
    assert "trial 000 is started again: LEARNING_RATE = 0.001" in capsys.readouterr().err


def read(path):
    return path.read_text() if path.exists() else ""


def test_a_sweep_of_a_gin_file(stub, capsys, tmp_path):
    (tmp_path / "sweep.gin").write_text(
        'Sweep.vary = ["LEARNING_RATE = log(1e-3, 1)"]\nSweep.trials = 3\nSweep.search = "bayesian"\nSweep.seed = 4\n'
    )
    assert run(*LOCAL, "--sweep_file=sweep.gin", "--seed=5") == 0
    found = Study.load("sweeps/run").sweep
    assert (found.trials, found.search, found.seed) == (3, "bayesian", 5) and states() == ["done"] * 3
    (tmp_path / "sweep.gin").write_text('Sweep.goal = "low"\n')
    assert run(*LOCAL, *GRID, "--sweep_file=sweep.gin") == exits.EXIT_USER_ERROR
    assert "Sweep.goal is 'low'" in capsys.readouterr().err


def test_a_dry_run_starts_nothing(capsys, tmp_path):
    assert run(*LOCAL, *GRID, "--emulate=1", "--dry-run") == 0
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [
        f"trial 00{k}: LEARNING_RATE = {rate}" for k, rate in enumerate((0.001, 0.01, 0.1))
    ]
    assert "capibara.launch local" in shown.out and "--gin_bindings=LEARNING_RATE = 0.001" in shown.out
    assert run(*gke(tmp_path, "--vary=LENGTH = int(64, 999)", "--trials=40", "--dry-run")) == 0
    shown = capsys.readouterr()
    assert "and 20 more\n" in shown.err and "price: 9.60 USD an hour" in shown.err
    assert "name: run-000" in shown.out and "--gin_bindings=LENGTH = " in shown.out
    assert not (tmp_path / "sweeps").exists()


def test_the_trials_are_jobs_of_a_cluster(cluster, capsys, tmp_path):
    command = gke(tmp_path, "--vary=LEARNING_RATE = log(0.1, 1)", "--trials=3", "--parallel=2", "--budget_usd=5")
    with Hosts(cluster, name="LEARNING_RATE") as hosts:
        assert run(*command) == 0
        shown = capsys.readouterr()
        assert run(*command) == 0
    assert "sweep run: 3 trials on v5e-8, 2 at once, 19.20 USD an hour, at most 15.00 USD" in shown.err
    assert [line.split()[-1] for line in shown.out.splitlines()] == ["state", "done", "done", "done"]
    assert len(hosts.created) == 3 and live(cluster) == []
    records = Records(tmp_path / "jobs.sqlite")
    assert [one.name for one in records.all()] == ["run-000", "run-001", "run-002"]


def test_jobs_of_an_interrupted_sweep_still_run(cluster, capsys, tmp_path):
    command = gke(tmp_path, *GRID, "--parallel=2")

    def interrupt():
        wait_for(lambda: len(live(cluster)) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert run(*command) == exits.EXIT_INTERRUPTED
    thread.join()
    err = capsys.readouterr().err
    assert "2 jobs still run (run-000, run-001): repeat the command to resume the sweep" in err
    assert live(cluster) == ["run-000", "run-001"]


def test_a_cluster_that_is_not_there_is_found_before_anything_is_written(capsys, tmp_path, monkeypatch, gs):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert run(*gke(tmp_path, *GRID)) == exits.EXIT_USER_ERROR
    assert "gcloud container clusters get-credentials" in capsys.readouterr().err
    with pytest.raises(exits.UserError, match="has no sweep.json"):
        Study.load(f"gs://bucket/{tmp_path.name}/sweeps/run")


def test_a_sweep_of_real_runs(capsys, tmp_path):
    """Two that learn, and one whose loss is not finite."""
    command = (*LOCAL, "--vary=LEARNING_RATE = [1e-3, 1e-2, 1e30]", "--search=grid", "--emulate=1", "--parallel=3")
    assert run(*command) == 0
    assert states() == ["done", "done", "failed"], capsys.readouterr()
    trials = Study.load("sweeps/run").trials
    assert all([step for step, _ in trial.points] == [2, 4] for trial in trials[:2])
    assert trials[1].value < trials[0].value < 7 and trials[2].reason
    assert (tmp_path / "sweeps/run/trials/001/checkpoints/4").is_dir()


@pytest.mark.heavy
def test_a_sweep_of_real_runs_that_is_killed_ends_as_if_it_had_not_been(tmp_path):
    more = ["--gin.TRAIN_STEPS=30", "--gin.Evaluation.every=10", "--gin.Checkpointing.every=5", "--restarts=0"]
    command = [sys.executable, "-m", "capibara.launch", "sweep", *LOCAL, *GRID, "--emulate=1", "--parallel=2", *more]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    subprocess.run([*command, "--sweep_dir=undisturbed"], env=environment, check=True, timeout=500)
    for kill, reached in enumerate(
        ("000/metrics.jsonl", "000/checkpoints/10", "001/checkpoints/20", "002/checkpoints/5")
    ):
        process = subprocess.Popen([*command, "--sweep_dir=killed"], env=environment)
        wait_for(lambda: process.poll() is not None or (tmp_path / "killed/trials" / reached).exists(), 400)
        process.send_signal(signal.SIGKILL)
        assert process.wait(300) == -signal.SIGKILL, f"it had ended before kill {kill + 1}"
    subprocess.run([*command, "--sweep_dir=killed"], env=environment, check=True, timeout=500)
    tables = [(tmp_path / folder / "results.txt").read_text() for folder in ("undisturbed", "killed")]
    assert tables[0] == tables[1] and tables[0].count("done") == 3
