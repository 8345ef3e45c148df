"""A run whose nodes train apart: it resumes within a round, is evaluated by what was agreed, and says who was left out."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal

import jax
import numpy as np
import pytest

from capibara.consensus.outer import OuterSgd
from capibara.core.types import UserError
from capibara.models import api
from capibara.models.api import Lora
from capibara.sharding import Plan
from capibara.strategies.consensus import ConsensusConfig
from capibara.training import initialization, run_folder
from capibara.training.base.options import Evaluation

NODES = Plan(batch_size=8, node=4, fsdp=2)


@pytest.mark.parametrize("fragments", [1, pytest.param(2, marks=pytest.mark.heavy)])
def test_a_run_of_nodes_resumes_bit_for_bit_within_a_round(make_trainer, train, tmp_path, fragments):
    strategy = ConsensusConfig(every=4, fragments=fragments, outer=OuterSgd(learning_rate=0.7, momentum=0.9))
    trainer = make_trainer(plan=NODES, strategy=strategy, steps=8, evaluation=Evaluation(every=4, max_batches=2))
    whole = train(dataclasses.replace(trainer, model_dir=str(tmp_path / "whole")))
    first = train(trainer, after_step=lambda step: step == 6 and os.kill(os.getpid(), signal.SIGTERM))
    second = train(trainer)
    assert (first.outcome.reason, second.start_step) == ("interrupted", 6)
    assert {**first.losses, **second.losses} == whole.losses and first.batches + second.batches == whole.batches
    jax.tree.map(np.testing.assert_array_equal, second.state, whole.state)
    assert whole.evaluations[8]["loss"] < whole.evaluations[4]["loss"]
    assert whole.metrics[8]["consensus_score"] == 1 and "node_3/loss" in whole.metrics[8]


def test_a_run_without_agreement_keeps_its_model_says_who_and_why_and_ends(make_trainer, train):
    """Half of the nodes are below the median's quality in every round."""
    strategy = ConsensusConfig(every=2, quality_threshold=1.0, consensus_threshold=1.0, max_retries=1)
    trainer = make_trainer(plan=NODES, strategy=strategy, steps=2, log_every=4)
    seen = train(trainer)
    jax.tree.map(np.testing.assert_array_equal, seen.state.params, seen.started.params)
    assert seen.metrics[2]["consensus_score"] == 0.5 and seen.metrics[2]["failed_rounds"] == 1
    told = [line for line in seen.statuses if line.startswith("step 2: ")]
    assert len(told) == 3 and all("has no part in the round, its quality 0.9" in line for line in told[:2])
    assert told[2] == "step 2: no agreement, consensus score 0.50 of 1: the nodes go on from the last agreed model"
    with pytest.raises(UserError, match="did not agree in 2 rounds in a row, must be at most ConsensusConfig.max_retr"):
        train(dataclasses.replace(trainer, steps=4))


@pytest.fixture
def saved(make_trainer, tmp_path):
    """(seed) -> a folder with a model, and the model's parameters."""

    def save(seed):
        params = jax.jit(api.build(make_trainer().model).init)(jax.random.key(seed))
        run_folder.save(str(tmp_path / f"model-{seed}"), params, "")
        return str(tmp_path / f"model-{seed}"), jax.device_get(params)

    return save


def test_nodes_begin_with_open_models_of_their_own_in_turn(make_trainer, train, saved):
    """The agreed model is the base until the first round."""
    (base, base_params), (a, a_params), (b, b_params) = (saved(seed) for seed in (5, 6, 7))
    strategy = ConsensusConfig(every=2, init_from=(a, b))
    trainer = make_trainer(plan=NODES, strategy=strategy, init_from=base, steps=2)
    seen = train(trainer)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(seen.started.params), base_params)
    for got, first, second in zip(
        *(jax.tree.leaves(x) for x in (seen.started.opt_state.params, a_params, b_params)), strict=True
    ):
        np.testing.assert_array_equal(got, np.stack([first, second, first, second]))
    half = jax.tree.map(lambda x, y: (x + y) / 2, a_params, b_params)
    near, far = (_distance(seen.state.params, model) for model in (half, base_params))
    assert near < 0.1 * far  # two steps from the mean of the models
    resumed = train(dataclasses.replace(trainer, steps=4))
    assert resumed.start_step == 2
    jax.tree.map(np.testing.assert_array_equal, resumed.started.params, seen.state.params)


def test_a_run_that_resumes_does_not_ask_for_the_models_of_its_nodes(make_trainer, saved):
    base, _ = saved(5)
    strategy = ConsensusConfig(every=2, init_from=("elsewhere",))
    trainer = make_trainer(plan=NODES, strategy=strategy, init_from=base, steps=2)
    asked = []
    (load,) = initialization.starts(trainer, None, None, lambda path, model, merge: asked.append(path))
    assert asked == ["elsewhere"] and callable(load)
    shutil.copytree(base, trainer.model_dir)
    assert (
        initialization.starts(trainer, None, None, lambda path, model, merge: asked.append(path)) == ()
        and len(asked) == 1
    )


def _distance(a, b):
    squares = jax.tree.map(lambda x, y: np.square(np.asarray(x) - y).sum(), a, b)
    return np.sqrt(sum(jax.tree.leaves(squares)))


def test_open_models_of_nodes_are_refused_by_name(make_trainer, train, saved):
    base, _ = saved(5)
    with pytest.raises(
        UserError, match="ConsensusConfig.init_from is set and Trainer.init_from is None: set that to the"
    ):
        make_trainer(plan=NODES, strategy=ConsensusConfig(init_from=(base,)), steps=50)
    adapted = dataclasses.replace(make_trainer().model, lora=Lora())
    with pytest.raises(
        UserError, match="ConsensusConfig.init_from is not supported with adapters: leave it out, or set Dec"
    ):
        make_trainer(plan=NODES, strategy=ConsensusConfig(init_from=(base,)), steps=50, init_from=base, model=adapted)
    strategy = ConsensusConfig(every=2, init_from=(base, base + "-missing"))
    with pytest.raises(UserError, match="^ConsensusConfig.init_from .*model-5-missing"):
        train(make_trainer(plan=NODES, strategy=strategy, init_from=base, steps=2))
