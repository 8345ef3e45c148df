"""Gradients that are computed together, where the scheduler would postpone some."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import sharding
from capibara.kernels.gradients import gradients_together


@pytest.mark.parametrize("platform, barriers", [("tpu", 1), ("cpu", 0)])
def test_they_are_the_same_and_tied_on_tpu_alone(platform, barriers, monkeypatch):
    monkeypatch.setattr(sharding, "platform", lambda: platform)
    x, w = jnp.arange(6.0).reshape(2, 3), jnp.arange(12.0).reshape(3, 4)

    def loss(x, w):
        x, w = gradients_together(x, w)
        return jnp.sum(jnp.sin(x @ w))

    gradient = jax.grad(loss, (0, 1))
    assert str(jax.make_jaxpr(gradient)(x, w)).count("optimization_barrier") == barriers
    for got, want in zip(gradient(x, w), jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w)), (0, 1))(x, w), strict=True):
        np.testing.assert_array_equal(got, want)
