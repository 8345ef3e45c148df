"""Hosts of a slice find each other, agree, and train as one process does."""

import json
import sys

import numpy as np
import pytest

hosts = sys.modules["of_hosts_conftest"]
TRAIN = ("--gin_file=tiny.gin", "--gin.TRAIN_STEPS=4")


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


@pytest.fixture(scope="module")
def alone(shell):
    """The losses of one process with four devices."""
    done = shell.run("train", *TRAIN, "--emulate=4", "--gin.MODEL_DIR=alone")
    assert done.code == 0, done.err
    return losses(shell.folder / "alone")


@pytest.mark.parametrize(
    "kind", ["GCE", *(pytest.param(kind, marks=pytest.mark.heavy) for kind in ("GKE", "Slurm", "flags"))]
)
def test_four_processes_find_each_other_and_learn_as_one(cluster, shell, alone, kind):
    four = cluster(kind, 4)
    done = four.run("train", *TRAIN, f"--gin.MODEL_DIR={kind}")
    assert [one.code for one in done] == [0] * 4, [one.err[-2000:] for one in done]
    assert "joined 4 processes: 4 devices" in done[0].out and "on 4 x cpu" in done[0].out
    assert [line for one in done[1:] for line in one.out.splitlines() if "[Gloo]" not in line] == []
    if kind == "GCE":
        assert all("agent-worker-number" in server.asked for server in four.servers)
    together = losses(shell.folder / kind)
    assert sorted(together) == sorted(alone) == [1, 2, 3, 4]
    np.testing.assert_allclose(list(together.values()), list(alone.values()), rtol=1e-5)


@pytest.mark.fault(65)
def test_what_is_wrong_with_a_host_is_one_line_on_every_host(cluster, shell):
    two = cluster("flags", 2)
    seeds = [
        two.start(index, "train", *TRAIN, f"--gin.Trainer.seed={index}", "--gin.MODEL_DIR=no") for index in range(2)
    ]
    missing = cluster("flags", 3)
    absent = [missing.start(index, "train", *TRAIN, "--join_timeout=10", "--gin.MODEL_DIR=no") for index in (0, 2)]
    for one in hosts.ends(seeds):
        assert one.code == 2 and one.err.count("\n") == 1, one.err
        assert "has another configuration than process 0" in one.err and "'Trainer.seed = 1'" in one.err
    for one in hosts.ends(absent):
        assert one.code == 75 and one.err.count("\n") == 1, one.err
        assert "process 1 of 3 did not come within 10 s" in one.err
    assert not (shell.folder / "no").exists()
