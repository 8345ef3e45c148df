"""Outer optimizers against their formulas, over several rounds."""

from __future__ import annotations

import collections

import jax.numpy as jnp
import numpy as np
import pytest

from capibara.consensus.outer import FedAdam, FedYogi, OuterSgd, sample_nodes
from capibara.core.types import UserError


def rounds(optimizer, aggregates, start):
    params = {"w": jnp.asarray(start)}
    state = optimizer.init(params)
    for aggregate in aggregates:
        params, state = optimizer.step(params, {"w": jnp.asarray(aggregate)}, state)
    return np.asarray(params["w"])


@pytest.fixture
def aggregates():
    return np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)


def test_plain_sgd_takes_the_aggregate(aggregates):
    start = np.ones(5, np.float32)
    np.testing.assert_allclose(rounds(OuterSgd(), aggregates, start), aggregates[-1], rtol=1e-6, atol=1e-6)
    new, _ = OuterSgd().step({"w": jnp.ones(5, jnp.bfloat16)}, {"w": jnp.ones(5)}, OuterSgd().init({"w": jnp.ones(5)}))
    assert new["w"].dtype == jnp.bfloat16


def test_nesterov(aggregates):
    x, velocity = np.ones(5), np.zeros(5)
    for aggregate in aggregates:
        gradient = x - aggregate
        velocity = 0.9 * velocity + gradient
        x = x - 0.7 * (gradient + 0.9 * velocity)
    found = rounds(OuterSgd(learning_rate=0.7, momentum=0.9), aggregates, np.ones(5, np.float32))
    np.testing.assert_allclose(found, x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", [FedAdam(), FedYogi(learning_rate=0.1, b1=0.8, b2=0.9, tau=0.01)])
def test_adaptive(optimizer, aggregates):
    x, m, v = np.ones(5), np.zeros(5), np.full(5, optimizer.tau**2)
    for aggregate in aggregates:
        g = x - aggregate
        m = optimizer.b1 * m + (1 - optimizer.b1) * g
        if isinstance(optimizer, FedAdam):
            v = optimizer.b2 * v + (1 - optimizer.b2) * g**2
        else:
            v = v - (1 - optimizer.b2) * g**2 * np.sign(v - g**2)
        x = x - optimizer.learning_rate * m / (np.sqrt(v) + optimizer.tau)
    np.testing.assert_allclose(rounds(optimizer, aggregates, np.ones(5, np.float32)), x, rtol=1e-4, atol=1e-5)


def test_the_same_nodes_are_drawn_everywhere_and_all_equally_often():
    drawn = [sample_nodes(10, 3, seed=1, round_=i) for i in range(1000)]
    assert drawn == [sample_nodes(10, 3, seed=1, round_=i) for i in range(1000)]
    assert all(len(set(nodes)) == 3 for nodes in drawn) and len(set(drawn)) > 100
    counts = collections.Counter(node for nodes in drawn for node in nodes)
    assert len(counts) == 10 and all(abs(count - 300) < 5 * 15 for count in counts.values())
    assert sample_nodes(4, 4, seed=0, round_=9) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: OuterSgd(learning_rate=0), "OuterSgd.learning_rate is 0.0, must be positive"),
        (lambda: OuterSgd(momentum=1), "OuterSgd.momentum is 1.0, must be at least 0 and below 1"),
        (lambda: FedAdam(b2=-0.1), "FedAdam.b2 is -0.1"),
        (lambda: FedYogi(tau=0), "FedYogi.tau is 0.0, must be positive"),
        (lambda: sample_nodes(3, 4, seed=0, round_=0), "4 nodes a round, must be from 1 to num_nodes .3."),
    ],
)
def test_bad_fields(call, said):
    with pytest.raises(UserError, match=said):
        call()
