"""Attention of a prompt's queries, one part after the other, is that of all of them at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import sharding
from capibara.kernels.attention.spec import AttentionSpec
from capibara.kernels.cached_attention import dispatch, reference
from capibara.kernels.cached_attention import tpu as paged_attention

B, T, N, K, S, H = 2, 24, 4, 2, 48, 8
SPEC = AttentionSpec(causal=True, window=None, soft_cap=4.0, scale=0.3)


def drawn(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_parts_are_the_whole(monkeypatch, bias, sinks):
    q, rows = drawn(B, T, N, H), dispatch.Rows(drawn(B, K, S, H, seed=1), drawn(B, K, S, H, seed=2))
    visible = jnp.arange(S) <= jnp.array([3, S - T])[:, None, None] + jnp.arange(T)[:, None]
    of_bias, of_sinks = drawn(B, N, T, S, seed=3) if bias else None, drawn(N, seed=4) if sinks else None
    seen = dispatch.Visibility(visible, of_bias, None, of_sinks)
    want = reference.attend_rows(q, rows, seen, SPEC)
    monkeypatch.setattr(sharding, "platform", lambda: "tpu")
    monkeypatch.setattr(paged_attention, "_SCORES_BYTES", B * N * T * S * 4 // 5)
    got = jax.jit(dispatch.attend_rows, static_argnums=3)
    np.testing.assert_allclose(got(q, rows, seen, SPEC), want, rtol=2e-6, atol=2e-6)
    assert "while" in got.lower(q, rows, seen, SPEC).as_text()


def test_parts_are_the_fewest_that_fit(monkeypatch):
    q, keys = (
        jax.ShapeDtypeStruct((1, 512, 32, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((1, 8, 2560, 128), jnp.bfloat16),
    )
    assert paged_attention.parts(q, keys) == 1
    monkeypatch.setattr(sharding, "platform", lambda: "tpu")
    assert paged_attention.parts(q, keys) == 8  # 160 MiB of scores: 5 parts would do, and do not divide 512
    assert paged_attention.parts(jax.ShapeDtypeStruct((1, 1, 32, 128), jnp.bfloat16), keys) == 1


@pytest.mark.parametrize("rows, queries", [(32, 5), (1, 509)], ids=["drafts", "a prime number"])
def test_parts_that_would_read_the_keys_too_often_stay_together(monkeypatch, rows, queries):
    monkeypatch.setattr(sharding, "platform", lambda: "tpu")
    q = jax.ShapeDtypeStruct((rows, queries, 32, 128), jnp.bfloat16)
    keys = jax.ShapeDtypeStruct((rows, 8, 8192, 128), jnp.bfloat16)
    assert rows * 32 * queries * 8192 * 4 > paged_attention._SCORES_BYTES
    assert paged_attention.parts(q, keys) == 1
