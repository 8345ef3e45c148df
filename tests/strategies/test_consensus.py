"""Consensus training: nodes that agree after each step train as one model, and others in rounds."""

import functools

import jax
import numpy as np
import optax
import pytest

from capibara import sharding
from capibara.consensus.aggregation import Aggregation, CoordinateMedian, Krum
from capibara.consensus.compression import Compression
from capibara.consensus.outer import OuterSgd
from capibara.core.types import UserError
from capibara.models import api
from capibara.models.api import DecoderConfig
from capibara.sharding import Plan
from capibara.strategies.consensus import Consensus
from capibara.training import state as states
from capibara.training.state import Apart
from capibara.training.step import make_nodes_step, make_train_step

CONFIG = DecoderConfig(
    vocab_size=64, embed_dim=32, num_layers=2, num_heads=2, num_kv_heads=2, mlp_dim=64, dtype="float32"
)
RATE = 0.1


def batch_of(step, rows=16, length=16):
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, 64, (rows, length)).astype(np.int32)
    return {
        "tokens": tokens,
        "targets": (tokens * 3 + 1) % 64,
        "weights": np.ones((rows, length), np.float32),
        "segment_ids": np.ones((rows, length), np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
    }


def run(plan, steps, strategy=None, harm=None, tx=None):
    """Losses, the last state and the last metrics; `harm` changes a batch."""
    model, tx = api.build(CONFIG), tx or optax.sgd(RATE)
    mesh = sharding.make_mesh(plan)
    apart = None if strategy is None else Apart(strategy, plan.node)
    shardings = states.state_shardings(model, tx, mesh, plan.rules, ema=False, apart=apart)
    step = make_train_step(model, tx, lambda _: RATE, plan, mesh)
    if strategy is not None:
        strategy.check(plan)
        step = make_nodes_step(step, model, strategy, shardings)
    step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    init = functools.partial(states.init_state, model, tx, ema=False, apart=apart)
    state, losses = jax.jit(init, out_shardings=shardings)(jax.random.key(0)), []
    rows = sharding.batch_sharding(mesh, plan.rules)
    for index in range(steps):
        state, metrics = step(state, sharding.global_batch(rows, (harm or (lambda batch: batch))(batch_of(index))))
        losses.append(float(metrics["loss"]))
    return np.array(losses), jax.device_get(state), jax.device_get(metrics)


@functools.cache
def as_one():
    return run(Plan(batch_size=16), 4)


@pytest.mark.parametrize("sizes", [dict(node=4, fsdp=2), dict(node=8, fsdp=1), dict(node=2, fsdp=2, tensor=2)], ids=str)
def test_a_round_after_each_step_of_sgd_is_data_parallel_training(sizes):
    losses, state, metrics = run(Plan(batch_size=16, **sizes), 4, Consensus(every=1))
    want, want_state, want_metrics = as_one()
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    for got, expected in zip(jax.tree.leaves(state.params), jax.tree.leaves(want_state.params), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6, rtol=0)
    assert metrics["tokens"] == want_metrics["tokens"] == 256
    assert int(state.step) == 4
