"""Mistakes in the options of drawing beside training, each named in a line before anything is compiled."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from capibara.core.types import UserError
from capibara.inference.engine.placement.serving_mesh import ServingMesh
from capibara.strategies.grpo import Grpo
from capibara.strategies.online_dpo import OnlineDpo
from capibara.strategies.ppo import Ppo
from capibara.strategies.rewards.functions import exact_answer
from capibara.training import emulation
from tests.strategies.test_grpo import NEW, make_trainer, train

__all__ = ["make_trainer", "train"]  # fixtures


@pytest.mark.parametrize("kind", [Grpo, Ppo])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rollout_devices": -2}, r"rollout_devices is -2, must be at least 0 .*, or -1: the planner's choice"),
        ({"rollout_devices": 2, "max_staleness": -1}, "max_staleness is -1, must be at least 0, or None"),
        (
            {"rollout_devices": 2, "max_staleness": 5, "updates": 2, "mini_batches": 2},
            r"max_staleness is 5, must be a multiple of the 4 steps of a rollout .*: try 8",
        ),
        (
            {"rollout_devices": 2, "where": "all"},
            r"where is 'all', and \w+.rollout_devices is 2, .*: leave \w+.where out",
        ),
        (
            {"rollout_devices": 2, "mini_batches": 3, "importance_cap": None},
            "importance_cap is None, and answers of up to 3 steps ago .*: try 2.0",
        ),
    ],
)
def test_options_that_do_not_go_together_are_named(kind, options, said):
    with pytest.raises(UserError, match=f"^{kind.__name__}.{said}") as error:
        kind(rewards=(exact_answer,), **options)
    assert "\n" not in str(error.value)


def test_importance_weights_may_be_left_out_where_no_answer_is_stale():
    Grpo(rewards=(exact_answer,), rollout_devices=2, max_staleness=0, importance_cap=None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rollout_devices": 4}, "Grpo.rollout_devices is 4, must be below the 4 devices of the run: try 2"),
        (
            {"rollout_devices": -1},
            "Grpo.rollout_devices is -1, which the planner replaces .*: set Plan.slice, .* try Grpo.rollout_devices = 2",
        ),
        (
            {"rollout_devices": 3, "mesh": ServingMesh(tensor=2)},
            r"ServingMesh.tensor x ServingMesh.data \(2\) must divide Grpo.rollout_devices \(3\): try 1",
        ),
        (
            {"rollout_devices": 1},
            "Plan .* needs 2 devices, a run of 4 without Grpo.rollout_devices has 3: set one axis to -1",
        ),
    ],
)
def test_devices_that_are_not_there_are_named_before_anything_is_compiled(
    make_trainer, train, options, said, monkeypatch
):
    monkeypatch.setattr("capibara.training.setup.compile_step", lambda *args: pytest.fail("it compiles"))
    with pytest.raises(UserError, match=said):
        train(make_trainer(options), devices=4)


def test_several_processes_are_refused(make_trainer, train, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match="Grpo.rollout_devices is 2, and the run has 2 processes"):
        train(make_trainer({"rollout_devices": 2}), devices=4)


def test_chips_that_form_no_box_are_named(make_trainer, train, monkeypatch):
    def refuses(plan, devices):
        raise AssertionError("jax_devices=...")

    monkeypatch.setattr("capibara.sharding.make_mesh", refuses)
    with pytest.raises(UserError, match="rollout_devices is 2, and the 2 chips that train form no box of the slice"):
        train(make_trainer({"rollout_devices": 2}), devices=4)
    with pytest.raises(AssertionError, match="jax_devices"):  # of no option of ours
        train(make_trainer(), devices=2)


@pytest.mark.parametrize("kind", [Grpo, Ppo, OnlineDpo])
def test_the_planner_is_told_how_a_rollout_is_drawn(kind, make_trainer):
    options = {"group": 2, "mini_batches": 3, "updates": 2, "max_staleness": 0, "mesh": ServingMesh(tensor=2)}
    grpo = make_trainer().loss
    loss = kind(rewards=(exact_answer,), sampling=grpo.sampling, engine=grpo.engine, rollout_devices=2, **options)
    dataset = make_trainer().dataset
    rollout = loss.rollout(dataset, 8)
    assert rollout.answers == 2 * 3 * (8 if kind is OnlineDpo else 4)
    room = dataset.length // 2 if kind is OnlineDpo else dataset.length  # a row of pairs has the prompt twice
    assert rollout.prompt_tokens + rollout.answer_tokens == room and rollout.answer_tokens == NEW
    assert (rollout.steps, rollout.in_turn, rollout.slots, rollout.tensor, rollout.data) == (6, True, 16, 2, None)
    assert not dataclasses.replace(loss, max_staleness=6).rollout(dataset, 8).in_turn
    assert dataclasses.replace(loss, rollout_devices=0).rollout(dataset, 8) is None
    assert loss.with_rollouts(4, 1, 4) == dataclasses.replace(
        loss, rollout_devices=4, mesh=ServingMesh(tensor=1, data=4)
    )


def test_an_emulated_run_has_rows_for_the_devices_that_train(make_trainer):
    trainer = make_trainer({"rollout_devices": 4})
    wide = dataclasses.replace(trainer.model, embed_dim=512)
    trainer = dataclasses.replace(trainer, model=wide, plan=dataclasses.replace(trainer.plan, fsdp=-1))
    assert emulation.shrunk(trainer, 8).plan.batch_size == 4 * trainer.loss.group
