"""Finds jobs that no database knows, by the labels of their resources."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

from capibara.core.types import UserError
from capibara.jobs import spec_file
from capibara.jobs.backends.backend import Backend
from capibara.jobs.managing.records import Record, Records, State
from capibara.jobs.systems.system import Resource, System


def recover(
    records: Records, backend: Backend, system: System, storage: str, say: Callable[[str], None] = print
) -> list[Record]:
    """Adds the jobs of a system that the database does not have.

    A job whose own file is not in the storage is skipped with a line; its resources stay as they are. So is one of which
    all resources have ended.

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
    for one in system.resources():
        by_job[one.job].append(one)
    added = []
    for name, resources in sorted(by_job.items()):
        known = records.find(name)
        newest = max(resources, key=lambda one: (one.created_s, one.attempt.number))
        if known is not None and (not known.state.is_final or known.attempt.launch == newest.attempt.launch):
            continue
        if newest.phase.has_ended and not system.ended_costs:
            say(f"job {name} has ended ({newest.phase}): skipped")
            continue
        try:
            owner, spec = spec_file.read(storage, newest.labels)
            if owner != backend:
                raise UserError(
                    f"job {name} was launched with other fields of {backend.name}: {_differences(owner, backend)}"
                )
        except UserError as error:
            say(f"{error}: skipped")
            continue
        record = Record(
            name=name,
            text=spec_file.text_of(owner, spec),
            attempt=newest.attempt,
            state=State.WAITING,
            reason="recovered from its labels",
            launched_s=newest.created_s or time.time(),
        )
        added.append(records.add(record))
        records.note(name, f"recovered from the labels of {newest.id} (attempt {newest.attempt.number + 1})")
    return added


def _differences(one: Backend, other: Backend) -> str:
    mine, theirs = vars(one), vars(other)
    if type(one) is not type(other):
        return f"it is of {one.name}"
    return ", ".join(f"--{name}={mine[name]}" for name in mine if mine[name] != theirs[name])
