"""Plans from Python answer the question that was asked."""

from __future__ import annotations

import math

import pytest

import capibara as cb
from capibara.core.types import UserError
from capibara.planner.compiler import proof
from capibara.planner.hardware import slices, topology
from capibara.strategies.rewards.functions import exact_answer
from tests.strategies.test_grpo import make_trainer

__all__ = ["make_trainer"]  # a fixture


def test_what_was_asked_is_what_is_planned(folder):
    found = cb.plan(cb.model_config(f"{folder}/hf"), "v5e-4", length=64, batch_size=16, headroom=0.5, most=3)
    usable = slices.parse("v5e-4").chip.device_usable_hbm_bytes
    assert len(found) == 3 and {one.hbm_limit_bytes for one in found} == {usable * 0.5}
    assert {one.plan.batch_size for one in found} == {16} and all(one.fits for one in found)


def test_a_run_that_draws_beside_training_gets_both_halves(make_trainer):
    trainer = make_trainer({"rollout_devices": -1})
    found = cb.plan(trainer, "v5e-8", batch_size=32, most=2)
    assert len(found) == 2 and all(one.fits for one in found)
    loss = found[0].loss
    assert loss.rollout_devices in (2, 4, 6) and loss.mesh.data * loss.mesh.tensor <= loss.rollout_devices
    assert f"; {loss.rollout_devices} of the devices draw, tensor=" in found[0].description
    assert math.prod(found[0].plan.mesh_shape(8 - loss.rollout_devices).values()) == 8 - loss.rollout_devices
    assert cb.plan(make_trainer(), "v5e-8", batch_size=32, most=1)[0].loss == make_trainer().loss


def test_a_proof_is_of_the_devices_that_train(make_trainer, monkeypatch):
    monkeypatch.setattr(proof, "prove", lambda run, *_, **__: run.plan)
    monkeypatch.setattr(topology, "check", lambda name: None)
    plan, options = cb.Plan(batch_size=32, fsdp=4), {"rewards": (exact_answer,)}
    assert cb.prove(make_trainer(options | {"rollout_devices": 4}, plan=plan), "v5e-8") == plan
    with pytest.raises(UserError, match="needs 4 devices, v5e-8 without rollout_devices has 6"):
        cb.prove(make_trainer(options | {"rollout_devices": 2}, plan=plan), "v5e-8")
    with pytest.raises(UserError, match="v5e-8 .* has no box of 5 devices"):
        cb.prove(make_trainer(options | {"rollout_devices": 3}, plan=plan), "v5e-8")
