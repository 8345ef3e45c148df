"""What each back end asks for, and what it refuses before anything is staged."""

import pathlib
import sys

import pytest

from capibara.core.types import UserError
from capibara.jobs import backends
from capibara.jobs.secrets import Secret, Source
from capibara.jobs.spec import Bundle

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from job_specs import WHEEL, job  # noqa: E402

WHERE = {
    "gce": {"project": "my-project", "zone": "us-west4-a"},
    "gke": {},
    "slurm": {},
    "vertex": {"project": "my-project", "region": "us-west1"},
}


def backend(where, **fields):
    return backends.find(where)(**{**WHERE[where], **fields})


def documents(where, spec, **fields):
    return backend(where, **fields).render(spec).documents


@pytest.mark.parametrize(
    ("where", "spec", "message"),
    [
        ("gke", {"image": None}, "launch gke needs a container image"),
        ("vertex", {"image": None}, "launch vertex needs a container image"),
        ("gce", {"image": None}, "launch gce installs capibara from a wheel"),
        ("gce", {"slice_": "h100-8"}, "launch gce runs TPUs: use launch gke, slurm or ssh"),
        ("gce", {"slice_": "tpu7x-128"}, "the Cloud TPU API has no tpu7x: use launch gke"),
        ("gce", {"priority": "high"}, "--priority=high has no effect"),
        ("slurm", {"slice_": "h100-8", "image": None, "priority": "a;b"}, "must have letters, digits"),
        ("slurm", {"slice_": "h100-8", "image": None, "grace_s": 65_530}, "--grace is 65530, must be at most 65505"),
        ("slurm", {}, "launch slurm runs GPUs and CPUs: use launch gce, gke or vertex"),
        ("slurm", {"slice_": "h100-8"}, "--image has no effect with launch slurm"),
        ("slurm", {"slice_": "h100-8", "image": None, "capacity": "spot"}, "--capacity=spot has no effect"),
        ("vertex", {"slice_": "v5p-8"}, "Vertex AI has no v5p: use launch gce or gke"),
        ("vertex", {"slice_": "2xv5e-16"}, "a custom job has one slice or machine: use launch gke"),
        ("vertex", {"slice_": "cpu-1"}, "launch vertex runs accelerators"),
        ("vertex", {"capacity": "spot"}, "no Spot slices of several hosts"),
        ("vertex", {"environment": {f"A{i}": "" for i in range(101)}}, "there are 101 variables in --env"),
        ("gke", {"slice_": "2xcpu-8"}, "emulated devices are of one machine: try cpu-8"),
        ("gce", {"image": "i", "environment": {"A": "x" * (256 << 10)}}, "must have at most 262144"),
    ],
)
def test_what_a_back_end_cannot_run(where, spec, message):
    spec = {"slice_": "v5e-64", **spec}
    with pytest.raises(UserError, match=message):
        backend(where).render(job(spec.pop("slice_"), **spec))


def test_a_budget_of_tpu_vms_needs_a_manager():
    gce, spec = backend("gce"), job("v5e-64", budget_usd=500.0)
    assert gce.render(spec).documents
    with pytest.raises(
        UserError, match="--budget_usd=500 has no effect with launch gce unless a manager watches the job"
    ):
        gce.check_unmanaged(spec)
    backend("gke").check_unmanaged(spec)


@pytest.mark.parametrize(
    ("where", "source", "name"),
    [
        ("gce", Source.KUBERNETES, "s/k"),
        ("gce", Source.ENVIRONMENT, "A"),
        ("gke", Source.ENVIRONMENT, "A"),
        ("slurm", Source.SECRET_MANAGER, "projects/p/secrets/s/versions/1"),
        ("slurm", Source.KUBERNETES, "s/k"),
        ("vertex", Source.KUBERNETES, "s/k"),
    ],
)
def test_a_secret_that_a_back_end_cannot_read(where, source, name):
    spec = job("h100-8" if where == "slurm" else "v5e-8", secrets=(Secret(variable="A", source=source, name=name),))
    if where == "slurm":
        spec = job("h100-8", image=None, secrets=spec.secrets)
    with pytest.raises(UserError, match=f"--secret=A=... is in {source}, which launch {where} cannot read"):
        backend(where).render(spec)


@pytest.mark.parametrize(
    ("where", "fields", "message"),
    [
        ("gce", {"project": None}, "--project is not set"),
        ("gce", {"zone": None}, "--zone is not set"),
        ("vertex", {"region": None}, "--region is not set"),
        ("gce", {"project": "My_Project"}, "must be like my-project"),
        ("gce", {"zone": "us-west4"}, "must be like us-west4-a"),
        ("vertex", {"region": "us-west4-a"}, "must be like us-west1"),
        ("gce", {"valid_hours": 0.0}, "must be above 0"),
        ("vertex", {"max_days": -1.0}, "must be above 0"),
        ("gke", {"namespace": "My"}, "--namespace=My must have lower-case"),
        ("gke", {"arch": "riscv"}, "must be amd64 or arm64"),
        ("gke", {"cpus": 0}, "--cpus is 0, must be at least 1"),
        ("gke", {"cpus": 4}, "--cpus has no effect on v5e-64"),
        ("gke", {"arch": "arm64"}, "--arch has no effect on v5e-64"),
        ("slurm", {"partition": "a;b"}, "must have letters, digits"),
        ("slurm", {"minutes": 0}, "must be from 1 to"),
        ("slurm", {"cpus": 0}, "must be at least 1"),
    ],
)
def test_a_place_that_is_none(where, fields, message):
    with pytest.raises(UserError, match=message):
        backend(where, **fields).check(job())


def pod_of(document):
    return document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def test_a_job_set_has_a_job_for_each_slice_and_a_pod_for_each_host():
    (document,) = documents("gke", job("2xv6e-64", restarts=3))
    (slices,) = document["spec"]["replicatedJobs"]
    assert slices["replicas"] == 2
    of_slice = slices["template"]["spec"]
    assert of_slice["parallelism"] == of_slice["completions"] == 16 and of_slice["backoffLimit"] == 0
    assert document["spec"]["failurePolicy"]["maxRestarts"] == 3
    pod = pod_of(document)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "8x8",
    }
    assert pod["containers"][0]["resources"] == {"limits": {"google.com/tpu": "4"}}


def test_invalid_input_ends_a_job_set_at_once():
    (document,) = documents("gke", job())
    rules = document["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rules == [
        {"action": "FailJob", "onExitCodes": {"containerName": "capibara", "operator": "In", "values": [2]}}
    ]
    (rule,) = document["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "FailJobSet"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy", "DeadlineExceeded"]  # nor is a budget spent twice


def test_pods_with_an_account_of_their_own_are_not_on_the_hosts_network():
    (node,) = documents("gke", job())
    (own,) = documents("gke", job(), service_account="trainer")
    assert pod_of(node)["hostNetwork"] and "serviceAccountName" not in pod_of(node)
    assert "hostNetwork" not in pod_of(own) and pod_of(own)["serviceAccountName"] == "trainer"


def test_capacity_and_grace_on_kubernetes():
    (spot,) = documents("gke", job(capacity="spot", grace_s=100))
    assert pod_of(spot)["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert pod_of(spot)["terminationGracePeriodSeconds"] == 25
    assert {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"} in pod_of(
        spot
    )["tolerations"]
    (reserved,) = documents("gke", job(capacity="reserved", reservation="r", grace_s=100))
    assert pod_of(reserved)["nodeSelector"]["cloud.google.com/reservation-name"] == "r"
    assert pod_of(reserved)["terminationGracePeriodSeconds"] == 130


def test_pods_of_gpus_find_process_0_by_a_service():
    service, document = documents("gke", job("2xh100-8"), namespace="ml")
    pod = document["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {one["name"]: one for one in container["env"]}
    assert variables["JAX_COORDINATOR_ADDRESS"]["value"] == "run-0.run.ml.svc.cluster.local:8476"
    assert variables["JAX_NUM_PROCESSES"]["value"] == "2"
    assert variables["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"].endswith(
        "['batch.kubernetes.io/job-completion-index']"
    )
    assert pod["subdomain"] == service["metadata"]["name"] == "run" and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "run"}
    assert service["spec"]["publishNotReadyAddresses"] is True  # all must be found before any is ready
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}


def test_a_cpu_job_on_arm():
    (document,) = documents("gke", job("cpu-1"), arch="arm64", cpus=16, memory_gib=64)
    pod = document["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"kubernetes.io/arch": "arm64"}
    assert pod["containers"][0]["resources"] == {"requests": {"cpu": "16", "memory": "64Gi"}}


def test_secrets_are_references_in_every_manifest():
    secrets = (
        Secret(variable="HUB", source=Source.KUBERNETES, name="hub/token"),
        Secret(variable="WB", source=Source.SECRET_MANAGER, name="projects/p/secrets/s/versions/1"),
    )
    (document,) = documents("gke", job(secrets=secrets))
    (container,) = pod_of(document)["containers"]
    assert container["env"] == [{"name": "HUB", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}]
    assert "--secret=WB=projects/p/secrets/s/versions/1" in container["command"]


def node_spec(document):
    (found,) = document["queuedResource"]["tpu"]["nodeSpec"]
    return found


def test_a_queued_resource_for_one_slice_and_for_several():
    (one,) = documents("gce", job("v5e-64"))
    assert node_spec(one)["nodeId"] == "run" and node_spec(one)["node"]["acceleratorType"] == "v5litepod-64"
    (two,) = documents("gce", job("2xv5p-128"))
    assert node_spec(two)["multisliceParams"] == {"nodeCount": 2, "nodeIdPrefix": "run"}
    assert node_spec(two)["node"]["acceleratorType"] == "v5p-128" and "nodeId" not in node_spec(two)
    (shaped,) = documents("gce", job("v5p:4x4x16"))
    assert node_spec(shaped)["node"]["acceleratorConfig"] == {"type": "V5P", "topology": "4x4x16"}


def test_a_queued_resource_is_asked_for_once():
    """The service makes one of two requests with one id."""
    same = {"name": "run", "arguments": ("--gin_file=run.gin",)}
    others = [
        {"name": "other"},
        {"arguments": ("--gin_file=other.gin",)},
        {"capacity": "spot"},
        {"image": "registry/b:2"},
    ]
    first, again, *rest = (documents("gce", job(**{**same, **one}))[0]["requestId"] for one in ({}, {}, *others))
    assert first == again and len({first, *rest}) == 1 + len(others)


def test_the_wheel_of_a_tpu_vm_lies_in_google_cloud_storage():
    with pytest.raises(UserError, match="--storage must be in gs://"):
        backend("gce").render(job(wheel=True, bundle=Bundle(url="s3://b/jobs/run/0123", files={WHEEL: ""})))


def test_tiers_of_a_queued_resource():
    (document,) = documents("gce", job(capacity="spot"), valid_hours=2.0)
    assert document["queuedResource"]["spot"] == {}
    assert document["queuedResource"]["queueingPolicy"] == {"validUntilDuration": "7200s"}
    (document,) = documents("gce", job(capacity="reserved", reservation="r"))
    reserved = "projects/my-project/locations/us-west4-a/reservations/r"
    assert document["queuedResource"]["reservationName"] == reserved and "guaranteed" in document["queuedResource"]


def custom_job(spec, **fields):
    return documents("vertex", spec, **fields)[0]["customJob"]["jobSpec"]


def test_a_custom_job_says_its_topology_and_no_number_of_hosts():
    (pool,) = custom_job(job("v6e-64"))["workerPoolSpecs"]
    assert pool["machineSpec"] == {"machineType": "ct6e-standard-4t", "tpuTopology": "8x8"}
    assert pool["replicaCount"] == "1"
    (pool,) = custom_job(job("h100-8"))["workerPoolSpecs"]
    assert pool["machineSpec"] == {
        "machineType": "a3-highgpu-8g",
        "acceleratorType": "NVIDIA_H100_80GB",
        "acceleratorCount": 8,
    }


def test_a_budget_is_a_timeout():
    assert custom_job(job("v5e-64", budget_usd=76.8))["scheduling"]["timeout"] == "3600s"
    assert custom_job(job("v5e-64", budget_usd=1e6), max_days=2.0)["scheduling"]["timeout"] == "172800s"
    (document,) = documents("gke", job("v5e-64", budget_usd=76.8))
    assert document["spec"]["replicatedJobs"][0]["template"]["spec"]["activeDeadlineSeconds"] == 3600


def test_no_system_expands_a_variable_in_a_value_or_a_binding():
    spec = job("v5e-8", environment={"A": "$(HOME) $5"}, arguments=("--gin_bindings=A = '$(HOME)'",))
    (pool,) = custom_job(spec)["workerPoolSpecs"]
    (pod,) = pod_of(documents("gke", spec)[0])["containers"]
    for container in (pool["containerSpec"], pod):
        assert container["env"] == [{"name": "A", "value": "$$(HOME) $$5"}]
        assert container["command"][-1] == "--gin_bindings=A = '$$(HOME)'"
