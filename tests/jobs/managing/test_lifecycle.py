"""What is decided for a job, in each situation that its system and its hosts can be in."""

import dataclasses
import pathlib
import sys

import pytest

from capibara.jobs.managing.lifecycle import Lifecycle, Rules, Seen
from capibara.jobs.managing.records import Record, State
from capibara.jobs.reports import Outcome
from capibara.jobs.spec import Attempt
from capibara.jobs.systems.system import Phase, Resource

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from job_specs import job  # noqa: E402

NOW = 1_000_000.0
RULES = Rules(settle_s=90, vanish_s=60, hung_s=900, start_s=3600, well_s=600, first_s=10, longest_s=600)
# As the queued resources, as JobSets, and as Vertex AI's jobs.
TPU_VMS = Lifecycle(knows_result=False, ended_costs=True, has_unique_names=True, rules=RULES)
CLUSTER = Lifecycle(knows_result=True, ended_costs=False, has_unique_names=True, rules=RULES)
CUSTOM_JOBS = Lifecycle(knows_result=True, ended_costs=False, has_unique_names=False, rules=RULES)
ALL = pytest.mark.parametrize("lifecycle", [TPU_VMS, CLUSTER, CUSTOM_JOBS], ids=["gce", "gke", "vertex"])


def record(state=State.RUNNING, number=0, **fields):
    attempt = Attempt(launch="ab", number=number, failures=fields.pop("failures", 0), spent_s=fields.pop("spent_s", 0))
    return Record(name="run", text="", attempt=attempt, state=state, **fields)


def resource(phase=Phase.RUNNING, number=0, launch="ab", **fields):
    labels = {"capibara-job": "run", **Attempt(launch=launch, number=number).labels}
    return Resource(**{"id": f"run-{number}", "labels": labels, "phase": phase, **fields})


def decide(lifecycle, record, *resources, now_s=NOW, spec=None, **seen):
    return lifecycle.decide(record, spec or job(restarts=2), Seen(resources=resources, **seen), now_s)


@ALL
def test_a_new_job_is_written_down_before_it_is_submitted(lifecycle):
    decision = decide(lifecycle, record(State.SUBMITTING))
    assert decision.submit and decision.record.submit_s == NOW and decision.record.state is State.SUBMITTING


@ALL
def test_what_was_submitted_already_is_not_submitted_again(lifecycle):
    """A manager that was killed right after the call."""
    decision = decide(lifecycle, record(State.SUBMITTING, submit_s=NOW - 1), resource(Phase.WAITING))
    assert not decision.submit and decision.record.state is State.WAITING and decision.record.submit_s == 0


def test_a_call_without_an_answer_is_repeated_at_once_only_where_names_are_unique():
    unanswered = record(State.SUBMITTING, submit_s=NOW - 30)
    assert decide(TPU_VMS, unanswered).submit and decide(CLUSTER, unanswered).submit
    assert not decide(CUSTOM_JOBS, unanswered).submit
    assert decide(CUSTOM_JOBS, dataclasses.replace(unanswered, submit_s=NOW - 91)).submit


@ALL
def test_the_next_attempt_waits_for_its_pause(lifecycle):
    assert not decide(lifecycle, record(State.SUBMITTING, due_s=NOW + 1)).submit
    assert decide(lifecycle, record(State.SUBMITTING, due_s=NOW)).submit


@ALL
def test_of_two_resources_of_one_attempt_the_younger_is_deleted(lifecycle):
    first, second = resource(id="a", created_s=5.0), resource(id="b", created_s=6.0)
    decision = decide(lifecycle, record(), second, first)
    assert [*decision.delete] == [second] and decision.record.state is State.RUNNING


@ALL
def test_a_job_of_the_same_name_that_runs_is_not_touched(lifecycle):
    decision = decide(lifecycle, record(State.SUBMITTING), resource(launch="cd"))
    assert decision.record.state is State.FAILED and "choose another --name" in decision.record.reason
    assert not decision.submit and not decision.delete


def test_what_is_left_of_an_ended_job_of_the_same_name_makes_room():
    old = resource(Phase.FAILED, launch="cd")
    for lifecycle in (TPU_VMS, CLUSTER):
        decision = decide(lifecycle, record(State.SUBMITTING), old)
        assert [*decision.delete] == [old] and not decision.submit
    assert decide(CUSTOM_JOBS, record(State.SUBMITTING), old).submit


@ALL
def test_what_is_being_deleted_of_an_earlier_launch_is_waited_for(lifecycle):
    """A job that was cancelled a moment ago, and is launched again."""
    decision = decide(lifecycle, record(State.SUBMITTING), resource(Phase.DELETING, launch="cd"))
    assert decision.record.state is State.SUBMITTING and not decision.delete
    assert decision.submit is not lifecycle.has_unique_names


@ALL
@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.RUNNING])
def test_a_job_has_the_state_of_its_resource(lifecycle, phase):
    decision = decide(lifecycle, record(State.WAITING), resource(phase, reason="why"))
    assert decision.record.state == phase and decision.record.reason == "why" and not decision.delete
    assert decision.record.running_s == (NOW if phase is Phase.RUNNING else 0.0)


@ALL
def test_a_preempted_resource_is_replaced_and_does_not_count_as_a_failure(lifecycle):
    running = record(running_s=NOW - 50.4, spent_s=10)
    first = decide(lifecycle, running, resource(Phase.PREEMPTED)).record
    assert first.state is State.REPLACING and first.attempt == Attempt(launch="ab", spent_s=60)
    assert NOW + 5 <= first.due_s <= NOW + 10 and first.running_s == 0
    second = decide(lifecycle, first, resource(Phase.PREEMPTED))
    if lifecycle.has_unique_names:
        assert [one.id for one in second.delete] == ["run-0"] and second.record == first
        assert not decide(lifecycle, first, resource(Phase.DELETING)).delete
        second = decide(lifecycle, first)
    assert second.record.state is State.SUBMITTING and second.record.attempt.number == 1
    assert not decide(lifecycle, second.record, now_s=first.due_s - 0.1).submit
    assert decide(lifecycle, second.record, now_s=first.due_s).submit


@ALL
def test_failures_are_counted_and_end_a_job(lifecycle):
    first = decide(lifecycle, record(failures=1), resource(Phase.FAILED, reason="node lost")).record
    assert first.state is State.REPLACING and first.attempt.failures == 2 and first.reason == "node lost"
    last = decide(lifecycle, record(failures=2), resource(Phase.FAILED, reason="node lost")).record
    assert last.state is State.ENDING and last.outcome is State.FAILED
    assert last.reason == "node lost (--restarts=2 are used up)"


@ALL
def test_pauses_double_until_a_resource_has_run_well(lifecycle):
    quick = decide(lifecycle, record(pauses=2, running_s=NOW - 599), resource(Phase.PREEMPTED)).record
    assert quick.pauses == 3 and NOW + 20 <= quick.due_s <= NOW + 40
    well = decide(lifecycle, record(pauses=2, running_s=NOW - 600), resource(Phase.PREEMPTED)).record
    assert well.pauses == 1 and well.due_s <= NOW + 10
    often = decide(lifecycle, record(pauses=50), resource(Phase.PREEMPTED)).record
    assert NOW + 300 <= often.due_s <= NOW + 600


@ALL
def test_a_missing_quota_or_right_ends_a_job_at_once(lifecycle):
    decision = decide(lifecycle, record(), resource(Phase.FAILED, reason="quota of v5e: ask for 64", is_denied=True))
    assert decision.record.outcome is State.FAILED and decision.record.reason == "quota of v5e: ask for 64"


def test_reports_say_how_a_run_on_tpu_vms_has_ended():
    done = decide(TPU_VMS, record(), resource(), outcome=Outcome(code=0)).record
    assert done.state is State.ENDING and done.outcome is State.SUCCEEDED
    wrong = decide(TPU_VMS, record(), resource(), outcome=Outcome(code=2, message="h: --x")).record
    assert wrong.outcome is State.FAILED and wrong.reason == "exit code 2: h: --x"
    crashed = decide(TPU_VMS, record(), resource(), outcome=Outcome(code=1, message="h")).record
    assert crashed.state is State.REPLACING and crashed.attempt.failures == 1


@pytest.mark.parametrize("lifecycle", [CLUSTER, CUSTOM_JOBS])
def test_reports_only_explain_what_a_system_knows(lifecycle):
    """It may start the hosts again, and then files of the earlier ones are still there."""
    assert decide(lifecycle, record(), resource(), outcome=Outcome(code=1)).record.state is State.RUNNING
    failed = resource(Phase.FAILED, reason="BackoffLimitExceeded")
    wrong = decide(lifecycle, record(), failed, outcome=Outcome(code=2, message="h: --x")).record
    assert wrong.outcome is State.FAILED and wrong.reason == "exit code 2: h: --x"
    assert decide(lifecycle, record(), failed, outcome=Outcome(code=1)).record.state is State.REPLACING
    assert decide(lifecycle, record(), resource(Phase.SUCCEEDED)).record.outcome is State.SUCCEEDED


@ALL
def test_hosts_that_do_not_report_are_replaced(lifecycle):
    assert decide(lifecycle, record(running_s=1.0), resource(), silent_s=899.0).record.state is State.RUNNING
    hung = decide(lifecycle, record(running_s=1.0), resource(), silent_s=900.0).record
    assert hung.state is State.REPLACING and hung.reason == "hung: a host has not reported for 15 minutes"
    late = record(running_s=NOW - 3600)
    assert decide(lifecycle, late, resource(), missing=3).record.reason.startswith("hung: 3 hosts have not reported")
    assert decide(lifecycle, late, resource()).record.state is State.RUNNING
    assert decide(lifecycle, record(running_s=NOW - 3599), resource(), missing=3).record.state is State.RUNNING


@ALL
def test_a_budget_ends_a_job(lifecycle):
    spec = job("v5e-64", budget_usd=76.8)  # an hour
    assert spec.longest_s == 3600
    running = record(spent_s=3000, running_s=NOW - 599)
    assert decide(lifecycle, running, resource(), spec=spec).record.state is State.RUNNING
    ended = decide(lifecycle, running, resource(), spec=spec, now_s=NOW + 1).record
    assert ended.state is State.ENDING and ended.outcome is State.FAILED and "budget of 76.80 USD" in ended.reason


@ALL
@pytest.mark.parametrize("phase", [Phase.FAILED, Phase.PREEMPTED])
def test_a_budget_that_is_spent_pays_for_no_other_attempt(lifecycle, phase):
    spec = job("v5e-64", budget_usd=76.8)
    last = decide(lifecycle, record(spent_s=3000, running_s=NOW - 541), resource(phase, reason="x"), spec=spec).record
    assert last.outcome is State.FAILED and last.reason.startswith("x; its chips have cost the budget")
    assert last.attempt.spent_s == 3541
    again = decide(lifecycle, record(spent_s=3000, running_s=NOW - 540), resource(phase), spec=spec).record
    assert again.state is State.REPLACING


@ALL
def test_a_job_that_waits_for_chips_again_pays_nothing_and_does_not_hang(lifecycle):
    waits = decide(lifecycle, record(running_s=NOW - 50), resource(Phase.WAITING)).record
    assert waits.attempt.spent_s == 50 and waits.running_s == 0
    assert decide(lifecycle, waits, resource(Phase.WAITING), now_s=NOW + 9999).record.attempt.spent_s == 50
    runs = decide(lifecycle, waits, resource(), now_s=NOW + 9999, silent_s=9999.0).record
    assert runs.state is State.RUNNING and runs.spent_s(NOW + 9999) == 50
    hung = decide(lifecycle, runs, resource(), now_s=NOW + 9999 + 900, silent_s=9999.0).record
    assert hung.state is State.REPLACING


@ALL
def test_a_resource_that_a_list_does_not_show_yet_is_not_gone(lifecycle):
    made = record(State.WAITING, submit_s=NOW - 30)
    assert decide(lifecycle, made).record == made
    assert decide(lifecycle, made, is_cancelled=True).record.submit_s == NOW - 30
    assert decide(lifecycle, made, resource()).record.submit_s == 0
    assert decide(lifecycle, made, now_s=NOW + 61).record.gone_s == NOW + 61


@ALL
def test_a_resource_that_was_made_in_part_is_submitted_again(lifecycle):
    decision = decide(lifecycle, record(State.WAITING), resource(Phase.WAITING, is_partial=True))
    assert decision.submit and decision.record.state is State.SUBMITTING and decision.record.submit_s == NOW


@ALL
def test_what_was_preempted_of_another_launch_is_left_to_its_manager(lifecycle):
    decision = decide(lifecycle, record(State.SUBMITTING), resource(Phase.PREEMPTED, launch="cd"))
    assert decision.record.state is State.FAILED and not decision.delete
    assert decision.record.reason.startswith("run-0 is preempted already, of another launch of job run")


def test_a_deletion_of_several_steps_is_repeated():
    hosts = dataclasses.replace(CLUSTER, repeats_delete=True)
    ending = record(State.ENDING, outcome=State.CANCELLED)
    for lifecycle, count in ((CLUSTER, 0), (hosts, 1)):
        decision = decide(lifecycle, ending, resource(Phase.DELETING))
        assert len(decision.delete) == count and decision.record.state is State.ENDING


@ALL
def test_a_resource_that_vanishes_is_made_again_after_a_while(lifecycle):
    missed = decide(lifecycle, record()).record
    assert missed.state is State.RUNNING and missed.gone_s == NOW
    assert decide(lifecycle, missed, now_s=NOW + 59).record.state is State.RUNNING
    assert decide(lifecycle, missed, resource(), now_s=NOW + 59).record.gone_s == 0
    assert decide(lifecycle, missed, now_s=NOW + 60).record.state is State.REPLACING


@ALL
@pytest.mark.parametrize("state", [State.SUBMITTING, State.WAITING, State.RUNNING, State.REPLACING])
def test_cancelling_deletes_before_it_ends(lifecycle, state):
    first = decide(lifecycle, record(state), resource(), is_cancelled=True)
    assert first.record.state is State.ENDING and [one.id for one in first.delete] == ["run-0"] and not first.submit
    ended = resource(Phase.FAILED)
    second = decide(lifecycle, first.record, ended, is_cancelled=True)
    if lifecycle.ended_costs:
        assert [*second.delete] == [ended] and second.record.state is State.ENDING
        second = decide(lifecycle, first.record, is_cancelled=True)
    assert second.record.state is State.CANCELLED and not second.delete


@ALL
def test_a_job_that_may_still_appear_has_not_ended(lifecycle):
    unanswered = record(State.SUBMITTING, submit_s=NOW - 30)
    ending = decide(lifecycle, unanswered, is_cancelled=True).record
    assert ending.state is State.ENDING
    assert [one.id for one in decide(lifecycle, ending, resource()).delete] == ["run-0"]
    assert decide(lifecycle, ending, now_s=NOW + 59).record.state is State.ENDING
    assert decide(lifecycle, ending, now_s=NOW + 61).record.state is State.CANCELLED


@ALL
def test_what_appears_after_the_end_is_deleted(lifecycle):
    late = resource()
    assert [*decide(lifecycle, record(State.CANCELLED), late).delete] == [late]


@ALL
def test_a_newer_attempt_than_the_record_is_taken_over(lifecycle):
    """The database is a copy of last week's."""
    newer = resource(number=4)
    decision = decide(lifecycle, record(State.SUBMITTING, number=1, submit_s=NOW), newer)
    assert decision.record.attempt.number == 4 and decision.record.state is State.RUNNING and not decision.submit


@ALL
def test_an_older_attempt_that_runs_is_deleted(lifecycle):
    old, present = resource(number=1), resource(number=2)
    assert [*decide(lifecycle, record(number=2), old, present).delete] == [old]
    waits = decide(lifecycle, record(State.SUBMITTING, number=2), old)
    assert [*waits.delete] == [old] and not waits.submit


@ALL
def test_what_is_being_deleted_is_waited_for(lifecycle):
    decision = decide(lifecycle, record(), resource(Phase.DELETING))
    assert decision.record.state is State.RUNNING and not decision.delete


@ALL
def test_what_somebody_has_cancelled_elsewhere_is_not_made_again(lifecycle):
    decision = decide(lifecycle, record(), resource(Phase.CANCELLED))
    assert decision.record.state is State.ENDING and decision.record.outcome is State.CANCELLED
    assert decision.record.reason == "run-0 was cancelled"
