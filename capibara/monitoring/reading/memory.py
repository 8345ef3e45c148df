"""Which runs keep all of their rows in memory: those that viewers look at come first."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Mapping

from capibara.monitoring.reading.run import Run

_LOOKED_AT_S = 60.0  # since a viewer last asked for a run


def is_looked_at(run: Run) -> bool:
    """Whether a viewer has asked for a run lately."""
    return run.wanted_s > time.monotonic() - _LOOKED_AT_S


def fits(run: Run, runs: Mapping[str, Run], reading: Container[str], most_bytes: int) -> bool:
    """Whether there is memory for all rows of a run beside those of other runs that are looked at.

    Args:
      run: a run of which rows are missing.
      runs: all runs by their ids.
      reading: the ids of those that are being read.
      most_bytes: memory for all rows.
    """
    others = [item for item in runs.values() if item is not run and is_looked_at(item)]
    held = sum(
        other.whole_bytes if other.id in reading else other.held_bytes * (not other.is_coarse) for other in others
    )
    return held + run.whole_bytes <= most_bytes


def save(runs: Iterable[Run], most_bytes: int) -> None:
    """Drops rows of the runs that were not looked at for longest, until the others fit."""
    whole = [run for run in runs if not run.is_coarse]
    held = sum(run.held_bytes for run in whole)
    for run in sorted(whole, key=lambda run: run.wanted_s):
        if held <= most_bytes:
            break
        held -= run.held_bytes
        run.forget_rows()
        held += 0 if run.is_coarse else run.held_bytes  # a small run is kept
