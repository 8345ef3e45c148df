"""Queued resources through Google's own client, against a server on loopback that also fails as theirs does."""

import concurrent.futures
import dataclasses
import json
import pathlib
import subprocess
import sys
import time

import pytest
from google.cloud import tpu_v2
from google.protobuf import json_format

from capibara.core.types import UserError
from capibara.jobs import backends, systems
from capibara.jobs.managing import recovery
from capibara.jobs.managing.records import State
from capibara.jobs.spec import Attempt
from capibara.jobs.systems import gce
from capibara.jobs.systems.system import Busy, Denied, Exists, Phase

HERE = pathlib.Path(__file__).resolve().parent
sys.path.extend([str(HERE), str(HERE.parent)])
from fake_tpu import TOO_LATE, FakeTpu, Fault, status, too_many, unavailable  # noqa: E402
from job_specs import job  # noqa: E402
from managed import Managed, until  # noqa: E402

BACKEND = backends.find("gce")(project="my-project", zone="us-west4-a")
PLACE = "projects/my-project/locations/us-west4-a"
CREATE, DELETE = "CreateQueuedResource", "DeleteQueuedResource"
NO_CHIPS = "Quota limit 'TPUV5sLitepodPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in zone us-west4-a."


@pytest.fixture
def tpu():
    with FakeTpu() as fake:
        yield fake


@pytest.fixture
def system(tpu, monkeypatch):
    monkeypatch.setenv("CAPIBARA_TPU_ENDPOINT", tpu.address)
    opened = systems.connect(BACKEND)
    yield opened
    opened.close()


def only(system):
    (resource,) = system.resources()
    return resource


def calm(call):
    """What a call gives once the system is not busy; a connection that was cut may fail the next call, too."""

    def tried():
        try:
            return [call()]
        except Busy:
            return None

    return until(tried)[0]


@pytest.mark.parametrize("slice_", ["v5e-64", "2xv6e:4x8"])
def test_the_request_is_the_one_of_the_dry_run(tpu, system, slice_):
    spec = job(slice_, capacity="spot", labels={"team": "a"})
    system.submit(spec)
    ((_, request),) = tpu.log
    assert json_format.MessageToDict(request) == BACKEND.render(spec).documents[0]


def test_what_was_submitted_is_listed_with_the_labels_of_the_job(tpu, system):
    spec = job(attempt=Attempt(launch="ab12", number=3, failures=1, spent_s=70))
    assert system.resources() == []
    began_s = time.time()
    system.submit(spec)
    resource = only(system)
    assert resource.labels == spec.all_labels and resource.attempt == spec.attempt and resource.job == "run"
    assert resource.id == f"{PLACE}/queuedResources/run"
    assert began_s - 1 < resource.created_s < time.time() + 1


@pytest.mark.parametrize("state", [*tpu_v2.QueuedResourceState.State])
def test_each_state_is_a_phase(tpu, system, state):
    expected = {
        "ACTIVE": Phase.RUNNING,
        "SUSPENDED": Phase.PREEMPTED,
        "FAILED": Phase.FAILED,
        "SUSPENDING": Phase.DELETING,
        "DELETING": Phase.DELETING,
    }
    system.submit(job())
    tpu.set_state("run", state.name)
    resource = only(system)
    assert resource.phase is expected.get(state.name, Phase.WAITING) and not resource.is_denied
    assert resource.reason == ("" if state.name == "ACTIVE" else state.name)


def test_a_state_that_the_client_does_not_know_is_waiting(tpu, system):
    system.submit(job())
    (record,) = tpu.api.records.values()
    record.resource.state.state = 77
    assert (only(system).phase, only(system).reason) == (Phase.WAITING, "state 77")


def test_the_same_request_twice_makes_one_queued_resource(tpu, system):
    system.submit(job())
    system.submit(job())
    assert len(tpu.api.records) == 1 and tpu.count(CREATE) == 2


def test_another_attempt_of_that_name_is_not_made_while_one_exists(tpu, system):
    system.submit(job())
    with pytest.raises(Exists, match="^run$"):
        system.submit(job(attempt=Attempt(number=1)))
    assert only(system).attempt.number == 0


@pytest.mark.parametrize(
    ("before", "after_s"),
    [
        (too_many(), None),
        (too_many(1.5), 1.5),
        (unavailable(), None),
        (unavailable(7.0), 7.0),
        (status("ABORTED", "try again"), None),
        (status("INTERNAL", "oops"), None),
        (status("UNKNOWN", "oops"), None),
        (status("CANCELLED", "oops"), None),
        (TOO_LATE, None),
        (status("RESOURCE_EXHAUSTED", "Resource has been exhausted (e.g. check quota)."), None),
        (status("RESOURCE_EXHAUSTED", "Maximum number of CreateNode requests per minute"), None),
        (status("RESOURCE_EXHAUSTED", 'There is no more capacity in the zone "us-west4-a"'), None),
    ],
)
def test_in_a_storm_every_call_is_busy_and_none_retries(tpu, system, before, after_s):
    system.submit(job())
    resource, calls = only(system), len(tpu.log)
    tpu.fault(Fault(before=before), 3)
    for call in (lambda: system.submit(job(name="other")), system.resources, lambda: system.delete(resource)):
        with pytest.raises(Busy) as caught:
            call()
        assert caught.value.after_s == after_s and "\n" not in str(caught.value)
    assert len(tpu.log) == calls + 3
    system.submit(job(name="other"))
    assert len(system.resources()) == 2


@pytest.mark.parametrize(
    "after", [unavailable(), TOO_LATE, "cut", "garbage", "details"], ids=["503", "late", "cut", "garbage", "details"]
)
def test_a_creation_whose_answer_is_lost_makes_exactly_one(tpu, system, after):
    tpu.fault(Fault(after=after, method=CREATE))
    with pytest.raises(Busy):
        system.submit(job())
    assert calm(lambda: only(system)).phase is Phase.WAITING
    system.submit(job())
    assert tpu.count(CREATE) == 2 and len(system.resources()) == 1


@pytest.mark.parametrize(
    "after", [unavailable(), "cut", "garbage", "details"], ids=["503", "cut", "garbage", "details"]
)
def test_a_deletion_whose_answer_is_lost_has_its_effect(tpu, system, after):
    system.submit(job())
    resource = only(system)
    tpu.fault(Fault(after=after, method=DELETE))
    with pytest.raises(Busy):
        system.delete(resource)
    until(lambda: not calm(system.resources))
    system.delete(resource)
    assert tpu.count(DELETE) == 1


def test_a_slow_answer_is_busy_and_what_it_did_stays(tpu, system, monkeypatch):
    monkeypatch.setattr(gce, "CALL_S", 0.3)
    tpu.fault(Fault(slow_s=0.8, method=CREATE))
    began_s = time.monotonic()
    with pytest.raises(Busy, match="DeadlineExceeded"):
        system.submit(job())
    assert time.monotonic() - began_s < 0.7
    until(system.resources)
    system.submit(job())
    assert len(system.resources()) == 1


def test_a_server_that_is_gone_is_busy(tpu, system):
    system.submit(job())
    tpu.stop()
    with pytest.raises(Busy):
        system.resources()


@pytest.mark.parametrize(
    "answer",
    [
        status("RESOURCE_EXHAUSTED", NO_CHIPS),
        status("RESOURCE_EXHAUSTED", "Exhausted.", quota=NO_CHIPS),
        status("INVALID_ARGUMENT", NO_CHIPS),
    ],
    ids=["message", "details", "invalid"],
)
def test_a_quota_is_denied_with_its_name_and_where_to_get_more(tpu, system, answer):
    tpu.fault(Fault(before=answer))
    with pytest.raises(Denied) as caught:
        system.submit(job())
    message = str(caught.value)
    assert "'TPUV5sLitepodPerProjectPerZoneForTPUAPI'" in message and "Limit: 0 in zone us-west4-a" in message
    assert "https://console.cloud.google.com/iam-admin/quotas?project=my-project" in message and "run" in message


@pytest.mark.parametrize(
    ("answer", "right", "role"),
    [
        (status("PERMISSION_DENIED", "The caller does not have permission"), "tpu.nodes.create", "roles/tpu.admin"),
        (status("PERMISSION_DENIED", "Permission 'tpu.nodes.create' denied"), "tpu.nodes.create", "roles/tpu.admin"),
        (
            status("PERMISSION_DENIED", "no", reason="IAM_PERMISSION_DENIED", permission="iam.serviceAccounts.actAs"),
            "iam.serviceAccounts.actAs",
            "roles/iam.serviceAccountUser",
        ),
        (
            status("PERMISSION_DENIED", "Permission 'compute.networks.use' denied"),
            "compute.networks.use",
            "a role that has compute.networks.use",
        ),
    ],
    ids=["caller", "named", "service account", "network"],
)
def test_a_missing_right_is_denied_with_its_name_and_the_role(tpu, system, answer, right, role):
    tpu.fault(Fault(before=answer))
    with pytest.raises(Denied) as caught:
        system.submit(job())
    message = f"this login lacks {right} in project my-project, zone us-west4-a: have an administrator grant it {role}"
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("answer", "fix"),
    [
        (status("UNAUTHENTICATED", "invalid authentication credentials"), "gcloud auth application-default login"),
        (
            status("UNAVAILABLE", "Getting metadata from plugin failed with error: ('invalid_grant: Bad Request',)"),
            "gcloud auth application-default login",
        ),
        (
            status("PERMISSION_DENIED", "not used before, or disabled", reason="SERVICE_DISABLED"),
            "gcloud services enable tpu.googleapis.com --project=my-project",
        ),
    ],
    ids=["login", "expired", "API"],
)
def test_what_a_command_would_mend_is_denied_with_the_command(tpu, system, answer, fix):
    tpu.fault(Fault(before=answer), 2)
    for call in (lambda: system.submit(job()), system.resources):
        with pytest.raises(Denied) as caught:
            call()
        assert str(caught.value).endswith(fix) and "my-project" in str(caught.value)


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "FAILED_PRECONDITION", "NOT_FOUND", "OUT_OF_RANGE"])
def test_what_the_api_refuses_is_the_users_mistake(tpu, system, code):
    tpu.fault(Fault(before=status(code, "no accelerator\ntype 'v5litepod-64' here.")))
    with pytest.raises(UserError) as caught:
        system.submit(job())
    assert not isinstance(caught.value, Denied)
    assert str(caught.value) == (
        "the Cloud TPU API refuses the job run in project my-project, zone us-west4-a: no accelerator type 'v5litepod-64' "
        "here: check --project, --zone, --slice, --runtime_version and --reservation"
    )


def test_an_operation_that_has_failed_at_once_is_the_error_of_the_call(tpu, system):
    system.submit(job())
    ((_, _, operation),) = tpu.api._operations.values()
    operation.done = True
    operation.error.CopyFrom(status("RESOURCE_EXHAUSTED", NO_CHIPS))
    with pytest.raises(Denied, match="TPUV5sLitepod"):
        system.submit(job())


@pytest.mark.parametrize(
    ("message", "code", "is_denied"),
    [
        (NO_CHIPS, "RESOURCE_EXHAUSTED", True),
        ("Permission 'iam.serviceAccounts.actAs' denied\non the service account.", "UNKNOWN", True),
        ("No.", "PERMISSION_DENIED", True),
        ('There is no more capacity in the zone "us-west4-a"', "RESOURCE_EXHAUSTED", False),
        ("Quota exceeded: 'Mutate requests per minute'", "RESOURCE_EXHAUSTED", False),
        ("The request was not provisioned in time", "DEADLINE_EXCEEDED", False),
    ],
)
def test_a_failure_says_why_and_whether_another_attempt_would_help(tpu, system, message, code, is_denied):
    system.submit(job())
    tpu.fail("run", message, code)
    resource = only(system)
    assert (resource.phase, resource.is_denied) == (Phase.FAILED, is_denied)
    assert resource.reason == message.replace("\n", " ").rstrip(".")


def test_a_suspended_one_is_deleted_and_then_gone(tpu, system):
    system.submit(job(capacity="spot"))
    tpu.activate("run")
    assert only(system).phase is Phase.RUNNING
    tpu.suspend("run")
    resource = only(system)
    assert resource.phase is Phase.PREEMPTED
    system.delete(resource)
    assert only(system).phase is Phase.DELETING
    until(lambda: not system.resources())
    (request,) = [request for name, request in tpu.log if name == DELETE]
    assert request.force and request.name == resource.id and request.request_id
    system.delete(resource)
    system.submit(job(capacity="spot", attempt=Attempt(number=1)))
    assert only(system).attempt.number == 1


@pytest.mark.parametrize("state", ["SUSPENDING", "DELETING"])
def test_what_is_being_suspended_or_deleted_is_not_deleted_by_force(tpu, system, state):
    system.submit(job())
    tpu.activate("run")
    resource = only(system)
    tpu.set_state("run", state)
    for one in (resource, only(system)):
        system.delete(one)
    assert tpu.count(DELETE) == 0


@pytest.mark.parametrize("state", ["SUSPENDED", "FAILED"])
def test_the_deletion_of_one_that_is_stuck_is_sent_once_more(tpu, system, state):
    system.submit(job())
    tpu.set_state("run", state)
    tpu.stick("run")
    system.delete(only(system))
    assert only(system).phase.has_ended
    system.delete(only(system))
    assert only(system).phase is Phase.DELETING


def test_a_newer_attempt_of_that_name_is_not_deleted(tpu, system):
    system.submit(job())
    resource = only(system)
    system.delete(dataclasses.replace(resource, labels={**resource.labels, "capibara-attempt": "1"}))
    system.delete(dataclasses.replace(resource, labels={**resource.labels, "capibara-launch": "ab"}))
    assert tpu.count(DELETE) == 0
    system.delete(resource)
    assert tpu.count(DELETE) == 1


def test_a_deletion_that_must_wait_is_busy(tpu, system):
    system.submit(job())
    tpu.fault(Fault(before=status("FAILED_PRECONDITION", "it is being provisioned"), method=DELETE))
    with pytest.raises(Busy, match="it is being provisioned"):
        system.delete(only(system))


def test_a_list_has_all_its_pages(tpu, system):
    tpu.api.page_size = 2
    for index in range(5):
        system.submit(job(name=f"run-{index}"))
        tpu.activate(f"run-{index}")
    tpu.preempt("run-4")
    before = len(tpu.log)
    phases = {one.job: one.phase for one in system.resources()}
    assert phases == {**{f"run-{index}": Phase.RUNNING for index in range(4)}, "run-4": Phase.PREEMPTED}
    assert [name for name, _ in tpu.log[before:]] == ["ListQueuedResources"] * 3 + ["ListNodes"] * 3


def test_a_list_that_is_not_whole_is_busy(tpu, system):
    system.submit(job())
    tpu.api.unreachable = ["us-west4-a"]
    with pytest.raises(Busy, match="cannot reach us-west4-a"):
        system.resources()
    tpu.api.unreachable, tpu.api.page_size = [], 0
    with pytest.raises(Busy, match="twice"):
        system.resources()
    tpu.api.page_size = 1
    system.submit(job(name="other"))
    tpu.fault(Fault())
    tpu.fault(Fault(before=unavailable()))
    with pytest.raises(Busy):
        system.resources()
    assert len(system.resources()) == 2


def test_queued_resources_of_others_are_skipped(tpu, system):
    client = tpu_v2.TpuClient(transport=system._client.transport)
    client.create_queued_resource(parent=PLACE, queued_resource_id="bare", queued_resource=tpu_v2.QueuedResource())
    node = {"parent": PLACE, "node_id": "theirs", "node": {"labels": {"team": "b"}}}
    theirs = tpu_v2.QueuedResource(tpu={"node_spec": [node]})
    client.create_queued_resource(parent=PLACE, queued_resource_id="theirs", queued_resource=theirs)
    elsewhere = dataclasses.replace(BACKEND, zone="us-west4-b")
    other = systems.connect(elsewhere)
    other.submit(job())
    assert system.resources() == [] and len(other.resources()) == 1
    other.close()


@pytest.mark.parametrize("state", ["PREEMPTED", "TERMINATED"])
@pytest.mark.parametrize(("slice_", "index"), [("v5e-64", 0), ("2xv5e-64", 1)])
def test_a_node_without_chips_ends_a_queued_resource_that_is_still_active(tpu, system, slice_, index, state):
    system.submit(job(slice_))
    tpu.activate("run")
    assert only(system).phase is Phase.RUNNING
    tpu.set_node("run", state, index=index)
    node = "run" if slice_ == "v5e-64" else "run-1"
    resource = only(system)
    assert (resource.phase, resource.reason) == (Phase.PREEMPTED, f"{node} is {state}")
    system.delete(resource)
    assert only(system).phase is Phase.DELETING


def test_a_node_that_is_repaired_or_due_for_maintenance_still_runs(tpu, system):
    system.submit(job("3xv5e-64"))
    tpu.activate("run")
    tpu.set_node("run", "REPAIRING")
    tpu.set_node("run", "RESTARTING", index=1)
    tpu.set_node("run", "READY", "UNHEALTHY_MAINTENANCE", "host\nmaintenance", index=2)
    resource = only(system)
    assert resource.phase is Phase.RUNNING
    reason = "run-0 is REPAIRING; run-1 is RESTARTING; run-2 is UNHEALTHY_MAINTENANCE: host maintenance"
    assert resource.reason == reason


def test_nodes_that_must_not_be_listed_are_no_failure(tpu, system):
    system.submit(job())
    tpu.activate("run")
    tpu.fault(Fault(before=status("PERMISSION_DENIED", "no"), method="ListNodes"))
    assert only(system).phase is Phase.RUNNING
    tpu.fault(Fault(before=unavailable(), method="ListNodes"))
    with pytest.raises(Busy):
        system.resources()


def test_the_log_is_where_a_command_shows_it(system, tpu):
    def command(node):
        options = "--zone=us-west4-a --project=my-project --worker=0"
        return f"gcloud compute tpus tpu-vm ssh {node} {options} --command='tail -n 100 /var/log/capibara.log'"

    for slice_, nodes in (("v5e-64", ["run"]), ("2xv5e-64", ["run-0", "run-1"])):
        spec = job(slice_)
        system.submit(spec)
        lines = [*system.log(spec, only(system))]
        assert lines == [f"the log of {node}: {command(node)}" for node in nodes]
        tpu.api.records.clear()


@pytest.mark.parametrize(
    "endpoint", ["10.0.0.1:80", "tpu.googleapis.com:443", "localhost:80", "127.0.0.1", "127.0.0.1:x", "[::]:80"]
)
def test_an_endpoint_must_be_on_loopback(monkeypatch, endpoint):
    monkeypatch.setenv("CAPIBARA_TPU_ENDPOINT", endpoint)
    with pytest.raises(UserError, match="must be an address on loopback"):
        systems.connect(BACKEND)


def test_without_credentials_the_message_says_how_to_get_them(monkeypatch, tmp_path):
    for name in ("CAPIBARA_TPU_ENDPOINT", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    for name in ("HOME", "CLOUDSDK_CONFIG"):
        monkeypatch.setenv(name, str(tmp_path))
    with pytest.raises(UserError, match="run gcloud auth application-default login"):
        systems.connect(BACKEND)


def test_without_a_project_or_a_zone_there_is_no_connection():
    for name in ("project", "zone"):
        with pytest.raises(UserError, match=f"--{name} is not set"):
            systems.connect(dataclasses.replace(BACKEND, **{name: None}))


@pytest.fixture
def storage(tmp_path, system, monkeypatch):
    """A folder in place of the bucket in which hosts report."""
    monkeypatch.setattr(type(BACKEND), "uses_buckets", False)
    return tmp_path


def report(one, number, hosts, code=0):
    """What hosts of an attempt report when their run has ended."""
    spec = dataclasses.replace(one.spec, attempt=Attempt(launch=one.spec.attempt.launch, number=number))
    folder = pathlib.Path(spec.reports)
    folder.mkdir(parents=True, exist_ok=True)
    for host in hosts:
        ended = {"host": f"host-{host}", "beats": 2, "started_s": 1.0, "code": code, "message": "why"}
        (folder / f"host-{host}.json").write_text(json.dumps(ended))


def test_a_managed_job_survives_storms_preemption_and_the_loss_of_its_database(tpu, system, storage):
    with Managed(storage, BACKEND, job("v5e-16", capacity="spot", restarts=1)) as one:
        tpu.fault(Fault(before=too_many()), 2)
        tpu.fault(Fault(after="garbage", method=CREATE))
        one.comes_to(State.WAITING)
        tpu.activate("run")
        one.comes_to(State.RUNNING)
        tpu.preempt("run", index=0)
        one.comes_to(State.WAITING, 1)
        tpu.activate("run")
        one.comes_to(State.RUNNING, 1)
        tpu.set_state("run", "SUSPENDING")
        assert one.manager.look()[0].reason == "SUSPENDING"
        tpu.suspend("run")
        one.comes_to(State.WAITING, 2)
        tpu.fail("run", "an internal error")
        one.comes_to(State.WAITING, 3)
        one.lose()
        tpu.fault(Fault(before=unavailable()))
        with pytest.raises(Busy):
            recovery.recover(one.records, BACKEND, system, str(storage))
        (found,) = recovery.recover(one.records, BACKEND, system, str(storage))
        assert (found.attempt.number, found.attempt.failures) == (3, 1)
        with one:
            tpu.activate("run")
            report(one, 3, range(3))
            one.comes_to(State.RUNNING, 3)
            report(one, 3, range(4))
            assert one.ends().state is State.SUCCEEDED
    attempts = [request.queued_resource.tpu.node_spec[0].node.labels["capibara-attempt"] for request in tpu.api.made]
    assert attempts == ["0", "1", "2", "3"] and not tpu.api.records


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_managed_job_without_a_quota_ends_at_once_with_its_name(tpu, storage, when):
    with Managed(storage, BACKEND, job("v5e-16")) as one:
        if when == "at once":
            tpu.fault(Fault(before=status("RESOURCE_EXHAUSTED", NO_CHIPS), method=CREATE))
        else:
            one.comes_to(State.WAITING)
            tpu.fail("run", NO_CHIPS, "RESOURCE_EXHAUSTED")
        record = one.ends()
    assert record.state is State.FAILED and "'TPUV5sLitepodPerProjectPerZoneForTPUAPI'" in record.reason
    assert ("iam-admin/quotas" in record.reason) == (when == "at once")
    assert tpu.count(CREATE) == 1 and not tpu.api.records


def test_a_managed_job_with_a_mistake_is_deleted_and_not_made_again(tpu, storage):
    with Managed(storage, BACKEND, job("v5e-16")) as one:
        one.comes_to(State.WAITING)
        tpu.activate("run")
        report(one, 0, [1], code=2)
        record = one.ends()
    assert (record.state, record.reason) == (State.FAILED, "exit code 2: host-1: why")
    assert tpu.count(CREATE) == 1 and not tpu.api.records


def test_a_managed_job_is_deleted_when_all_its_attempts_have_cost_the_budget(tpu, storage):
    with Managed(storage, BACKEND, job("v5e-16", budget_usd=4.8)) as one:  # a quarter of an hour
        for number in range(2):
            one.comes_to(State.WAITING, number)
            tpu.activate("run")
            running = one.comes_to(State.RUNNING, number)
            one.records.put(dataclasses.replace(running, running_s=running.running_s - 460))
            if number == 0:
                assert one.manager.look()[0].state is State.RUNNING
                tpu.suspend("run")
        record = one.ends()
    assert record.state is State.FAILED and record.reason.startswith("its chips have cost the budget of 4.80 USD")
    assert tpu.count(CREATE) == 2 and not tpu.api.records


@pytest.mark.parametrize("state", ["WAITING_FOR_RESOURCES", "ACTIVE", "SUSPENDING"])
def test_a_managed_job_that_is_cancelled_is_deleted(tpu, storage, state):
    with Managed(storage, BACKEND, job("v5e-16")) as one:
        one.comes_to(State.WAITING)
        tpu.set_state("run", state)
        tpu.stick("run")
        one.records.cancel("run")
        one.comes_to(State.ENDING)
        if state == "SUSPENDING":
            assert tpu.count(DELETE) == 0
            tpu.suspend("run")
        assert one.ends().state is State.CANCELLED
    assert tpu.count(CREATE) == 1 and tpu.count(DELETE) == 2 and not tpu.api.records


def test_the_process_in_chaos_makes_each_job_once_and_writes_its_journal(tmp_path, monkeypatch):
    port, journal = tmp_path / "port", tmp_path / "journal"
    flags = [
        f"--port-file={port}",
        f"--journal={journal}",
        "--seed=1",
        "--chaos=0.4",
        "--active-after=0.2",
        "--preempt=1",
    ]
    server = subprocess.Popen([sys.executable, str(HERE / "fake_tpu.py"), *flags])
    try:
        monkeypatch.setenv("CAPIBARA_TPU_ENDPOINT", f"127.0.0.1:{until(lambda: port.exists() and port.read_text())}")
        system = systems.connect(BACKEND)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            jobs = [job(name=f"run-{index}") for index in range(4)]
            assert [*pool.map(lambda spec: calm(lambda: system.submit(spec)), jobs)] == [None] * 4
            resources = calm(system.resources)
            assert [*pool.map(lambda one: calm(lambda: system.delete(one)), resources)] == [None] * 4
        until(lambda: not calm(system.resources))
        system.close()
        written = [json.loads(line) for line in journal.read_text().splitlines()]
    finally:
        server.terminate()
        assert server.wait(300) == 0
    each = [(op, f"run-{index}") for op in ("create", "delete") for index in range(4)]
    assert sorted((line["op"], line["name"]) for line in written) == each
    assert all(line["labels"]["capibara-job"] == line["name"] and line["time"] > 0 for line in written)
