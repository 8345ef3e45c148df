"""Attention to a cache as XLA's CPU back end does it fastest: one row without its batch, pages one after the other."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from capibara.kernels.attention.spec import AttentionSpec
from capibara.kernels.cached_attention.reference import Pages, Rows, Seen, attend_by, scales_of


def attend_one(q_BTNH: jax.Array, rows: Rows, seen: Seen, spec: AttentionSpec) -> jax.Array:
    """As dispatch.attend_rows, of one query of one row.

    XLA's CPU back end drops the batch of one row from a product, and then updates the cache twice, in copies of it.
    """
    k_BKSH, v_BKSH = (x.astype(q_BTNH.dtype) for x in rows[:2])

    def scores(q_BKXH: jax.Array) -> jax.Array:
        return jnp.sum((q_BKXH[:, :, :, None] * k_BKSH[:, :, None]).astype(jnp.float32), axis=-1)

    def mixed(w_BKXS: jax.Array) -> jax.Array:
        return jnp.sum(w_BKXS[..., None] * v_BKSH[:, :, None], axis=3, dtype=jnp.float32).astype(v_BKSH.dtype)

    return attend_by(q_BTNH, scores, mixed, k_BKSH.shape[1], seen, spec, rows.scales)


def attend_pages(q_BTNH: jax.Array, pages: Pages, seen: Seen, spec: AttentionSpec) -> jax.Array:
    """As dispatch.attend_pages: XLA makes a slow loop over numbers of a gather, so a loop over pages is quicker."""
    scales = scales_of(pages)
    each = _each_page(seen.visible_BTS.any(axis=1), pages.keys.shape[2])

    def scores(q_BKXH: jax.Array) -> jax.Array:
        return _scores_of_pages(q_BKXH, pages.keys, pages.table_BM, each)

    def mixed(w_BKXS: jax.Array) -> jax.Array:
        return _mixed_of_pages(w_BKXS, pages.values, pages.table_BM, pages.there_BS, each)

    return attend_by(q_BTNH, scores, mixed, pages.keys.shape[1], seen, spec, scales)


Loop = Callable[[Callable, jax.Array], jax.Array]
"""(function of slot, place of the page in its table and what it has made, its beginning) -> what it has made of all."""


def _each_page(seen_BS: jax.Array, page_size: int) -> Loop:
    """A loop over all pages of all slots in which anything is seen."""
    B, M = seen_BS.shape[0], seen_BS.shape[1] // page_size
    seen_X = seen_BS.reshape(B * M, page_size).any(axis=1)
    (order,) = jnp.nonzero(seen_X, size=B * M, fill_value=0)
    count, order = jnp.sum(seen_X, dtype=jnp.int32), order.astype(jnp.int32)

    def loop(body: Callable, first: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda i, made: body(order[i] // M, order[i] % M, made), first)

    return loop


def _page(pool: jax.Array, table_BM: jax.Array, slot: jax.Array, place: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(pool, table_BM[slot, place])


def _scores_of_pages(q_BKXH: jax.Array, pool: jax.Array, table_BM: jax.Array, each: Loop) -> jax.Array:
    """Products [B, K, X, S] of queries and keys; 0 where a slot has no page."""
    (B, K, X, _), P = q_BKXH.shape, pool.shape[2]

    def body(slot, place, made):
        k_1KPH = _page(pool, table_BM, slot, place).astype(q_BKXH.dtype)
        q_1KXH = jax.lax.dynamic_index_in_dim(q_BKXH, slot)
        dims = (((3,), (3,)), ((0, 1), (0, 1)))
        new = jax.lax.dot_general(q_1KXH, k_1KPH, dims, preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice(made, new, (slot, 0, 0, place * P))

    return each(body, jnp.zeros((B, K, X, table_BM.shape[1] * P), jnp.float32))


def _mixed_of_pages(
    w_BKXS: jax.Array, pool: jax.Array, table_BM: jax.Array, there_BS: jax.Array, each: Loop
) -> jax.Array:
    """Sums [B, K, X, H] of values by their weights."""
    (B, K, X, _), (P, H) = w_BKXS.shape, pool.shape[2:]

    def body(slot, place, made):
        v_1KPH = _page(pool, table_BM, slot, place).astype(w_BKXS.dtype)
        there_P = jax.lax.dynamic_slice(there_BS, (slot, place * P), (1, P))[0]
        v_1KPH = jnp.where(there_P[:, None], v_1KPH, 0)
        w_1KXP = jax.lax.dynamic_slice(w_BKXS, (slot, 0, 0, place * P), (1, K, X, P))
        dims = (((3,), (2,)), ((0, 1), (0, 1)))
        new = jax.lax.dot_general(w_1KXP, v_1KPH, dims, preferred_element_type=jnp.float32)
        old = jax.lax.dynamic_index_in_dim(made, slot)
        return jax.lax.dynamic_update_slice(made, old + new, (slot, 0, 0, 0))

    return each(body, jnp.zeros((B, K, X, H), jnp.float32)).astype(w_BKXS.dtype)
