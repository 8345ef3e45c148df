"""A run whose nodes train apart: it resumes within a round, is evaluated by what was agreed, and says who was left out."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.sharding import Plan
from capibara.strategies.consensus import ConsensusConfig
from capibara.training.trainer import Evaluation

NODES = Plan(batch_size=8, node=4, fsdp=2)


def test_a_run_of_nodes_resumes_bit_for_bit_within_a_round(make_trainer, train, tmp_path):
    trainer = make_trainer(
        plan=NODES, strategy=ConsensusConfig(every=4), steps=10, evaluation=Evaluation(every=5, max_batches=2)
    )
    whole = train(dataclasses.replace(trainer, model_dir=str(tmp_path / "whole")))
    first = train(dataclasses.replace(trainer, steps=6))
    second = train(trainer)
    assert {**first.losses, **second.losses} == whole.losses and first.batches + second.batches == whole.batches
    jax.tree.map(np.testing.assert_array_equal, second.state, whole.state)
    # The agreed model of step 8 is that of step 10.
    assert whole.evaluations[10]["loss"] < whole.evaluations[5]["loss"]
    assert whole.metrics[10]["consensus_score"] == 1 and "node_3/loss" in whole.metrics[10]


def test_a_run_without_agreement_keeps_its_model_says_who_and_why_and_ends(make_trainer, train):
    """Half of the nodes are below the median's quality in every round."""
    strategy = ConsensusConfig(every=2, quality_threshold=1.0, consensus_threshold=1.0, max_retries=1)
    trainer = make_trainer(plan=NODES, strategy=strategy, steps=3)
    seen = train(trainer)
    jax.tree.map(np.testing.assert_array_equal, seen.state.params, seen.started.params)
    assert seen.metrics[2]["consensus_score"] == 0.5 and seen.metrics[2]["failed_rounds"] == 1
    told = [line for line in seen.statuses if line.startswith("step 2: ")]
    assert len(told) == 3 and all("has no part in the agreed model, its quality 0.9" in line for line in told[:2])
    assert told[2] == "step 2: no agreement, consensus score 0.50 of 1: the nodes go on from the last agreed model"
    with pytest.raises(UserError, match="did not agree in 2 rounds in a row, must be at most ConsensusConfig.max_retr"):
        train(dataclasses.replace(trainer, steps=4))
