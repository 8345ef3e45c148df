"""The blocked cross entropy against optax's plain one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from capibara.training import losses
from capibara.training.losses import cross_entropy


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_cross_entropy_and_its_gradients_equal_optax(dtype, blocks, monkeypatch):
    monkeypatch.setattr(losses, "_BLOCK_BYTES", {"cpu": 3 * 8 * 40 * 4 // blocks})
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(3, 8, 16)), dtype)
    head = jnp.asarray(rng.normal(size=(40, 16)), jnp.float32)
    targets = rng.integers(0, 40, (3, 8))
    weights = jnp.asarray(rng.integers(0, 3, (3, 8)), jnp.float32)

    def ours(hidden, head):
        return cross_entropy(hidden, head, targets, weights, z_loss=0.3)

    def plain(hidden, head):
        logits = hidden.astype(jnp.float32) @ head.astype(dtype).astype(jnp.float32).T
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        z = jnp.square(jax.nn.logsumexp(logits, -1))
        return jnp.sum(nll * weights) + 0.3 * jnp.sum(z * weights), jnp.sum((logits.argmax(-1) == targets) * weights)

    grad = functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    (got, sums), got_grads = grad(ours)(hidden, head)
    (want, correct), want_grads = grad(plain)(hidden, head)
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert sums.correct == correct and sums.weight == weights.sum()
    for a, b in zip(got_grads, want_grads):
        scale = np.abs(np.asarray(b, np.float32)).max()
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=tolerance * scale)
