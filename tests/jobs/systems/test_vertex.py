"""Custom jobs of Vertex AI: what Google's own client sends over loopback, and what its answers and faults mean."""

import concurrent.futures
import datetime
import json
import pathlib
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import google.oauth2.credentials
import pytest
from google.cloud.aiplatform_v1.services.job_service import JobServiceClient
from google.cloud.aiplatform_v1.services.job_service.transports import JobServiceRestTransport
from google.cloud.aiplatform_v1.types import CreateCustomJobRequest, CustomJob, JobState, Scheduling
from google.protobuf import json_format

from capibara.core.types import UserError
from capibara.jobs import backends, systems
from capibara.jobs.spec import Attempt
from capibara.jobs.systems import vertex
from capibara.jobs.systems.system import Busy, Denied, Exists, Phase, Resource

HERE = pathlib.Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent)]
from fake_vertex import GARBAGE, Answer, FakeVertex, refusal  # noqa: E402
from job_specs import job  # noqa: E402

BACKEND = backends.find("vertex")(project="my-project", region="us-west1")
QUOTA = (
    "The following quota metrics exceed quota limits: aiplatform.googleapis.com/custom_model_training_tpu_v5e,"
    "aiplatform.googleapis.com/custom_model_training_cpus"
)
RATE = "Quota exceeded for quota metric 'Resource management requests' and limit 'Requests per minute per region'"


@pytest.fixture
def fake(monkeypatch):
    with FakeVertex() as server:
        monkeypatch.setenv("CAPIBARA_VERTEX_ENDPOINT", server.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield server


@pytest.fixture
def system(fake):
    connected = systems.connect(BACKEND)
    yield connected
    connected.close()


def spec(**fields):
    return job("v5e-8", **fields)


def ops(fake):
    return [call.op for call in fake.calls]


def the_only(system):
    (resource,) = system.resources()
    return resource


CALLS = {
    "submit": lambda system, resource: system.submit(spec(name="other")),
    "resources": lambda system, _: system.resources(),
    "delete": lambda system, resource: system.delete(resource),
}


@pytest.fixture(params=CALLS)
def call(request, system, fake):
    """Each method in turn, as a function, after a job was submitted."""
    system.submit(spec())
    resource = the_only(system)
    fake.calls.clear()
    return lambda: CALLS[request.param](system, resource)


def test_what_is_sent_is_what_a_dry_run_prints(system, fake):
    wanted = spec(labels={"team": "a"}, environment={"A": "$(B)"}, attempt=Attempt(launch="c0ffee", number=3))
    system.submit(wanted)
    request = CreateCustomJobRequest.pb(CreateCustomJobRequest())
    json_format.ParseDict(json.loads(BACKEND.render(wanted).text()), request)
    (sent,) = fake.jobs.values()
    for output in ("name", "state", "create_time"):
        sent.ClearField(output)
    assert sent == request.custom_job
    assert fake.calls[-1].path == f"/v1/{request.parent}/customJobs"


def test_an_attempt_is_made_once(system, fake):
    system.submit(spec())
    with pytest.raises(Exists, match="projects/123456789012/locations/us-west1/customJobs/10"):
        system.submit(spec())
    for other in ({"number": 1}, {"launch": "c0ffee"}, {"launch": "c0ffee", "number": 1}):
        system.submit(spec(attempt=Attempt(**other)))
    system.submit(spec(name="other"))
    assert len(fake.jobs) == 5
    fake.set_state(next(iter(fake.jobs)), "CANCELLED")
    with pytest.raises(Exists):  # one that has ended is no reason for a second one of the same attempt
        system.submit(spec())


@pytest.mark.parametrize("fault", ["cut", "half", "torn", "garbage"])
def test_a_creation_whose_answer_is_lost_is_found_again(system, fake, fault):
    fake.fault_next(None, fault)
    with pytest.raises(Busy):
        system.submit(spec())
    with pytest.raises(Exists):
        system.submit(spec())
    assert len(fake.jobs) == 1


def test_a_creation_that_takes_effect_too_late_is_a_second_resource_of_its_attempt(system, fake):
    fake.delay_landing = 0.3
    fake.fault_next(None, "late")
    with pytest.raises(Busy):
        system.submit(spec())
    system.submit(spec())
    deadline = time.monotonic() + 5
    while len(found := system.resources()) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    younger, older = found
    assert younger.attempt == older.attempt and younger.created_s > older.created_s > time.time() - 60
    system.delete(younger)
    assert [one.phase for one in system.resources()] == [Phase.CANCELLED, Phase.WAITING]


def test_a_list_that_fails_makes_nothing(system, fake):
    fake.fault_next("503")
    with pytest.raises(Busy):
        system.submit(spec())
    assert ops(fake) == ["list"] and not fake.jobs


@pytest.mark.parametrize("fault", ["429", "503", "lost", "cut", "half", "torn"])
def test_a_fault_that_may_pass_is_busy_and_nothing_is_tried_twice(call, fake, fault):
    fake.fault_next(fault)
    with pytest.raises(Busy) as caught:
        call()
    assert len(fake.calls) == 1
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("body", [*GARBAGE, b'{"error": {}}', b'{"customJobs": 5}', b'{"nextPageToken": [1]}'])
@pytest.mark.parametrize("status", [200, 302, 500])
def test_garbage_is_busy_and_never_an_empty_list(system, fake, status, body):
    fake.fault_next(Answer(status, body, {"Location": "/v1/elsewhere"} if status == 302 else {}))
    with pytest.raises(Busy):
        system.resources()
    fake.fault_next(None, Answer(status, body))
    with pytest.raises(Busy):
        system.submit(spec())


@pytest.mark.parametrize("error", ["text", 5, [], None, {"message": 5, "details": ["text"]}])
def test_an_error_in_another_form_is_busy(system, fake, error):
    fake.fault_next(Answer(503, json.dumps({"error": error}).encode()))
    with pytest.raises(Busy):
        system.resources()


@pytest.mark.parametrize("status", [408, 409, 429, 499, 500, 502, 503, 504, 599])
def test_statuses_that_may_pass(system, fake, status):
    fake.fault_next(refusal(status, "words of\nthe service\x1b[2J"))
    with pytest.raises(Busy, match=rf"^Vertex AI in us-west1 answers {status}: words of the service\[2J$") as caught:
        system.resources()
    assert caught.value.after_s is None


def test_an_answer_that_takes_too_long_is_busy(system, fake, monkeypatch):
    monkeypatch.setattr(vertex, "CALL_S", 0.1)
    fake.slow = 2.0
    fake.fault_next("slow")
    with pytest.raises(Busy, match="does not answer: ReadTimeout"):
        system.resources()


def test_no_server_is_busy(system, fake):
    fake.close()
    with pytest.raises(Busy, match="does not answer: ConnectionError"):
        system.resources()


def in_a_minute():
    return (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=60)).strftime("%a, %d %b %Y %H:%M:%S GMT")


@pytest.mark.parametrize(
    ("headers", "delay", "after_s"),
    [
        ({"Retry-After": "17"}, None, 17.0),
        ({"Retry-After": in_a_minute}, None, 60.0),
        ({"Retry-After": "Thu, 01 Jan 2015 00:00:00 GMT"}, None, 0.0),
        ({"Retry-After": "soon"}, None, None),
        ({"Retry-After": "-1"}, None, None),
        ({"Retry-After": "nan"}, None, None),
        ({"Retry-After": "1e999"}, None, None),
        ({}, "12.500s", 12.5),
        ({"Retry-After": "17"}, "3s", 3.0),
        ({}, "inf", None),
        ({}, 5, None),
    ],
)
def test_how_long_the_service_asks_to_wait(system, fake, headers, delay, after_s):
    headers = {name: value() if callable(value) else value for name, value in headers.items()}
    info = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": delay}
    fake.fault_next(refusal(503, "later", headers=headers, details=[] if delay is None else [info]))
    with pytest.raises(Busy) as caught:
        system.resources()
    assert caught.value.after_s == (None if after_s is None else pytest.approx(after_s, abs=5 if after_s == 60 else 0))


def error_info(reason, **metadata):
    return {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": reason,
        "domain": "googleapis.com",
        "metadata": metadata,
    }


@pytest.mark.parametrize(
    ("message", "details"),
    [
        (QUOTA, []),
        (f"{QUOTA}\n", [error_info("QUOTA_EXCEEDED", quota_unit="1/{project}/{region}")]),
        ("Quota limit 'custom_model_training_tpu_v5e' has been exceeded.", []),
    ],
)
def test_a_quota_of_chips_is_denied_and_says_where_to_ask(system, fake, message, details):
    fake.fault_next(None, refusal(429, message, details=details))
    with pytest.raises(Denied) as caught:
        system.submit(spec())
    for part in (
        "custom_model_training_tpu_v5e",
        "project my-project in us-west1",
        "https://console.cloud.google.com/iam-admin/quotas?project=my-project",
    ):
        assert part in str(caught.value)
    if message == QUOTA:
        assert "aiplatform.googleapis.com/custom_model_training_cpus: ask" in str(caught.value)
    assert "\n" not in str(caught.value) and "google.rpc" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "message", "details"),
    [
        (429, RATE, []),
        (429, "Resource has been exhausted (e.g. check quota).", []),
        (429, "Quota exceeded.", [error_info("RATE_LIMIT_EXCEEDED", quota_unit="1/min/{project}/{region}")]),
        (403, "Quota exceeded.", [error_info("RATE_LIMIT_EXCEEDED")]),
    ],
)
def test_a_rate_of_calls_is_busy(system, fake, status, message, details):
    fake.fault_next(None, refusal(status, message, details=details))
    with pytest.raises(Busy, match=f"answers {status}: {re.escape(message)}"):
        system.submit(spec())


@pytest.mark.parametrize(
    ("faults", "kind", "parts"),
    [
        (
            [None, refusal(403, "Permission 'aiplatform.customJobs.create' denied")],
            Denied,
            ["aiplatform.customJobs.create in project my-project, region us-west1", "role=roles/aiplatform.user"],
        ),
        (
            [refusal(403, "no")],
            Denied,
            ["aiplatform.customJobs.list in", "gcloud projects add-iam-policy-binding my-project"],
        ),
        (
            [None, refusal(403, "You do not have permission to act as service_account: a@b")],
            Denied,
            ["to act as service_account: a@b"],
        ),
        (
            [None, refusal(403, "It is disabled.", details=[error_info("SERVICE_DISABLED")])],
            Denied,
            ["gcloud services enable aiplatform.googleapis.com --project=my-project"],
        ),
        (
            [None, refusal(401, "no")],
            Denied,
            [
                "aiplatform.customJobs.create in project my-project",
                "application-default login",
                "roles/aiplatform.user",
            ],
        ),
        (
            [None, refusal(400, "Machine type\nis not supported.")],
            UserError,
            ["Vertex AI refuses to create job run: Machine type is not supported."],
        ),
        (
            [refusal(404, "The location is not found.")],
            UserError,
            ["not found", "are --project=my-project and --region=us-west1 right?"],
        ),
        ([refusal(412, "no")], UserError, ["refuses to list jobs"]),
    ],
)
def test_what_the_service_refuses(system, fake, faults, kind, parts):
    fake.fault_next(*faults)
    with pytest.raises(UserError) as caught:
        system.submit(spec())
    assert type(caught.value) is kind
    assert all(part in str(caught.value) for part in parts) and "\n" not in str(caught.value), str(caught.value)
    assert not fake.jobs


@pytest.fixture
def member(fake):
    """The system by an account with a token, which expires at once."""
    account = google.oauth2.credentials.Credentials(
        None, refresh_token="refresh-me", token_uri=f"{fake.url}/token", client_id="id", client_secret="client-secret"
    )
    transport = JobServiceRestTransport(host=fake.url.removeprefix("http://"), credentials=account, url_scheme="http")
    return vertex.CustomJobs(BACKEND, JobServiceClient(transport=transport))


TOKEN = Answer(200, json.dumps({"access_token": "ya29.secret", "expires_in": 3600}).encode())


@pytest.mark.parametrize(
    "faults",
    [
        [Answer(400, b'{"error": "invalid_grant", "error_description": "refresh-me has been revoked"}')],
        [TOKEN, refusal(401, "no"), TOKEN, refusal(401, "no"), TOKEN, refusal(401, "ya29.secret")],
    ],
)
def test_an_account_that_is_not_accepted_is_denied_and_no_token_is_said(member, fake, faults):
    fake.fault_next(*faults)
    with pytest.raises(
        Denied, match="customJobs.list in project my-project, .* gcloud auth application-default login"
    ) as e:
        member.resources()
    assert not re.search("ya29|refresh-me|client-secret", str(e.value))


def test_a_token_that_does_not_come_is_busy(member, fake):
    fake.fault_next("lost")
    with pytest.raises(Busy, match="tokens does not answer"):
        member.resources()
    fake.fault_next(TOKEN)
    assert member.resources() == []


PHASES = {
    "UNSPECIFIED": Phase.WAITING,
    "QUEUED": Phase.WAITING,
    "PENDING": Phase.WAITING,
    "PAUSED": Phase.WAITING,
    "RUNNING": Phase.RUNNING,
    "UPDATING": Phase.RUNNING,
    "SUCCEEDED": Phase.SUCCEEDED,
    "FAILED": Phase.FAILED,
    "EXPIRED": Phase.FAILED,
    "PARTIALLY_SUCCEEDED": Phase.FAILED,
    "CANCELLED": Phase.CANCELLED,
    "CANCELLING": Phase.DELETING,
}


def test_every_state_is_a_phase(system, fake):
    assert {state.name.removeprefix("JOB_STATE_") for state in JobState} == {*PHASES}
    fake.cancel_after = 60.0
    system.submit(spec())
    (name,) = fake.jobs
    for state, phase in PHASES.items():
        fake.set_state(name, state)
        assert the_only(system).phase is phase, state
    fake.set_state(name, 99)  # of a later version
    assert the_only(system).phase is Phase.WAITING
    assert vertex.SPOT == Scheduling.Strategy.SPOT


@pytest.mark.parametrize(
    ("state", "code", "message", "reason", "phase", "is_denied"),
    [
        ("FAILED", 3, "The replica workerpool0-0\nexited with 1.", "The replica workerpool0-0 exited with 1.", "failed", False),
        ("FAILED", 8, QUOTA, QUOTA, "failed", True),
        ("FAILED", 7, "Permission denied on the image.", "Permission denied on the image.", "failed", True),
        ("FAILED", 8, RATE, RATE, "failed", False),
        ("FAILED", 8, "STOCKOUT: no v5e", "STOCKOUT: no v5e", "preempted", False),
        ("FAILED", 8, "Resources are insufficient in region: r", "Resources are insufficient in region: r", "preempted", False),
        ("FAILED", 13, "The worker was preempted.", "The worker was preempted.", "preempted", False),
        ("FAILED", 8, f"{QUOTA}_preemptible_tpu", f"{QUOTA}_preemptible_tpu", "failed", True),
        ("CANCELLED", 1, "The job has been cancelled.", "cancelled", "cancelled", False),
        ("CANCELLED", 4, "Timeout of 60s.", "cancelled: Timeout of 60s.", "cancelled", False),
        ("EXPIRED", 0, "", "expired", "failed", False),
        ("PARTIALLY_SUCCEEDED", 0, "", "partially succeeded", "failed", False),
        ("RUNNING", 0, "", "", "running", False),
    ],
)  # fmt: skip
def test_why_a_job_has_ended(system, fake, state, code, message, reason, phase, is_denied):
    system.submit(spec(capacity="spot"))
    fake.set_state(next(iter(fake.jobs)), state, code=code, message=message)
    resource = the_only(system)
    assert (resource.reason, resource.phase, resource.is_denied) == (reason, phase, is_denied)


def test_a_stockout_is_a_preemption_on_spot_chips_alone(system, fake):
    system.submit(spec())
    fake.set_state(next(iter(fake.jobs)), "FAILED", code=8, message="STOCKOUT: no v5e")
    assert the_only(system).phase is Phase.FAILED
    fake.set_state(next(iter(fake.jobs)), "FAILED", code=8, message="It was preempted by the reservation's owner.")
    assert the_only(system).phase is Phase.PREEMPTED


def test_all_pages_of_all_jobs_are_listed_and_no_others(system, fake):
    fake.page = 3
    for number in range(8):
        system.submit(spec(name=f"run-{number}", labels={"team": "a"}))
    for labels in ({}, {"team": "a"}):
        foreign = CustomJob.pb(
            CustomJob(name=f"projects/1/locations/us-west1/customJobs/{len(fake.jobs)}", labels=labels)
        )
        fake.jobs[foreign.name] = foreign
    fake.calls.clear()
    found = system.resources()
    assert [one.job for one in found] == [f"run-{number}" for number in reversed(range(8))]
    assert ops(fake) == ["list"] * 3
    assert {*found[0].labels} == {*spec(labels={"team": "a"}).all_labels}
    fake.fault_next(None, "torn")
    with pytest.raises(Busy):  # rather than some of them
        system.resources()


def test_an_attempt_is_found_after_an_empty_page(system, fake):
    system.submit(spec())
    fake.fault_next(Answer(200, b'{"nextPageToken": "1"}'))
    with pytest.raises(Exists):
        system.submit(spec())


def test_a_list_without_an_end_is_busy(system, fake):
    fake.fault_next(*[Answer(200, b'{"nextPageToken": "1"}')] * 9)
    with pytest.raises(Busy, match="the same page"):
        system.resources()
    assert len(fake.calls) == 2


def test_a_service_that_ignores_the_filter_shows_no_foreign_jobs(system, fake):
    system.submit(spec(name="other"))
    listing = json.dumps(
        {"customJobs": [{"name": "a/1", "displayName": "run"}, {"name": "a/2", "labels": {"capibara-job": "run"}}]}
    ).encode()
    fake.fault_next(Answer(200, listing))
    assert [one.id for one in system.resources()] == ["a/2"]
    fake.fault_next(Answer(200, listing))
    system.submit(spec())


def test_a_job_that_waits_or_runs_is_cancelled(system, fake):
    for number, state in enumerate(("PENDING", "RUNNING")):
        system.submit(spec(attempt=Attempt(number=number)))
        fake.set_state([*fake.jobs][-1], state)
    for resource in system.resources():
        system.delete(resource)
        system.delete(resource)  # the second time it has ended
    assert {(one.phase, one.reason) for one in system.resources()} == {(Phase.CANCELLED, "cancelled")}


@pytest.mark.parametrize("phase", [Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED, Phase.PREEMPTED, Phase.DELETING])
def test_nothing_is_cancelled_that_has_ended_or_is_being_cancelled(system, fake, phase):
    system.delete(Resource(id="projects/1/locations/us-west1/customJobs/1", labels={}, phase=phase))
    assert not fake.calls


def test_a_job_that_is_gone_or_has_ended_meanwhile_is_deleted(system, fake):
    system.submit(spec())
    resource = the_only(system)
    fake.set_state(resource.id, "SUCCEEDED")
    system.delete(resource)
    assert the_only(system).phase is Phase.SUCCEEDED
    del fake.jobs[resource.id]
    system.delete(resource)
    assert ops(fake).count("cancel") == 2


def test_a_job_that_may_not_be_cancelled(system, fake):
    system.submit(spec())
    fake.fault_next(None, refusal(403, "no"))
    with pytest.raises(Denied, match="aiplatform.customJobs.cancel in project my-project"):
        system.delete(the_only(system))


def test_where_the_log_is(system, fake):
    system.submit(spec())
    gcloud, console, query = system.log(spec(), the_only(system))
    number = next(iter(fake.jobs)).rpartition("/")[2]
    assert gcloud == f"gcloud ai custom-jobs stream-logs {number} --region=us-west1 --project=my-project"
    assert console.startswith("https://console.cloud.google.com/") and number in console
    assert f"job_id%3D%22{number}%22" in query and query.endswith("?project=my-project")


def test_several_threads_at_once(system, fake):
    def submit(number):
        system.submit(spec(name=f"run-{number}"))
        system.delete(next(one for one in system.resources() if one.job == f"run-{number}"))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(submit, range(16)))
    assert len({one.job for one in system.resources()}) == len(fake.jobs) == 16


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1:80",
        "http://localhost:80",
        "https://127.0.0.1:80",
        "http://127.0.0.1@evil.example:80",
        "http://127.0.0.1.evil.example:80",
        "http://127.0.0.1",
        "127.0.0.1:80",
    ],
)
def test_no_other_machine_is_an_endpoint(monkeypatch, url):
    monkeypatch.setenv("CAPIBARA_VERTEX_ENDPOINT", url)
    with pytest.raises(UserError, match="CAPIBARA_VERTEX_ENDPOINT=.* must be on this machine"):
        systems.connect(BACKEND)


def test_a_machine_without_credentials(monkeypatch, tmp_path):
    monkeypatch.delenv("CAPIBARA_VERTEX_ENDPOINT", raising=False)
    key = tmp_path / "key.json"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key))
    for content in (None, "{", '{"type": "service_account"}'):
        if content:
            key.write_text(content)
        with pytest.raises(UserError, match="no credentials of Google Cloud: .*gcloud auth application-default login"):
            systems.connect(BACKEND)


def test_the_service_is_that_of_the_region(monkeypatch, tmp_path):
    monkeypatch.delenv("CAPIBARA_VERTEX_ENDPOINT", raising=False)
    user = {
        "type": "authorized_user",
        "client_id": "i",
        "client_secret": "s",
        "refresh_token": "r",
        "quota_project_id": "p",
    }
    (tmp_path / "key.json").write_text(json.dumps(user))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    connected = systems.connect(BACKEND)
    assert connected._client.api_endpoint == "us-west1-aiplatform.googleapis.com"
    assert connected._client.transport.kind == "rest"
    connected.close()


def test_what_the_manager_must_know_of_this_system(system):
    """A second submission makes a second job, and what has ended stays listed."""
    assert system.knows_result and not system.ended_costs and not system.has_unique_names


@pytest.mark.parametrize("name", ["project", "region"])
def test_a_back_end_without_a_place(name):
    where = {"project": "my-project", "region": "us-west1", name: None}
    with pytest.raises(UserError, match=f"--{name} is not set"):
        systems.connect(backends.find("vertex")(**where))


def test_the_client_is_imported_when_it_connects():
    code = "import sys, capibara.jobs.systems.vertex; print({'google.auth', 'google.api_core', 'requests'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "projects/p/locations/r/customJobs", {"displayName": "a", "jobSpeck": {}}, 400),
        ("POST", "projects/p/locations/r/customJobs", {"displayName": "a"}, 400),
        ("POST", "projects/p/locations/r/customJobs", {"displayName": 5}, 400),
        ("GET", "projects/p/locations/r/customJobs?filter=label.a%3Db", None, 400),
        ("GET", "projects/p/locations/r/customJobs?size=5", None, 400),
        ("GET", "projects/p/locations/r/customJobs/1", None, 404),
        ("POST", "projects/p/locations/r/customJobs/1:cancel", {"force": True}, 400),
        ("POST", "projects/p/locations/r/customJobs/1:cancel", {}, 404),
        ("POST", "projects/p/locations/r/customJobs/1:resume", {}, 404),
        ("GET", "projects/p/locations/r/jobs", None, 404),
    ],
)
def test_the_fake_refuses_what_the_service_would(fake, method, path, body, status):
    data = None if body is None else json.dumps(body).encode()
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(f"{fake.url}/v1/{path}", data, method=method), timeout=5)
    assert caught.value.code == status


def test_the_fake_as_a_process_in_chaos(tmp_path, monkeypatch):
    """Whatever it does, a caller that calls again has its job once, or sees each of them, and the journal has each."""
    port, journal = tmp_path / "port", tmp_path / "journal"
    flags = [f"--port-file={port}", f"--journal={journal}", "--seed=3", "--chaos=0.5", "--active-after=0"]
    process = subprocess.Popen([sys.executable, str(HERE / "fake_vertex.py"), *flags, "--delay-landing=0.05"])
    try:
        deadline = time.monotonic() + 300
        while not port.exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        monkeypatch.setenv("CAPIBARA_VERTEX_ENDPOINT", f"http://127.0.0.1:{port.read_text()}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(vertex, "CALL_S", 0.3)
        system = systems.connect(BACKEND)
        for number in range(6):
            patiently(lambda: system.submit(spec(attempt=Attempt(number=number))))
        for resource in patiently(system.resources):
            patiently(lambda: system.delete(resource))
        found, lines = patiently(system.resources), noted(journal)
        while {line["name"] for line in lines if line["op"] == "create"} != {one.id for one in found}:
            assert time.monotonic() < deadline  # the last late one lands in between
            found, lines = patiently(system.resources), noted(journal)
        assert {one.attempt.number for one in found} == {*range(6)}
        cancelled = [line["name"] for line in lines if line["op"] == "cancel"]
        assert len(cancelled) == len({*cancelled}) >= 6
        assert all(line["labels"]["capibara-job"] == "run" and line["time"] <= time.time() for line in lines)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0


def noted(journal):
    return [json.loads(line) for line in journal.read_text().splitlines()]


def patiently(call):
    for _ in range(200):
        try:
            return call()
        except Exists:
            return None
        except Busy:
            time.sleep(0.01)
    raise AssertionError("always busy")
