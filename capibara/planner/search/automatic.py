"""Chooses the plan of a run that names a slice but no mesh: the best one of the search."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from capibara.core.types import AUTO
from capibara.planner.hardware import slices
from capibara.planner.hardware.chips import GIB
from capibara.planner.hardware.slices import Slice
from capibara.planner.model import workload
from capibara.planner.model.units import seconds
from capibara.planner.model.workload import Run
from capibara.planner.search import ranking, splits
from capibara.planner.search.ranking import Question

R = TypeVar("R", bound=Run)


def is_open(run: Run) -> bool:
    """Whether the run names a slice, but no mesh axis."""
    return run.plan.slice is not None and not run.plan.has_mesh


def planned(run: R, slice_: Slice | None = None) -> tuple[R, str]:
    """A run with its mesh set, and a line that describes the choice.

    The batch is the run's. Remat and accumulation are chosen too if they are not set, and so are the devices that draw
    answers beside training and their mesh. The plan is only predicted to fit: `capibara plan --verify` proves it, and writes
    a Gin file.

    Args:
      run: the run.
      slice_: overrides the slice that it names.

    Returns:
      The run itself and an empty line if its mesh is set.

    Raises:
      UserError: no plan fits the slice, or no mesh divides the batch.
    """
    name = run.plan.slice
    if name is None or not is_open(run):
        return run, ""
    workload.check_one_model(run.plan)
    workload.check_ordinary(run)
    slice_, work = slice_ or slices.parse(name), workload.of_run(run)
    remats = None if run.plan.remat is AUTO else (run.plan.remat_policy,)
    question = Question(
        batch_size=run.plan.batch_size,
        accumulation=None if run.plan.accumulation is AUTO else run.plan.accumulation,
        state_dtypes=tuple(work.state),
        remats=remats,
    )
    layout = splits.search(run, slice_, work, question, ranking.BINDINGS)
    best = layout.ranked[0]
    line = (
        f"plan for {slice_.name}: {best.choice.describe()}; predicted {best.memory.peak / GIB:.2f} GiB of HBM a "
        f"{slice_.chip.unit}, {seconds(best.cost.step_s)} a step"
    )
    line = "; ".join([line, *(split.describe() for split in layout.splits[:1])])
    run = dataclasses.replace(run, plan=dataclasses.replace(run.plan, **best.choice.fields(work, slice_.name)))
    return layout.divided(run), line
