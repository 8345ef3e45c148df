"""`capibara.sweep`: trials of a run that Python describes, each in a process of its own."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import pytest

import capibara as cb
from capibara import config
from capibara.api import sweeping
from capibara.cli import launch
from capibara.cli.launching import trial_runs
from capibara.core.types import TryAgain, UserError
from capibara.jobs.sweeps.local import LocalLauncher
from capibara.multihost import exits

RATES = {"Schedule.learning_rate": [0.001, 0.01, 0.1]}
# A trial that needs no time: its loss depends on the learning rate.
STUB = """
import json, os, sys
folder, rate = sys.argv[1], float(sys.argv[2])
os.makedirs(folder, exist_ok=True)
with open(f"{folder}/metrics.jsonl", "a") as file:
    for line in (
        {"kind": "event", "step": 0, "event": "start"},
        {"kind": "eval", "step": 1, "loss": 1 / rate},
        {"kind": "event", "step": 1, "event": "end", "reason": "finished"},
    ):
        print(json.dumps(line), file=file)
"""


RUN = """
include "runs/pretrain.gin"
include "models/tiny.gin"
include "tasks/stdlib.gin"
MODEL_DIR = "unused"
TRAIN_STEPS = 2
BATCH_SIZE = 4
LENGTH = 64
DecoderConfig.num_layers = 1
Evaluation.every = 1
Evaluation.max_batches = 1
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run.gin").write_text(RUN)
    return cb.read_run(f"{tmp_path}/run.gin")


@pytest.fixture
def stub(monkeypatch):
    def command(self, trial):
        return [sys.executable, "-S", "-c", STUB, trial.model_dir, trial.bindings["Schedule.learning_rate"]]

    monkeypatch.setattr(LocalLauncher, "command", command)


def test_every_value_of_lists_is_tried_and_the_best_is_found(run, stub, tmp_path, capsys):
    sweep = cb.sweep(run, RATES, tmp_path / "sweep", parallel=3)
    assert [trial.bindings["Schedule.learning_rate"] for trial in sweep.trials] == ["0.1", "0.01", "0.001"]
    assert sweep.best.value == 10.0 and sweep.best_run.folder == sweep.best.model_dir
    assert sweep.best_run.history == [{"step": 1, "eval_loss": 10.0}]
    frame = sweep.frame()
    assert list(frame["eval/loss"]) == [10.0, 100.0, 1000.0] and list(frame["Schedule.learning_rate"])[0] == 0.1
    assert "0.01" in str(sweep) and "done" in str(sweep)


def test_what_has_no_effect_is_refused_where_the_first_trial_cannot_run(run, tmp_path):
    vary = {"DecoderConfig.num_layers": [-1, 1, 2], "other/Schedule.learning_rate": [1e-3, 1e-2]}
    with pytest.raises(UserError, match="other/Schedule.learning_rate has no effect on the run"):
        cb.sweep(run, vary, f"{tmp_path}/sweep")


def test_it_is_resumed_and_another_sweep_is_refused(run, stub, tmp_path):
    folder = f"{tmp_path}/sweep"
    options = {"search": "random", "seed": 3}
    first = cb.sweep(run, RATES, folder, trials=1, **options)
    keys = {trial.key for trial in first.trials}
    second = cb.sweep(run, RATES, folder, trials=3, **options)
    assert len(second.trials) == 3 and keys < {trial.key for trial in second.trials}
    text = pathlib.Path(folder, "run.gin").read_text()
    with pytest.raises(UserError, match="have changed since this sweep began"):
        cb.sweep(dataclasses.replace(run, steps=3), RATES, folder, trials=3, **options)
    assert pathlib.Path(folder, "run.gin").read_text() == text


@pytest.mark.parametrize(
    "vary, options, message",
    [
        ({}, {}, "must say what varies"),
        ({"LEARNING_RATE": [1e-3]}, {}, "must name a field of a class"),
        ({"Schedule.learning_rate": {1e-3}}, {}, "must be a list of values"),
        ({"Schedule.learning_rat": [1e-3]}, {}, "no parameter learning_rat"),
        ({"other/Schedule.learning_rate": [1e-3, 1e-2]}, {}, "has no effect on the run"),
        ({"Schedule.learning_rate": "log(1e-4, 1e-2)"}, {}, "trials"),
        (RATES, {"serch": "grid"}, "no option 'serch'"),
        (RATES, {"metric": "eval/los"}, "is not reported"),
        (RATES, {"parallel": "2"}, "parallel is '2', must be a number of trials, at least 1"),
        (RATES, {"emulate": 0}, "emulate is 0, must be a number of devices from 1 to 64, or None"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_is_written(run, tmp_path, vary, options, message):
    with pytest.raises(UserError, match=message):
        cb.sweep(run, vary, f"{tmp_path}/sweep", **options)
    assert not (tmp_path / "sweep").exists()


def test_what_other_processes_cannot_import_is_refused(run, tmp_path):
    @config.configurable
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Inner(cb.Optimizer):
        pass

    with pytest.raises(UserError, match="Inner is of this script"):
        cb.sweep(dataclasses.replace(run, optimizer=Inner()), RATES, f"{tmp_path}/sweep")


def test_interrupted_it_returns_what_it_has(run, stub, tmp_path, monkeypatch):
    def look(launcher, trial):
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalLauncher, "state", look)
    sweep = cb.sweep(run, RATES, f"{tmp_path}/sweep")
    assert sweep.best is None and [str(trial.state) for trial in sweep.trials] == ["running"]
    with pytest.raises(UserError, match="no trial of .* has ended well"):
        _ = sweep.best_run


def test_no_trial_starts_when_a_module_has_changed(run, tmp_path, monkeypatch):
    checks = []

    class Recorder(LocalLauncher):
        def __init__(self, *args, check, **options):
            checks.append(check)
            raise KeyboardInterrupt

    monkeypatch.setattr(sweeping, "LocalLauncher", Recorder)
    with pytest.raises(KeyboardInterrupt):
        cb.sweep(run, RATES, f"{tmp_path}/sweep")
    checks[0]()
    monkeypatch.setattr(trial_runs, "digest", lambda *_: "other")
    with pytest.raises(TryAgain, match="its modules have changed since the sweep began"):
        checks[0]()


def test_a_run_is_a_trainer(tmp_path):
    with pytest.raises(UserError, match="must be given a cb.Trainer"):
        cb.sweep("quickstart.gin", RATES, f"{tmp_path}/sweep")


@pytest.mark.parametrize("out", [3, None, ""])
def test_a_sweep_has_a_folder(run, out):
    with pytest.raises(UserError, match="out is .*, must be the path of a folder"):
        cb.sweep(run, RATES, out)


def test_trials_train(run, tmp_path):
    sweep = cb.sweep(run, {"Schedule.learning_rate": [1e-3, 1e-1]}, f"{tmp_path}/sweep", emulate=1)
    assert [trial.step for trial in sweep.trials] == [2, 2]
    assert sweep.best_run.history[-1]["eval_loss"] == sweep.best.value
    assert sweep.best_run.model.config.num_layers == 1


def test_runs_of_a_model_by_its_name_are_swept(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.gin").write_text(
        f'include "tasks/chat.gin"\ninclude "runs/lora.gin"\nMODEL = "{folder}/hf"\nFILES = ("{folder}/chats.jsonl",)\n'
        'MODEL_DIR = "unused"\nTRAIN_STEPS = 2\nLENGTH = 64\n'
    )
    argv = ["sweep", "local", "mine.gin", "--vary=LEARNING_RATE = [1e-4, 1e-3]", "--search=grid", "--dry-run"]
    flags = [*argv, "--gin.Evaluation.every=1"]
    assert exits.run_verb(launch.main, flags) == 0, capsys.readouterr().err
    assert "trial 001: LEARNING_RATE = 0.001" in capsys.readouterr().err
