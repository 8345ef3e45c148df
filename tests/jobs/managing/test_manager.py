"""The manager's passes: each job gets to its end, whatever its system answers."""

import dataclasses
import json
import pathlib
import sys
import time

import pytest

from capibara.core.types import TryAgain, UserError
from capibara.jobs import reports
from capibara.jobs.backends.gke import Gke
from capibara.jobs.managing import manager as managing
from capibara.jobs.managing import recovery, spec_file
from capibara.jobs.managing.lifecycle import Rules
from capibara.jobs.managing.manager import Manager, Times
from capibara.jobs.managing.records import Record, Records, State
from capibara.jobs.spec import Attempt, Bundle
from capibara.jobs.systems.system import Busy, Denied, Phase, Resource

sys.path += [str(pathlib.Path(__file__).resolve().parent), str(pathlib.Path(__file__).resolve().parents[1])]
from clouds import Cloud  # noqa: E402
from job_specs import SUM, job  # noqa: E402

GKE = Gke(namespace="ml")
QUICK = Rules(settle_s=0.05, vanish_s=0.05, hung_s=0.3, start_s=0.5, first_s=0.01, longest_s=0.02)


@pytest.fixture
def records(tmp_path):
    opened = Records(tmp_path / "jobs.sqlite")
    yield opened
    opened.close()


def launch(records, tmp_path, name="run", backend=GKE, **fields):
    bundle = Bundle(url=f"{tmp_path}/jobs/{name}/0123456789abcdef", files={"gin/0/run.gin": SUM})
    spec = spec_file.signed(backend, job("v5e-8", name=name, bundle=bundle, **fields))
    spec_file.write(backend, spec)
    text = spec_file.text_of(backend, spec)
    return records.add(Record(name=name, text=text, attempt=Attempt(launch="ab"), launched_s=time.time()))


class Pass:
    """A manager whose passes a test makes one by one; `lines` is what it says."""

    def __init__(self, records, cloud, names=None, rules=QUICK):
        self.lines, self.records = [], records
        self.manager = Manager(
            records,
            names,
            rules=rules,
            times=Times(poll_s=0.01, reports_s=0.0),
            connect=lambda backend: cloud,
            say=self.lines.append,
        )

    def __enter__(self):
        self.manager.__enter__()
        return self

    def __exit__(self, *error):
        self.manager.__exit__(*error)

    def until(self, condition, name="run"):
        end_s = time.monotonic() + 300
        while True:
            self.manager.look()
            if condition(self.records.find(name)):
                return self.records.find(name)
            assert time.monotonic() < end_s, self.records.find(name)
            time.sleep(0.01)


def is_state(state):
    return lambda record: record.state is state


def test_a_job_from_its_launch_to_its_end(records, tmp_path):
    launch(records, tmp_path)
    cloud = Cloud()
    with Pass(records, cloud) as passes:
        passes.until(is_state(State.WAITING))
        cloud.become("run", Phase.RUNNING)
        passes.until(is_state(State.RUNNING))
        cloud.become("run", Phase.SUCCEEDED)
        passes.until(is_state(State.SUCCEEDED))
    assert cloud.submitted() == [("run", 0)] and cloud.calls[-1] == "close"
    assert "run" in cloud.there  # its log stays, since it costs nothing
    assert passes.lines == [f"job run is {state}" for state in ("waiting", "running", "ending", "succeeded")]
    assert [text for _, text in records.history("run")] == ["waiting", "running", "ending", "succeeded"]


def test_a_preempted_job_is_made_again_with_what_it_has_spent(records, tmp_path):
    launch(records, tmp_path)
    cloud = Cloud(phase=Phase.RUNNING)
    with Pass(records, cloud) as passes:
        running = passes.until(is_state(State.RUNNING))
        records.put(dataclasses.replace(running, running_s=time.time() - 100))
        cloud.become("run", Phase.PREEMPTED, reason="the node was taken")
        passes.until(lambda record: record.state is State.RUNNING and record.attempt.number == 1)
        labels = cloud.there["run"].labels
        assert labels["capibara-attempt"] == "1" and 100 <= int(labels["capibara-spent"]) <= 110
        assert labels["capibara-failures"] == "0"
    assert cloud.submitted() == [("run", 0), ("run", 1)]
    assert "job run is replacing: the node was taken" in passes.lines


def test_a_storm_is_not_answered_with_a_storm(records, tmp_path, monkeypatch):
    """Hundred jobs, and a system that refuses every call: three of each kind, then a pause, then one."""
    for n in range(100):
        launch(records, tmp_path, f"run-{n}")
    cloud = Cloud()
    clock = [1_000.0]
    monkeypatch.setattr(managing.time, "monotonic", lambda: clock[0])
    with Pass(records, cloud) as passes:
        cloud.faults = [None] + [Busy("429")] * 10_000
        for _ in range(4):
            passes.manager.look()
        first = len(cloud.calls)
        assert first <= 1 + 3 + 8 + 3  # those of threads that were under way
        for _ in range(10):
            passes.manager.look()
        assert len(cloud.calls) == first
        clock[0] += 301
        passes.manager.look()
        assert len(cloud.calls) == first + 1
        cloud.faults = []
        clock[0] += 301
        passes.manager.look()
        assert len(cloud.submitted()) >= 100
        names = [name for name, _ in cloud.submitted()]
    assert set(cloud.there) == {f"run-{n}" for n in range(100)} and len(names) <= 112


def test_lists_that_are_answered_allow_no_storm_of_submissions(records, tmp_path, monkeypatch):
    for n in range(20):
        launch(records, tmp_path, f"run-{n}")
    clock = [1_000.0]
    monkeypatch.setattr(managing.time, "monotonic", lambda: clock[0])
    cloud = Cloud(refuses=Busy("503"))
    with Pass(records, cloud) as passes:
        for _ in range(60):  # a quarter of an hour
            passes.manager.look()
            clock[0] += 15
    assert cloud.calls.count("resources") == 60 and len(cloud.submitted()) <= 8 * 10
    assert passes.lines == ["503: tried again"] and "503" in {one.reason for one in records.all()}
    assert {one.state for one in records.all()} == {State.SUBMITTING}


def test_a_job_that_was_not_submitted_in_a_storm_is_cancelled_at_once(records, tmp_path, monkeypatch):
    """No call was begun, so nothing of it can appear later."""
    launch(records, tmp_path)
    monkeypatch.setattr(managing.time, "monotonic", lambda: 1_000.0)
    cloud = Cloud(refuses=Busy("503"))
    with Pass(records, cloud, rules=dataclasses.replace(QUICK, settle_s=30)) as passes:
        for _ in range(3):
            passes.manager.look()
        launch(records, tmp_path, "late")
        passes.manager.look()
        records.cancel("late")
        passes.manager.look()
    assert records.find("late").state is State.CANCELLED
    assert [name for name, _ in cloud.submitted()] == ["run"] * 3


def test_what_is_refused_may_have_been_made_by_the_call_before(records, tmp_path):
    """The first answer is lost, the list lags behind, and then a quota is used up: the resource is deleted."""
    launch(records, tmp_path)
    cloud = Cloud()
    cloud.faults = [None, Busy("half an answer")]
    with Pass(records, cloud, rules=dataclasses.replace(QUICK, settle_s=30)) as passes:
        passes.manager.look()
        cloud.refuses = Denied("quota")
        passes.until(is_state(State.ENDING))
        spec = records.find("run").spec()[1]
        cloud.there["run"] = Resource(id="run", labels=spec.all_labels, phase=Phase.RUNNING)
        failed = passes.until(is_state(State.FAILED))
    assert failed.reason == "quota" and cloud.there == {}


@pytest.mark.parametrize("error", [Busy("503"), Denied("grant tpu.nodes.delete")])
def test_why_a_job_has_failed_is_not_why_it_cannot_be_deleted(records, tmp_path, error):
    launch(records, tmp_path, restarts=0)
    cloud = Cloud(phase=Phase.RUNNING, ended_costs=True)
    with Pass(records, cloud) as passes:
        passes.until(is_state(State.RUNNING))
        cloud.become("run", Phase.FAILED, reason="disk lost")
        cloud.faults = [None, None, error, None, error]
        failed = passes.until(is_state(State.FAILED))
    assert failed.reason == "disk lost (--restarts=0 are used up)"
    assert [line for line in passes.lines if str(error) in line] and cloud.there == {}


def test_what_a_list_does_not_show_yet_is_not_cancelled(records, tmp_path):
    launch(records, tmp_path)
    cloud, hidden = Cloud(), {}
    with Pass(records, cloud, rules=dataclasses.replace(QUICK, settle_s=30)) as passes:
        passes.until(is_state(State.WAITING))
        hidden, cloud.there = cloud.there, hidden
        records.cancel("run")
        for _ in range(20):
            passes.manager.look()
        assert records.find("run").state is State.ENDING
        cloud.there = hidden
        passes.until(is_state(State.CANCELLED))
    assert cloud.there == {} and len(cloud.submitted()) == 1


def test_one_job_that_breaks_the_manager_does_not_stop_the_rest(records, tmp_path, monkeypatch):
    for name in ("bad", "run"):
        launch(records, tmp_path, name)
    cloud = Cloud(phase=Phase.RUNNING)
    submit = cloud.submit

    def broken(spec):
        if spec.name == "bad":
            raise RuntimeError("a bug")
        submit(spec)

    cloud.submit = broken
    with Pass(records, cloud) as passes:
        passes.until(is_state(State.RUNNING))
        passes.manager.look()
    assert passes.lines.count("job bad: RuntimeError: a bug: tried again") == 1


def test_a_record_of_another_version_does_not_stop_the_rest(records, tmp_path):
    launch(records, tmp_path)
    document = json.loads(records.find("run").text)
    document["spec"]["later"] = 1
    later = Record(name="later", text=json.dumps(document), attempt=Attempt(launch="cd"))
    records.put(later)
    with Pass(records, Cloud(phase=Phase.RUNNING)) as passes:
        passes.until(is_state(State.RUNNING))
    assert records.find("later") == later
    assert [line for line in passes.lines if line.startswith("job later is not managed: no file of a job")] != []


def test_a_label_that_is_too_large_a_number_is_none(records, tmp_path):
    launch(records, tmp_path)
    cloud = Cloud(phase=Phase.RUNNING)
    with Pass(records, cloud) as passes:
        passes.until(is_state(State.RUNNING))
        labels = {**cloud.there["run"].labels, "capibara-attempt": "9" * 40}
        cloud.there["twin"] = Resource(id="twin", labels=labels, phase=Phase.RUNNING, created_s=9.0)
        passes.manager.look()
    assert records.find("run").attempt.number == 0 and [*cloud.there] == ["run"]


def test_a_client_that_cannot_connect_is_tried_again(records, tmp_path):
    launch(records, tmp_path)
    cloud, faults, lines = Cloud(), [Busy("no credentials yet")] * 3, []

    def connect(backend):
        if faults:
            raise faults.pop()
        return cloud

    with Manager(records, rules=QUICK, connect=connect, say=lines.append) as manager:
        for _ in range(4):
            manager.look()
    assert cloud.submitted() == [("run", 0)] and lines[0] == "no credentials yet: tried again"
    assert lines.count(lines[0]) == 1


def test_a_job_that_has_ended_can_be_resumed_while_its_manager_runs(records, tmp_path):
    launch(records, tmp_path)
    cloud = Cloud(phase=Phase.RUNNING)
    with Pass(records, cloud) as passes:
        passes.until(is_state(State.RUNNING))
        records.cancel("run")
        cancelled = passes.until(is_state(State.CANCELLED))
        other = Records(records.path)
        with other.lock("run") as has_it:
            assert has_it
            other.resume(dataclasses.replace(cancelled, state=State.REPLACING, outcome=None))
        other.close()
        passes.until(lambda record: record.state is State.RUNNING and record.attempt.number == 1)


def test_a_place_that_denies_access_is_tried_again_later(records, tmp_path, monkeypatch):
    launch(records, tmp_path)
    cloud, clock = Cloud(), [1_000.0]
    monkeypatch.setattr(managing.time, "monotonic", lambda: clock[0])
    cloud.faults = [Denied("log in"), Denied("log in")]
    with Pass(records, cloud) as passes:
        for _ in range(3):
            passes.manager.look()
        assert cloud.calls == ["resources"]
        clock[0] += 301
        passes.manager.look()
        clock[0] += 301
        passes.manager.look()
    assert cloud.submitted() == [("run", 0)] and passes.lines[0] == "log in: its jobs are not managed until then"
    assert passes.lines.count(passes.lines[0]) == 1


def test_half_an_answer_is_no_second_resource(records, tmp_path):
    """The resource was made, and the answer was lost."""
    launch(records, tmp_path)
    cloud = Cloud()

    def submit(spec):
        Cloud.submit(cloud, spec)
        raise Busy("the connection was cut")

    cloud.submit = submit
    with Pass(records, cloud) as passes:
        passes.until(is_state(State.WAITING))
    assert cloud.submitted() == [("run", 0)]


@pytest.mark.parametrize("error", [Denied("quota of v5e in us-west4-a is 0: ask for 8"), UserError("no such slice")])
def test_what_is_refused_ends_at_once(records, tmp_path, error):
    launch(records, tmp_path)
    cloud = Cloud(refuses=error)
    with Pass(records, cloud) as passes:
        failed = passes.until(is_state(State.FAILED))
        passes.manager.look()
    assert failed.reason == str(error) and len(cloud.submitted()) == 1


def test_a_name_that_something_else_has(records, tmp_path):
    launch(records, tmp_path)
    cloud = Cloud()
    cloud.there["run"] = Resource(id="run", labels={}, phase=Phase.RUNNING)  # somebody's own
    with Pass(records, cloud) as passes:
        failed = passes.until(is_state(State.FAILED))
    assert "exists already, without the labels of job run" in failed.reason and "run" in cloud.there


def test_access_that_is_lost_ends_the_manager_and_no_job(records, tmp_path):
    launch(records, tmp_path)
    cloud = Cloud(phase=Phase.RUNNING)
    with Pass(records, cloud) as passes:
        passes.until(is_state(State.RUNNING))
        cloud.faults = [Denied("grant roles/x")]
        with pytest.raises(Denied, match="grant roles/x"):
            passes.manager.run(lambda found: False)
    assert records.find("run").state is State.RUNNING and "run" in cloud.there


def test_cancelling_while_it_runs(records, tmp_path):
    launch(records, tmp_path)
    cloud = Cloud(phase=Phase.RUNNING)
    with Pass(records, cloud) as passes:
        passes.until(is_state(State.RUNNING))
        records.cancel("run")
        passes.until(is_state(State.CANCELLED))
    assert cloud.there == {}


def test_a_job_that_another_manager_has_is_left_to_it(records, tmp_path):
    launch(records, tmp_path)
    launch(records, tmp_path, "other")
    mine, theirs = Cloud(), Cloud()
    with Pass(records, theirs, ["run"]) as first, Pass(Records(records.path), mine) as second:
        first.manager.look()
        second.manager.look()
        assert theirs.submitted() == [("run", 0)] and mine.submitted() == [("other", 0)]
        assert [one.name for one in second.manager.look()] == ["other"]


def test_what_another_place_denies_does_not_stop_the_rest(records, tmp_path):
    launch(records, tmp_path)
    launch(records, tmp_path, "other", backend=Gke(namespace="closed"))
    good, bad, lines = Cloud(), Cloud(), []
    bad.faults = [Denied("no")] * 99
    with Manager(
        records, rules=QUICK, connect=lambda backend: bad if backend.namespace == "closed" else good, say=lines.append
    ) as manager:
        manager.look()
        manager.look()
    assert good.submitted() == [("run", 0)] and bad.submitted() == []
    assert bad.calls.count("resources") == 1


def report(tmp_path, host, beats, code=None, attempt=0, message=""):
    folder = tmp_path / "jobs/run/reports" / f"ab-{attempt}"
    folder.mkdir(parents=True, exist_ok=True)
    values = {"host": host, "beats": beats, "started_s": 1.0, "code": code, "message": message}
    (folder / f"{host}.json").write_text(json.dumps(values))


def test_a_run_that_reports_success_on_tpu_vms(records, tmp_path):
    launch(records, tmp_path)
    cloud = Cloud(phase=Phase.RUNNING, knows_result=False, ended_costs=True)
    report(tmp_path, "a", 9, code=0)
    with Pass(records, cloud) as passes:
        passes.until(is_state(State.SUCCEEDED))
    assert cloud.there == {}  # it would cost money still


def test_a_host_that_is_silent_is_replaced_and_the_new_one_is_not(records, tmp_path):
    launch(records, tmp_path)
    cloud = Cloud(phase=Phase.RUNNING)
    report(tmp_path, "a", 1)
    with Pass(records, cloud) as passes:
        passes.until(is_state(State.RUNNING))
        for beats in range(2, 60):  # longer than hung_s
            report(tmp_path, "a", beats)
            passes.manager.look()
            time.sleep(0.01)
        assert records.find("run").state is State.RUNNING and records.find("run").attempt.number == 0
        replaced = passes.until(lambda record: record.attempt.number == 1)
        assert replaced.reason.startswith("hung: a host has not reported") and replaced.attempt.failures == 1
        began_s = time.monotonic()
        while time.monotonic() - began_s < 0.4:  # its first report may come later
            passes.manager.look()
            number = records.find("run").attempt.number
            assert number == 1 or time.monotonic() - began_s >= 0.4  # a look that took long may see it end
            time.sleep(0.01)
        passes.until(lambda record: record.attempt.number == 2)
    assert any("1 hosts have not reported" in line for line in passes.lines)


def test_files_of_hosts_that_were_replaced_are_not_silent_hosts(records, tmp_path):
    """A cluster has started the pod again on another node."""
    launch(records, tmp_path)
    cloud = Cloud(phase=Phase.RUNNING)
    report(tmp_path, "old-node", 7)
    with Pass(records, cloud) as passes:
        passes.until(is_state(State.RUNNING))
        began_s, beats = time.monotonic(), 0
        while time.monotonic() - began_s < 0.5:
            beats += 1
            report(tmp_path, "new-node", beats)
            passes.manager.look()
            time.sleep(0.01)
    assert records.find("run").attempt.number == 0


def test_a_host_that_has_ended_is_not_silent(records, tmp_path):
    """Its system has not seen that yet, or waits for the other hosts."""
    launch(records, tmp_path)
    cloud = Cloud(phase=Phase.RUNNING)
    report(tmp_path, "a", 9, code=0)
    with Pass(records, cloud) as passes:
        passes.until(is_state(State.RUNNING))
        began_s = time.monotonic()
        while time.monotonic() - began_s < 0.5:
            passes.manager.look()
            time.sleep(0.01)
    assert records.find("run").state is State.RUNNING and records.find("run").attempt.number == 0


def test_reports_that_cannot_be_read_hang_nothing(records, tmp_path, monkeypatch):
    launch(records, tmp_path)
    cloud = Cloud(phase=Phase.RUNNING)
    report(tmp_path, "a", 1)
    with Pass(records, cloud) as passes:
        passes.until(is_state(State.RUNNING))
        passes.manager.look()
        folder = tmp_path / "jobs/run/reports/ab-0"
        monkeypatch.setattr(reports, "read", _unreadable)
        began_s = time.monotonic()
        while time.monotonic() - began_s < 0.5:
            passes.manager.look()
            time.sleep(0.01)
    assert folder.exists() and records.find("run").attempt.number == 0


def _unreadable(folder):
    raise TryAgain(f"{folder} cannot be read")


def test_a_lost_database_is_filled_from_the_labels(records, tmp_path):
    launched = launch(records, tmp_path, budget_usd=100.0, restarts=4)
    launch(records, tmp_path, "ended")
    cloud = Cloud(phase=Phase.RUNNING)
    with Pass(records, cloud) as passes:
        passes.until(is_state(State.RUNNING))
        cloud.become("run", Phase.PREEMPTED)
        passes.until(lambda record: record.state is State.RUNNING and record.attempt.number == 1)
        passes.until(is_state(State.RUNNING), "ended")
        cloud.become("ended", Phase.SUCCEEDED)
    cloud.there["foreign"] = Resource(id="x", labels={"capibara-job": "foreign"}, phase=Phase.RUNNING)
    lost, lines = Records(tmp_path / "new.sqlite"), []
    (found,) = recovery.recover(lost, GKE, cloud, str(tmp_path), lines.append)
    assert found.text == launched.text and found.attempt == records.find("run").attempt
    assert found.attempt.number == 1 and lost.all() == [found]
    assert any(line.startswith("job ended has ended") for line in lines)
    assert any("foreign/specs/.json does not exist" in line for line in lines)
    assert recovery.recover(lost, GKE, cloud, str(tmp_path), lines.append) == []
    submitted = len(cloud.submitted())
    with Pass(lost, cloud) as passes:
        passes.until(is_state(State.RUNNING))
        cloud.become("run", Phase.FAILED, reason="x")
        passes.until(lambda record: record.attempt.number == 2 and record.state is State.RUNNING)
    assert len(cloud.submitted()) == submitted + 1


def test_recovery_by_other_fields_names_them(records, tmp_path):
    launch(records, tmp_path)
    cloud = Cloud(phase=Phase.RUNNING)
    with Pass(records, cloud) as passes:
        passes.until(is_state(State.RUNNING))
    lines = []
    other = Gke(namespace="ml", queue="q")
    assert recovery.recover(Records(tmp_path / "new.sqlite"), other, cloud, str(tmp_path), lines.append) == []
    assert lines == ["job run is skipped: job run was launched with other fields of gke: queue is None, not q"]


def test_recovery_finds_a_later_launch_of_a_job_that_the_database_has_as_ended(records, tmp_path):
    """The database is a copy of last week's."""
    ended = dataclasses.replace(launch(records, tmp_path), state=State.FAILED)
    records.put(ended)
    spec, cloud = ended.spec()[1], Cloud()
    cloud.there["a"] = Resource(id="a", labels=spec.all_labels, phase=Phase.RUNNING, created_s=5.0)
    assert recovery.recover(records, GKE, cloud, str(tmp_path)) == [] and records.all() == [ended]
    later = dataclasses.replace(spec, attempt=Attempt(launch="cd", number=2))
    cloud.there["b"] = Resource(id="b", labels=later.all_labels, phase=Phase.RUNNING, created_s=6.0)
    (found,) = recovery.recover(records, GKE, cloud, str(tmp_path))
    assert found.attempt == later.attempt and found.state is State.WAITING and records.all() == [found]


def test_recovery_finds_the_resource_that_runs_beside_one_that_was_cancelled(records, tmp_path):
    launched = launch(records, tmp_path)
    labels = launched.spec()[1].all_labels
    cloud = Cloud()
    cloud.there = {
        "a": Resource(id="a", labels=labels, phase=Phase.RUNNING, created_s=5.0),
        "b": Resource(id="b", labels=labels, phase=Phase.CANCELLED, created_s=6.0),
    }
    report(tmp_path, "host", 1)
    (found,) = recovery.recover(Records(tmp_path / "new.sqlite"), GKE, cloud, str(tmp_path))
    assert found.running_s == 5.0  # it has chips, at the latest since then


def test_recovery_counts_chips_since_the_first_report(records, tmp_path):
    launched = launch(records, tmp_path)
    cloud = Cloud()
    cloud.there = {"a": Resource(id="a", labels=launched.spec()[1].all_labels, phase=Phase.RUNNING, created_s=0.5)}
    report(tmp_path, "host", 1)
    (found,) = recovery.recover(Records(tmp_path / "new.sqlite"), GKE, cloud, str(tmp_path))
    assert found.running_s == 1.0


@pytest.mark.parametrize("content", [b"[" * 3000, b"\xff", b" " * (2 << 20)])
def test_a_file_that_is_none_of_a_job_does_not_stop_the_recovery(records, tmp_path, content):
    launch(records, tmp_path)
    bad = launch(records, tmp_path, "bad").spec()[1]
    pathlib.Path(spec_file.url_of(bad)).write_bytes(content)
    cloud, lines = Cloud(phase=Phase.RUNNING), []
    with Pass(records, cloud) as passes:
        passes.until(is_state(State.RUNNING))
    found = recovery.recover(Records(tmp_path / "new.sqlite"), GKE, cloud, str(tmp_path), lines.append)
    assert [one.name for one in found] == ["run"] and len(lines) == 1 and lines[0].startswith("job bad is skipped: ")
