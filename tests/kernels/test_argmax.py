"""The index of the largest number is jnp.argmax's, with equal ones, infinities and NaN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import sharding
from capibara.kernels.argmax import argmax

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize(
    "row", [[1.0, 3.0, 3.0], [-INF] * 3, [2.0, NAN, NAN], [INF, 1.0, INF], [-INF, NAN, INF], [-0.0, 0.0, -1.0], [5.0]]
)
def test_it_is_the_first_of_the_largest(monkeypatch, platform, row):
    monkeypatch.setattr(sharding, "platform", lambda: platform)
    x = jnp.array([row, [-value for value in row]], jnp.float32)
    got = jax.jit(argmax)(x)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, jnp.argmax(x, axis=-1))


def test_it_has_any_leading_dimensions():
    x = jnp.asarray(np.random.default_rng(0).integers(0, 9, (3, 4, 50)), jnp.bfloat16)
    np.testing.assert_array_equal(argmax(x), jnp.argmax(x, axis=-1))


def test_a_draw_is_that_of_categorical():
    """Gumbel noise on the logits, and the largest: as jax.random.categorical draws."""
    logits, key = jax.random.normal(jax.random.key(1), (50,)), jax.random.key(2)
    got = argmax(jax.random.gumbel(key, logits.shape, logits.dtype) + logits)
    assert got == jax.random.categorical(key, logits)
