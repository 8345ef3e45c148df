"""What a process takes for its place among the others, from flags, JAX's variables and the cluster."""

import argparse

import pytest

from capibara import joining
from capibara.joining import Joining
from capibara.types import UserError

NAMES = (
    "JAX_COORDINATOR_ADDRESS",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
    "KUBERNETES_SERVICE_HOST",
    "JOB_COMPLETION_INDEX",
)


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def found(monkeypatch, joining_=Joining(), emulated=False, **environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return joining._find(joining_, emulated)


SLURM = {
    "SLURM_JOB_ID": "5",
    "SLURM_STEP_NODELIST": "node[003-006]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}


def test_nothing_is_joined_where_nothing_says_so(monkeypatch):
    assert found(monkeypatch) is None


def test_flags_win_over_variables_and_variables_over_the_cluster(monkeypatch):
    assert found(monkeypatch, **SLURM)[:3] == (f"node003:{5 % 4096 + 61440}", 4, 2)
    assert found(monkeypatch, JAX_PROCESS_ID="1")[:3] == (f"node003:{5 % 4096 + 61440}", 4, 1)
    flags = Joining(coordinator_address="a:1", num_processes=8, process_id=7)
    assert found(monkeypatch, flags)[:3] == ("a:1", 8, 7)


def test_emulated_devices_are_of_this_process_alone_unless_it_is_named(monkeypatch):
    assert found(monkeypatch, emulated=True, **SLURM) is None
    named = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
    assert found(monkeypatch, emulated=True, **named)[:3] == ("a:1", 2, 0)


@pytest.mark.parametrize(
    "flags, environment, said",
    [
        ({"num_processes": 2}, {}, "--coordinator_address, --process_id is not given"),
        ({"coordinator_address": "a:1"}, {}, "--num_processes, --process_id is not given"),
        ({}, {"JAX_PROCESS_ID": "two"}, "JAX_PROCESS_ID is 'two', must be a number"),
        ({}, {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, "process 2 of 2"),
    ],
)
def test_what_is_not_enough_is_named(monkeypatch, flags, environment, said):
    with pytest.raises(UserError, match=said):
        found(monkeypatch, Joining(**flags), **environment)


@pytest.mark.parametrize(
    "flags, said",
    [
        ({"num_processes": 0}, "--num_processes is 0"),
        ({"process_id": -1}, "--process_id is -1"),
        ({"process_id": 3, "num_processes": 3}, "--process_id is 3"),
        ({"timeout_s": 0.0}, "--join_timeout is 0"),
        ({"timeout_s": float("nan")}, "--join_timeout is nan"),
    ],
)
def test_flags_are_checked(flags, said):
    with pytest.raises(UserError, match=said):
        Joining(**flags)


def test_a_pod_that_is_in_no_indexed_job_is_alone(monkeypatch):
    """JAX would ask Kubernetes for its job, or warn that it cannot."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found(monkeypatch, KUBERNETES_SERVICE_HOST="10.0.0.1") is None


def test_a_pod_of_an_indexed_job_that_cannot_join_says_so(monkeypatch, capsys):
    with pytest.warns(UserWarning, match="kubernetes"):
        assert found(monkeypatch, KUBERNETES_SERVICE_HOST="10.0.0.1", JOB_COMPLETION_INDEX="3") is None
    assert "number 3 of an indexed job, and runs alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    "raised, said",
    [
        (ModuleNotFoundError("no", name="requests"), 'package requests: pip install "capibara\\[tpu\\]"'),
        (OSError("no route"), r"cannot be found \(no route\): give --coordinator_address"),
    ],
)
def test_a_cluster_that_cannot_be_asked_is_one_line(monkeypatch, raised, said):
    from jax._src import clusters

    def fails(*args):
        raise raised

    monkeypatch.setattr(clusters.ClusterEnv, "auto_detect_unset_distributed_params", fails)
    with pytest.raises(UserError, match=said):
        found(monkeypatch)


def test_what_is_asked_for_is_a_fact_but_the_place_is_none():
    parser = argparse.ArgumentParser()
    joining.add_arguments(parser)
    parser.add_argument("--limit")
    args = parser.parse_args(["--limit=3", "--process_id=1", "--num_processes=2", "--coordinator_address=a:1"])
    assert joining.asked(args) == {"command": "--limit=3"}
    assert joining.of(args) == Joining(coordinator_address="a:1", num_processes=2, process_id=1)
