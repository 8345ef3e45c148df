"""JobSets, Jobs and Services by Kubernetes's own client, spoken to a server on loopback with the API's answers."""

import concurrent.futures
import json
import pathlib
import subprocess
import sys
import time

import pytest
import urllib3

from capibara.core.types import UserError
from capibara.jobs import backends, systems
from capibara.jobs.spec import Attempt
from capibara.jobs.systems import gke
from capibara.jobs.systems.system import Busy, Denied, Exists, Phase

HERE = pathlib.Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE)]
from fake_kubernetes import FAULTS, FakeKubernetes  # noqa: E402
from job_specs import job  # noqa: E402

GPUS = "4xh100-8"
UNSCHEDULABLE = "0/9 nodes are available: 9 Insufficient google.com/tpu."


@pytest.fixture
def fake(tmp_path, monkeypatch):
    with FakeKubernetes(slow_s=0.15, gone_after_s=(1e6, 1e6)) as server:  # gone when a test says so
        server.write_kubeconfig(tmp_path / "kubeconfig")
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        yield server


@pytest.fixture
def cluster(fake):
    opened = systems.connect(backend())
    yield opened
    opened.close()


def backend(**fields):
    return backends.find("gke")(**fields)


def only(cluster):
    (found,) = cluster.resources()
    return found


def until(is_true, within_s=300.0):
    end = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.02)


def without_what_is_added(item):
    """A document without what the server adds."""
    metadata = {
        key: item["metadata"][key] for key in ("name", "namespace", "labels", "annotations") if key in item["metadata"]
    }
    return {**{key: part for key, part in item.items() if key != "status"}, "metadata": metadata}


@pytest.mark.parametrize(
    ("slice_", "plurals"),
    [
        ("2xv6e-64", ["jobsets"]),
        ("v5e-8", ["jobsets"]),
        ("h100-8", ["jobs"]),
        (GPUS, ["services", "jobs"]),
        ("cpu-1", ["jobs"]),
    ],
)
def test_what_is_submitted_is_what_a_dry_run_prints(fake, cluster, slice_, plurals):
    spec = job(slice_, environment={"A": "$x 'y'"}, budget_usd=None if slice_ == "cpu-1" else 1e4)
    cluster.submit(spec)
    made = [item for plural in plurals for item in fake.objects(plural).values()]
    assert [without_what_is_added(item) for item in made] == [*backend().render(spec).documents]
    assert [call.partition("?")[0].rpartition("/")[2] for call in fake.calls] == plurals


@pytest.mark.parametrize("slice_", ["2xv6e-64", GPUS])
def test_a_job_waits_runs_and_succeeds(fake, cluster, slice_):
    attempt = Attempt(launch="ab12", number=3, failures=2, spent_s=60)
    spec = job(slice_, attempt=attempt, digest="0123456789abcdef", labels={"team": "a"})
    cluster.submit(spec)
    found = only(cluster)
    assert (found.job, found.attempt, found.phase, found.reason) == ("run", attempt, Phase.WAITING, "")
    assert spec.all_labels.items() <= found.labels.items()
    assert abs(found.created_s - time.time()) < 5
    fake.start("run")
    assert only(cluster).phase is Phase.RUNNING
    fake.complete("run")
    assert (only(cluster).phase, only(cluster).id) == (Phase.SUCCEEDED, found.id)


def test_a_job_set_runs_when_all_slices_are_ready_or_have_succeeded(fake, cluster):
    cluster.submit(job("2xv6e-64"))
    for ready, succeeded, phase in ((1, 0, Phase.WAITING), (2, 0, Phase.RUNNING), (1, 1, Phase.RUNNING)):
        counts = {"name": "slice", "active": 2 - succeeded, "ready": ready, "succeeded": succeeded, "failed": 0}
        fake.set_status("run", replicatedJobsStatus=[counts])
        assert only(cluster).phase is phase


def test_a_job_runs_when_all_hosts_are_ready_or_have_succeeded(fake, cluster):
    cluster.submit(job(GPUS))
    for ready, succeeded, phase in ((3, 0, Phase.WAITING), (4, 0, Phase.RUNNING), (3, 1, Phase.RUNNING)):
        fake.set_status("run", active=4 - succeeded, ready=ready, succeeded=succeeded)
        assert only(cluster).phase is phase


@pytest.mark.parametrize(
    ("slice_", "reason", "message", "expected"),
    [
        ("v5e-8", "", "", "ReachedMaxRestarts: jobset failed due to reaching max number of restarts (first failed job: run-slice-0)"),
        ("cpu-1", "PodFailurePolicy", "Container capibara\nfailed with exit code 2", "PodFailurePolicy: Container capibara failed with exit code 2"),
    ],
)  # fmt: skip
def test_a_failure_has_its_reason_in_one_line(fake, cluster, slice_, reason, message, expected):
    cluster.submit(job(slice_))
    fake.start("run")
    fake.fail("run", reason, message)
    found = only(cluster)
    assert (found.phase, found.reason, found.is_denied) == (Phase.FAILED, expected, False)


def test_a_failure_for_a_quota_is_denied(fake, cluster):
    cluster.submit(job("cpu-1"))
    fake.fail("run", "FailedCreate", 'pods "run-0" is forbidden: exceeded quota: chips, requested: cpu=8')
    assert only(cluster).is_denied


def test_a_job_whose_pods_are_being_stopped_is_not_yet_failed(fake, cluster):
    cluster.submit(job("cpu-1"))
    fake.start("run")
    fake.play("add_condition", "run", "FailureTarget", "BackoffLimitExceeded", "too many")
    assert (only(cluster).phase, only(cluster).reason) == (Phase.DELETING, "BackoffLimitExceeded: too many")
    fake.fail("run")
    assert only(cluster).phase is Phase.FAILED


@pytest.mark.parametrize("slice_", ["v5e-8", GPUS])
def test_what_kueue_has_evicted_waits_until_it_is_admitted(fake, cluster, slice_):
    cluster.submit(job(slice_))
    fake.start("run")
    fake.evict("run")
    assert only(cluster).phase is Phase.WAITING and "suspended" in only(cluster).reason
    fake.start("run")
    assert (only(cluster).phase, only(cluster).reason) == (Phase.RUNNING, "")


def test_a_job_set_that_restarts_waits(fake, cluster):
    cluster.submit(job("v5e-8"))
    fake.start("run")
    fake.restart("run")
    assert only(cluster).phase is Phase.WAITING and "(first failed job: run-slice-0)" in only(cluster).reason
    fake.start("run")
    assert only(cluster).phase is Phase.RUNNING


def pending(message, moment="2026-01-01T00:00:00Z"):
    return [{"type": "PodScheduled", "status": "False", "message": message, "lastTransitionTime": moment}]


@pytest.mark.parametrize("slice_", ["v5e-16", GPUS])
def test_what_waits_says_the_newest_obstacle_of_its_pods(fake, cluster, slice_):
    cluster.submit(job(slice_))
    cluster.submit(job(slice_, name="other"))
    first, second, *_ = fake.pods("run")
    first["status"]["conditions"] = pending(UNSCHEDULABLE, "2026-01-01T00:00:02Z")
    second["status"]["conditions"] = pending("no preemption victims", "2026-01-01T00:00:01Z")
    assert {one.job: one.reason for one in cluster.resources()} == {"run": UNSCHEDULABLE, "other": ""}


def test_an_image_that_cannot_be_pulled_is_a_reason(fake, cluster):
    cluster.submit(job("cpu-1"))
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "registry/capibara:1"'}
    (pod,) = fake.pods("run")
    pod["status"]["containerStatuses"] = [{"name": "capibara", "state": {"waiting": waiting}}]
    assert only(cluster).reason == 'ImagePullBackOff: Back-off pulling image "registry/capibara:1"'


def test_the_list_needs_no_reasons(fake, cluster):
    cluster.submit(job("cpu-1"))
    for fault in (*FAULTS, None):
        if fault is None:
            fake.refuse_rights("list", "pods")
        fake.fault_next(None, None, fault)
        assert (only(cluster).phase, only(cluster).reason) == (Phase.WAITING, "")


def test_what_is_being_deleted_says_so_until_it_is_gone(fake, cluster):
    for spec in (job("v5e-8"), job(GPUS, name="other")):
        cluster.submit(spec)
    for resource in cluster.resources():
        cluster.delete(resource)
        cluster.delete(resource)
    assert {one.phase for one in cluster.resources()} == {Phase.DELETING}
    assert not fake.objects("services")
    with pytest.raises(Exists):
        cluster.submit(job("v5e-8"))
    for name in ("run", "other"):
        fake.play("remove", name)
    assert not cluster.resources() and not fake.objects("pods")
    cluster.submit(job("v5e-8"))


def test_an_outcome_is_not_lost_while_the_job_is_deleted(fake, cluster):
    cluster.submit(job("v5e-8"))
    fake.start("run")
    fake.complete("run")
    cluster.delete(only(cluster))
    assert "deletionTimestamp" in fake.objects("jobsets")["run"]["metadata"]
    assert only(cluster).phase is Phase.SUCCEEDED


@pytest.mark.parametrize("slice_", ["v5e-8", GPUS])
def test_a_newer_attempt_of_the_name_is_not_deleted(fake, cluster, slice_):
    cluster.submit(job(slice_))
    old = only(cluster)
    cluster.delete(old)
    fake.play("remove", "run")
    cluster.delete(old)
    cluster.submit(job(slice_, attempt=Attempt(number=1)))
    before = fake.objects("services")
    cluster.delete(old)
    assert only(cluster).attempt.number == 1 and fake.objects("services") == before


def service(name="run", **labels):
    return {"kind": "Service", "apiVersion": "v1", "metadata": {"name": name, "labels": labels}, "spec": {}}


def test_a_service_that_is_left_will_do(fake, cluster):
    """A manager was killed between the Service and the Job."""
    spec = job(GPUS)
    fake.put("services", backend().render(spec).documents[0])
    cluster.submit(spec)
    with pytest.raises(Exists, match="^run$"):
        cluster.submit(spec)
    cluster.delete(only(cluster))
    assert not fake.objects("services")


def test_the_service_of_somebody_else_stays(fake, cluster):
    fake.put("services", service())
    with pytest.raises(
        UserError, match="--name=run: namespace default has a Service of that name which is not the job's"
    ):
        cluster.submit(job(GPUS))
    assert not fake.objects("jobs")
    cluster.submit(job("h100-8"))
    cluster.delete(only(cluster))
    assert [*fake.objects("services")] == ["run"]


def test_a_service_whose_job_is_refused_does_not_stay(fake, cluster):
    fake.refuse_rights("create", "jobs")
    with pytest.raises(Denied):
        cluster.submit(job(GPUS))
    assert not fake.objects("services")
    fake.put("services", backend().render(job(GPUS)).documents[0])
    with pytest.raises(Denied):
        cluster.submit(job(GPUS))
    assert [*fake.objects("services")] == ["run"]  # this one may be of a Job that runs


def test_a_service_that_is_being_deleted_will_not_do(fake, cluster):
    fake.put("services", service(**{"capibara-job": "run"}))["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    with pytest.raises(Busy, match="Service run in namespace default is being deleted"):
        cluster.submit(job(GPUS))


def test_lists_of_many_pages_have_the_jobs_of_this_namespace_alone(fake, cluster, monkeypatch):
    monkeypatch.setattr(gke, "PAGE", 2)
    for index in range(5):
        cluster.submit(job("v5e-1" if index % 2 else "cpu-1", name=f"run-{index}"))
    strange = {"apiVersion": "batch/v1", "kind": "Job", "spec": {"parallelism": 1, "template": {"spec": {}}}}
    labels = {"capibara-job": "run-1", "jobset.sigs.k8s.io/jobset-name": "run-1"}
    fake.put("jobs", {**strange, "metadata": {"name": "run-1-slice-0", "labels": labels}})
    fake.put("jobs", {**strange, "metadata": {"name": "not-ours", "labels": {}}})
    systems.connect(backend(namespace="ml")).submit(job("cpu-1", name="elsewhere"))
    fake.calls.clear()
    assert sorted(one.job for one in cluster.resources()) == [f"run-{index}" for index in range(5)]
    assert sum("limit=2" in call and "jobs?" in call for call in fake.calls) == 2


def test_a_token_that_has_expired_is_busy(fake, cluster, monkeypatch):
    monkeypatch.setattr(gke, "PAGE", 1)
    for name in ("a", "b"):
        cluster.submit(job("cpu-1", name=name))
    fake.refuse("list", "jobs", 410, "Expired", "The provided continue parameter is too old")
    with pytest.raises(Busy, match="answers 410 to list jobs.batch: The provided continue parameter is too old"):
        cluster.resources()


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "slow"])
def test_a_call_that_fails_is_made_once_and_the_same_call_succeeds_later(fake, cluster, fault):
    with pytest.raises(Busy) as error:
        fake.fault_next(fault)
        cluster.submit(job("v5e-8"))
    assert error.value.after_s == (1.0 if fault == "429" else None)
    assert "\n" not in str(error.value) and len(fake.calls) == 1
    if fault in ("cut", "half", "torn", "late"):  # it was made all the same
        until(lambda: fake.objects("jobsets"))
        with pytest.raises(Exists):
            cluster.submit(job("v5e-8"))
    else:
        cluster.submit(job("v5e-8"))
    fake.start("run")
    resource = only(cluster)
    calls = (cluster.resources, lambda: cluster.log(job("v5e-8"), resource), lambda: cluster.delete(resource))
    for call in calls:
        before = len(fake.calls)
        with pytest.raises(Busy):
            fake.fault_next(fault)
            call()
        assert len(fake.calls) == before + 1
    with pytest.raises(Busy):
        fake.fault_next(None, fault)
        cluster.resources()


@pytest.mark.parametrize("fault", ["cut", "late"])
def test_a_service_and_a_job_whose_creation_is_not_answered_are_made_once(fake, cluster, fault):
    for served, plural in ((0, "services"), (2, "jobs")):
        fake.fault_next(*[None] * served, fault)
        with pytest.raises(Busy):
            cluster.submit(job(GPUS))
        until(lambda: fake.objects(plural))
    with pytest.raises(Exists):
        cluster.submit(job(GPUS))
    assert [*fake.objects("services")] == [*fake.objects("jobs")] == ["run"]


def test_a_storm_passes(fake, cluster):
    fake.storm(3)
    for _ in range(3):
        with pytest.raises(Busy, match="answers (429|503) to create jobsets"):
            cluster.submit(job("v5e-8"))
    cluster.submit(job("v5e-8"))


def test_the_client_repeats_no_call(fake, cluster):
    assert cluster._api._client.configuration.retries is False
    fake.fault_next("lost", "lost")
    for _ in range(2):
        with pytest.raises(Busy):
            cluster.resources()
    assert len(fake.calls) == 2


def test_a_call_without_an_answer_ends(fake, cluster, monkeypatch):
    monkeypatch.setattr(gke, "CALL_S", 0.05)
    fake.fault_next("slow")
    with pytest.raises(Busy, match=f"the Kubernetes API at {fake.url} does not answer: ReadTimeoutError"):
        cluster.resources()


def test_no_server_is_busy(fake, cluster):
    fake.__exit__()
    with pytest.raises(Busy, match="does not answer"):
        cluster.resources()


def test_an_error_that_is_no_status_says_its_code(fake, cluster):
    fake.refuse("list", "jobs", 502, "", None)
    with pytest.raises(Busy, match="answers 502 to list jobs.batch: Bad Gateway$"):
        cluster.resources()


@pytest.mark.parametrize(
    ("verb", "plural", "call"),
    [
        ("create", "jobsets", lambda cluster: cluster.submit(job("v5e-8"))),
        ("create", "services", lambda cluster: cluster.submit(job(GPUS))),
        ("create", "jobs", lambda cluster: cluster.submit(job(GPUS))),
        ("list", "jobsets", lambda cluster: cluster.resources()),
        ("list", "jobs", lambda cluster: cluster.resources()),
        ("delete", "jobsets", lambda cluster: cluster.delete(only(cluster))),
        ("list", "pods", lambda cluster: cluster.log(job("v5e-8"), only(cluster))),
        ("get", "pods/log", lambda cluster: cluster.log(job("v5e-8"), only(cluster))),
    ],
)
def test_a_right_that_is_missing_is_named_with_its_fix(fake, cluster, verb, plural, call):
    if verb in ("delete", "get") or plural == "pods":
        cluster.submit(job("v5e-8"))
    resource = {"jobsets": "jobsets.jobset.x-k8s.io", "jobs": "jobs.batch"}.get(plural, plural)
    fake.refuse(verb, plural, 403, "Forbidden", f'{resource} is forbidden: User "a" cannot {verb} resource')
    with pytest.raises(Denied) as error:
        call(cluster)
    assert str(error.value).startswith(f"namespace default: no right to {verb} {resource} ({resource} is forbidden: ")
    assert (
        "kubectl create role capibara --namespace=default --verb=create,get,list,delete "
        "--resource=jobsets.jobset.x-k8s.io,jobs.batch,services,pods,pods/log" in str(error.value)
    )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (401, "Unauthorized"),
        (403, 'jobs.batch is forbidden: User "system:anonymous" cannot list resource "jobs" in API group "batch"'),
    ],
)
def test_credentials_that_have_expired_are_named(fake, cluster, code, message):
    fake.refuse("list", "jobs", code, "Unauthorized", message)
    with pytest.raises(Denied, match="run gcloud auth login, then run gcloud container clusters get-credentials"):
        cluster.resources()


def test_a_quota_that_is_used_up_is_denied(fake, cluster):
    used = (
        "exceeded quota: compute, requested: count/jobs.batch=1, used: count/jobs.batch=4, limited: count/jobs.batch=4"
    )
    fake.refuse("create", "jobs", 403, "Forbidden", f'jobs.batch "run" is forbidden: {used}')
    with pytest.raises(Denied, match="used: count/jobs.batch=4.* have the ResourceQuota raised") as error:
        cluster.submit(job("cpu-1"))
    assert "Role" not in str(error.value)
    fake.refuse("create", "jobs", 409, "Conflict", 'Operation cannot be fulfilled on resourcequotas "compute"')
    with pytest.raises(Busy, match="answers 409"):  # somebody else was counted at the same time
        cluster.submit(job("cpu-1"))


@pytest.mark.parametrize(
    ("code", "reason", "message"),
    [
        (400, "BadRequest", 'strict decoding error: unknown field "spec.failurePolicy.rules"'),
        (403, "Forbidden", 'admission webhook "vjobset.kb.io" denied the request:\npod name is too long'),
        (422, "Invalid", 'JobSet.jobset.x-k8s.io "run" is invalid: spec.replicatedJobs: Required value'),
    ],
)
def test_a_job_that_the_cluster_refuses_is_a_mistake(fake, cluster, code, reason, message):
    fake.refuse("create", "jobsets", code, reason, message)
    with pytest.raises(UserError) as error:
        cluster.submit(job("v5e-8"))
    line = message.replace("\n", " ")
    assert str(error.value) == f"the Kubernetes API at {fake.url} refuses run in namespace default: {line}"
    assert not isinstance(error.value, Denied)


def test_a_cluster_without_job_sets_runs_jobs(fake, cluster):
    fake.has_job_sets = False
    with pytest.raises(
        UserError, match="no JobSet controller.*kubectl apply --server-side -f https://.*/manifests.yaml$"
    ):
        cluster.submit(job("v5e-8"))
    cluster.submit(job("cpu-1"))
    assert only(cluster).job == "run"


def test_job_sets_that_a_cluster_has_had_are_not_taken_for_gone(fake, cluster):
    """An API server that starts knows no kinds of others for a while."""
    cluster.submit(job("v5e-8"))
    fake.has_job_sets = False
    with pytest.raises(Busy, match="has no jobsets.jobset.x-k8s.io now"):
        cluster.resources()


@pytest.mark.parametrize("slice_", ["v5e-8", "cpu-1"])
def test_a_namespace_that_is_not_there(fake, slice_):
    with pytest.raises(UserError, match="^--namespace=nowhere does not exist: kubectl create namespace nowhere$"):
        systems.connect(backend(namespace="nowhere")).submit(job(slice_))


def lines(cluster, slice_):
    return [*cluster.log(job(slice_), only(cluster))]


@pytest.mark.parametrize("slice_", ["2xv6e-64", GPUS])
def test_the_log_is_that_of_process_0(fake, cluster, slice_):
    cluster.submit(job(slice_))
    (waiting,) = lines(cluster, slice_)
    assert "is waiting to start: ContainerCreating" in waiting
    fake.start("run")
    assert lines(cluster, slice_) == []
    for pod in fake.pods("run"):
        name = pod["metadata"]["name"]
        fake.say(name, "".join(f"{name} {number} é\n" for number in range(1200)))
    found = lines(cluster, slice_)
    stem = "run-slice-0-0" if slice_ == "2xv6e-64" else "run-0"
    assert len(found) == 1000 and found[-1].startswith(f"{stem}-") and found[-1].endswith(" 1199 é")
    assert any("container=capibara" in call and "tailLines=1000" in call for call in fake.calls)


def test_the_log_is_that_of_the_newest_restart(fake, cluster):
    cluster.submit(job("v5e-8"))
    fake.start("run")
    (old,) = fake.pods("run")
    fake.say(old["metadata"]["name"], "old\n")
    fake.restart("run")
    fake.start("run")
    (new,) = fake.pods("run")
    fake.say(new["metadata"]["name"], "new")
    fake.put("pods", old)
    assert lines(cluster, "v5e-8") == ["new"]


def test_the_log_is_that_of_the_attempt(fake, cluster):
    """A pod of an earlier attempt that is still there has restarted more often."""
    cluster.submit(job("v5e-8"))
    fake.restart("run")
    fake.start("run")
    (old,) = fake.pods("run")
    cluster.delete(only(cluster))
    fake.play("remove", "run")
    cluster.submit(job("v5e-8", attempt=Attempt(number=1)))
    fake.start("run")
    (new,) = fake.pods("run")
    fake.put("pods", old)
    fake.say(old["metadata"]["name"], "old")
    fake.say(new["metadata"]["name"], "new")
    assert lines(cluster, "v5e-8") == ["new"]


def test_a_job_without_pods_says_so(fake, cluster):
    cluster.submit(job("v5e-8"))
    fake.evict("run")
    assert lines(cluster, "v5e-8") == ["job run has no pods yet"]


def test_no_kubeconfig_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(
        UserError, match="/none does not exist, .*run gcloud container clusters get-credentials CLUSTER"
    ):
        systems.connect(backend())
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    with pytest.raises(UserError, match="the service account of this pod has no valid cluster"):
        systems.connect(backend())


@pytest.mark.parametrize("text", ["users: [{name: a, user: {token: s3cret}}]\n", "token: {s3cret", "", "- s3cret\n"])
def test_a_kubeconfig_that_is_none_is_not_quoted(tmp_path, monkeypatch, text):
    (tmp_path / "kubeconfig").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with pytest.raises(UserError, match="has no valid cluster, user and current context") as error:
        systems.connect(backend())
    assert "s3cret" not in str(error.value)


def test_the_kubeconfig_is_not_changed(fake, cluster, tmp_path):
    before = (tmp_path / "kubeconfig").read_bytes()
    cluster.resources()
    assert (tmp_path / "kubeconfig").read_bytes() == before


def test_several_threads_call_at_once(fake, cluster):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(cluster.submit, job("cpu-1", name=f"run-{index}")) for index in range(16)]:
            future.result()
        lists = [future.result() for future in [pool.submit(cluster.resources) for _ in range(16)]]
    assert all(len(found) == 16 for found in lists)


@pytest.mark.parametrize(
    ("slice_", "change", "message"),
    [
        ("v5e-8", lambda document: document["spec"].update(replicas=1), 'unknown field "spec.replicas"'),
        ("v5e-8", lambda document: document["spec"]["failurePolicy"].update(maxRestarts="3"), "must be of type integer"),
        ("v5e-8", lambda document: document["spec"]["failurePolicy"]["rules"][0].update(action="Fail"), "Unsupported"),
        ("v5e-8", lambda document: document["metadata"].update(name="a" * 50), "pod name is too long"),
        ("v5e-8", lambda document: document["metadata"]["labels"].update(team="a" * 64), "metadata.labels: Invalid"),
        ("cpu-1", lambda document: document["spec"].update(backoffLimits=1), 'unknown field "spec.backoffLimits"'),
        ("cpu-1", lambda document: document["spec"]["template"]["spec"].update(restartPolicy="Always"), "restartPolicy"),
        ("cpu-1", lambda document: document["spec"].pop("completions"), "completions: Required value"),
        (GPUS, lambda document: document["spec"]["ports"][0].update(ports=1), 'unknown field "spec.ports[0].ports"'),
    ],
)  # fmt: skip
def test_the_server_refuses_what_kubernetes_would(fake, slice_, change, message):
    document = backend().render(job(slice_)).documents[0]
    change(document)
    version, plural = {
        "JobSet": ("apis/jobset.x-k8s.io/v1alpha2", "jobsets"),
        "Job": ("apis/batch/v1", "jobs"),
        "Service": ("api/v1", "services"),
    }[document["kind"]]
    answer = urllib3.request("POST", f"{fake.url}/{version}/namespaces/default/{plural}", json=document)
    assert answer.status in (400, 422) and message in answer.json()["message"]
    assert not fake.objects(plural)


def test_a_server_of_its_own_makes_each_job_once_whatever_befalls_the_calls(tmp_path, monkeypatch):
    port, journal = tmp_path / "port", tmp_path / "journal"
    flags = [f"--port-file={port}", f"--journal={journal}", "--seed=1", "--chaos=0.3", "--active-after=0.1"]
    argv = [sys.executable, str(HERE / "fake_kubernetes.py"), *flags, "--fail=0.5", "--done-after=0.1"]
    with subprocess.Popen(argv) as server:
        try:
            until(port.exists, within_s=30.0)
            config = {
                "clusters": [{"name": "a", "cluster": {"server": f"http://127.0.0.1:{port.read_text()}"}}],
                "contexts": [{"name": "a", "context": {"cluster": "a", "user": ""}}],
                "current-context": "a",
            }
            (tmp_path / "kubeconfig").write_text(json.dumps(config))
            monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
            cluster = systems.connect(backend())
            names = [f"run-{index}" for index in range(4)]
            for index, name in enumerate(names):
                spec = job("v5e-8" if index % 2 else GPUS, name=name)
                until(lambda: _is_done(cluster.submit, spec))
            until(lambda: all(one.phase.has_ended for one in _list(cluster)), within_s=120.0)
            phases = {one.job: one.phase for one in _list(cluster)}
            for resource in _list(cluster):
                until(lambda: _is_done(cluster.delete, resource))
            until(lambda: not _list(cluster), within_s=120.0)
        finally:
            server.terminate()
    assert sorted(phases) == names
    assert {*phases.values()} == {Phase.SUCCEEDED, Phase.FAILED}
    ops = [json.loads(line) for line in journal.read_text().splitlines()]
    for kind, wanted in (("JobSet", names[1::2]), ("Job", names[::2]), ("Service", names[::2])):
        for op in ("create", "delete"):
            assert sorted(one["name"] for one in ops if (one["op"], one["kind"]) == (op, kind)) == wanted


def _is_done(call, *arguments):
    try:
        call(*arguments)
    except Busy:
        return False
    except Exists:
        pass
    return True


def _list(cluster):
    """The resources, once they can be listed."""
    while True:
        try:
            return cluster.resources()
        except Busy:
            time.sleep(0.01)
