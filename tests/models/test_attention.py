"""Every way to attend gives the numbers and gradients of the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.models.attention import dot_product_attention
from capibara.models.blockwise import block_size, blockwise_attention


def inputs(B=2, T=128, N=4, K=2, H=16, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    q, k, v, dy = (jnp.asarray(rng.normal(size=(B, T, heads, H)), dtype) for heads in (N, K, K, N))
    segment_ids = np.sort(rng.integers(0, 4, (B, T)), axis=1).astype(np.int32)
    return q, k, v, dy, segment_ids


@pytest.mark.parametrize("K", [1, 2, 4])
@pytest.mark.parametrize("block", [32, 128])
def test_blockwise_equals_plain_attention_and_its_gradients(K, block):
    q, k, v, dy, segment_ids = inputs(K=K)

    def outputs(attend):
        y, backward = jax.vjp(lambda q, k, v: attend(q, k, v, segment_ids), q, k, v)
        return y, *backward(dy)

    got = jax.jit(lambda: outputs(lambda *args: blockwise_attention(*args, block)))()
    want = jax.jit(lambda: outputs(dot_product_attention))()
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_blockwise_in_bfloat16_stays_near():
    q, k, v, _, segment_ids = inputs(dtype=jnp.bfloat16)
    got = blockwise_attention(q, k, v, segment_ids, 64)
    assert got.dtype == jnp.bfloat16
    want = dot_product_attention(*(x.astype(jnp.float32) for x in (q, k, v)), segment_ids)
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.03)


@pytest.mark.parametrize("length, block", [(256, 64), (64, 64), (2048, 128), (100, None), (16, None)])
def test_block_size(length, block):
    assert block_size(length) == block
