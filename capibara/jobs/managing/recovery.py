"""Finds jobs that no database knows, by the labels of their resources."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable

from capibara.core.types import TryAgain, UserError
from capibara.jobs import reports
from capibara.jobs.backends.backend import Backend
from capibara.jobs.managing import spec_file
from capibara.jobs.managing.records import Record, Records, State, Unreadable
from capibara.jobs.spec import JobSpec
from capibara.jobs.systems.system import Phase, Resource, System


def recover(
    records: Records, backend: Backend, system: System, storage: str, say: Callable[[str], None] = print
) -> list[Record]:
    """Adds the jobs of a system that the database does not have.

    A job whose own file is not in the storage is skipped with a line; its resources stay as they are. So is one of which
    all resources have ended. No other manager may have the jobs: each would replace what the other deletes.

    Args:
      records: the database.
      backend: names the system's place.
      system: there.
      storage: --storage of the jobs.
      say: called with a line for each job that is skipped.

    Returns:
      The records that were added.

    Raises:
      Busy, Denied: the system cannot list its resources.
    """
    by_job = collections.defaultdict[str, list[Resource]](list)
    for item in system.resources():
        by_job[item.job].append(item)
    added = []
    for name, resources in sorted(by_job.items()):
        known, is_lost = _known(records, name)
        live = [resource for resource in resources if not resource.phase.has_ended or system.ended_costs]
        newest = max(live or resources, key=lambda entry: (entry.created_s, entry.attempt.number))
        if known is not None and (not known.state.is_final or known.attempt.launch == newest.attempt.launch):
            continue
        if not live:
            say(f"job {name} has ended ({newest.phase}): skipped; launched again, its run resumes")
            continue
        try:
            text = spec_file.read(storage, newest.labels)
            owner, spec = spec_file.read_text(text)
            if owner != backend:
                raise UserError(
                    f"job {name} was launched with other fields of {backend.name}: {_differences(owner, backend)}"
                )
        except (UserError, TryAgain) as error:
            say(f"job {name} is skipped: {error}")
            continue
        spec = dataclasses.replace(spec, attempt=newest.attempt)
        record = Record(
            name=name,
            text=text,
            attempt=newest.attempt,
            state=State.WAITING,
            running_s=_running_s(spec, newest),
            reason="recovered from its labels",
            launched_s=newest.created_s or time.time(),
        )
        added.append(records.resume(record) if is_lost else records.add(record))
        records.note(name, f"recovered from the labels of {newest.id} (attempt {newest.attempt.number + 1})")
    return added


def _known(records: Records, name: str) -> tuple[Record | None, bool]:
    """What the database has of a job, and whether its row is no record, which is written anew."""
    try:
        return records.find(name), False
    except Unreadable:
        return None, True


def _running_s(spec: JobSpec, resource: Resource) -> float:
    """Since when a resource has chips: since its first host has reported, or at most since it was made."""
    if resource.phase is not Phase.RUNNING:
        return 0.0
    with contextlib.suppress(TryAgain):
        if result := reports.read(spec.reports):
            return max(resource.created_s, min(report.started_s for report in result.values()))
    return resource.created_s


def _differences(first: Backend, other: Backend) -> str:
    mine, theirs = vars(first), vars(other)
    if type(first) is not type(other):
        return f"it is of {first.name}"
    different = [name for name in mine if mine[name] != theirs[name]]
    return ", ".join(f"{name} is {mine[name]}, not {theirs[name]}" for name in different)
