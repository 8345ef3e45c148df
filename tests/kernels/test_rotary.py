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


@pytest.mark.parametrize("rest", [0, 4])
@pytest.mark.parametrize("pairs", rotary.Pairs)
def test_a_tpu_rotates_heads_in_one_pass_to_the_same_bits(pairs, rest, monkeypatch):
    x, gradient = np.random.default_rng(0).normal(size=(2, 2, 4, 3, 6 + rest))
    x, gradient = jnp.asarray(x, jnp.bfloat16), jnp.asarray(gradient, jnp.bfloat16)
    angles = rotary.reference(POSITIONS, jnp.asarray([0.5, 0.1, 0.01], jnp.float32), 1.25)

    def both(x):
        out, backward = jax.vjp(lambda x: rotary.rotate(x, angles, pairs), x)
        return out, *backward(gradient)

    wanted = both(x)
    monkeypatch.setattr(sharding, "platform", lambda: "tpu")
    programs = {
        "rows": jax.make_jaxpr(both)(x),
        "one token": jax.make_jaxpr(lambda x, *angles: rotary.rotate(x, angles, pairs))(
            x[:, :1], *(a[:, :1] for a in angles)
        ),
        "float32": jax.make_jaxpr(lambda x: rotary.rotate(x, angles, pairs))(x.astype(jnp.float32)),
    }
    assert {name: "dot_general" in str(program) for name, program in programs.items()} == {
        "rows": True, "one token": False, "float32": False,
    }  # fmt: skip
    for got, want in zip(both(x), wanted, strict=True):
        np.testing.assert_array_equal(got, want)
