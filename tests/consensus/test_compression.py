"""Gradients in few bits: what a round may lose, and that rounds together lose nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.consensus.compression import Compression
from capibara.core.types import UserError


def tree_of(seed, dtype=np.float32):
    draw = np.random.default_rng(seed)
    return {"w": jnp.asarray(draw.normal(size=(7, 13)), dtype), "b": {"c": jnp.asarray(draw.normal(size=5), dtype)}}


@pytest.mark.parametrize("bits", [8, 4])
def test_the_error_is_at_most_half_a_step_of_a_block(bits):
    how, tree = Compression(bits=bits, block=16), tree_of(0)
    sent, lost = how.encode(tree, how.init(tree))
    got = how.decode(sent, tree)
    for x, y, rest in zip(*map(jax.tree.leaves, (tree, got, lost)), strict=True):
        x, y = np.asarray(x).reshape(-1), np.asarray(y).reshape(-1)
        for start in range(0, len(x), 16):
            part = x[start : start + 16]
            step = np.abs(part).max() / (2 ** (bits - 1) - 1)
            assert np.abs(part - y[start : start + 16]).max() <= step / 2 * 1.0001
        assert np.abs(x - y).max() > 0
        np.testing.assert_allclose(np.asarray(rest).reshape(-1), x - y, atol=1e-7)
    assert how.bytes_of(tree) == sum(x.nbytes for x in jax.tree.leaves(sent))


def test_the_extremes_of_a_block_are_exact():
    how = Compression(bits=4, block=4)
    x = {"w": jnp.asarray([7.0, -7.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, -14.0])}
    sent, _ = how.encode(x, how.init(x))
    assert sent["w"].codes.dtype == jnp.uint8 and sent["w"].codes.shape == (3, 2)
    np.testing.assert_array_equal(how.decode(sent, x)["w"], x["w"])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("feedback", [True, False])
def test_with_feedback_rounds_together_lose_only_what_the_last_holds(bits, feedback):
    how, rounds = Compression(bits=bits, block=16, error_feedback=feedback), 40
    lost, total = how.init(tree_of(0)), how.init(tree_of(0))
    true = how.init(tree_of(0))
    step = jax.jit(how.encode)
    for _ in range(rounds):  # the same gradient: rounding errs in one direction
        gradient = tree_of(1)
        sent, lost = step(gradient, lost)
        total = jax.tree.map(jnp.add, total, how.decode(sent, gradient))
        true = jax.tree.map(jnp.add, true, gradient)
    off = max(float(jnp.abs(x - y).max()) for x, y in zip(jax.tree.leaves(true), jax.tree.leaves(total), strict=True))
    held = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(lost))
    if feedback:
        assert off <= held * 1.01 + 1e-4 and held > 0
    else:
        assert held == 0 and off > rounds / 4 * 3 / (2 ** (bits - 1) - 1) / 4


def test_a_block_that_is_not_finite_is_nan_and_loses_nothing():
    how = Compression(block=2)
    x = {"w": jnp.asarray([1.0, jnp.inf, 0.3, 1.0])}
    sent, lost = how.encode(x, how.init(x))
    got = np.asarray(how.decode(sent, x)["w"])
    assert np.isnan(got[:2]).all() and np.isfinite(got[2:]).all()
    assert np.isfinite(lost["w"]).all() and not np.asarray(lost["w"][:2]).any()


def test_bfloat16_goes_in_and_bad_fields_do_not():
    how, tree = Compression(), tree_of(2, jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(how.decode(how.encode(tree, how.init(tree))[0], tree))} == {np.dtype("f4")}
    with pytest.raises(UserError, match="Compression.bits is 2, must be 8 or 4"):
        Compression(bits=2)
    with pytest.raises(UserError, match="Compression.block is 3, must be even"):
        Compression(block=3)
