"""Every way to attend gives the numbers and gradients of the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.models.attention import dot_product_attention
from capibara.models.attention_kind import AttentionKind
from capibara.models.blockwise import block_size, blockwise_attention


def inputs(B=2, T=128, S=128, N=4, K=2, H=16, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H), (N, T, S), (B, T, N, H))
    q, k, v, bias, dy = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    segments = [np.sort(rng.integers(0, 4, (B, length)), axis=1).astype(np.int32) for length in (T, S)]
    return q, k, v, bias, dy, *segments


KINDS = {
    "causal": dict(causal=True),
    "both sides": dict(causal=False),
    "window": dict(causal=True, window=37),
    "window of one block": dict(causal=True, window=32),
    "narrow": dict(causal=True, window=1),
    "window on both sides": dict(causal=False, window=40),
    "soft cap": dict(causal=True, soft_cap=1.5),
    "all": dict(causal=True, window=50, soft_cap=2.0),
}


def kind_of(*, causal, window=None, soft_cap=None, scale=0.3):
    return AttentionKind(causal=causal, window=window, soft_cap=soft_cap, scale=scale)


def blockwise(q, k, v, *, kind, q_segments_BT, kv_segments_BS, bias_NTS, block):
    return blockwise_attention(q, k, v, q_segments_BT, kv_segments_BS, bias_NTS, kind, block)


def outputs(attend, arrays, dy):
    """The result and the gradients of all arrays, bias included."""
    y, backward = jax.vjp(attend, *arrays)
    return [y, *jax.tree.leaves(backward(dy))]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("K, block, biased", [(1, 32, False), (2, 128, True), (4, 32, True)])
def test_blockwise_equals_plain_attention_and_its_gradients(name, K, block, biased):
    q, k, v, bias, dy, *segments = inputs(K=K)
    options = dict(kind=kind_of(**KINDS[name]), q_segments_BT=segments[0], kv_segments_BS=segments[0])
    arrays = (q, k, v, bias if biased else None)
    ways = (lambda *a, bias: blockwise(*a, **options, bias_NTS=bias, block=block)), (
        lambda *a, bias: dot_product_attention(*a, **options, bias_NTS=bias)
    )
    got, want = (
        jax.jit(lambda way=way: outputs(lambda q, k, v, bias: way(q, k, v, bias=bias), arrays, dy))() for way in ways
    )
    assert len(got) == len(want) == 4 + biased
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=3e-5)


def test_blockwise_cross_attention():
    q, k, v, bias, dy, q_segments, kv_segments = inputs(T=64, S=96)
    options = dict(kind=kind_of(causal=False), q_segments_BT=q_segments, kv_segments_BS=kv_segments)
    got = outputs(lambda *a: blockwise(*a, **options, bias_NTS=bias, block=32), (q, k, v), dy)
    want = outputs(lambda *a: dot_product_attention(*a, **options, bias_NTS=bias), (q, k, v), dy)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=3e-5)


def test_rows_out_of_order_need_only_their_places():
    q, k, v, _, dy, segments, _ = inputs()
    order = np.random.default_rng(1).permutation(128)
    kind = kind_of(causal=True, window=50)
    want = dot_product_attention(q, k, v, kind=kind, q_segments_BT=segments, kv_segments_BS=segments)
    moved = [x[:, order] for x in (q, k, v)]
    ids = segments[:, order]
    got = dot_product_attention(
        *moved, kind=kind, q_segments_BT=ids, kv_segments_BS=ids, q_places_T=order, kv_places_S=order
    )
    np.testing.assert_allclose(got, want[:, order], rtol=1e-5, atol=1e-6)


def test_blockwise_in_bfloat16_stays_near():
    q, k, v, _, _, segments, _ = inputs(dtype=jnp.bfloat16)
    options = dict(kind=kind_of(causal=True), q_segments_BT=segments, kv_segments_BS=segments)
    got = blockwise(q, k, v, **options, bias_NTS=None, block=64)
    assert got.dtype == jnp.bfloat16
    want = dot_product_attention(*(x.astype(jnp.float32) for x in (q, k, v)), **options)
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.03)


@pytest.mark.parametrize("length, block", [(256, 64), (64, 64), (2048, 128), (100, None), (16, None)])
def test_block_size(length, block):
    assert block_size(length) == block
