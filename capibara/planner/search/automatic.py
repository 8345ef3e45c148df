"""Chooses the plan of a run that names a slice but no mesh: the best one of the search."""

from __future__ import annotations

import dataclasses

from capibara.core.types import AUTO
from capibara.planner.hardware import slices
from capibara.planner.hardware.chips import GIB
from capibara.planner.hardware.slices import Slice
from capibara.planner.model import workload
from capibara.planner.model.units import seconds
from capibara.planner.model.workload import Run
from capibara.planner.search import ranking
from capibara.planner.search.ranking import Question
from capibara.sharding import Plan


def is_open(run: Run) -> bool:
    """Whether the run names a slice, but no mesh axis."""
    return run.plan.slice is not None and not run.plan.has_mesh


def plan(run: Run, slice_: Slice | None = None) -> tuple[Plan, str]:
    """The plan of a run with its mesh set, and a line that describes the choice.

    The batch is the run's. Remat and accumulation are chosen too if they are not set. The plan is only
    predicted to fit: `capibara plan --verify` proves it, and writes a Gin file.

    Args:
      run: the run.
      slice_: overrides the slice that it names.

    Returns:
      The run's own plan and an empty line if its mesh is set.

    Raises:
      UserError: no plan fits the slice, or no mesh divides the batch.
    """
    named = run.plan.slice
    if named is None or not is_open(run):
        return run.plan, ""
    workload.check_one_model(run.plan)
    workload.check_ordinary(run)
    slice_, work = slice_ or slices.parse(named), workload.of_run(run)
    remats = None if run.plan.remat is AUTO else (run.plan.remat_policy,)
    question = Question(
        batch_size=run.plan.batch_size,
        accumulation=None if run.plan.accumulation is AUTO else run.plan.accumulation,
        state_dtypes=tuple(work.state),
        remats=remats,
    )
    best = ranking.search(work, slice_, question)[0]
    if not best.fits:
        raise ranking.no_plan(best, work, slice_, question, ranking.BINDINGS)
    line = (
        f"plan for {slice_.name}: {best.choice.describe()}; predicted {best.memory.peak / GIB:.2f} GiB of HBM a "
        f"{slice_.chip.unit}, {seconds(best.cost.step_s)} a step"
    )
    return dataclasses.replace(run.plan, **best.choice.fields(work, slice_.name)), line
