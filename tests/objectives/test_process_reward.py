"""The loss of steps: that of a token classification with two labels, in float64."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from capibara.objectives.process_reward import ProcessReward


def test_the_loss_is_the_cross_entropy_of_two_labels():
    rng = np.random.default_rng(0)
    scores, labels = 3 * rng.normal(size=(3, 9)), rng.integers(0, 2, (3, 9)).astype(np.float64)
    weights = (rng.random((3, 9)) < 0.4).astype(np.float32)
    logits = np.stack([np.zeros_like(scores), scores], -1)
    nll = -np.take_along_axis(log_softmax(logits, -1), labels[..., None].astype(int), -1)[..., 0]
    batch = {"weights": weights, "labels": labels.astype(np.float32), "segment_ids": np.ones((3, 9), np.int32)}
    of = lambda x: ProcessReward().totals(x, batch)  # noqa: E731
    loss, totals = of(jnp.asarray(scores, jnp.float32))
    assert float(loss) == pytest.approx((nll * weights).sum(), rel=1e-5) and totals.weight == weights.sum()
    right = ((scores > 0) == (labels > 0)) * weights
    assert totals.values["step_accuracy"] == right.sum() and totals.tokens == 27
    gradient = jax.grad(lambda x: of(x)[0])(jnp.asarray(scores, jnp.float32))
    np.testing.assert_allclose(gradient, weights * (1 / (1 + np.exp(-scores)) - labels), rtol=1e-5, atol=1e-6)


def test_a_loss_of_layers_is_weighted_as_steps():
    """It is a sum over tokens, and a batch's loss the mean over its steps."""
    hidden_BTD, head_VD = jnp.ones((2, 8, 4)), jnp.full((1, 4), 0.25)
    model = SimpleNamespace(
        hidden=lambda params, batch: (hidden_BTD, {}), head=lambda params: head_VD, layer_loss=lambda stats: 32.0
    )
    weights = np.zeros((2, 8), np.float32)
    weights[:, 3] = 1.0
    ones = np.ones((2, 8), np.int32)
    batch = {"weights": weights, "labels": weights, "segment_ids": ones, "tokens": ones}
    loss, totals, _ = ProcessReward().objective(model, None).sums({}, batch, None, None)
    assert float(loss) == pytest.approx(2 * np.log1p(np.exp(-1.0)) + 32.0 * 2 / 16, rel=1e-6) and totals.weight == 2
