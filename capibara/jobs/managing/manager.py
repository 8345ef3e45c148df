"""Manages jobs until they have ended: one pass after another over their systems, each of which may be killed."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Collection, Sequence

from capibara.core.types import UserError
from capibara.jobs import systems
from capibara.jobs.backends.backend import Backend
from capibara.jobs.managing.lifecycle import Decision, Rules, Seen
from capibara.jobs.managing.places import Place, Places
from capibara.jobs.managing.records import Record, Records, State
from capibara.jobs.managing.watch import Watch
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
    """Manages the jobs whose locks it gets, in a `with` block; those of another manager are left to that one.

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
        self._records, self._names, self._times = records, names, times
        self._places, self._say = Places(connect, rules, say), say
        self._watches = collections.defaultdict[str, Watch](Watch)
        self._locks: dict[str, contextlib.ExitStack] = {}  # of the jobs that it manages now
        self._managed: set[str] = set()  # now or before

    def __enter__(self) -> Manager:
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS, "capibara-manager")
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for lock in self._locks.values():
            lock.close()
        self._places.close()

    def run(
        self,
        until: Callable[[Sequence[Record]], bool],
        watch: Callable[[Sequence[Record]], None] = lambda records: None,
        pause: Callable[[float], None] = time.sleep,
    ) -> list[Record]:
        """Manages until `until` says of the jobs' records that it is enough, or none is left that could be managed.

        Args:
          until: called after each pass.
          watch: called after each pass, to show the jobs.
          pause: waits so many seconds; what it raises ends this.

        Returns:
          The records.

        Raises:
          Denied: a system denies access to all that it has of the jobs; they are left as they are.
        """
        while True:
            watch(result := self.look())
            if until(result):
                return result
            left = [item for item in result if not item.state.is_final]
            denials = [self._places.denial(Places.of(item)) for item in left]
            if denials and denials[0] is not None and None not in denials:
                raise denials[0]
            pause(self._times.poll_s * random.uniform(0.8, 1.0))

    def look(self) -> list[Record]:
        """One pass over all jobs; returns their records after it."""
        self._take()
        cancelled = self._records.cancelled()
        chosen = [entry for entry in self._records.all() if entry.name in self._locks and self._is_readable(entry)]
        by_place = collections.defaultdict[str, list[Record]](list)
        for item in chosen:
            by_place[Places.of(item)].append(item)
        for key, result in by_place.items():
            self._visit(key, result, cancelled)
        self._release()
        names = self._managed if self._names is None else self._names
        return [entry for entry in self._records.all() if entry.name in names]

    def _take(self) -> None:
        """Takes the locks of the jobs to manage."""
        for item in self._records.all():
            wanted = self._names is None or item.name in self._names
            if wanted and not _is_over(item) and item.name not in self._locks:
                with contextlib.ExitStack() as stack:
                    if stack.enter_context(self._records.lock(item.name)):
                        self._managed.add(item.name)
                        self._locks[item.name] = stack.pop_all()

    def _release(self) -> None:
        """Releases the locks of jobs that have ended, so that they can be resumed."""
        for item in self._records.all():
            if _is_over(item) and item.name in self._locks:
                self._locks.pop(item.name).close()

    def _is_readable(self, record: Record) -> bool:
        try:
            record.spec()
        except UserError as error:  # of another version of capibara
            self._watches[record.name].say_once(f"job {record.name} is not managed: {error}", self._say)
            return False
        return True

    def _visit(self, key: str, records: Sequence[Record], cancelled: set[str]) -> None:
        """One pass over the jobs of one place."""
        place = self._places.find(key, records[0])
        if place is None or not place.reads.breaker.allows(time.monotonic()):
            return
        try:
            resources = place.system.resources()
        except UserError as error:
            self._places.deny(key, error)
            return
        except Exception as error:  # of any client
            place.reads.failed(error, self._say)
            return
        place.reads.succeeded()
        self._places.allow(key)
        by_job = collections.defaultdict[str, list[Resource]](list)
        for resource in resources:
            by_job[resource.job].append(resource)
        steps = [self._pool.submit(self._step, place, job, by_job[job.name], job.name in cancelled) for job in records]
        for step in steps:
            step.result()

    def _step(self, place: Place, record: Record, resources: Sequence[Resource], is_cancelled: bool) -> None:
        """Decides for one job, writes that down and does it; no other job depends on whether that succeeds."""
        watch = self._watches[record.name]
        try:
            _, spec = record.spec()
            now_s = time.monotonic()
            if record.state in (State.WAITING, State.RUNNING) and now_s - watch.read_s >= self._times.reports_s:
                watch.read(spec, now_s, self._say)
            seen = Seen(
                resources=resources,
                outcome=watch.outcome_of(spec),
                silent_s=watch.silent_s(now_s),
                missing=watch.missing,
                is_cancelled=is_cancelled,
            )
            decision = place.lifecycle.decide(record, spec, seen, time.time())
            if decision.submit and not place.writes.breaker.allows(time.monotonic()):
                after = dataclasses.replace(decision.record, submit_s=record.submit_s)  # no call is begun
                decision = dataclasses.replace(decision, record=after, submit=False)
            self._write(record, decision.record)
            self._act(place, record, decision)
        except Exception as error:
            watch.say_once(f"job {record.name}: {type(error).__name__}: {error}: tried again", self._say)

    def _write(self, before: Record, after: Record) -> None:
        if before != after:
            self._records.put(after)
        if (before.state, before.attempt.number) != (after.state, after.attempt.number):
            text = f"{after.state}{f' (attempt {after.attempt.number + 1})' if after.attempt.number else ''}"
            text += f": {after.reason}" if after.reason else ""
            self._records.note(after.name, text)
            self._say(f"job {after.name} is {text}")

    def _act(self, place: Place, before: Record, decision: Decision) -> None:
        record = decision.record
        try:
            for resource in decision.delete:
                if place.writes.breaker.allows(time.monotonic()):
                    place.system.delete(resource)
                    place.writes.succeeded()
            if decision.submit:
                self._submit(place, record)
        except Busy as error:
            place.writes.failed(error, self._say)
            if decision.submit:
                self._records.put(dataclasses.replace(record, reason=str(error)))
        except UserError as error:
            reason = str(error)
            if decision.submit:
                # What is refused was not made, but an earlier call may have made it.
                state = State.ENDING if before.submit_s else State.FAILED
                refused = dataclasses.replace(record, state=state, outcome=State.FAILED, reason=reason)
                self._write(record, dataclasses.replace(refused, submit_s=before.submit_s))
            else:  # the reason of its end is another one
                self._watches[record.name].say_once(f"job {record.name}: {reason}", self._say)

    def _submit(self, place: Place, record: Record) -> None:
        watch, (_, spec) = self._watches[record.name], record.spec()
        try:
            place.system.submit(spec)
        except Exists as error:
            place.writes.succeeded()
            watch.clashes += 1
            if watch.clashes > _CLASHES:
                raise UserError(
                    f"{error} exists already, without the labels of job {record.name}, and may run: delete it, or choose "
                    "another --name"
                ) from None
            return
        place.writes.succeeded()
        watch.clashes = 0
        # `submit_s` stays until the resource is seen, since a list may lag behind.
        self._write(record, dataclasses.replace(record, state=State.WAITING, reason=""))


def _is_over(record: Record) -> bool:
    """Whether nothing of a job is left to do, and nothing of it can appear any more."""
    return record.state.is_final and not record.submit_s
