"""The metrics of a step are those of the update that was made: with skipped updates the schedule and averages go by those made.

The right values are arithmetic: an update of plain SGD is learning rate x gradient, so its size over `grad_norm` is the rate;
a moving average has the decay min(d, (1 + n) / (10 + n)) after n updates.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from capibara import sharding
from capibara.models import api
from capibara.models.api import DecoderConfig
from capibara.optim import Optimizer, Schedule
from capibara.sharding import Plan
from capibara.training.base import state as states
from capibara.training.metrics import Meter
from capibara.training.stability.anomalies import Anomalies
from capibara.training.step import make_train_step

STEPS, DECAY = 8, 0.5
MODEL = DecoderConfig(vocab_size=32, embed_dim=8, num_layers=1, num_heads=1, mlp_dim=8, dtype="float32")
SCHEDULE = Schedule(kind="linear", learning_rate=0.1, warmup_steps=5)


def trained(optimizer, skipped):
    """(state before, state after, metrics) of each step; the gradients of the steps in `skipped` are not finite."""
    model, plan = api.build(MODEL), Plan(batch_size=2)
    mesh = sharding.make_mesh(plan, jax.devices()[:1])
    tx = optimizer.build(STEPS, model.axes)
    state = jax.jit(lambda key: states.init_state(model, tx, key, ema=True))(jax.random.key(0))
    step = make_train_step(
        model, tx, optimizer.schedule.build(STEPS), plan, mesh, ema_decay=DECAY, anomalies=Anomalies()
    )
    step, tokens = jax.jit(step), np.arange(16, dtype=np.int32).reshape(2, 8)
    batch = {"tokens": tokens, "targets": tokens + 1, "segment_ids": np.ones_like(tokens), "positions": tokens % 8}
    found = []
    for index in range(STEPS):
        weights = np.full((2, 8), np.nan if index in skipped else 1.0, np.float32)
        new, metrics = step(state, batch | {"weights": weights})
        found.append((state, new, metrics))
        state = new
    return found


@pytest.mark.parametrize("skipped", [(), (0,), (2, 3), (1, 4, 5, 6)], ids=str)
def test_the_learning_rate_is_that_of_the_update(skipped):
    optimizer = Optimizer(name="sgd", momentum=0.0, nesterov=False, clip_norm=None, weight_decay=0.0, schedule=SCHEDULE)
    updates, meter = 0, Meter(16)
    for index, (old, new, metrics) in enumerate(trained(optimizer, skipped)):
        meter.add(metrics)
        assert int(metrics["skipped"]) == (index in skipped)
        moved = float(optax.tree.norm(jax.tree.map(jnp.subtract, new.params, old.params)))
        if index in skipped:
            assert moved == 0.0
            continue
        assert float(metrics["learning_rate"]) == pytest.approx(moved / float(metrics["grad_norm"]), rel=1e-3)
        decay = min(DECAY, (1 + updates) / (10 + updates))
        for average, before, params in zip(*map(jax.tree.leaves, (new.ema, old.ema, new.params)), strict=True):
            np.testing.assert_allclose(average, decay * before + (1 - decay) * params, rtol=1e-4, atol=1e-6)
        updates, applied = updates + 1, moved / float(metrics["grad_norm"])
    assert meter.read()["learning_rate"] == pytest.approx(applied, rel=1e-3)


@pytest.mark.parametrize("name", ["adamw", "adafactor", pytest.param("lion", marks=pytest.mark.heavy), "muon"])
def test_every_optimizer_counts_the_updates_that_were_made(name):
    skipped = (1, 4, 5)
    rates = SCHEDULE.build(STEPS)
    made = 0
    for index, (_, _, metrics) in enumerate(trained(Optimizer(name=name, schedule=SCHEDULE), skipped)):
        assert float(metrics["learning_rate"]) == pytest.approx(float(rates(made)))
        made += index not in skipped
