"""A run that names its slice but no mesh gets the planner's."""

import math

import pytest

from capibara import config
from capibara.cli.composition.inspected_run import run_of_gin
from capibara.core.types import UserError
from capibara.planner.hardware import slices
from capibara.planner.search import automatic
from capibara.sharding import MESH_AXES, Remat

FILES = ["runs/pretrain.gin", "models/capibara_1b.gin", "tasks/text.gin"]
OPEN = ["MODEL_DIR = 'unused'", "TRAIN_STEPS = 10", "BATCH_SIZE = 128", "LENGTH = 2048", "FILES = ('unused',)"]
OPEN += ["Plan.slice = 'v5e-64'"]


def run_of(*bindings):
    config.reset()
    config.parse(FILES, [*OPEN, *bindings], [])
    return run_of_gin()


def planned(*bindings):
    """The run as `train` continues with it, and the line that it prints."""
    run = run_of(*bindings)
    run, line = automatic.planned(run)
    return run, line


def test_an_open_mesh_is_chosen_for_the_slice_and_the_batch_kept():
    run, line = planned()
    plan = run.plan
    assert math.prod(getattr(plan, axis) for axis in MESH_AXES) == slices.parse("v5e-64").devices
    assert plan.batch_size == 128 and plan.slice == "v5e-64"
    assert line.startswith("plan for v5e-64: ") and "predicted" in line
    assert automatic.planned(run) == (run, "")


def test_another_slice_than_the_files_name_gets_its_own_mesh():
    run, line = automatic.planned(run_of(), slices.parse("v5e-16"))
    assert line.startswith("plan for v5e-16: ") and run.plan.slice == "v5e-16"
    assert math.prod(getattr(run.plan, axis) for axis in MESH_AXES) == 16


def test_what_the_files_say_is_kept():
    plan = planned("Plan.remat = 'full'", "Plan.accumulation = 2", "Plan.pipeline_repeats = 2")[0].plan
    assert plan.remat is Remat.FULL and plan.accumulation == 2 and plan.pipeline_repeats == 2


@pytest.mark.parametrize("binding", ["Plan.fsdp = -1", "Plan.tensor = 2", "Plan.slice = None"])
def test_a_mesh_that_is_not_open_stays(binding):
    run = run_of(binding)
    assert automatic.planned(run) == (run, "")


def test_a_slice_that_is_too_small_is_one_line():
    run = run_of("Plan.slice = 'v5e-1'")
    with pytest.raises(UserError, match=r"no plan fits v5e-1: .* use v5e-"):
        automatic.planned(run)


def test_a_search_knows_one_model():
    nodes = ["Plan.node = 4", "Trainer.strategy = @ConsensusConfig()", "ConsensusConfig.every = 10"]
    with pytest.raises(UserError, match="Plan.node is 4, must be 1 for a search: plan one node's model"):
        automatic.planned(run_of(*nodes))
    meshed = run_of(*nodes, "Plan.fsdp = 16")
    assert automatic.planned(meshed) == (meshed, "")
