"""Frequencies that depend on the row length, computed in programs and in advance."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.models.layers.rope import Rope, Trial, angles, tried

DYNAMIC = Rope(theta=100.0, scaling="dynamic", factor=3.0, original_length=8)
LONG = Rope(
    theta=100.0, scaling="longrope", factor=4.0, original_length=8, short_factors=(1.0, 1.5), long_factors=(1.0, 5.0)
)


@pytest.mark.parametrize("rope", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
def test_rows_up_to_the_original_length_turn_as_in_pretraining_and_longer_ones_slower(rope):
    lengths = [5, 8, 9, 20]
    got = np.asarray(rope.frequencies_of(jnp.array(lengths), 4))
    for row, length in zip(got, lengths, strict=True):
        np.testing.assert_allclose(row, rope.frequencies(4, length=length), rtol=1e-6)
    np.testing.assert_array_equal(got[0], got[1])
    assert got[2][-1] < got[1][-1] and (rope is LONG or got[3][-1] < got[2][-1])


def test_frequencies_are_those_of_the_formulas():
    stretch = 3.0 * 20 / 8 - 2.0
    wanted = (100.0 * stretch ** (4 / 2)) ** (-np.array([0, 2]) / 4)  # theta of NTK-aware scaling, with 4 dimensions
    np.testing.assert_allclose(DYNAMIC.frequencies(4, length=20), wanted, rtol=1e-6)
    np.testing.assert_allclose(LONG.frequencies(4, length=20), [1.0, 0.1 / 5], rtol=1e-6)
    assert LONG.magnitude() == pytest.approx((1 + np.log(4) / np.log(8)) ** 0.5) and DYNAMIC.magnitude() == 1.0


def test_each_row_has_its_own_length():
    positions = jnp.array([[0, 1, 2, 3], [6, 7, 8, 9]])
    sin, _ = angles(positions, LONG, 4)
    for row, length in zip(range(2), (4, 10), strict=True):
        alone, _ = angles(positions[row : row + 1], LONG, 4, length=length)
        np.testing.assert_allclose(sin[row], alone[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(scaling="longrope", original_length=8, factor=2.0),
            "Rope.short_factors has 0 numbers, must be one for each of 2",
        ),
        (
            dict(short_factors=(1.0, 2.0)),
            "Rope.short_factors has 2 numbers, are for longrope scaling only: leave them out",
        ),
    ],
)
def test_factors_are_one_for_each_frequency(changes, message):
    with pytest.raises(UserError, match=message):
        Rope(**changes).check(4)
    with pytest.raises(UserError, match="Rope.long_factors are .*0.0.*, must be finite and above 0"):
        Rope(long_factors=(0.0,))
    with pytest.raises(UserError, match="Rope.original_length is None, dynamic scaling needs the row length"):
        Rope(scaling="dynamic", factor=2.0)


def test_one_bound_for_both_is_a_step():
    """Llama 4 Scout's published values; transformers 5.24 computes these of them."""
    bounds = {"low_frequency_factor": 1.0, "high_frequency_factor": 1.0}
    rope = Rope(theta=500000.0, scaling="llama3", factor=16.0, original_length=8192, **bounds)
    plain = 500000.0 ** (-np.arange(64) / 64)
    step = int(np.sum(8192 * plain / (2 * np.pi) > 1))
    got = np.asarray(rope.frequencies(128), np.float64)
    np.testing.assert_allclose(got[:step], plain[:step], rtol=1e-5)
    np.testing.assert_allclose(got[step:], plain[step:] / 16, rtol=1e-5)
    np.testing.assert_allclose(got[[34, 35]], [9.3847e-4, 4.7781e-5], rtol=1e-4)
    with pytest.raises(UserError, match="low_frequency_factor .2.0. must be above 0 and at most"):
        Rope(
            theta=500000.0,
            scaling="llama3",
            factor=16.0,
            original_length=8192,
            low_frequency_factor=2.0,
            high_frequency_factor=1.0,
        )


def test_first_tokens_keep_their_frequencies():
    rope = dataclasses.replace(LONG, unscaled_tokens=3)
    positions = jnp.arange(20)[None]
    got, scaled, plain = (angles(positions, item, 4) for item in (rope, LONG, Rope(theta=100.0)))
    for new, long, short in zip(got, scaled, plain, strict=True):
        np.testing.assert_allclose(new[0, :3], short[0, :3] * LONG.magnitude(), rtol=1e-5)
        np.testing.assert_array_equal(new[0, 3:], long[0, 3:])
        assert not np.allclose(new[0, 1:3], long[0, 1:3], rtol=1e-3)
    for changes, message in (
        (dict(unscaled_tokens=-1), "Rope.unscaled_tokens is -1, must be at least 0"),
        (dict(unscaled_tokens=2), "is for longrope scaling, and scaling is 'none': leave it out"),
    ):
        with pytest.raises(UserError, match=message):
            Rope(**changes)


def test_a_trial_is_the_scaling_that_it_describes():
    trial = Trial(jnp.array(LONG.long_factors), jnp.float32(LONG.magnitude()), jnp.int32(3))
    positions = jnp.arange(20)[None]
    with tried(trial):
        got = angles(positions, Rope(theta=100.0), 4)
        local = angles(positions, Rope(theta=100.0, local_theta=50.0), 4, local=True)
    wanted = angles(positions, dataclasses.replace(LONG, unscaled_tokens=3), 4)
    for new, old in zip(got, wanted, strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-6)
    for new, old in zip(
        local, angles(positions, Rope(theta=50.0), 4), strict=True
    ):  # layers with a window are not scaled
        np.testing.assert_array_equal(new, old)
