"""Transposing part by part gives the transpose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels.matmul import transposition
from capibara.kernels.matmul.transposition import transposed


@pytest.fixture(autouse=True, params=[0, 2**20], ids=["large", "small"])
def large(request, monkeypatch):
    """Runs each test with every matrix treated as large, and with none."""
    monkeypatch.setattr(transposition, "LARGE_BYTES", request.param)


@pytest.mark.parametrize("shape", [(1, 5), (7, 3), (8, 16), (20, 9), (512, 4), (515, 2), (1000, 3)])
def test_it_is_the_transpose(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(transposed)(x), x.T)


def test_it_has_gradients_and_takes_batches():
    x = np.random.default_rng(0).normal(size=(3, 20, 6)).astype(np.float32)
    factor = np.random.default_rng(1).normal(size=(6, 20)).astype(np.float32)
    gradient = jax.jit(jax.vmap(jax.grad(lambda x: jnp.sum(jnp.sin(transposed(x)) * factor))))(x)
    np.testing.assert_allclose(gradient, np.cos(x) * factor.T, rtol=1e-5, atol=1e-6)
