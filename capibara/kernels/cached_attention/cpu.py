"""Attention to a cache in forms that XLA's CPU back end runs fast: one row without a batch axis, pages in a loop."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from capibara.kernels.attention.spec import AttentionSpec
from capibara.kernels.cached_attention.reference import Pages, Rows, Visibility, attend_by, scales_of


def attend_one(q_BTNH: jax.Array, rows: Rows, seen: Visibility, spec: AttentionSpec) -> jax.Array:
    """See dispatch.attend_rows; for one query of one row.

    XLA's CPU back end drops a batch axis of size one from a product, and then updates the cache twice, in copies.
    """
    k_BKSH, v_BKSH = (x.astype(q_BTNH.dtype) for x in rows[:2])

    def scores(q_BKXH: jax.Array) -> jax.Array:
        return jnp.sum((q_BKXH[:, :, :, None] * k_BKSH[:, :, None]).astype(jnp.float32), axis=-1)

    def mixed(w_BKXS: jax.Array) -> jax.Array:
        return jnp.sum(w_BKXS[..., None] * v_BKSH[:, :, None], axis=3, dtype=jnp.float32).astype(v_BKSH.dtype)

    return attend_by(q_BTNH, scores, mixed, k_BKSH.shape[1], seen, spec, rows.scales)


def attend_pages(q_BTNH: jax.Array, pages: Pages, seen: Visibility, spec: AttentionSpec) -> jax.Array:
    """See dispatch.attend_pages. XLA compiles a gather to a slow scalar loop; a loop over pages is faster."""
    scales = scales_of(pages)
    each = _each_page(seen.visible_BTS.any(axis=1), pages.keys.shape[2])

    def scores(q_BKXH: jax.Array) -> jax.Array:
        return _scores_of_pages(q_BKXH, pages.keys, pages.table_BM, each)

    def mixed(w_BKXS: jax.Array) -> jax.Array:
        return _mixed_of_pages(w_BKXS, pages.values, pages.table_BM, pages.written_BS, each)

    return attend_by(q_BTNH, scores, mixed, pages.keys.shape[1], seen, spec, scales)


Body = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Loop = Callable[[Body, jax.Array], jax.Array]
"""loop(body, initial): folds body(slot, index of the page in the slot's table, carry) -> carry over pages."""


def _each_page(seen_BS: jax.Array, page_size: int) -> Loop:
    """A loop over all pages of all slots that hold a visible token."""
    B, M = seen_BS.shape[0], seen_BS.shape[1] // page_size
    seen_X = seen_BS.reshape(B * M, page_size).any(axis=1)
    (order,) = jnp.nonzero(seen_X, size=B * M, fill_value=0)
    count, order = jnp.sum(seen_X, dtype=jnp.int32), order.astype(jnp.int32)

    def loop(body: Body, first: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda i, made: body(order[i] // M, order[i] % M, made), first)

    return loop


def _page(pool: jax.Array, table_BM: jax.Array, slot: jax.Array, entry: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(pool, table_BM[slot, entry])


def _scores_of_pages(q_BKXH: jax.Array, pool: jax.Array, table_BM: jax.Array, each: Loop) -> jax.Array:
    """Products [B, K, X, S] of queries and keys; 0 where a slot has no page."""
    (B, K, X, _), P = q_BKXH.shape, pool.shape[2]

    def body(slot: jax.Array, entry: jax.Array, made: jax.Array) -> jax.Array:
        k_1KPH = _page(pool, table_BM, slot, entry).astype(q_BKXH.dtype)
        q_1KXH = jax.lax.dynamic_index_in_dim(q_BKXH, slot)
        dims = (((3,), (3,)), ((0, 1), (0, 1)))
        new = jax.lax.dot_general(q_1KXH, k_1KPH, dims, preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice(made, new, (slot, 0, 0, entry * P))

    return each(body, jnp.zeros((B, K, X, table_BM.shape[1] * P), jnp.float32))


def _mixed_of_pages(
    w_BKXS: jax.Array, pool: jax.Array, table_BM: jax.Array, written_BS: jax.Array, each: Loop
) -> jax.Array:
    """Weighted sums [B, K, X, H] of the values."""
    (B, K, X, _), (P, H) = w_BKXS.shape, pool.shape[2:]

    def body(slot: jax.Array, entry: jax.Array, made: jax.Array) -> jax.Array:
        v_1KPH = _page(pool, table_BM, slot, entry).astype(w_BKXS.dtype)
        written_P = jax.lax.dynamic_slice(written_BS, (slot, entry * P), (1, P))[0]
        v_1KPH = jnp.where(written_P[:, None], v_1KPH, 0)
        w_1KXP = jax.lax.dynamic_slice(w_BKXS, (slot, 0, 0, entry * P), (1, K, X, P))
        dims = (((3,), (2,)), ((0, 1), (0, 1)))
        new = jax.lax.dot_general(w_1KXP, v_1KPH, dims, preferred_element_type=jnp.float32)
        old = jax.lax.dynamic_index_in_dim(made, slot)
        return jax.lax.dynamic_update_slice(made, old + new, (slot, 0, 0, 0))

    return each(body, jnp.zeros((B, K, X, H), jnp.float32)).astype(w_BKXS.dtype)
