"""Meshes whose axes span processes learn as in one process, and all processes decide alike."""

import importlib.util
import json
import pathlib
import signal
import socket
import sys

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from capibara.checkpoints.manager import Checkpointing, CheckpointReader
from capibara.models import api
from capibara.training.base.state import with_shardings

hosts = sys.modules["of_hosts_conftest"]
SCRIPT = pathlib.Path(__file__).with_name("axes.py")


def _load():
    spec = importlib.util.spec_from_file_location("of_hosts_axes", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


axes = _load()
PARTS = ("signalled", "resumed", "not_shared")


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

    run.folder = folder
    return run


def assert_learned_alike(told, wanted):
    assert told[0]["steps"].keys() == wanted["steps"].keys() and len(wanted["steps"]) == axes.STEPS
    for step, metrics in wanted["steps"].items():
        assert told[0]["steps"][step] == pytest.approx(metrics, rel=1e-5)
    assert told[0]["evaluations"] == pytest.approx(wanted["evaluations"], rel=1e-5)
    assert {tuple(one["outcome"]) for one in told} == {(axes.STEPS, "finished", None)}


def averages(run):
    """The moving averages of the newest checkpoint, read by this process alone."""
    model, here = api.build(run.model), SingleDeviceSharding(jax.devices()[0])
    target = with_shardings(model.abstract_params, jax.tree.map(lambda _: here, model.abstract_params))
    with CheckpointReader(run.model_dir, Checkpointing()) as reader:
        step, found = reader.newest_params(target)
        assert step == axes.STEPS and not reader.corrupted
        return found


def assert_saved_alike(told_in, name, alone_in):
    """What several processes have saved, each its shards, is what one has."""
    together, wanted = averages(axes.run_of(told_in, name)), averages(axes.run_of(alone_in, name))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), together, wanted)


def assert_stopped_alike_and_resumed(told, wanted):
    """One was told to stop: all stopped after that step, and went on as one that never stopped."""
    stopped, resumed = told["signalled"], told["resumed"]
    assert {tuple(one["outcome"]) for one in stopped} == {(axes.STOPPED_AT, "interrupted", signal.SIGTERM)}
    assert {tuple(one["outcome"]) for one in resumed} == {(axes.STEPS, "finished", None)}
    steps = stopped[0]["steps"] | resumed[0]["steps"]
    assert steps.keys() == wanted["steps"].keys()
    for step, metrics in wanted["steps"].items():
        assert steps[step] == pytest.approx(metrics, rel=1e-5)


@pytest.mark.parametrize(
    "meshes",
    [(), *(pytest.param(names, marks=pytest.mark.heavy) for names in (("nodes",), ("tensor", "stage")))],
    ids=str,
)
def test_two_processes_do_as_one(cluster, alone, tmp_path, meshes):
    """Meshes, a stop that one of them was told, a resume, and a run folder that is not shared."""
    told = did(cluster, tmp_path / "two", 2, [*meshes, *PARTS])
    for name in meshes:
        assert_learned_alike(told[name], alone(name))
        assert_saved_alike(tmp_path / "two", name, alone.folder)
    assert_stopped_alike_and_resumed(told, alone("data_fsdp"))
    first, second = (one["said"] for one in told["not_shared"])
    assert first is None
    assert "is not the folder that process 0 writes to: name a MODEL_DIR that all hosts share" in second


@pytest.mark.heavy
def test_a_process_that_decides_otherwise_ends_all_and_is_named(cluster, tmp_path):
    """In seconds, where each would wait for the other."""
    axes.write_corpus(tmp_path)
    ends = cluster("flags", 2).run(str(SCRIPT), str(tmp_path), "differing", timeout_s=60)
    here = socket.gethostname()
    said = f"process 1 on {here}: save after step 2; process 0 on {here}: the next step"
    assert [one.code for one in ends] == [1, 1], [one.err[-2000:] for one in ends]
    assert all(f"the processes of this run took different decisions: {said}" in one.err for one in ends)


@pytest.mark.heavy
def test_four_processes_do_as_one(cluster, alone, tmp_path):
    told = did(cluster, tmp_path / "four", 4, [*axes.MESHES, "signalled", "resumed"])
    for name in axes.MESHES:
        assert_learned_alike(told[name], alone(name))
        assert_saved_alike(tmp_path / "four", name, alone.folder)
    assert_stopped_alike_and_resumed(told, alone("data_fsdp"))
