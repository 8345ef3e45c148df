"""What a process takes for its place among the others, from flags, JAX's variables and the cluster."""

import argparse
import sys
import types

import pytest

from capibara.cli.arguments import multihost
from capibara.core.types import UserError
from capibara.multihost import joining
from capibara.multihost.joining import Joining
from capibara.multihost.roll_call import Process

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
        ({"num_processes": 2}, {}, "--coordinator_address, --process_id is not set"),
        ({"coordinator_address": "a:1"}, {}, "--num_processes, --process_id is not set"),
        ({}, {"JAX_PROCESS_ID": "two"}, "JAX_PROCESS_ID is 'two', must be a number"),
        ({}, {"JAX_LOCAL_DEVICE_IDS": "a,1"}, "JAX_LOCAL_DEVICE_IDS is 'a,1', must be numbers"),
        (
            {},
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"},
            "process id is 2, must be from 0 to 1",
        ),
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
    monkeypatch.setitem(sys.modules, "kubernetes", None)  # as where it is not installed
    with pytest.warns(UserWarning, match="kubernetes"):
        assert found(monkeypatch, KUBERNETES_SERVICE_HOST="10.0.0.1", JOB_COMPLETION_INDEX="3") is None
    assert (
        'note: this pod is number 3 of an indexed job (pip install "jax[k8s]"), but JAX does not detect the others, so it runs alone'
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "raised, said",
    [
        (ModuleNotFoundError("no", name="requests"), r'package requests: pip install -e "[^"]+\[tpu\]"'),
        (OSError("no route"), r"cannot be found \(no route\): pass --coordinator_address"),
    ],
)
def test_a_cluster_that_cannot_be_asked_is_one_line(monkeypatch, raised, said):
    from jax._src import clusters

    def fails(*args):
        raise raised

    monkeypatch.setattr(clusters.ClusterEnv, "auto_detect_unset_distributed_params", fails)
    with pytest.raises(UserError, match=said):
        found(monkeypatch)


def test_what_is_asked_for_is_a_fact_and_what_gin_files_say_but_the_place_is_none(tmp_path):
    parser = argparse.ArgumentParser()
    multihost.add_arguments(parser)
    parser.add_argument("--limit")
    parser.add_argument("--gin_file", action="append", default=[])
    parser.add_argument("--gin_search_paths", action="append", default=[])
    place = ["--process_id=1", "--num_processes=2", "--coordinator_address=a:1"]
    (tmp_path / "a.gin").write_text("Trainer.seed = 1\n")
    args = parser.parse_args(["--limit=3", *place, "--gin_file=a.gin", f"--gin_search_paths={tmp_path}"])
    facts = multihost.command_facts(args)
    assert facts.pop("command").splitlines()[0] == "--limit=3" and not any(flag in str(facts) for flag in place)
    assert facts == {"Gin file a.gin": "Trainer.seed = 1\n"}
    assert multihost.of(args) == Joining(coordinator_address="a:1", num_processes=2, process_id=1)


@pytest.mark.parametrize("name, said", [("OMPI_COMM_WORLD_SIZE", "one of 4"), ("PMI_SIZE", "one of 4")])
def test_one_of_several_that_jax_does_not_find_says_so(monkeypatch, capsys, name, said):
    """Open MPI 5 no longer sets what JAX looks for."""
    assert found(monkeypatch, **{name: "4"}) is None
    assert (
        f"note: this process is {said} ({name}), but JAX does not detect the others, so it runs alone"
        in capsys.readouterr().err
    )
    assert found(monkeypatch, **{name: "1"}) is None and not capsys.readouterr().err


def test_open_mpi_is_found(monkeypatch):
    names = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911", "OMPI_COMM_WORLD_SIZE": "4"}
    rank = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    address, count, index, local = found(monkeypatch, **names, **rank)
    assert (address.split(":")[0], count, index, local) == ("10.96.0.1", 4, 3, [1])


def test_the_devices_that_jax_is_told_of_are_those_of_the_process(monkeypatch):
    assert found(monkeypatch, **SLURM).local_device_ids == [0]
    assert found(monkeypatch, JAX_LOCAL_DEVICE_IDS="2,3").local_device_ids == [2, 3]


def metadata(monkeypatch, slices, index):
    """Of the hosts of two-host slices: what JAX asks the metadata server for, in host `index` of all."""
    from jax._src.clusters import cloud_tpu_cluster

    env = {
        "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.1",
        "MEGASCALE_NUM_SLICES": slices,
        "MEGASCALE_SLICE_ID": index // 2,
    }
    answers = {
        "agent-worker-number": str(index % 2),
        "worker-network-endpoints": f"unknown:8470:10.0.{index // 2}.1,unknown:8471:10.0.{index // 2}.2",
        "tpu-env": "\n".join(f"{name}: '{value}'" for name, value in env.items() if slices > 1),
    }
    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", lambda key: (answers[key], 200))
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu_cluster.socket, "gethostbyname", lambda name: name)
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)


@pytest.mark.parametrize("slices, index, place", [(1, 1, (2, 1)), (2, 0, (4, 0)), (2, 3, (4, 3)), (3, 2, (6, 2))])
def test_the_hosts_of_several_slices_are_found(monkeypatch, slices, index, place):
    metadata(monkeypatch, slices, index)
    address = "10.0.0.1:8482" if slices > 1 else f"10.0.{index // 2}.1:8482"
    assert found(monkeypatch)[:3] == (address, *place)


def test_pods_of_several_slices_are_found(monkeypatch):
    from jax._src.clusters import cloud_tpu_cluster

    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu_cluster.socket, "gethostbyname", lambda name: name)
    names = {"TPU_WORKER_HOSTNAMES": "a-0,a-1", "TPU_WORKER_ID": "1", "TPU_SKIP_MDS_QUERY": "1"}
    slices = {"MEGASCALE_COORDINATOR_ADDRESS": "a-0:8080", "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"}
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}
    assert found(monkeypatch, **names, **slices, **pod)[:3] == ("a-0:8482", 4, 3)


def test_pods_of_an_indexed_job_are_found(monkeypatch):
    """By the package kubernetes, of which this has what JAX asks for."""
    from jax._src.clusters import k8s_cluster

    owner = types.SimpleNamespace(controller=True, kind="Job")
    pod = types.SimpleNamespace(
        metadata=types.SimpleNamespace(name="train-2-x", labels={"job-name": "train"}, owner_references=[owner]),
        spec=types.SimpleNamespace(subdomain="pods"),
    )
    job = types.SimpleNamespace(
        metadata=types.SimpleNamespace(name="train", labels={}), spec=types.SimpleNamespace(parallelism=4)
    )
    core = types.SimpleNamespace(list_namespaced_pod=lambda **_: types.SimpleNamespace(items=[pod]))
    batch = types.SimpleNamespace(read_namespaced_job=lambda **_: job)
    fake = types.SimpleNamespace(
        config=types.SimpleNamespace(load_incluster_config=lambda: None),
        client=types.SimpleNamespace(
            CoreV1Api=lambda: core,
            BatchV1Api=lambda: batch,
            exceptions=types.SimpleNamespace(ApiException=RuntimeError),
        ),
    )
    monkeypatch.setitem(sys.modules, "kubernetes", fake)
    monkeypatch.setattr(k8s_cluster.K8sCluster, "_namespace", classmethod(lambda cls: "default"))
    monkeypatch.setattr(k8s_cluster.socket, "gethostbyname", lambda name: "10.1.2.3")
    for name in ("_pod", "_job"):
        getattr(k8s_cluster.K8sCluster, name).__func__.cache_clear()
    names = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-2-x"}
    assert found(monkeypatch, **names)[:3] == ("train-0.pods:55527", 4, 2)


@pytest.mark.parametrize(
    "devices, said",
    [
        ([("tpu", 0, (x, y, 0)) for x in range(4) for y in range(4)], "16 chips in 1 slice"),
        ([("tpu", s, (x, y, 0)) for s in range(2) for x in range(2) for y in range(4)], "16 chips in 2 slices"),
        ([("tpu", 0, (x, 0, 0)) for x in range(4) for _ in range(2)], "4 chips in 1 slice"),
        ([("cpu", 0, None)] * 8, "8 devices"),
    ],
)
def test_how_many_have_joined_is_said(devices, said):
    there = [
        types.SimpleNamespace(platform=platform, id=number, slice_index=index, **({"coords": coords} if coords else {}))
        for number, (platform, index, coords) in enumerate(devices)
    ]
    came = [Process(index, 4, {}, host=f"host-{index // 2}") for index in range(4)]
    assert joining._joined(came, there) == f"joined 4 processes on 2 hosts: {said}"
