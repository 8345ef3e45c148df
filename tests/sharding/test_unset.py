"""What is not set is a value: a plan that sets its default differs from one that leaves it out, through both doors."""

import dataclasses

import pytest

from capibara import config
from capibara.config import written
from capibara.core.types import AUTO, UserError
from capibara.planner.search import automatic
from capibara.sharding import MESH_AXES, Plan, Remat
from tests.planner.search.test_automatic import run_of

UNSET = [field.name for field in dataclasses.fields(Plan) if field.default is AUTO]
DEFAULTS = dict.fromkeys(MESH_AXES, 1) | {"fsdp": -1, "accumulation": 1, "remat": "none"}  # in records of before


def read(text: str) -> Plan:
    config.reset()
    config.parse([], [line for line in text.splitlines() if line])
    return config.build(Plan)


def test_each_has_a_default():
    assert {*UNSET} == {*DEFAULTS}


@pytest.mark.parametrize("name", UNSET)
def test_a_default_that_is_set_is_written_and_read(name):
    plan = Plan(batch_size=64, slice="v5e-64", **{name: DEFAULTS[name]})
    left_out = Plan(batch_size=64, slice="v5e-64")
    assert plan != left_out and (plan.axes, plan.micro_batches, plan.remat_policy) == (
        left_out.axes,
        left_out.micro_batches,
        left_out.remat_policy,
    )
    for one in (plan, left_out):
        text = written.text_of(one)
        assert read(text) == one and (f"Plan.{name} = " in text) == (one is plan)
    assert read(f"Plan.batch_size = 64\nPlan.slice = 'v5e-64'\nPlan.{name} = 'auto'") == left_out


@pytest.mark.parametrize("name", MESH_AXES)
def test_the_planner_is_asked_for_no_mesh_that_is_set(name):
    """Python's plan and its Gin text lead to the same mesh."""
    plan = Plan(batch_size=128, slice="v5e-64", **{name: DEFAULTS[name]})
    run = run_of(*(line for line in written.text_of(plan).splitlines() if line))
    assert run.plan == plan and automatic.planned(run) == (run, "")
    again = dataclasses.replace(run, plan=plan)
    assert automatic.planned(again) == (again, "")
    left_out = dataclasses.replace(run, plan=dataclasses.replace(plan, **{name: AUTO}))
    assert automatic.is_open(left_out) and automatic.planned(left_out) == automatic.planned(run_of())


def test_the_defaults_are_those_of_before():
    plan = Plan(batch_size=8)
    assert plan.axes == {"data": 1, "stage": 1, "fsdp": -1, "expert": 1, "context": 1, "tensor": 1}
    assert plan.micro_batches == 1 and plan.remat_policy.kind is Remat.NONE and not plan.has_mesh
    with pytest.raises(UserError, match=r"Plan.fsdp \('wide'\) must be int \| 'auto', not str"):
        Plan(batch_size=8, fsdp="wide")
    with pytest.raises(UserError, match="Plan has more than one mesh axis of -1"):
        Plan(batch_size=8, data=-1)


@pytest.mark.parametrize("name", UNSET)
def test_a_record_that_sets_a_default_is_no_other_configuration(name):
    before, after = f"Plan.{name} = {DEFAULTS[name]!r}", f"Plan.{name} = 'auto'"
    assert config.changes(before, after) == config.changes(after, before) == {}
    assert config.changes(after, f"Plan.{name} = 8") == {f"Plan.{name}": (repr(DEFAULTS[name]), "8")}
