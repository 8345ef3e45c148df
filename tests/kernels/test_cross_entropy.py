"""The blocked cross entropy against optax's plain one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from capibara import sharding
from capibara.kernels import cross_entropy as losses
from capibara.kernels.cross_entropy import cross_entropy
from capibara.sharding import Plan, Rules


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_cross_entropy_and_its_gradients_equal_optax(dtype, blocks, smoothing, monkeypatch):
    monkeypatch.setattr(losses, "_BLOCK_BYTES", {"cpu": 3 * 8 * 40 * 4 // blocks})
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(3, 8, 16)), dtype)
    head = jnp.asarray(rng.normal(size=(40, 16)), jnp.float32)
    targets = rng.integers(0, 40, (3, 8))
    weights = jnp.asarray(rng.integers(0, 3, (3, 8)), jnp.float32)

    def ours(hidden, head):
        return cross_entropy(hidden, head, targets, weights, z_loss=0.3, label_smoothing=smoothing)

    def plain(hidden, head):
        logits = hidden.astype(jnp.float32) @ head.astype(dtype).astype(jnp.float32).T
        wanted = jnp.where(jax.nn.one_hot(targets, 40) > 0, 1 - smoothing, smoothing / 39)
        nll = optax.softmax_cross_entropy(logits, wanted) - jnp.sum(jax.scipy.special.entr(wanted), -1)
        z = jnp.square(jax.nn.logsumexp(logits, -1))
        return jnp.sum(nll * weights) + 0.3 * jnp.sum(z * weights), jnp.sum(
            jnp.where(logits.argmax(-1) == targets, weights, 0.0)
        )

    grad = functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    (got, sums), got_grads = grad(ours)(hidden, head)
    (want, correct), want_grads = grad(plain)(hidden, head)
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert sums.correct == correct and sums.weight == weights.sum()
    total = sums.nll + 0.3 * sums.z + (0.0 if sums.smoothing is None else sums.smoothing)
    np.testing.assert_allclose(total, got, rtol=1e-5)
    for a, b in zip(got_grads, want_grads):
        scale = np.abs(np.asarray(b, np.float32)).max()
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=tolerance * scale)


def test_what_has_no_weight_may_have_no_id():
    rng = np.random.default_rng(0)
    hidden, head = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((1, 4, 16), (40, 16)))
    targets, weights = np.array([[3, -100, 7, 40]]), jnp.asarray([[1.0, 0.0, 1.0, 0.0]])

    def loss(targets):
        return jax.value_and_grad(lambda *x: cross_entropy(*x, targets, weights)[0], (0, 1))(hidden, head)

    jax.tree.map(np.testing.assert_array_equal, loss(targets), loss(np.array([[3, 0, 7, 0]])))


@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "context": 2, "stage": 2}])
@pytest.mark.parametrize("reduced_bytes", [2**20, 64])
@pytest.mark.parametrize("length", [8, 32])
def test_every_mesh_has_the_gradients_of_one_device(axes, reduced_bytes, length, monkeypatch):
    """The head's gradient is reduced to its shards, in one piece or several; that of few tokens is made then."""
    monkeypatch.setattr(losses, "_REDUCED_BYTES", reduced_bytes)
    monkeypatch.setattr(losses, "_BLOCK_BYTES", {"cpu": 4 * 40 * 16})
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(8, length, 32)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(40, 32)), jnp.float32)
    targets, weights = rng.integers(0, 40, (8, length)), jnp.asarray(rng.integers(0, 2, (8, length)), jnp.float32)
    mesh, rules = sharding.make_mesh(Plan(batch_size=8, **{"fsdp": 1} | axes)), Rules()

    def on_mesh(hidden, head):
        with sharding.activate(mesh, rules):
            return cross_entropy(hidden, head, targets, weights, z_loss=0.1)[0]

    def on_one(hidden, head):
        return cross_entropy(hidden, head, targets, weights, z_loss=0.1)[0]

    want = jax.grad(on_one, (0, 1))(hidden, head)
    placed = jax.device_put(head, jax.sharding.NamedSharding(mesh, rules.spec(("vocab", "embed"))))
    for a, b in zip(jax.jit(jax.grad(on_mesh, (0, 1)))(hidden, placed), want):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
