"""Two processes train as one by every method: losses, gradients, parameters and evaluations."""

from __future__ import annotations

import json
import shutil
import sys

import jax
import numpy as np
import pytest

hosts = sys.modules["of_hosts_conftest"]
SCRIPT = hosts.HERE / "methods.py"
methods = hosts.load("methods.py")
SHORT = ("kto", "reinforce_pp")  # statistics of a micro-batch, and of a rollout
DRAWING = [name for name, loss in methods.METHODS.items() if isinstance(loss, methods.RewardedLoss)]
OTHERS = {
    "of rollouts": [name for name in DRAWING if name not in SHORT],
    "of given answers": [name for name in methods.METHODS if name not in (*SHORT, *DRAWING)],
}

pytestmark = pytest.mark.standard_promotion


@pytest.fixture(scope="module")
def folder(tmp_path_factory, toy_tokenizer):
    folder = tmp_path_factory.mktemp("methods")
    shutil.copytree(toy_tokenizer, folder / "tokenizer")
    methods.write_data(folder)
    return folder


@pytest.fixture(scope="module")
def two(folder, nursery):
    """(methods) -> the metrics on process 0 of two, by method; both have come to their ends."""

    def run(*names):
        done = hosts.Named(folder, 2, nursery).run(str(SCRIPT), str(folder), "two", *names, timeout_s=560)
        assert [one.code for one in done] == [0, 0], [one.err[-3000:] for one in done]
        return {name: json.loads((folder / f"two.{name}.0.json").read_text()) for name in names}

    return run


TIMES = {"step_s", "tokens_per_s", "data_wait_s", "rollout_s", "evaluate_s", "save_s"}


def differences(folder, method, found, want):
    """What differs by more than the order of sums allows: metrics of steps and evaluations, and parameters."""
    result = []
    for kind in ("steps", "evaluations"):
        assert found[kind].keys() == want[kind].keys() and want[kind]
        for step, metrics in want[kind].items():
            assert found[kind][step].keys() == metrics.keys()
            for name in metrics.keys() - TIMES:
                if found[kind][step][name] != pytest.approx(metrics[name], rel=1e-5, abs=1e-5):
                    result.append(f"{method}: {name} of {kind} {step}: {found[kind][step][name]}, not {metrics[name]}")
    with np.load(folder / f"two.{method}.npz") as got, np.load(folder / f"alone.{method}.npz") as params:
        assert {*got} == {*params}
        moved = {name: np.abs(got[name] - params[name]).max() for name in params}
    return result + [f"{method}: parameter {name}: {value}" for name, value in moved.items() if value > 1e-5]


def compared(folder, two, names):
    assert methods.STEPS > 2
    found, result = two(*names), []
    for name in names:
        alone = json.loads(json.dumps(methods.trained(folder, "alone", name, jax.devices()[:1])))
        assert list(alone["steps"]) == ["1", "2", "3"] and list(alone["evaluations"]) == ["3"]
        result += differences(folder, name, found[name], alone)
    return result


def test_two_processes_train_as_one(folder, two):
    assert compared(folder, two, SHORT) == []


@pytest.mark.heavy
@pytest.mark.parametrize("kind", OTHERS)
def test_two_processes_train_as_one_by_every_other_method(folder, two, kind):
    if kind == "of given answers":
        methods.store_teacher(folder)
    assert len(OTHERS[kind]) > 10 and compared(folder, two, OTHERS[kind]) == []
