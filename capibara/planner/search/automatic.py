"""Chooses the plan of a run whose Gin files name a slice but no mesh: the best one of the search."""

from __future__ import annotations

from capibara import config
from capibara.planner.hardware import slices
from capibara.planner.hardware.chips import GIB
from capibara.planner.hardware.slices import Slice
from capibara.planner.model import workload
from capibara.planner.model.workload import Run
from capibara.planner.report import report
from capibara.planner.search import ranking
from capibara.planner.search.ranking import Question
from capibara.sharding import MESH_AXES


def is_open(run: Run) -> bool:
    """Whether the parsed Gin files name a slice for this run, but no mesh axis."""
    return run.plan.slice is not None and not any(config.is_bound(f"Plan.{axis}") for axis in MESH_AXES)


def bindings(run: Run, slice_: Slice | None = None) -> tuple[list[str], str]:
    """Gin statements that set the mesh of a run, and a line that describes the choice.

    The batch is the run's. Remat and accumulation are chosen too if the Gin files do not set them. The plan is only
    predicted to fit: `capibara plan --verify` proves it, and writes a Gin file.

    Args:
      run: as its Gin files say.
      slice_: overrides the slice that its Gin files name.

    Returns:
      No statements and an empty line if the Gin files set the mesh.

    Raises:
      UserError: no plan fits the slice, or no mesh divides the batch.
    """
    named = run.plan.slice
    if named is None or not is_open(run):
        return [], ""
    workload.check_one_model(run.plan)
    workload.check_ordinary(run)
    slice_, work = slice_ or slices.parse(named), workload.of_run(run)
    remats = (run.plan.remat_policy,) if config.is_bound("Plan.remat") else ranking.REMATS
    question = Question(
        batch_size=run.plan.batch_size,
        accumulation=run.plan.accumulation if config.is_bound("Plan.accumulation") else None,
        state_dtypes=tuple(work.state),
        remats=remats,
    )
    best = ranking.search(work, slice_, question)[0]
    if not best.fits:
        raise ranking.no_plan(best, work, slice_, question, ranking.BINDINGS)
    line = (
        f"plan for {slice_.name}: {best.choice.describe()}; predicted {best.memory.peak / GIB:.2f} GiB of HBM a "
        f"{slice_.chip.unit}, {report.seconds(best.cost.step_s)} a step"
    )
    return best.choice.bindings(work, slice_.name), line
