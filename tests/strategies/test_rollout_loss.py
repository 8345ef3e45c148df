"""Mistakes in the options of drawing beside training, each named in a line before anything is compiled."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from capibara.core.types import UserError
from capibara.inference.engine.placement.serving_mesh import ServingMesh
from capibara.strategies.grpo import Grpo
from capibara.strategies.ppo import Ppo
from capibara.strategies.rewards.functions import exact_answer
from capibara.training import emulation
from tests.strategies.test_grpo import make_trainer, train

__all__ = ["make_trainer", "train"]  # fixtures


@pytest.mark.parametrize("kind", [Grpo, Ppo])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rollout_devices": -1}, "rollout_devices is -1, must be at least 0"),
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


def test_an_emulated_run_has_rows_for_the_devices_that_train(make_trainer):
    trainer = make_trainer({"rollout_devices": 4})
    wide = dataclasses.replace(trainer.model, embed_dim=512)
    trainer = dataclasses.replace(trainer, model=wide, plan=dataclasses.replace(trainer.plan, fsdp=-1))
    assert emulation.shrunk(trainer, 8).plan.batch_size == 4 * trainer.loss.group
