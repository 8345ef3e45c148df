"""Sines, cosines and rotated heads agree with the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import sharding
from capibara.kernels import rotary

POSITIONS = jnp.asarray([[0, 1, 2, 500], [7, 8, 9, 0]], jnp.int32)


@pytest.mark.parametrize("shape", [(4,), (3,), (2, 1, 1, 4)], ids=str)
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_every_platform_has_the_numbers_of_the_formula(platform, shape, monkeypatch):
    monkeypatch.setattr(sharding, "platform", lambda: platform)
    frequency = jnp.asarray(np.random.default_rng(0).uniform(size=shape), jnp.float32)
    got = jax.jit(lambda *of: rotary.sin_cos(*of, 1.25))(POSITIONS, frequency)
    angle = np.asarray(POSITIONS, np.float64)[..., None, None] * np.asarray(frequency, np.float64)
    for found, plain, want in zip(got, rotary.reference(POSITIONS, frequency, 1.25), (np.sin, np.cos), strict=True):
        assert found.shape == (2, 4, 1, shape[-1])
        np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found, 1.25 * want(angle), atol=1e-4)


def test_pairs_turn_by_their_angle_and_the_rest_of_a_head_stays():
    x = np.random.default_rng(0).normal(size=(2, 4, 3, 10)).astype(np.float32)
    angles = rotary.reference(POSITIONS, jnp.asarray([0.5, 0.1, 0.01], jnp.float32), 1.0)
    got = rotary.rotate(jnp.asarray(x), angles)
    sin, cos = (np.asarray(a, np.float64) for a in angles)
    turned = (x[..., :3] + 1j * x[..., 3:6]) * (cos + 1j * sin)
    np.testing.assert_allclose(got[..., :3], turned.real, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[..., 3:6], turned.imag, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[..., 6:], x[..., 6:])
