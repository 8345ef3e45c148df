"""Meshes whose axes span processes learn as in one process, and all processes decide alike."""

import importlib.util
import json
import pathlib
import signal
import sys

import jax
import pytest

from capibara.training.checkpoints import Checkpointing, Checkpoints

hosts = sys.modules["of_hosts_conftest"]
SCRIPT = pathlib.Path(__file__).with_name("axes.py")


def _load():
    spec = importlib.util.spec_from_file_location("of_hosts_axes", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


axes = _load()
PARTS = ("data", "fsdp", "tensor", "stage", "signalled", "resumed", "not_shared")


def did(cluster, folder, count, parts):
    """What each process has told of each part: part -> [process]."""
    folder.mkdir()
    axes.write_corpus(folder)
    for one in cluster("flags", count).run(str(SCRIPT), str(folder), *parts, timeout_s=150):
        assert one.code == 0, one.err[-3000:]
    return {
        part: [json.loads((folder / f"{part}.{index}.json").read_text()) for index in range(count)] for part in parts
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """(name, steps) -> what a run in one process with four devices tells."""
    folder = tmp_path_factory.mktemp("alone")
    axes.write_corpus(folder)
    known = {}

    def run(name):
        if name not in known:
            told = axes.trained(axes.run_of(folder, name), devices=jax.devices()[: axes.DEVICES])
            known[name] = json.loads(json.dumps(told))
        return known[name]

    return run


def assert_learned_alike(told, wanted):
    assert told[0]["steps"].keys() == wanted["steps"].keys() and len(wanted["steps"]) == axes.STEPS
    for step, metrics in wanted["steps"].items():
        assert told[0]["steps"][step] == pytest.approx(metrics, rel=1e-5)
    assert told[0]["evaluations"] == pytest.approx(wanted["evaluations"], rel=1e-5)
    assert {tuple(one["outcome"]) for one in told} == {(axes.STEPS, "finished", None)}


def assert_anyone_resumes(folder, name, seen_steps):
    """One process with two devices reads what several have saved, and goes on as they would."""
    run = axes.run_of(folder, name, axes.STEPS + 1, plan=axes.Plan(batch_size=8))
    told = axes.trained(run, devices=jax.devices()[:2])
    assert list(told["steps"]) == [axes.STEPS + 1] and seen_steps[str(axes.STEPS)]["loss"] > 0
    with Checkpoints(run.model_dir, Checkpointing(), read_only=True) as reader:
        assert reader.verified_step() == axes.STEPS + 1 and not reader.damaged
    return told["steps"][axes.STEPS + 1]


def test_two_processes_do_as_one(cluster, alone, tmp_path):
    """Meshes, a stop that one of them was told, a resume, and a run folder that is not shared."""
    folder = tmp_path / "two"
    told = did(cluster, folder, 2, PARTS)
    for name in PARTS[:4]:
        assert_learned_alike(told[name], alone(name))
    after = [assert_anyone_resumes(folder, name, told[name][0]["steps"]) for name in ("tensor", "stage")]
    assert after[0] == pytest.approx(after[1], rel=1e-4)
    stopped, resumed = told["signalled"], told["resumed"]
    assert [one["outcome"] for one in stopped] == [[axes.STOPPED_AT, "interrupted", signal.SIGTERM]] * 2
    assert [one["outcome"] for one in resumed] == [[axes.STEPS, "finished", None]] * 2
    steps = stopped[0]["steps"] | resumed[0]["steps"]
    assert steps.keys() == alone("fsdp")["steps"].keys()
    for step, metrics in alone("fsdp")["steps"].items():
        assert steps[step] == pytest.approx(metrics, rel=1e-5)
    assert told["not_shared"][0]["said"] is None
    assert (
        "is not the folder that process 0 writes to: name a MODEL_DIR that all hosts share"
        in told["not_shared"][1]["said"]
    )


@pytest.mark.heavy
def test_four_processes_do_as_one(cluster, alone, tmp_path):
    told = did(cluster, tmp_path / "four", 4, [*axes.MESHES, "signalled", "resumed", "rolled_back"])
    for name in axes.MESHES:
        assert_learned_alike(told[name], alone(name))
    assert {tuple(one["outcome"]) for one in told["signalled"]} == {(axes.STOPPED_AT, "interrupted", signal.SIGTERM)}
    assert told["rolled_back"][0]["spikes"] and {tuple(one["outcome"]) for one in told["rolled_back"]} == {
        (24, "finished", None)
    }
