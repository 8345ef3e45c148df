"""The manifests of base_v5e64.gin on each back end: as in docs/manifests, and as the vendor's own client reads them."""

import json
import pathlib
import subprocess
import sys

import pytest
import yaml
from google.cloud import aiplatform_v1, tpu_v2
from google.protobuf import json_format
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet
from kubernetes import client as kubernetes

from capibara.cli import launch
from capibara.jobs import backends
from capibara.multihost import exits

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from job_specs import WHEEL, job  # noqa: E402

CHECKOUT = pathlib.Path(__file__).resolve().parents[3]
MANIFESTS = CHECKOUT / "docs" / "manifests"
IMAGE = "--image=us-docker.pkg.dev/my-project/images/capibara:1"
STORAGE = "--storage=gs://my-bucket"
COMMANDS = {
    "gke.yaml": ("gke", STORAGE, IMAGE),
    "gce.json": ("gce", STORAGE, "--project=my-project", "--zone=us-west4-a", f"--wheel={WHEEL}"),
    "vertex.json": ("vertex", STORAGE, IMAGE, "--project=my-project", "--region=us-west1"),
    "slurm.sh": ("slurm", "--slice=8xh100-8", "--storage=/shared", "--partition=gpu"),
    "ssh.sh": (
        "ssh",
        "--slice=8xh100-8",
        "--storage=/shared",
        "--hosts=gpu0,gpu1,gpu2,gpu3,gpu4,gpu5,gpu6,gpu7",
    ),
    "local.sh": ("local", "--processes=4"),
    "xmanager.txt": ("xmanager", "--where=vertex", STORAGE, IMAGE, "--project=my-project", "--region=us-west1"),
}


def of_api(document, kind):
    """A document as Kubernetes's own client writes it after reading it: fields that it does not know are lost."""
    api = kubernetes.ApiClient()
    return api.sanitize_for_serialization(api._ApiClient__deserialize(document, kind))


def of_proto(text, message):
    """A request as its own client writes it after reading it; fields that it does not know are an error."""
    read = json_format.Parse(text, message.pb()())
    return json.loads(json_format.MessageToJson(read))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_dry_run_of_the_docs(name, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / WHEEL).write_bytes(b"")
    where, *flags = COMMANDS[name]
    assert exits.run_verb(launch.main, [where, "base_v5e64.gin", *flags, "--dry-run"]) == 0
    shown = capfd.readouterr()
    assert shown.out.replace(sys.executable, "python") == (MANIFESTS / f"base_v5e64.{name}").read_text()
    if where != "local":
        assert shown.err.startswith("job base-v5e64: ") and "USD an hour" in shown.err
    assert [*tmp_path.iterdir()] == [tmp_path / WHEEL]


def test_the_job_set_is_one_of_jobsets_schema():
    document = yaml.safe_load((MANIFESTS / "base_v5e64.gke.yaml").read_text())
    assert JobsetV1alpha2JobSet.from_dict(document).to_dict() == document
    pod = document["spec"]["replicatedJobs"][0]["template"]
    assert of_api(pod, "V1JobTemplateSpec") == pod


@pytest.mark.parametrize("name", ["gce.json", "vertex.json"])
def test_the_request_is_one_of_the_clients(name):
    text = (MANIFESTS / f"base_v5e64.{name}").read_text()
    messages = {"gce.json": tpu_v2.CreateQueuedResourceRequest, "vertex.json": aiplatform_v1.CreateCustomJobRequest}
    assert of_proto(text, messages[name]) == json.loads(text)


def test_the_scripts_are_bash():
    request = json.loads((MANIFESTS / "base_v5e64.gce.json").read_text())
    node = request["queuedResource"]["tpu"]["nodeSpec"][0]["node"]
    scripts = [(MANIFESTS / f"base_v5e64.{name}").read_text() for name in COMMANDS if name.endswith(".sh")]
    for script in (node["metadata"]["startup-script"], *scripts):
        assert subprocess.run(["bash", "-n"], input=script.encode(), check=True).returncode == 0


def rendered(where, spec, **fields):
    return backends.find(where)(**fields).render(spec)


@pytest.mark.parametrize("slice_", ["v5e-1", "v6e-256", "v5p:4x4x8", "4xv6e-64", "tpu7x-128"])
@pytest.mark.parametrize("more", [{}, {"queue": "multislice-queue", "service_account": "trainer"}])
def test_job_sets_of_all_slices_are_of_the_schema(slice_, more):
    (document,) = rendered("gke", job(slice_, priority="high", environment={"A": "$x 'y' : \"z\""}), **more).documents
    assert JobsetV1alpha2JobSet.from_dict(document).to_dict() == document
    template = document["spec"]["replicatedJobs"][0]["template"]
    assert of_api(template, "V1JobTemplateSpec") == template
    assert yaml.safe_load(rendered("gke", job(slice_, environment={"A": "no"})).text())["kind"] == "JobSet"


@pytest.mark.parametrize("slice_", ["h100-8", "4xh100-8", "cpu-1"])
def test_jobs_on_gpus_and_cpus_are_of_the_schema(slice_):
    documents = rendered("gke", job(slice_), arch="arm64" if slice_ == "cpu-1" else None).documents
    assert [document["kind"] for document in documents] == (["Service"] if slice_ == "4xh100-8" else []) + ["Job"]
    for document in documents:
        assert of_api(document, f"V1{document['kind']}") == document


@pytest.mark.parametrize("fields", [{}, {"capacity": "spot"}, {"capacity": "reserved", "reservation": "r"}])
@pytest.mark.parametrize("slice_", ["v4-32", "v5e-8", "v6e:4x8", "2xv5p-128", "v5p:4x4x16"])
def test_queued_resources_are_of_the_client(slice_, fields):
    text = rendered("gce", job(slice_, **fields), project="my-project", zone="us-west4-a", valid_hours=1.5).text()
    assert of_proto(text, tpu_v2.CreateQueuedResourceRequest) == json.loads(text)


@pytest.mark.parametrize(
    "fields", [{}, {"capacity": "reserved", "reservation": "r"}, {"restarts": 0, "budget_usd": 1e3}]
)
@pytest.mark.parametrize("slice_", ["v5e-8", "v6e-256", "h100-8"])
def test_custom_jobs_are_of_the_client(slice_, fields):
    text = rendered(
        "vertex", job(slice_, environment={"A": "b"}, **fields), project="my-project", region="us-west1"
    ).text()
    assert of_proto(text, aiplatform_v1.CreateCustomJobRequest) == json.loads(text)
