"""The plan of a run whose Gin files name a slice and leave the mesh open: the search's first choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from capibara import config
from capibara.planner import search, slices, workload
from capibara.planner.search import Question
from capibara.sharding import MESH_AXES

GIB = 2**30


def is_open(trainer: Any) -> bool:
    """Whether the parsed Gin files name a slice for this run, and no mesh axis."""
    return trainer.plan.slice is not None and not any(config.is_bound(f"Plan.{axis}") for axis in MESH_AXES)


def planned(trainer: Any, say: Callable[[str], None] = print) -> Any:
    """The run (training.trainer.Trainer) with a mesh, where it is open; else as it is.

    The batch is the run's. Remat and accumulation are chosen too where the Gin files leave them open. The prediction is
    not proven: `capibara plan --verify` does that, and writes a Gin file.

    Args:
      trainer: the run.
      say: told the choice, in the first process only.

    Raises:
      UserError: no plan fits the slice, or its batch no mesh.
    """
    if not is_open(trainer):
        return trainer
    slice_, work = slices.parse(trainer.plan.slice), workload.of_run(trainer)
    remats = (trainer.plan.remat_policy,) if config.is_bound("Plan.remat") else search.REMATS
    question = Question(
        batch_size=trainer.plan.batch_size,
        accumulation=trainer.plan.accumulation if config.is_bound("Plan.accumulation") else None,
        state_dtypes=tuple(work.state),
        remats=remats,
    )
    best = search.search(work, slice_, question)[0]
    if not best.fits:
        raise search.no_plan(best, work, slice_, question)
    if jax.process_index() == 0:
        say(
            f"plan for {slice_.name}: {best.choice.describe()}; predicted {best.memory.peak / GIB:.2f} GiB of HBM a chip, "
            f"{best.cost.step_s:.2f} s a step"
        )
    return dataclasses.replace(trainer, plan=best.choice.plan(work, slice_.name))
