"""What is to be done for a job, decided from its record and from what its system and its hosts say: no call, no clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from capibara.jobs.managing import breaker
from capibara.jobs.managing.records import Record, State
from capibara.jobs.reports import Outcome
from capibara.jobs.spec import JobSpec
from capibara.jobs.systems.system import Phase, Resource, System
from capibara.multihost import exits

_SHORTEST_S = 60.0  # of an attempt that a budget must pay for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """Times, in seconds.

    Attributes:
      settle_s: after a call whose answer has not come, a resource may still appear for so long.
      vanish_s: a resource that is not listed for so long is gone.
      hung_s: a host that has not reported for so long hangs.
      start_s: so long hosts may take from having chips to their first report.
      well_s: a resource that has run so long has not failed at once: the next one follows after the first pause.
      first_s: pause before a resource is replaced; it doubles with each that does not run well.
      longest_s: the longest pause.
    """

    settle_s: float = 90.0
    vanish_s: float = 60.0
    hung_s: float = 900.0
    start_s: float = 3600.0
    well_s: float = 600.0
    first_s: float = 10.0
    longest_s: float = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """What is seen of a job.

    Attributes:
      resources: those with the job's name in their labels.
      outcome: what the reports of the present attempt's hosts amount to.
      silent_s: the seconds since the last report of the host that is silent for longest; 0.0 if that is not known.
      missing: how many hosts have not reported yet.
      is_cancelled: the user wants it to end.
    """

    resources: Sequence[Resource]
    outcome: Outcome = Outcome()
    silent_s: float = 0.0
    missing: int = 0
    is_cancelled: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What is to be done, after the record was written down.

    Attributes:
      record: the job's new one.
      submit: make the resource of its attempt.
      delete: resources to delete.
    """

    record: Record
    submit: bool = False
    delete: Sequence[Resource] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lifecycle:
    """Decides for the jobs of one system.

    Attributes:
      knows_result, ended_costs, has_unique_names, repeats_delete: of the System.
      rules: times.
    """

    knows_result: bool
    ended_costs: bool
    has_unique_names: bool
    repeats_delete: bool = False
    rules: Rules = Rules()

    @staticmethod
    def of(system: System, rules: Rules) -> Lifecycle:
        """Of a system."""
        return Lifecycle(
            knows_result=system.knows_result,
            ended_costs=system.ended_costs,
            has_unique_names=system.has_unique_names,
            repeats_delete=system.repeats_delete,
            rules=rules,
        )

    def decide(self, record: Record, spec: JobSpec, seen: Seen, now_s: float) -> Decision:
        """What is to be done for a job.

        Args:
          record: the job's.
          spec: of its present attempt.
          seen: of the job.
          now_s: seconds since 1970.
        """
        mine = [resource for resource in seen.resources if resource.attempt.launch == record.attempt.launch]
        if record.state.is_final:  # a call that was answered after all
            return Decision(record=record, delete=self._to_delete([item for item in mine if not self._is_over(item)]))
        if mine and (newest := max(item.attempt.number for item in mine)) > record.attempt.number:
            attempt = next(item.attempt for item in mine if item.attempt.number == newest)
            record = dataclasses.replace(record, attempt=attempt, state=State.WAITING)
        if any(item.attempt.number == record.attempt.number for item in mine):
            record = dataclasses.replace(record, submit_s=0.0)
        if seen.is_cancelled and record.state is not State.ENDING:
            record = ending(record, State.CANCELLED, "cancelled", now_s)
        if record.state is State.ENDING:
            return self._end(record, mine, now_s)
        if record.state is State.REPLACING:
            return self._replace(record, mine, now_s)
        present = sorted(
            (item for item in mine if item.attempt.number == record.attempt.number),
            key=lambda item: (item.created_s, item.id),
        )
        others = [item for item in mine if item not in present[:1] and not item.phase.has_ended]
        if record.state is State.SUBMITTING:
            if not present:
                return self._submit(record, seen.resources, others, now_s)
            record = dataclasses.replace(record, state=State.WAITING)
        if not present:
            return self._miss(record, spec, others, now_s)
        record = dataclasses.replace(record, gone_s=0.0)
        decided = self._look(record, spec, present[0], seen, now_s)
        return dataclasses.replace(decided, delete=[*decided.delete, *self._to_delete(others)])

    def _to_delete(self, resources: Sequence[Resource]) -> list[Resource]:
        return [resource for resource in resources if self.repeats_delete or resource.phase is not Phase.DELETING]

    def _is_over(self, resource: Resource) -> bool:
        """Whether nothing of a resource costs any more."""
        return resource.phase.has_ended and not self.ended_costs

    def _is_uncertain(self, record: Record, now_s: float) -> bool:
        """Whether a resource may still appear that nobody has seen."""
        return 0.0 < record.submit_s and now_s - record.submit_s < self.rules.settle_s

    def _end(self, record: Record, mine: Sequence[Resource], now_s: float) -> Decision:
        left = [item for item in mine if not self._is_over(item)]
        if left or self._is_uncertain(record, now_s):
            return Decision(record=record, delete=self._to_delete(left))
        return Decision(record=dataclasses.replace(record, state=record.outcome or State.FAILED, submit_s=0.0))

    def _replace(self, record: Record, mine: Sequence[Resource], now_s: float) -> Decision:
        left = [item for item in mine if self.has_unique_names or not item.phase.has_ended]
        if left or self._is_uncertain(record, now_s):
            return Decision(record=record, delete=self._to_delete(left))
        attempt = dataclasses.replace(record.attempt, number=record.attempt.number + 1)
        return Decision(record=dataclasses.replace(record, attempt=attempt, state=State.SUBMITTING, submit_s=0.0))

    def _submit(self, record: Record, named: Sequence[Resource], others: Sequence[Resource], now_s: float) -> Decision:
        strangers = [item for item in named if item.attempt.launch != record.attempt.launch]
        # What was preempted waits for its own manager.
        live = [stranger for stranger in strangers if not stranger.phase.has_ended or stranger.phase is Phase.PREEMPTED]
        live = [item for item in live if item.phase is not Phase.DELETING]
        if live and not others:
            reason = f"{live[0].id} is {live[0].phase} already, of another launch of job {record.name}: choose another --name"
            return Decision(record=dataclasses.replace(record, state=State.FAILED, reason=reason))
        left = [stranger for stranger in strangers if self.has_unique_names] + list(others)
        is_uncertain = not self.has_unique_names and self._is_uncertain(record, now_s)
        if left or is_uncertain or now_s < record.due_s:
            return Decision(record=record, delete=self._to_delete(left))
        return Decision(record=dataclasses.replace(record, submit_s=now_s), submit=True)

    def _miss(self, record: Record, spec: JobSpec, others: Sequence[Resource], now_s: float) -> Decision:
        if self._is_uncertain(record, now_s):  # a list may lag behind
            return Decision(record=record, delete=self._to_delete(others))
        if not record.gone_s:
            return Decision(record=dataclasses.replace(record, gone_s=now_s), delete=self._to_delete(others))
        if now_s - record.gone_s < self.rules.vanish_s:
            return Decision(record=record, delete=self._to_delete(others))
        return Decision(record=self._failed(record, spec, "its resource is gone", now_s))

    def _look(self, record: Record, spec: JobSpec, resource: Resource, seen: Seen, now_s: float) -> Decision:
        """A job whose present resource is there."""
        code = seen.outcome.code if not self.knows_result or resource.phase is Phase.FAILED else None
        if resource.phase is Phase.SUCCEEDED or (code == 0 and not self.knows_result):
            return Decision(record=ending(record, State.SUCCEEDED, "", now_s))
        if resource.phase is Phase.PREEMPTED:
            return Decision(record=self._again(record, spec, resource.reason or "preempted", now_s))
        if resource.phase is Phase.CANCELLED:
            return Decision(
                record=ending(record, State.CANCELLED, resource.reason or f"{resource.id} was cancelled", now_s)
            )
        if resource.phase is Phase.DELETING:
            return Decision(
                record=dataclasses.replace(record, reason=resource.reason or "its resource is being deleted")
            )
        if code == exits.EXIT_USER_ERROR or resource.is_denied:
            reason = resource.reason if resource.is_denied else f"exit code 2: {seen.outcome.message}"
            return Decision(record=ending(record, State.FAILED, reason, now_s))
        if code or resource.phase is Phase.FAILED:
            reason = f"exit code {code}: {seen.outcome.message}" if code else resource.reason or "failed"
            return Decision(record=self._failed(record, spec, reason, now_s))
        if resource.is_partial:
            return Decision(record=dataclasses.replace(record, state=State.SUBMITTING, submit_s=now_s), submit=True)
        if resource.phase is Phase.WAITING:  # perhaps once more, as when a queue suspends a job
            return Decision(
                record=dataclasses.replace(_spent(record, now_s), state=State.WAITING, reason=resource.reason)
            )
        record = dataclasses.replace(
            record, state=State.RUNNING, reason=resource.reason, running_s=record.running_s or now_s
        )
        if spec.longest_s is not None and record.spent_s(now_s) >= spec.longest_s:
            return Decision(record=ending(record, State.FAILED, over_budget(spec), now_s))
        if why := self._hangs(record, seen, now_s):
            return Decision(record=self._failed(record, spec, why, now_s))
        return Decision(record=record)

    def _hangs(self, record: Record, seen: Seen, now_s: float) -> str | None:
        silent_s = min(seen.silent_s, now_s - record.running_s)  # without chips nobody reports
        if silent_s >= self.rules.hung_s:
            return f"hung: a host has not reported for {silent_s / 60:.0f} minutes"
        if seen.missing and now_s - record.running_s >= self.rules.start_s:
            return f"hung: {seen.missing} hosts have not reported within {self.rules.start_s / 60:.0f} minutes"
        return None

    def _failed(self, record: Record, spec: JobSpec, reason: str, now_s: float) -> Record:
        failures = record.attempt.failures + 1
        record = dataclasses.replace(record, attempt=dataclasses.replace(record.attempt, failures=failures))
        if failures > spec.restarts:
            return ending(record, State.FAILED, f"{reason} (--restarts={spec.restarts} are used up)", now_s)
        return self._again(record, spec, reason, now_s)

    def _again(self, record: Record, spec: JobSpec, reason: str, now_s: float) -> Record:
        if is_over_budget(spec, record.spent_s(now_s)):
            return ending(record, State.FAILED, f"{reason}; {over_budget(spec)}", now_s)
        ran_well = record.running_s and now_s - record.running_s >= self.rules.well_s
        pauses = 1 if ran_well else record.pauses + 1
        due_s = now_s + breaker.pause_s(pauses, self.rules.first_s, self.rules.longest_s)
        record = _spent(record, now_s)
        return dataclasses.replace(record, state=State.REPLACING, reason=reason, due_s=due_s, gone_s=0.0, pauses=pauses)


def is_over_budget(spec: JobSpec, spent_s: float) -> bool:
    """Whether the budget pays for less than a minute more, which is not enough for another attempt."""
    return spec.longest_s is not None and spent_s > spec.longest_s - _SHORTEST_S


def over_budget(spec: JobSpec) -> str:
    """Why a job ends whose budget is spent."""
    return f"its chips have cost the budget of {spec.budget_usd:,.2f} USD: raise --budget_usd and launch it again"


def ending(record: Record, outcome: State, reason: str, now_s: float) -> Record:
    """The record of a job whose resources are deleted now, and which then ends."""
    return dataclasses.replace(_spent(record, now_s), state=State.ENDING, outcome=outcome, reason=reason)


def _spent(record: Record, now_s: float) -> Record:
    attempt = dataclasses.replace(record.attempt, spent_s=round(record.spent_s(now_s)))
    return dataclasses.replace(record, attempt=attempt, running_s=0.0)
