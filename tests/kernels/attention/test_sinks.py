"""Attention sinks: every back end supports them, with the gradients of the formula that is written out here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import sharding
from capibara.core.types import UserError
from capibara.kernels.attention import blockwise, reference, splash
from capibara.kernels.attention.dispatch import AttentionBackend, attend
from capibara.kernels.attention.signature import AttentionInputs
from capibara.kernels.attention.spec import AttentionSpec
from capibara.kernels.cached_attention import dispatch as cached_attention
from capibara.sharding import Plan

B, T, N, K, H = 2, 128, 4, 2, 16
CAUSAL = AttentionSpec(causal=True, window=None, soft_cap=None, scale=0.3)
WINDOW = AttentionSpec(causal=True, window=37, soft_cap=2.0, scale=0.3)


def drawn(dtype=jnp.float32, heads=N, kv_heads=K):
    """Queries, keys, values, sinks, the output's gradient; document numbers."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = ((B, T, heads, H), (B, T, kv_heads, H), (B, T, kv_heads, H), (B, T, heads, H))
    q, k, v, dy = (jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes))
    sinks = 2 * jax.random.normal(keys[4], (heads,))
    segments = jnp.broadcast_to(jnp.asarray(np.digitize(np.arange(T), [50, 100]), jnp.int32), (B, T))
    return (q, k, v, sinks), dy, segments


def written_out(q, k, v, sinks, segments, kind):
    """The formula for each head: exp(score) over the sum of all exp(score) and exp(sink)."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = kind.scale * jnp.einsum("btnh,bsnh->bnts", q, k)
    scores = scores if kind.soft_cap is None else kind.soft_cap * jnp.tanh(scores / kind.soft_cap)
    back = np.arange(T)[:, None] - np.arange(T)
    seen = (back >= 0) & (back < (kind.window or T)) & (segments[:, None, :, None] == segments[:, None, None, :])
    weights = jnp.where(seen, jnp.exp(scores), 0.0)
    weights = weights / (weights.sum(-1, keepdims=True) + jnp.exp(sinks)[:, None, None])
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def outputs(way, arrays, dy):
    y, pull = jax.vjp(way, *arrays)
    return [y, *pull(dy)]


def compared(got, want, atol=2e-5):
    assert len(got) == len(want) == 5
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), b, rtol=2e-5, atol=atol * max(1, np.abs(b).max()))


def way_of(attend, kind, segments, **options):
    """(queries, keys, values, sinks) -> a back end's output."""
    return lambda *qkv_sinks: attend(inputs_of(*qkv_sinks, segments), kind, **options)


def inputs_of(q, k, v, sinks, segments):
    return AttentionInputs(q, k, v, segments, segments, sinks_N=sinks)


def ways(kind, segments):
    return {
        "plain": way_of(reference.attend, kind, segments),
        "blockwise": way_of(blockwise.attend, kind, segments, block=32),
        "splash": way_of(splash.attend, kind, segments, interpret=True),
    }


@pytest.mark.parametrize("way", ["plain", "blockwise", "splash"])
@pytest.mark.parametrize("kind", [CAUSAL, WINDOW], ids=["causal", "window"])
def test_each_way_and_its_gradients_are_the_formula(way, kind):
    arrays, dy, segments = drawn()
    want = jax.jit(lambda *a: outputs(lambda *x: written_out(*x, segments, kind), a, dy))(*arrays)
    got = jax.jit(lambda *a: outputs(ways(kind, segments)[way], a, dy))(*arrays)
    compared(got, want)
    without = reference.attend(inputs_of(*arrays[:3], None, segments), kind)
    assert np.abs(got[0] - without).max() > 0.1


@pytest.mark.parametrize("way", ["blockwise", "splash"])
def test_in_bfloat16_sinks_and_their_gradients_stay_in_float32(way):
    arrays, dy, segments = drawn(jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in (*arrays, dy)]
    want = jax.jit(lambda *a: outputs(lambda *x: written_out(*x, segments, CAUSAL), a, wide[-1]))(*wide[:-1])
    got = jax.jit(lambda *a: outputs(ways(CAUSAL, segments)[way], a, dy))(*arrays)
    assert [x.dtype for x in got] == [jnp.bfloat16] * 4 + [jnp.float32]
    compared(got, want, atol=0.02)


@pytest.mark.parametrize("mesh", [dict(tensor=2, data=2), dict(context=2, fsdp=2)], ids=str)
def test_a_sharded_kernel_adds_up_the_sinks_gradient(mesh):
    arrays, dy, segments = drawn()
    want = jax.jit(lambda *a: outputs(lambda *x: written_out(*x, segments, CAUSAL), a, dy))(*arrays)
    plan = Plan(batch_size=2, **mesh)
    with sharding.activate(sharding.make_mesh(plan, jax.devices()[:4]), plan.rules):
        way = way_of(splash.attend, CAUSAL, segments, interpret=True)
        compared(jax.jit(lambda *a: outputs(way, a, dy))(*arrays), want)


def test_a_gpu_takes_blocks_and_cudnn_is_refused(monkeypatch):
    (q, k, v, sinks), _, segments = drawn(jnp.bfloat16)
    monkeypatch.setattr(sharding, "platform", lambda: "gpu")
    inputs = inputs_of(q, k, v, sinks, segments)
    np.testing.assert_array_equal(attend(inputs, CAUSAL), blockwise.attend(inputs, CAUSAL, block=64))
    with pytest.raises(UserError, match="attention is 'cudnn', which does not support attention sinks: set 'auto'"):
        attend(inputs, CAUSAL, AttentionBackend.CUDNN)


def test_a_sink_far_above_all_scores_takes_everything():
    (q, k, v, _), _, segments = drawn()
    for way in ways(CAUSAL, segments).values():
        got = way(q, k, v, jnp.array([90.0, 0.0, -90.0, 200.0]))
        assert np.abs(got[:, :, 0]).max() < 1e-30 and np.abs(got[:, :, 3]).max() == 0
        assert np.abs(got[:, :, 2]).max() > 1


def test_cached_keys_are_attended_to_with_sinks():
    (q, k, v, sinks), _, segments = drawn()
    seen = jnp.ones((B, T, T), bool) & (jnp.arange(T)[:, None] >= jnp.arange(T))
    want = written_out(q, k, v, sinks, jnp.zeros_like(segments), CAUSAL)
    keys, values = (jnp.swapaxes(x, 1, 2) for x in (k, v))
    seen = cached_attention.Visibility(seen, sinks_N=sinks)
    got = cached_attention.attend_rows(q, cached_attention.Rows(keys, values), seen, CAUSAL)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
