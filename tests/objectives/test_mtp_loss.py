"""The auxiliary loss of multi-token prediction: its value, its mask, its gradient, and who has it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.models import api
from capibara.models.api import DecoderConfig, Moe, Mtp
from capibara.objectives.base import of_cross_entropy
from capibara.objectives.cross_entropy import CrossEntropy
from capibara.objectives.preference import Dpo
from capibara.sharding import RematPolicy

V, T = 40, 10
CONFIG = DecoderConfig(
    vocab_size=V,
    embed_dim=16,
    num_layers=2,
    num_heads=2,
    mlp_dim=32,
    dtype="float32",
    mtp=Mtp(layers=2, loss_weight=0.3),
)
SEGMENTS = np.array([[1] * 4 + [2] * 5 + [0], [1] * 10], np.int32)


def batch():
    rng = np.random.default_rng(0)
    tokens, weights = rng.integers(0, V, (2, T + 1)), (SEGMENTS > 0).astype(np.float32)
    weights[1, :4] = 0.0  # a prompt
    positions = np.array([[*range(4), *range(5), 0], [*range(10)]], np.int32)
    rows = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": SEGMENTS, "positions": positions}
    return {name: jnp.asarray(x) for name, x in (rows | {"weights": weights}).items()}


def sums(config, params=None):
    model = api.build(config)
    params = model.init(jax.random.key(0)) if params is None else params
    objective = of_cross_entropy(model, 0.0)
    loss, found, _ = jax.jit(lambda p: objective.sums(p, batch(), RematPolicy(), jnp.int32(0)))(params)
    return float(loss), objective.metrics(found, found.weight), found, params


def test_the_loss_is_the_mean_over_depths_of_the_targets_within_each_document():
    loss, metrics, found, params = sums(CONFIG)
    plain = dataclasses.replace(CONFIG, mtp=None)
    main, *_ = sums(plain, {name: x for name, x in params.items() if name != "mtp"})
    model, rows = api.build(CONFIG), batch()
    hidden, _ = model.hidden(params, rows)
    tokens = [api.mtp.next_tokens(rows, depth)[0] for depth in (1, 2)]
    ahead, _ = model.ahead.states(params, hidden, tokens, rows, RematPolicy(), None)
    nll, right, count = 0.0, 0, 0
    for depth, states in enumerate(ahead, 1):
        logits = np.asarray(model.logits_of(params, states), np.float64)
        for row, t in np.ndindex(2, T - depth):
            inside = SEGMENTS[row, t] == SEGMENTS[row, t + depth] > 0 and rows["weights"][row, t + depth] > 0
            if inside:
                target = int(rows["targets"][row, t + depth])
                nll += np.log(np.exp(logits[row, t]).sum()) - logits[row, t, target]
                right, count = right + (logits[row, t].argmax() == target), count + 1
    assert count == 3 + 4 + 6 + 2 + 3 + 6
    assert float(found.ahead.weight) == count
    np.testing.assert_allclose(loss - main, 0.3 / 2 * nll, rtol=1e-5)
    np.testing.assert_allclose(metrics["mtp_loss"], nll / count, rtol=1e-5)
    np.testing.assert_allclose(metrics["mtp_acceptance"], right / count, rtol=1e-6)


def test_modules_and_the_trunk_get_gradients_of_it():
    model = api.build(CONFIG)
    params = model.init(jax.random.key(0))

    def grads(config):
        objective = of_cross_entropy(api.build(config), 0.0)
        return jax.jit(jax.grad(lambda p: objective.sums(p, batch(), RematPolicy(), jnp.int32(0))[0]))(params)

    with_loss, without = grads(CONFIG), grads(dataclasses.replace(CONFIG, mtp=Mtp(layers=2, loss_weight=0.0)))
    norms = jax.tree.map(lambda x: float(jnp.abs(x).max()), with_loss["mtp"])
    assert min(jax.tree.leaves(norms)) > 0
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(without["mtp"])) == 0
    for name in ("embedding", "layers", "final_norm"):
        pairs = zip(jax.tree.leaves(with_loss[name]), jax.tree.leaves(without[name]), strict=True)
        assert all(float(jnp.abs(a - b).max()) > 1e-6 for a, b in pairs)


def test_balance_losses_of_the_modules_experts_count():
    moe = Moe(num_experts=4, balance_loss=0.5)
    experts = dataclasses.replace(CONFIG, moe=moe)
    loss, _, _, params = sums(experts)
    alike = dataclasses.replace(experts, moe=dataclasses.replace(moe, balance_loss=0.0))
    neutral, *_ = sums(alike, params)
    dense = dataclasses.replace(experts, mtp=None)
    rest = {name: x for name, x in params.items() if name != "mtp"}
    of_trunk = sums(dense, rest)[0] - sums(dataclasses.replace(alike, mtp=None), rest)[0]
    assert loss - neutral > of_trunk + 1e-3


def test_only_losses_that_have_it_take_such_a_model():
    CrossEntropy().check_model(CONFIG)
    with pytest.raises(
        UserError, match=r"Trainer.loss \(@Dpo\(\)\) has no multi-token prediction: set Mtp.loss_weight = 0"
    ):
        Dpo().check_model(CONFIG)
    Dpo().check_model(dataclasses.replace(CONFIG, mtp=Mtp(loss_weight=0.0)))
