"""What a sweep has found: a table, files and a picture."""

import csv
import json
import math

import pytest

from capibara.jobs.sweeps import picture, results
from capibara.jobs.sweeps.folder import Folder
from capibara.jobs.sweeps.sweep import Sweep
from capibara.jobs.sweeps.trial import State, Trial, read_text

TEXTS = ["LEARNING_RATE = [0.001, 0.1, 0.01]", "KIND = ['a,b', None]"]


def sweep_of(*texts, **fields):
    return Sweep(vary=texts or TEXTS, trials=2, **fields)


def trial_of(number, rate, kind, state=State.DONE, value=None, **fields):
    points = () if value is None else ((10, value + 1), (20, value))
    bindings = {"LEARNING_RATE": rate, "KIND": kind}
    about = {"number": number, "bindings": bindings, "model_dir": f"/s/trials/{number:03d}", "state": state}
    return Trial(**about, points=points, value=value, **fields)


TRIALS = [
    trial_of(0, "0.001", "'a,b'", value=2.5),
    trial_of(1, "0.1", "None", State.FAILED, reason="exit code 1"),
    trial_of(2, "0.01", "None", State.STOPPED, value=0.5),
    trial_of(3, "0.1", "'a,b'", value=1.25),
    trial_of(4, "0.001", "None", State.RUNNING),
]


def test_the_table_is_sorted_by_the_metric():
    assert results.table(sweep_of(), TRIALS).splitlines() == [
        "trial  LEARNING_RATE  KIND   eval/loss  step  state",
        "003    0.1            'a,b'  1.25       20    done",
        "000    0.001          'a,b'  2.5        20    done",
        "002    0.01           None   0.5        20    stopped",
        "004    0.001          None                    running",
        "001    0.1            None                    failed",
        "trial 001: exit code 1",
    ]
    highest = sweep_of(goal="maximize")
    assert [trial.number for trial in results.ranked(highest, TRIALS)] == [0, 3, 2, 4, 1]
    assert results.best(highest, TRIALS) is TRIALS[0] and results.best(sweep_of(), TRIALS[1:3]) is None


def test_the_files(tmp_path):
    results.write(Folder(str(tmp_path)), sweep_of(), TRIALS)
    found = json.loads((tmp_path / "results.json").read_text())
    assert (found["metric"], found["goal"], found["best"]) == ("eval/loss", "minimize", "003")
    assert found["trials"][0]["bindings"] == {"LEARNING_RATE": 0.1, "KIND": "a,b"}
    assert found["trials"][4] == {
        "trial": "001", "state": "failed", "value": None, "step": None, "bindings": {"LEARNING_RATE": 0.1, "KIND": None},
        "model_dir": "/s/trials/001", "reason": "exit code 1",
    }  # fmt: skip
    rows = [*csv.reader((tmp_path / "results.csv").read_text().splitlines())]
    assert (tmp_path / "results.txt").read_text() == results.table(sweep_of(), TRIALS)
    assert rows[1] == ["003", "0.1", "'a,b'", "1.25", "20", "done"] and len(rows) == 6
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_a_sweep_without_a_value_has_no_picture(tmp_path):
    results.write(Folder(str(tmp_path)), sweep_of(), TRIALS[1:2])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.csv", "results.json", "results.txt"]


@pytest.mark.parametrize(
    ("texts", "width"),
    [
        (["A = log(1e-4, 1)"], 1144),
        (["A = [0.001, 1]"], 1144),
        (["A = ['x$y$', (1, 2)]", "B = int(1, 3)"], 1716),
        (["A = [True, False]", "B = uniform(0, 1)", "C = log(1e-4, 1)", "D = ['x', 1]"], 1170),
    ],
)
@pytest.mark.parametrize("goal", ["minimize", "maximize"])
def test_pictures_of_few_and_of_many_parameters(texts, width, goal):
    sweep, trials = sweep_of(*texts, goal=goal), []
    for number in range(6):
        bindings = {one.name: one.sample(number / 6) for one in sweep.space}
        state = State.STOPPED if number == 4 else State.DONE
        trials.append(Trial(number=number, bindings=bindings, model_dir="", state=state, value=float(number % 4)))
    image = picture.draw(sweep, trials, results.best(sweep, trials))
    assert image.startswith(b"\x89PNG") and int.from_bytes(image[16:20], "big") == width
    assert picture.draw(sweep, trials[4:5], None).startswith(b"\x89PNG")  # one, which was stopped


def test_a_trial_is_read_from_its_file():
    trial = trial_of(7, "0.1", "'é'", State.STOPPED, value=0.1, stop_step=20, reason="a")
    assert read_text(trial.text(), 7, trial.model_dir) == trial
    (_, (step, value)) = read_text(
        Trial(number=0, bindings={}, model_dir="", points=((1, 1.0), (2, math.nan))).text(), 0, ""
    ).points
    assert step == 2 and math.isnan(value)
