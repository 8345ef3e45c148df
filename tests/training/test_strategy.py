"""A run whose nodes train apart: it resumes within a round, is evaluated by what was agreed, and says who was left out."""

from __future__ import annotations

import dataclasses
import os
import signal

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
        plan=NODES, strategy=ConsensusConfig(every=4), steps=8, evaluation=Evaluation(every=4, max_batches=2)
    )
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
