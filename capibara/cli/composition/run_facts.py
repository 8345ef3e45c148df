"""What the dashboard shows of a run folder beyond its metrics: checkpoints, lineage, plan, group. Each runs in its own process."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from capibara.cli.composition import group_facts
from capibara.storage import stores

if TYPE_CHECKING:
    from capibara.planner.model.choice import Choice
    from capibara.planner.model.cost import Cost
    from capibara.training.trainer import Trainer

_ABOUT = {
    "whole": "its manifest is whole; capibara convert verify compares the hashes of its files",
    "corrupted": "its manifest or a file is not as it was written",
    "quarantined": "a run found it corrupted, and does not resume from it",
    "rolled_back": "the run rolled back before it, and does not resume from it",
    "lost": "the run committed it, and it is gone",
    "unfinished": "an interrupted save or removal",
}


def checkpoints(folder: str) -> dict[str, Any]:
    """The steps of a run folder with their state, by their manifests alone: hashes are not compared."""
    from capibara.checkpoints import inspection, step_folders

    rows = inspection.Inspection(folder).listed()
    lost = step_folders.lost(step_folders.folder_of(folder))
    return {"steps": [_checkpoint(row, lost) for row in rows], "unavailable": None}


def _checkpoint(row: dict[str, Any], lost: list[int]) -> dict[str, Any]:
    step, faults = row["step"], row["faults"]
    state = "corrupted" if faults else "whole"
    if isinstance(step, str):
        state = "rolled_back" if step.endswith(".rolled_back") else "quarantined"
    elif step in lost:
        state = "lost"
    return {**row, "state": state, "about": _ABOUT[state]}


def lineage(folder: str) -> dict[str, Any]:
    """The chain from a run's newest checkpoint back to its sources; files are compared by size."""
    from capibara.builders.lineage.chain import Chain
    from capibara.builders.lineage.nodes import Check

    return {"chain": Chain(Check.SIZES).of(folder).as_json(), "unavailable": None}


def plan(folder: str) -> dict[str, Any]:
    """What the planner predicts for a run's own plan on the slice that its configuration names."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # computes only shapes
    from capibara import config
    from capibara.cli.composition import inspected_run
    from capibara.training import run_folder

    config.parse((), (), (), run_folder.recorded(folder))
    run = inspected_run.run_of_gin()
    if run.plan.slice is None:
        return {"unavailable": "the run's configuration names no slice (Plan.slice)"}
    chosen, expected, peak_bytes = prediction(run)
    predicted = {"step_s": expected.step_s, "tokens_per_s": expected.tokens_per_s, "mfu": expected.mfu}
    predicted["peak_bytes"] = peak_bytes
    about = {"slice": expected.slice_.title, "plan": chosen.describe(), "bound by": str(expected.bound)}
    return {"predicted": predicted, "plan": about, "unavailable": None}


def prediction(run: Trainer) -> tuple[Choice, Cost, float]:
    """The plan of a run that names a slice, what a step costs, and the peak bytes of a device: a prediction.

    Raises:
      UserError: the planner does not know what the run's step needs, or the plan does not fit the slice's devices.
    """
    from capibara.planner.hardware import slices
    from capibara.planner.model import choice, cost, memory, workload
    from capibara.planner.search import automatic, splits

    run, _ = automatic.planned(run)
    workload.check_ordinary(run)
    slice_, work = slices.parse(str(run.plan.slice)), workload.of_run(run)
    part = splits.training_part(run, slice_)
    chosen = choice.of_plan(run.plan, work, part.devices)
    return chosen, cost.cost(work, chosen, part), memory.memory(work, chosen, part.chip).peak


def questions(roots: Sequence[str]) -> dict[str, Callable[[str], dict[str, Any]]]:
    """All of them, by name, for a server that shows the runs below some folders."""
    shown = [stores.of(root).absolute(os.fspath(stores.folder_of(root))) for root in roots]
    return {
        "checkpoints": checkpoints,
        "lineage": lineage,
        "plan": plan,
        "group": functools.partial(group_facts.group, roots=shown),
    }
