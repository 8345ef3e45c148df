"""A job's own file: all of the job, and nothing else than it."""

import json
import pathlib
import sys

import pytest

from capibara.core.types import UserError
from capibara.jobs.backends.gce import Gce
from capibara.jobs.managing import spec_file
from capibara.jobs.secrets import Secret, Source
from capibara.jobs.spec import Attempt, Bundle

sys.path.append(str(pathlib.Path(__file__).resolve().parent))
from job_specs import SUM, job  # noqa: E402

GCE = Gce(project="my-project", zone="us-west4-a", valid_hours=1.5)


def whole(**fields):
    secret = Secret(variable="HF_TOKEN", source=Source.SECRET_MANAGER, name="projects/p/secrets/s/versions/1")
    return job(
        "2xv5p-128",
        environment={"A": 'b"\n'[:2]},
        secrets=(secret,),
        labels={"team": "x"},
        restarts=3,
        grace_s=60,
        capacity="spot",
        usd_per_chip_hour=1.5,
        budget_usd=1e4,
        **fields,
    )


def test_a_job_comes_back_as_it_was():
    backend, spec = spec_file.read_text(spec_file.text_of(GCE, whole()))
    assert backend == GCE and spec == spec_file.signed(GCE, whole())


NAMES = {
    Source.SECRET_MANAGER: "projects/p/secrets/s/versions/1",
    Source.KUBERNETES: "hugging-face/token",
    Source.ENVIRONMENT: "MY_TOKEN",
}


@pytest.mark.parametrize("source", [*Source])
def test_a_secret_of_each_source_comes_back(source):
    spec = job(secrets=(Secret(variable="HF_TOKEN", source=source, name=NAMES[source]),))
    assert spec_file.read_text(spec_file.text_of(GCE, spec))[1].secrets == spec.secrets


def test_the_digest_is_of_all_but_the_attempt():
    signed = spec_file.signed(GCE, whole())
    assert spec_file.signed(GCE, whole(attempt=Attempt(launch="ab", number=3))).digest == signed.digest
    assert spec_file.signed(GCE, signed).digest == signed.digest and len(signed.digest) == 16
    others = [whole(priority="x"), whole(image="other")]
    digests = {spec_file.signed(GCE, one).digest for one in others} | {
        spec_file.signed(Gce(project="my-project", zone="us-west4-b"), whole()).digest
    }
    assert len(digests) == 3 and signed.digest not in digests


@pytest.fixture
def stored(tmp_path):
    bundle = Bundle(url=f"{tmp_path}/jobs/run/0123456789abcdef", files={"gin/0/run.gin": SUM})
    spec = spec_file.signed(GCE, whole(bundle=bundle))
    spec_file.write(GCE, spec)
    return spec, tmp_path / "jobs/run/specs" / f"{spec.digest}.json"


def test_a_job_is_found_by_its_labels(stored, tmp_path):
    spec, path = stored
    text = spec_file.read(str(tmp_path), spec.all_labels)
    assert text == path.read_text() == spec_file.read(f"{tmp_path}/", spec.all_labels)
    assert spec_file.read_text(text) == (GCE, spec)


def test_a_file_that_was_changed_is_not_used(stored, tmp_path):
    spec, path = stored
    path.write_text(path.read_text().replace("registry/capibara:1", "registry/evil:1"))
    with pytest.raises(UserError, match="has another content than when job run was launched"):
        spec_file.read(str(tmp_path), spec.all_labels)


def test_a_file_of_another_job_is_not_used(stored, tmp_path):
    spec, path = stored
    other = tmp_path / "jobs/other/specs"
    other.mkdir(parents=True)
    (other / path.name).write_text(path.read_text())
    with pytest.raises(UserError, match="is of job run, not of other"):
        spec_file.read(str(tmp_path), {**spec.all_labels, "capibara-job": "other"})


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(UserError, match="name the --storage with which job run was launched"):
        spec_file.read(str(tmp_path), {"capibara-job": "run", "capibara-spec": "0" * 16})


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(backend="nowhere"),
        lambda d: d.pop("spec"),
        lambda d: d["spec"].update(more=1),
        lambda d: d["spec"].update(slice="v9-4"),
        lambda d: d["spec"].update(name="Not A Name"),
        lambda d: d["spec"].update(secrets=[{"variable": "A", "source": "nowhere", "name": "x"}]),
        lambda d: d["spec"].update(secrets=[{"variable": "A", "source": "secret_manager", "name": "--x"}]),
        lambda d: d["spec"]["bundle"].update(files=[]),
        lambda d: d["spec"].update(arguments=[1]),
        lambda d: d["spec"].update(restarts="many"),
        lambda d: d["fields"].update(zone="nowhere"),
        lambda d: d["fields"].update(more=1),
    ],
)
def test_what_is_no_file_of_a_job(change):
    document = json.loads(spec_file.text_of(GCE, whole()))
    change(document)
    with pytest.raises(UserError):
        spec_file.read_text(json.dumps(document))


@pytest.mark.parametrize("text", ["", "[]", "null", '"x"', "{", "1", "[" * 100_000])
def test_text_that_is_no_file_of_a_job(text):
    with pytest.raises(UserError, match="no file of a job"):
        spec_file.read_text(text)
