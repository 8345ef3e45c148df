"""The CPU's implementations agree with the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import sharding
from capibara.kernels.attention.spec import AttentionSpec
from capibara.kernels.cached_attention import cpu, dispatch, reference
from capibara.kernels.cached_attention.reference import Pages, Rows, Visibility

SPEC = AttentionSpec(causal=True, window=None, soft_cap=3.0, scale=0.4)
K, N, H, P = 2, 4, 8, 4


def drawn(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def in_8_bits(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(-127, 127, shape), jnp.int8)


@pytest.mark.parametrize("scaled", [False, True])
def test_one_token_of_one_row(scaled):
    S = 12
    of_shape = in_8_bits if scaled else drawn
    scales = tuple(jnp.abs(drawn(1, K, S, seed=seed)) for seed in (3, 4)) if scaled else None
    rows = Rows(of_shape(1, K, S, H, seed=1), of_shape(1, K, S, H, seed=2), scales)
    seen = Visibility(jnp.arange(S)[None, None] < 9, drawn(1, N, 1, S, seed=5))
    q = drawn(1, 1, N, H)
    want = reference.attend_rows(q, rows, seen, SPEC)
    np.testing.assert_allclose(cpu.attend_one(q, rows, seen, SPEC), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dispatch.attend_rows(q, rows, seen, SPEC), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("counts", [(3, 130, 1), (500, 512, 260)], ids=["short rows", "long rows"])
def test_blocks_of_rows(scaled, counts):
    """By the loop, and by the whole product; behind the visible tokens is what earlier rows have left."""
    B, S = 3, 512
    of_shape = in_8_bits if scaled else drawn
    scales = tuple(jnp.abs(drawn(B, K, S, seed=seed)) for seed in (3, 4)) if scaled else None
    rows = Rows(of_shape(B, K, S, H, seed=1), of_shape(B, K, S, H, seed=2), scales)
    seen = Visibility(jnp.arange(S)[None, None] < jnp.asarray(counts)[:, None, None], drawn(B, N, 1, S, seed=5))
    q = drawn(B, 1, N, H)
    want = reference.attend_rows(q, rows, seen, SPEC)
    np.testing.assert_allclose(cpu.attend_blocks(q, rows, seen, SPEC), want, rtol=1e-5, atol=1e-5)
    lowered = jax.jit(lambda q: dispatch.attend_rows(q, rows, seen, SPEC)).lower(q).as_text()
    assert "while" in lowered and "case" in lowered
    np.testing.assert_allclose(dispatch.attend_rows(q, rows, seen, SPEC), want, rtol=1e-5, atol=1e-5)


def test_rows_are_in_blocks_where_they_are_long():
    assert [cpu.block_size(capacity) for capacity in (64, 250, 256, 384, 512, 1000, 1024, 131_072)] == [
        None, None, 128, 192, 256, None, 256, 256,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "scaled, biased, sinks", [(True, True, False), (False, True, False), (False, False, False), (False, False, True)]
)
def test_pages_one_by_one(scaled, biased, sinks, monkeypatch):
    B, T, M = 3, 2, 3
    table = jnp.asarray([[4, 2, 0], [5, 0, 0], [1, 6, 3]], jnp.int32)
    counts = np.array([7, 3, 12])
    there = jnp.asarray(np.arange(M * P) < counts[:, None])
    visible = there[:, None] & (np.arange(M * P) <= (counts[:, None, None] - T + np.arange(T)[:, None]))
    of_shape = in_8_bits if scaled else drawn
    scales = tuple(jnp.abs(drawn(7, K, P, seed=seed)) for seed in (3, 4)) if scaled else None
    pages = Pages(of_shape(7, K, P, H, seed=1), of_shape(7, K, P, H, seed=2), table, there, scales)
    bias = drawn(B, N, T, M * P, seed=5) if biased else None
    seen, q = Visibility(visible, bias, sinks_N=drawn(N, seed=6) if sinks else None), drawn(B, T, N, H)
    want = reference.attend_rows(q, reference.rows_of(pages), seen, SPEC)
    assert "while" in jax.jit(lambda q: dispatch.attend_pages(q, pages, seen, SPEC)).lower(q).as_text()
    np.testing.assert_allclose(dispatch.attend_pages(q, pages, seen, SPEC), want, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(sharding, "platform", lambda: "gpu")
    np.testing.assert_array_equal(dispatch.attend_pages(q, pages, seen, SPEC), want)


@pytest.mark.parametrize("dtype, sinks, leftover", [("float32", False, np.nan), ("bfloat16", True, np.inf)])
def test_pages_of_skewed_rows_beside_leftovers(dtype, sinks, leftover):
    """Entries that most rows have are read for all rows: also for a free slot, and for rows that have fewer pages."""
    B, T, M, rng = 5, 2, 4, np.random.default_rng(0)
    counts, table = np.array([15, 0, 3, 8, 6]), np.zeros((B, M), np.int32)
    pools, unused = np.full((2, 1 + B * M, K, P, H), leftover), iter(rng.permutation(np.arange(1, 1 + B * M)))
    for row, count in enumerate(counts):
        for entry, start in enumerate(range(0, count, P)):
            size, table[row, entry] = min(P, count - start), next(unused)
            pools[:, table[row, entry], :, :size] = 3 * rng.normal(size=(2, K, size, H))
    there = np.arange(M * P) < counts[:, None]
    visible = there[:, None] & (np.arange(M * P) <= (counts[:, None, None] - T + np.arange(T)[:, None]))
    keys, values = jnp.asarray(pools, dtype)
    pages = Pages(keys, values, jnp.asarray(table), jnp.asarray(there))
    seen, q = Visibility(jnp.asarray(visible), sinks_N=drawn(N, seed=6) if sinks else None), drawn(B, T, N, H)
    want = reference.attend_rows(q, reference.rows_of(pages), seen, SPEC)
    np.testing.assert_allclose(dispatch.attend_pages(q, pages, seen, SPEC), want, rtol=1e-5, atol=1e-5)


def test_a_slot_without_pages_reads_zeros():
    pages = Pages(drawn(2, K, P, H), drawn(2, K, P, H), jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 2 * P), bool))
    seen = Visibility(jnp.zeros((1, 1, 2 * P), bool))
    np.testing.assert_array_equal(dispatch.attend_pages(drawn(1, 1, N, H), pages, seen, SPEC), 0)


@pytest.mark.parametrize("capacity", [512, 60], ids=["blocks", "whole"])
@pytest.mark.parametrize("scaled", [False, True])
def test_some_rows(capacity, scaled):
    slots, of_shape = jnp.asarray([3, 0], jnp.int32), in_8_bits if scaled else drawn
    scales = tuple(jnp.abs(drawn(4, K, capacity, seed=seed)) for seed in (3, 4)) if scaled else None
    rows = Rows(of_shape(4, K, capacity, H, seed=1), of_shape(4, K, capacity, H, seed=2), scales, slots)
    seen = Visibility(jnp.arange(capacity)[None, None] < jnp.asarray([50, 7])[:, None, None])
    q = drawn(2, 1, N, H)
    alone = Rows(rows.k_BKSH[slots], rows.v_BKSH[slots], scales and tuple(x[slots] for x in scales))
    want = reference.attend_rows(q, alone, seen, SPEC)
    np.testing.assert_allclose(dispatch.attend_rows(q, rows, seen, SPEC), want, rtol=1e-5, atol=1e-5)
