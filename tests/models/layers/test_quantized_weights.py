"""Quantized weights: the published formula, and a product that saves nothing in floating point."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.models.layers import quantized_weights
from capibara.models.layers.quantized_weights import BaseDtype


def weight_of(shape=(2, 128, 3, 4)):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def nearest_in(book, weight, block=64):
    """Dettmers et al. 2023, equation 1 and appendix E, written out: 64 inputs in a row share their largest magnitude."""
    by_output = np.moveaxis(weight, 1, -1)
    blocks = by_output.reshape(-1, block)
    scales = np.abs(blocks).max(1, keepdims=True)
    codes = np.abs((blocks / scales)[..., None] - book).argmin(-1)
    return np.moveaxis((np.asarray(book, np.float32)[codes] * scales).reshape(by_output.shape), -1, 1)


@pytest.mark.parametrize(
    ("kind", "book", "bits"),
    [
        ("nf4", quantized_weights.NF4, 4.5),
        ("int4", np.arange(-7, 8) / 7, 4.5),
        ("int8", np.arange(-127, 128) / 127, 8.5),
    ],
)
def test_values_are_the_nearest_of_the_code_book(kind, book, bits):
    weight = weight_of()
    blocks = quantized_weights.quantize(weight, BaseDtype(kind), -3)
    got = blocks.astype(jnp.float32)
    np.testing.assert_allclose(got, nearest_in(np.asarray(book), weight), atol=1e-6)
    again = quantized_weights.quantize(got, BaseDtype(kind), -3)
    np.testing.assert_array_equal(blocks.codes, again.codes)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(blocks)) * 8 == bits * weight.size


def test_the_code_book_is_the_published_one():
    """Quantiles of the normal distribution, 8 above zero and 7 below it, scaled to 1 (appendix E; offset 0.9677083)."""
    normal = jax.scipy.stats.norm.ppf
    above = normal(np.linspace(0.9677083, 0.5, 9)[:-1])
    below = -normal(np.linspace(0.9677083, 0.5, 8)[:-1])
    want = np.sort(np.concatenate([above, below, [0.0]])) / above.max()
    np.testing.assert_allclose(quantized_weights.NF4, want, atol=1e-6)


def test_double_quantization_changes_scales_by_half_a_step():
    weight = weight_of((1, 4096, 2))
    once, twice = (quantized_weights.quantize(weight, BaseDtype.NF4, -2, double=double) for double in (False, True))
    scales = twice.means[:, None] + twice.steps[:, None] * twice.scales.astype(jnp.float32)
    assert np.all(np.abs(scales - once.scales) <= 0.5001 * twice.steps[:, None])
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(twice)) * 8 / weight.size < 4.15
    np.testing.assert_array_equal(once.codes, twice.codes)


def test_the_product_and_its_gradient_are_those_of_the_weight():
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=size).astype(np.float32) for size in ((2, 5, 3, 64), (2, 5, 4)))
    blocks = quantized_weights.quantize(weight_of((3, 64, 4)), BaseDtype.NF4, -2)
    y, back = jax.vjp(lambda x: quantized_weights.frozen_matmul(x, blocks, 2), x)
    weight = blocks.astype(jnp.float32)
    np.testing.assert_allclose(y, np.einsum("bthd,hdo->bto", x, weight), atol=1e-4)
    np.testing.assert_allclose(back(dy)[0], np.einsum("bto,hdo->bthd", dy, weight), atol=1e-4)


def test_zeros_stay_zeros_and_odd_weights_are_refused():
    np.testing.assert_array_equal(
        quantized_weights.quantize(jnp.zeros((64, 2)), BaseDtype.NF4, -2).astype(jnp.float32), 0.0
    )
    assert [quantized_weights.block_size(size) for size in (64, 96, 128, 80, 2)] == [64, 48, 64, 40, 2]
    with pytest.raises(UserError, match="weights with 33 inputs, which must be even: try 'bfloat16'"):
        quantized_weights.quantize(jnp.zeros((33, 2)), BaseDtype.INT8, -2)
