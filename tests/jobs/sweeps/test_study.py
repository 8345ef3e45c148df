"""Sweeps that run: what is started, stopped and recorded, and that a killed one continues as if it had not been."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from capibara.core.types import TryAgain, UserError
from capibara.jobs.sweeps import results
from capibara.jobs.sweeps.launcher import Progress, Status
from capibara.jobs.sweeps.local import LocalLauncher
from capibara.jobs.sweeps.study import Study
from capibara.jobs.sweeps.sweep import Sweep
from capibara.jobs.sweeps.trial import State
from capibara.storage import stores

CHECKOUT = pathlib.Path(__file__).resolve().parents[3]
STEPS = 5


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    """test_results draws it."""
    monkeypatch.setattr(results.picture, "draw", lambda *_: b"\x89PNG")


def sweep_of(*texts, **fields):
    return Sweep(vary=texts or ["x = uniform(0, 1)"], **{"trials": 8, **fields})


def loss(bindings, step=STEPS):
    """It falls with the steps by as much wherever it is."""
    return (float(bindings["x"]) - 0.3) ** 2 + 1 / step


class Synthetic:
    """Runs that take a step at each look; where `x` is above `fails_above` they fail."""

    def __init__(self, fails_above=2.0, objective=loss):
        self.started, self.stopped, self.most = [], [], 0
        self._steps, self._ended, self._fails_above, self._objective = {}, {}, fails_above, objective

    def knows(self, trial):
        return trial.name in self._steps

    def start(self, trial):
        if trial.name not in self._steps:
            self.started.append(trial.name)
            self._steps[trial.name] = 0
            self._write(trial, kind="event", event="start")
        self.most = max(self.most, len(self._steps) - len(self._ended))

    def state(self, trial):
        if trial.name not in self._steps:
            return Status(Progress.FAILED, "not there")
        if trial.name not in self._ended:
            self._step(trial)
        return self._ended.get(trial.name, Status(Progress.RUNNING))

    def stop(self, trial):
        self.stopped.append(trial.name)
        self._ended[trial.name] = Status(Progress.FAILED, "exit code 143")

    def _step(self, trial):
        self._steps[trial.name] += 1
        if float(trial.bindings["x"]) > self._fails_above:
            self._ended[trial.name] = Status(Progress.FAILED, "exit code 1")
            return
        self._write(trial, kind="eval", loss=self._objective(trial.bindings, self._steps[trial.name]))
        if self._steps[trial.name] == STEPS:
            self._write(trial, kind="event", event="end", reason="finished")
            self._ended[trial.name] = Status(Progress.SUCCEEDED)

    def _write(self, trial, **record):
        path = stores.folder_of(trial.model_dir) / "metrics.jsonl"
        line = json.dumps({"step": self._steps[trial.name], "time": 0.0, **record})
        stores.of(path).append(path, line)


def run(folder, sweep, launcher=None, **options):
    study = Study.open(str(folder), sweep)
    study.run(launcher or Synthetic(), **{"poll_s": 0.0, "say": lambda line: None, **options})
    return study


def test_all_trials_are_run_and_the_best_is_first(tmp_path):
    launcher, lines = Synthetic(), []
    study = run(tmp_path / "sweep", sweep_of(), launcher, parallel=3, say=lines.append)
    trials = study.trials
    assert [trial.number for trial in trials] == [*range(8)] and {trial.state for trial in trials} == {State.DONE}
    assert launcher.started == [f"{number:03d}" for number in range(8)] and launcher.most == 3
    assert all(trial.value == loss(trial.bindings) and trial.step == STEPS for trial in trials)
    assert all(trial.points == tuple((k, loss(trial.bindings, k)) for k in range(1, 6)) for trial in trials)
    first = results.best(study.sweep, trials)
    assert first.value == min(trial.value for trial in trials)
    found = json.loads((tmp_path / "sweep" / "results.json").read_text())
    assert found["best"] == first.name == found["trials"][0]["trial"] and len(found["trials"]) == 8
    assert (tmp_path / "sweep" / "results.png").read_bytes().startswith(b"\x89PNG")
    assert lines[0] == f"trial 000 is started: x = {trials[0].bindings['x']}"
    assert len(lines) == 16 and any("trial 007 done, eval/loss" in line for line in lines)


def test_a_trial_has_its_values_and_its_folder(tmp_path):
    trial = Study.open(str(tmp_path / "s"), sweep_of("x = [0.5]", "K = ['a']", search="grid", trials=1)).first_trials(
        9
    )[0]
    assert trial.statements == ["x = 0.5", "K = 'a'", f'Trainer.model_dir = "{tmp_path}/s/trials/000"']


def test_a_sweep_that_has_ended_starts_nothing(tmp_path):
    run(tmp_path, sweep_of())
    launcher = Synthetic()
    run(tmp_path, sweep_of(), launcher)
    assert launcher.started == []
    assert len(run(tmp_path, sweep_of(trials=10), launcher).trials) == 10  # more may be added
    assert launcher.started == ["008", "009"]
    assert Study.load(str(tmp_path)).sweep.trials == 10


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seed": 1}, "has seed 0, not 1: repeat its command, or name another --sweep_dir"),
        ({"goal": "maximize"}, "has goal minimize, not maximize"),
        ({"run": ("run.gin", "a", "b")}, "has run less, not a; b"),
        ({"vary": ["x = uniform(0, 2)"]}, r"has vary x = uniform\(0.0, 1.0\), not x = uniform"),
        ({"files": "1f"}, "the Gin files or modules have changed since this sweep began: restore them"),
    ],
)
def test_another_sweep_does_not_fit_the_folder(tmp_path, fields, message):
    first = sweep_of(run=("run.gin",))
    Study.open(str(tmp_path), first)
    with pytest.raises(UserError, match=message):
        Study.open(str(tmp_path), dataclasses.replace(first, **fields))


def test_failed_trials_are_recorded_and_do_not_end_the_sweep(tmp_path):
    study = run(tmp_path, sweep_of(), Synthetic(fails_above=0.5), parallel=2)
    failed = [trial for trial in study.trials if trial.state is State.FAILED]
    assert 0 < len(failed) < 8 and all(float(trial.bindings["x"]) > 0.5 for trial in failed)
    assert all(trial.reason == "exit code 1" and trial.value is None for trial in failed)
    assert f"trial {failed[0].name}: exit code 1\n" in results.table(study.sweep, study.trials)
    assert len([trial for trial in study.trials if trial.state is State.DONE]) == 8 - len(failed)


def test_a_metric_that_runs_do_not_report_ends_the_sweep(tmp_path):
    """At the first evaluation, not at the end of the first trials."""
    with pytest.raises(UserError, match="trial 000: the run has not reported eval/losses: did you mean eval/loss?"):
        run(tmp_path, sweep_of(metric="eval/losses"))
    study = run(tmp_path / "task", sweep_of(metric="eval/mnli/f1", trials=1))  # those of tasks may come later
    assert study.trials[0].reason == "the run has not reported eval/mnli/f1: known are eval/loss"


def test_a_run_without_a_finite_value_has_failed(tmp_path):
    study = run(tmp_path / "nan", sweep_of(trials=1), Synthetic(objective=lambda bindings, step: None))
    assert study.trials[0].reason == "eval/loss is not finite at step 5"


def test_the_sweep_ends_if_its_first_trials_all_fail(tmp_path):
    launcher = Synthetic(fails_above=-1.0)
    for _ in range(2):  # again: nothing is started
        with pytest.raises(
            UserError, match="the first 3 trials have failed; trial 000: exit code 1; mend that and add"
        ):
            run(tmp_path, sweep_of(), launcher)
    assert len(launcher.started) == 3 and (tmp_path / "results.txt").read_text().count("failed") == 3
    mended = Synthetic()
    study = run(tmp_path, sweep_of(), mended, retry_failed=True)
    assert {trial.state for trial in study.trials} == {State.DONE} and len(mended.started) == 8


def test_failed_trials_are_run_again_as_other_launches(tmp_path):
    before = run(tmp_path, sweep_of(), Synthetic(fails_above=0.5)).trials
    failed = [trial.name for trial in before if trial.state is State.FAILED]
    assert run(tmp_path, sweep_of()).trials == before  # they stay as they are
    launcher = Synthetic()
    after = run(tmp_path, sweep_of(), launcher, retry_failed=True).trials
    assert launcher.started == failed and {trial.state for trial in after} == {State.DONE}
    assert [trial.bindings for trial in after] == [trial.bindings for trial in before]
    changed = [new.name for new, old in zip(after, before, strict=True) if new.key != old.key]
    assert changed == failed and len({trial.key for trial in after}) == 8


def test_the_results_are_written_when_the_sweep_is_interrupted(tmp_path):
    launcher = Dying(30)
    with pytest.raises(Killed):
        run(tmp_path, sweep_of(), launcher)
    found = json.loads((tmp_path / "results.json").read_text())["trials"]
    assert [one["state"] for one in found] == ["done", "done", "running"] and (tmp_path / "results.png").exists()
    line = (tmp_path / "results.txt").read_text().splitlines()[3].split()
    assert line[0] == "002" and line[-1] == "running" and len(line) == 5  # with its last value


def test_it_shows_how_the_trials_are(tmp_path):
    seen = []
    run(tmp_path, sweep_of(trials=2), watch=lambda trials: seen.append([str(trial.state) for trial in trials]))
    assert seen[0] == ["running"] and seen[-1] == ["done", "done"]


@pytest.mark.parametrize(("early_stop", "parallel"), [("median", 1), ("halving", 3)])
def test_bad_trials_are_stopped_and_never_the_best(tmp_path, early_stop, parallel):
    launcher = Synthetic()
    sweep = sweep_of(trials=16, early_stop=early_stop, early_stop_after=2)
    study = run(tmp_path, sweep, launcher, parallel=parallel)
    stopped = [trial for trial in study.trials if trial.state is State.STOPPED]
    assert [*sorted(launcher.stopped)] == [trial.name for trial in stopped] and len(stopped) >= 4
    assert all(2 <= trial.stop_step < STEPS and trial.value == trial.points[-1][1] for trial in stopped)
    final = {trial.name: loss(trial.bindings) for trial in study.trials}
    best = results.best(sweep, study.trials)
    assert best.state is State.DONE and final[best.name] == min(final.values())
    assert results.table(sweep, study.trials).count("stopped") == len(stopped)


class Killed(Exception):
    pass


class Dying(Synthetic):
    """Raises at a call of the launcher, before or after it was done; as if the process were killed there."""

    def __init__(self, at, **options):
        super().__init__(**options)
        self._at = at

    def _call(self, what, trial):
        self._at -= 1
        if self._at == 0:
            raise Killed
        found = what(trial)
        self._at -= 1
        if self._at == 0:
            raise Killed
        return found

    def start(self, trial):
        return self._call(super().start, trial)

    def state(self, trial):
        return self._call(super().state, trial)

    def stop(self, trial):
        return self._call(super().stop, trial)


@pytest.mark.parametrize(("search", "early_stop"), [("random", "none"), ("bayesian", "median")])
def test_whatever_call_a_sweep_dies_at_it_ends_as_if_it_had_not(tmp_path, search, early_stop):
    """With a launcher whose runs go on by themselves, as jobs do."""
    sweep = sweep_of(trials=9, search=search, early_stop=early_stop, early_stop_after=int(early_stop != "none"))
    undisturbed = run(tmp_path / "undisturbed", sweep)
    expected = results.table(sweep, undisturbed.trials)
    launcher, deaths = Dying(0), 0
    while True:
        launcher._at = 11 + 4 * deaths
        try:
            study = run(tmp_path / "killed", sweep, launcher)
            break
        except Killed:
            deaths += 1
    assert deaths >= 4 and results.table(sweep, study.trials) == expected
    assert launcher.started == [f"{number:03d}" for number in range(9)]


class Unsteady(Synthetic):
    """Every other call is not answered."""

    calls = 0

    def _answer(self):
        self.calls += 1
        if self.calls % 2:
            raise TryAgain("503")

    def start(self, trial):
        self._answer()
        super().start(trial)

    def state(self, trial):
        self._answer()
        return super().state(trial)


def test_a_launcher_that_does_not_answer_is_called_again(tmp_path):
    lines = []
    study = run(tmp_path, sweep_of(trials=3), Unsteady(), parallel=2, say=lines.append)
    assert [trial.state for trial in study.trials] == [State.DONE] * 3
    assert "trial 000 cannot be started: 503; it is tried again" in lines


def test_two_processes_do_not_run_one_sweep(tmp_path):
    study = Study.open(str(tmp_path), sweep_of())
    with study.folder.locked(), pytest.raises(UserError, match="is run by .*process.*: wait for its end"):
        study.run(Synthetic())


def test_a_file_that_is_none(tmp_path):
    with pytest.raises(UserError, match="has no sweep.json"):
        Study.load(str(tmp_path))
    run(tmp_path, sweep_of(trials=2))
    (tmp_path / "trials" / "001.json").write_text("{}")
    with pytest.raises(UserError, match=r"001.json: no file of a trial .*remove it to repeat the trial"):
        Study.load(str(tmp_path)).run(Synthetic())
    (tmp_path / "trials" / "001.json").unlink()
    assert len(run(tmp_path, sweep_of(trials=2)).trials) == 2
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(UserError, match="sweep.json: no file of a sweep"):
        Study.load(str(tmp_path))


@pytest.mark.parametrize("option", ["parallel", "give_up_after"])
def test_numbers_that_are_none(tmp_path, option):
    with pytest.raises(UserError, match=f"--{option}=0 must be at least 1"):
        run(tmp_path, sweep_of(), **{option: 0})


def test_a_sweep_in_a_bucket(gs):
    study = run("gs://bucket/sweep", sweep_of(trials=3), parallel=2)
    assert [trial.state for trial in study.trials] == [State.DONE] * 3
    again = Study.load("gs://bucket/sweep")
    assert again.trials == study.trials and again.trials[0].model_dir == "gs://bucket/sweep/trials/000"


RUN = """
import json, os, sys, time
folder, x = sys.argv[1], float(sys.argv[2])
os.makedirs(folder, exist_ok=True)
path = f"{folder}/metrics.jsonl"
if os.path.exists(path) and '"end"' in open(path).read():
    open(f"{folder}/twice", "w").close()
with open(path, "a", buffering=1) as file:
    print(json.dumps({"kind": "event", "step": 0, "event": "start"}), file=file)
    for step in range(1, 4):
        time.sleep(0.03)
        print(json.dumps({"kind": "eval", "step": step, "loss": (x - 0.3) ** 2 + 1 / step}), file=file)
    print(json.dumps({"kind": "event", "step": 3, "event": "end", "reason": "finished"}), file=file)
"""
TRIALS = 6


class Tiny(LocalLauncher):
    """Each trial is a process that takes three steps."""

    def command(self, trial):
        return [sys.executable, "-S", "-c", RUN, trial.model_dir, trial.bindings["x"]]


def run_tiny(folder):
    with Tiny(folder, ()) as launcher:
        run(folder, sweep_of(trials=TRIALS, seed=5), launcher, parallel=3, poll_s=0.01)


def test_a_sweep_that_is_killed_in_the_middle_ends_as_if_it_had_not_been(tmp_path):
    run_tiny(str(tmp_path / "undisturbed"))
    undisturbed = Study.load(str(tmp_path / "undisturbed"))
    folder = tmp_path / "killed"
    code = (
        f"import importlib.util, sys\nspec = importlib.util.spec_from_file_location('tests', {__file__!r})\n"
        "module = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(module)\n"
        f"module.run_tiny({str(folder)!r})"
    )
    environment, codes = {**os.environ, "PYTHONPATH": str(CHECKOUT)}, []
    for started in (1, TRIALS - 1, None):
        process = subprocess.Popen([sys.executable, "-c", code], env=environment)
        while started is not None and process.poll() is None and not (folder / f"trials/{started:03d}").exists():
            time.sleep(0.005)
        if started is not None:
            process.send_signal(signal.SIGKILL)
        codes.append(process.wait(300))
    assert codes == [-9, -9, 0]
    study = Study.load(str(folder))
    assert results.table(study.sweep, study.trials) == results.table(undisturbed.sweep, undisturbed.trials)
    assert not [*folder.glob("trials/*/twice")] and {trial.state for trial in study.trials} == {State.DONE}
