"""The loss of a distillation against its formula in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

import capibara as cb
from capibara.models import api

MODEL = cb.DecoderConfig(
    vocab_size=9, embed_dim=8, num_layers=1, num_heads=1, mlp_dim=8, dtype="float32", logit_soft_cap=2.0
)


@pytest.mark.parametrize("hard_weight", [0.0, 0.3, 1.0])
def test_the_loss_is_a_sum_of_divergence_and_cross_entropy(hard_weight):
    """Of capped logits, with weights, in reverse KL at a temperature."""
    rng = np.random.default_rng(0)
    hidden, head = 3 * rng.normal(size=(2, 5, 8)), rng.normal(size=(9, 8))
    teacher = log_softmax(rng.normal(size=(2, 5, 9)), axis=-1)
    weights, targets = rng.integers(0, 2, (2, 5)).astype(float), rng.integers(0, 9, (2, 5))
    logits = 2.0 * np.tanh(hidden @ head.T / 2.0)
    log_q = log_softmax(logits / 1.7, axis=-1)
    divergence = (np.exp(log_q) * (log_q - teacher)).sum(-1)
    nll = -np.take_along_axis(log_softmax(logits, axis=-1), targets[..., None], -1)[..., 0]
    batch = {"weights": weights, "teacher_log_p": teacher} | {"targets": targets}
    batch = {name: jnp.asarray(value, jnp.int32 if name == "targets" else jnp.float32) for name, value in batch.items()}
    loss = cb.Distillation(
        teacher=cb.Teacher(path="nowhere", model=MODEL), beta=1.0, temperature=1.7, hard_weight=hard_weight
    )
    total, totals = loss.totals(
        api.build(MODEL), jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32), batch
    )
    want = (weights * ((1 - hard_weight) * divergence + hard_weight * nll)).sum()
    np.testing.assert_allclose(total, want, rtol=1e-5)
    np.testing.assert_allclose(totals.values["nll"], (weights * nll).sum(), rtol=1e-5)
