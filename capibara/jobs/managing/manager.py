"""Looks after jobs until they have ended: one pass after another over their systems, each of which may be killed."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from capibara.core.types import TryAgain, UserError
from capibara.jobs import reports, systems
from capibara.jobs.backends.backend import Backend
from capibara.jobs.managing.breaker import Breaker
from capibara.jobs.managing.lifecycle import Decision, Lifecycle, Rules, Seen
from capibara.jobs.managing.records import Record, Records, State
from capibara.jobs.spec import JobSpec
from capibara.jobs.systems.system import Busy, Exists, Resource, System

_THREADS = 8
_CLASHES = 3  # passes in which a name is taken by what is not listed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """How often the manager looks, in seconds.

    Attributes:
      poll_s: between two passes.
      reports_s: between two reads of a job's reports.
    """

    poll_s: float = 15.0
    reports_s: float = 30.0


class Manager:
    """Manages jobs; use it in a `with` block.

    It manages the jobs whose locks it gets; those of another manager are left to that one.

    Args:
      records: the jobs.
      names: of the jobs to manage; None: all that have not ended, also those that are launched later.
      rules: when a resource is hung, gone, or made again.
      times: how often it looks.
      connect: opens the system of a back end.
      say: called with each line of a job's history.
    """

    def __init__(
        self,
        records: Records,
        names: Collection[str] | None = None,
        *,
        rules: Rules = Rules(),  # noqa: B008
        times: Times = Times(),  # noqa: B008
        connect: Callable[[Backend], System] = systems.connect,
        say: Callable[[str], None] = print,
    ):
        self._records, self._names, self._rules, self._times = records, names, rules, times
        self._connect, self._say = connect, say
        self._places: dict[str, _Place] = {}
        self._denied: dict[str, UserError] = {}
        self._watches = collections.defaultdict[str, _Watch](_Watch)
        self._locks = contextlib.ExitStack()
        self._mine: set[str] = set()

    def __enter__(self) -> Manager:
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS, "capibara-manager")
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._locks.close()
        for place in self._places.values():
            place.system.close()

    def run(
        self,
        until: Callable[[Sequence[Record]], bool],
        watch: Callable[[Sequence[Record]], None] = lambda records: None,
    ) -> list[Record]:
        """Manages until `until` says of the jobs' records that it is enough, or none is left that could be managed.

        Args:
          until: called after each pass.
          watch: called after each pass, to show the jobs.

        Returns:
          The records.

        Raises:
          Denied: a system denies access to all that it has of the jobs; they are left as they are.
        """
        while True:
            found = self.look()
            watch(found)
            if until(found):
                return found
            left = [one for one in found if not one.state.is_final]
            if self._denied and all(_place_of(one) in self._denied for one in left):
                raise next(iter(self._denied.values()))
            time.sleep(self._times.poll_s * random.uniform(0.8, 1.0))

    def look(self) -> list[Record]:
        """One pass over all jobs; returns their records after it."""
        self._take()
        cancelled = self._records.cancelled()
        chosen = [one for one in self._records.all() if one.name in self._mine]
        by_place = collections.defaultdict[str, list[Record]](list)
        for one in chosen:
            by_place[_place_of(one)].append(one)
        for key, found in by_place.items():
            if key in self._denied or all(one.state.is_final and not one.submit_s for one in found):
                continue
            self._visit(key, found, cancelled)
        names = self._names
        return [
            one for one in self._records.all() if (one.name in names if names is not None else one.name in self._mine)
        ]

    def _take(self) -> None:
        """Takes the locks of the jobs to manage."""
        for one in self._records.all():
            wanted = one.name in self._names if self._names is not None else not one.state.is_final
            if wanted and one.name not in self._mine:
                with contextlib.ExitStack() as stack:
                    if stack.enter_context(self._records.lock(one.name)):
                        self._mine.add(one.name)
                        self._locks.enter_context(stack.pop_all())

    def _visit(self, key: str, found: Sequence[Record], cancelled: set[str]) -> None:
        """One pass over the jobs of one place."""
        place = self._place(key, found[0])
        if place is None or not place.breaker.allows(time.time()):
            return
        try:
            resources = place.system.resources()
        except Busy as error:
            place.breaker.failed(time.time(), error.after_s)
            if str(error) != place.fault:
                self._say(f"{error}: tried again")
            place.fault = str(error)
            return
        except UserError as error:
            self._denied[key] = error
            return
        place.breaker.succeeded()
        place.fault = ""
        by_job = collections.defaultdict[str, list[Resource]](list)
        for one in resources:
            by_job[one.job].append(one)
        steps = [self._pool.submit(self._step, place, one, by_job[one.name], one.name in cancelled) for one in found]
        for step in steps:
            step.result()

    def _place(self, key: str, record: Record) -> _Place | None:
        """The place of a job; None: there is no way to it."""
        if key not in self._places:
            try:
                system = self._connect(record.spec()[0])
            except UserError as error:
                self._denied[key] = error
                return None
            self._places[key] = _Place(system, Lifecycle.of(system, self._rules), Breaker())
        return self._places[key]

    def _step(self, place: _Place, record: Record, resources: Sequence[Resource], is_cancelled: bool) -> None:
        """Decides for one job, writes that down and does it."""
        _, spec = record.spec()
        watch, now_s = self._watches[record.name], time.time()
        if record.state in (State.WAITING, State.RUNNING) and now_s - watch.read_s >= self._times.reports_s:
            watch.read(spec, now_s, self._say)
        seen = Seen(
            resources=resources,
            outcome=watch.outcome_of(spec),
            silent_s=watch.silent_s(now_s),
            missing=watch.missing,
            is_cancelled=is_cancelled,
        )
        decision = place.lifecycle.decide(record, spec, seen, now_s)
        self._write(record, decision.record)
        self._act(place, decision)

    def _write(self, before: Record, after: Record) -> None:
        if before != after:
            self._records.put(after)
        if (before.state, before.attempt.number) != (after.state, after.attempt.number):
            text = f"{after.state}{f' (attempt {after.attempt.number + 1})' if after.attempt.number else ''}"
            text += f": {after.reason}" if after.reason else ""
            self._records.note(after.name, text)
            self._say(f"job {after.name} is {text}")

    def _act(self, place: _Place, decision: Decision) -> None:
        record = decision.record
        try:
            for resource in decision.delete:
                if place.breaker.allows(time.time()):
                    place.system.delete(resource)
                    place.breaker.succeeded()
            if decision.submit:
                self._submit(place, record)
        except Busy as error:
            place.breaker.failed(time.time(), error.after_s)
        except UserError as error:
            reason = str(error)
            if decision.submit:
                # What is refused was not made: nothing is left to delete.
                self._write(record, dataclasses.replace(record, state=State.FAILED, reason=reason, submit_s=0.0))
            elif reason != record.reason:
                self._write(record, dataclasses.replace(record, reason=reason))
                self._say(f"job {record.name}: {reason}")

    def _submit(self, place: _Place, record: Record) -> None:
        watch, (_, spec) = self._watches[record.name], record.spec()
        if not place.breaker.allows(time.time()):  # no call was begun, so nothing is uncertain
            self._records.put(dataclasses.replace(record, submit_s=0.0))
            return
        try:
            place.system.submit(spec)
        except Exists as error:
            place.breaker.succeeded()
            watch.clashes += 1
            if watch.clashes > _CLASHES:
                raise UserError(
                    f"{error} exists already, and was not made for job {record.name}: choose another --name"
                ) from None
            self._records.put(dataclasses.replace(record, submit_s=0.0))
            return
        place.breaker.succeeded()
        watch.clashes = 0
        self._write(record, dataclasses.replace(record, state=State.WAITING, submit_s=0.0))


@dataclasses.dataclass
class _Place:
    """A system at one place, with what the manager knows of it."""

    system: System
    lifecycle: Lifecycle
    breaker: Breaker
    fault: str = ""  # why its last call was not answered


@dataclasses.dataclass
class _Watch:
    """What this manager has seen of the reports of a job's present attempt.

    The hosts' clocks are not compared with ours: a report is as old as the time since it last changed here.
    """

    attempt: tuple[str, int] = ("", 0)
    read_s: float = 0.0
    found: Mapping[str, reports.Report] = dataclasses.field(default_factory=dict)
    changed_s: dict[str, float] = dataclasses.field(default_factory=dict)
    hosts: int = 0
    clashes: int = 0

    def read(self, spec: JobSpec, now_s: float, say: Callable[[str], None]) -> None:
        """Reads the reports; those that cannot be read are as they were, and nothing is silent meanwhile."""
        self._begin(spec)
        try:
            found = reports.read(spec.reports)
        except TryAgain as error:
            say(f"job {spec.name}: {error}")
            self.changed_s = dict.fromkeys(self.changed_s, now_s)
            return
        for name, report in found.items():
            if report != self.found.get(name):
                self.changed_s[name] = now_s
        self.found, self.read_s, self.hosts = found, now_s, spec.slice_.hosts

    def _begin(self, spec: JobSpec) -> None:
        attempt = (spec.attempt.launch, spec.attempt.number)
        if attempt != self.attempt:
            self.attempt, self.found, self.changed_s, self.read_s = attempt, {}, {}, 0.0

    def outcome_of(self, spec: JobSpec) -> reports.Outcome:
        """What the reports amount to."""
        self._begin(spec)
        return reports.outcome(self.found, spec.slice_.hosts)

    def silent_s(self, now_s: float) -> float:
        """The seconds for which the host that is silent for longest has not reported.

        A system that starts hosts again elsewhere leaves files of earlier ones: as many files count as there are hosts.
        """
        newest = sorted((self.changed_s[name] for name in self.found), reverse=True)[: self.hosts]
        running = [
            changed_s
            for name, changed_s in self.changed_s.items()
            if name in self.found and not self.found[name].is_final
        ]
        return now_s - min(newest) if newest and min(newest) in running else 0.0

    @property
    def missing(self) -> int:
        """How many hosts have not reported yet."""
        return max(0, self.hosts - len(self.found))


def _place_of(record: Record) -> str:
    """The back end with its fields, by which the jobs of one system are found together."""
    document = json.loads(record.text)
    return json.dumps([document["backend"], document["fields"]], sort_keys=True)
