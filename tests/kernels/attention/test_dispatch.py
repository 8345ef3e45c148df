"""Every attention back end agrees with the reference in values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import sharding
from capibara.core.types import UserError
from capibara.kernels.attention import blockwise, reference
from capibara.kernels.attention.dispatch import AttentionBackend, attend
from capibara.kernels.attention.signature import AttentionInputs
from capibara.kernels.attention.spec import AttentionSpec
from capibara.sharding import Plan


def drawn(B=2, T=128, S=128, N=4, K=2, H=16, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H), (N, T, S), (B, T, N, H))
    q, k, v, bias, dy = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    segments = [np.sort(rng.integers(0, 4, (B, length)), axis=1).astype(np.int32) for length in (T, S)]
    return q, k, v, bias, dy, *segments


SPECS = {
    "causal": dict(causal=True),
    "both sides": dict(causal=False),
    "window": dict(causal=True, window=37),
    "window of one block": dict(causal=True, window=32),
    "narrow": dict(causal=True, window=1),
    "window on both sides": dict(causal=False, window=40),
    "soft cap": dict(causal=True, soft_cap=1.5),
    "all": dict(causal=True, window=50, soft_cap=2.0),
}


def spec_of(*, causal, window=None, soft_cap=None, scale=0.3):
    return AttentionSpec(causal=causal, window=window, soft_cap=soft_cap, scale=scale)


def outputs(attend, arrays, dy):
    """The result and the gradients of all arrays, bias included."""
    y, backward = jax.vjp(attend, *arrays)
    return [y, *jax.tree.leaves(backward(dy))]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("K, block, biased", [(1, 32, False), (2, 128, True), (4, 32, True)])
def test_blockwise_equals_plain_attention_and_its_gradients(name, K, block, biased):
    q, k, v, bias, dy, *segments = drawn(K=K)
    spec, ids = spec_of(**SPECS[name]), (segments[0], segments[0])
    arrays = (q, k, v, bias if biased else None)

    def found(attend):
        of_arrays = lambda q, k, v, bias: attend(AttentionInputs(q, k, v, *ids, bias_NTS=bias), spec)  # noqa: E731
        return jax.jit(functools.partial(outputs, of_arrays))(arrays, dy)

    got, want = found(functools.partial(blockwise.attend, block=block)), found(reference.attend)
    assert len(got) == len(want) == 4 + biased
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=3e-5)


def test_blockwise_cross_attention():
    q, k, v, bias, dy, q_segments, kv_segments = drawn(T=64, S=96)
    spec = spec_of(causal=False)
    inputs = lambda *qkv: AttentionInputs(*qkv, q_segments, kv_segments, bias_NTS=bias)  # noqa: E731
    got = outputs(lambda *qkv: blockwise.attend(inputs(*qkv), spec, block=32), (q, k, v), dy)
    want = outputs(lambda *qkv: reference.attend(inputs(*qkv), spec), (q, k, v), dy)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=3e-5)


def test_rows_out_of_order_need_only_their_row_positions():
    q, k, v, _, dy, segments, _ = drawn()
    order = np.random.default_rng(1).permutation(128)
    spec = spec_of(causal=True, window=50)
    want = reference.attend(AttentionInputs(q, k, v, segments, segments), spec)
    moved = [x[:, order] for x in (q, k, v, segments, segments)]
    got = reference.attend(AttentionInputs(*moved, order, order), spec)
    np.testing.assert_allclose(got, want[:, order], rtol=1e-5, atol=1e-6)


def test_blockwise_in_bfloat16_stays_near():
    q, k, v, _, _, segments, _ = drawn(dtype=jnp.bfloat16)
    spec, ids = spec_of(causal=True), (segments, segments)
    got = blockwise.attend(AttentionInputs(q, k, v, *ids), spec, block=64)
    assert got.dtype == jnp.bfloat16
    want = reference.attend(AttentionInputs(*(x.astype(jnp.float32) for x in (q, k, v)), *ids), spec)
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.03)


@pytest.mark.parametrize("length, block", [(256, 64), (64, 64), (2048, 128), (100, None), (16, None)])
def test_block_size(length, block):
    assert blockwise.block_size(length) == block


def attended(backend, *, T=128, row_positions=None, spec=None, dtype=jnp.float32, H=16, bias=False):
    q, k, v, bias_NTS, _, segments, _ = drawn(T=T, S=T, H=H, dtype=dtype)
    inputs = AttentionInputs(q, k, v, segments, segments, row_positions, row_positions, bias_NTS if bias else None)
    return attend(inputs, spec or spec_of(causal=True), AttentionBackend(backend))


@pytest.mark.parametrize(
    "backend, platform, given, message",
    [
        ("splash", "cpu", {}, "attention is 'splash', which runs on TPU only, not on CPU: set 'auto'"),
        ("cudnn", "cpu", {}, "attention is 'cudnn', which runs on GPU only, not on CPU: set 'auto'"),
        ("cudnn", "tpu", {}, "runs on GPU only, not on TPU"),
        ("blockwise", "cpu", dict(T=100), "'blockwise', which takes rows of a multiple of 64 tokens.*not of 100"),
        ("blockwise", "cpu", dict(row_positions=np.arange(128)[::-1]), "needs whole rows in their order"),
        (
            "cudnn",
            "gpu",
            dict(row_positions=np.arange(128)[::-1], dtype=jnp.bfloat16),
            "needs whole rows in their order",
        ),
        ("cudnn", "gpu", {}, "takes 16-bit floats.*not float32"),
        ("cudnn", "gpu", dict(dtype=jnp.bfloat16, spec=spec_of(causal=True, soft_cap=2.0)), "soft_cap=2.0"),
        ("cudnn", "gpu", dict(dtype=jnp.bfloat16, spec=spec_of(causal=False, window=9)), "causal=False, window=9"),
        ("splash", "tpu", dict(H=320), "takes head_dim up to 256.*head_dim 320"),
        ("splash", "tpu", dict(bias=True), "no relative positions.*relative positions: set 'auto'"),
    ],
)
def test_a_named_back_end_says_what_it_cannot_do(backend, platform, given, message, monkeypatch):
    monkeypatch.setattr(sharding, "platform", lambda: platform)
    with pytest.raises(UserError, match=message) as raised:
        attended(backend, **given)
    assert "\n" not in str(raised.value)


def test_a_context_axis_takes_no_blocks_of_rows_out_of_order():
    layout = Plan(batch_size=2, fsdp=1, context=2)
    with sharding.activate(sharding.make_mesh(layout, jax.devices()[:2]), layout.rules):
        with pytest.raises(UserError, match="attention is 'blockwise'.*Plan.context"):
            attended("blockwise", row_positions=sharding.zigzag(128, 2))


def test_auto_heeds_row_positions():
    order = np.random.default_rng(1).permutation(128)
    np.testing.assert_array_equal(attended("auto", row_positions=order), attended("xla", row_positions=order))
    assert np.abs(attended("auto", row_positions=order) - attended("auto")).max() > 0.1
