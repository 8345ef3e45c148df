"""Attention to a cache in forms that XLA's CPU back end runs fast: one row without a batch axis, pages in a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from capibara.kernels.attention.spec import AttentionSpec
from capibara.kernels.cached_attention.reference import (
    MASKED,
    Pages,
    Rows,
    Visibility,
    attend_by,
    attend_rows,
    scales_of,
)

_BATCHED = ((0, 1), (0, 1))
# Tokens of a block, the first that fits: a loop's turn costs some microseconds, as much as reading 100 tokens.
_BLOCKS = (256, 192, 128)


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


def attend_blocks(q_BTNH: jax.Array, rows: Rows, seen: Visibility, spec: AttentionSpec) -> jax.Array:
    """See dispatch.attend_rows; while rows are short it reads only their blocks that hold a visible token.

    A product reads whole rows, on all cores; a loop over blocks is less work until rows are half full. Of some slots'
    rows a product would need a copy.
    """
    k_BKSH, v_BKSH, slots_R = rows.k_BKSH, rows.v_BKSH, rows.slots_R
    size, B, S = block_size(k_BKSH.shape[2]), len(q_BTNH), k_BKSH.shape[2]
    assert size is not None, "the caller has checked it"
    seen_BM = _by_page(seen.visible_BTS, size)
    each, blocks = _each_page(seen_BM), jnp.sum(seen_BM)

    def block(x_BKSH: jax.Array, row: jax.Array, entry: jax.Array) -> jax.Array:
        _, K, _, H = x_BKSH.shape
        slot = row if slots_R is None else slots_R[row]
        return jax.lax.dynamic_slice(x_BKSH, (slot, 0, entry * size, 0), (1, K, size, H))

    def scores(q_BKXH: jax.Array) -> jax.Array:
        return _scores_of_pages(q_BKXH, lambda *at: block(k_BKSH, *at), k_BKSH.shape[2], size, each)

    def mixed(w_BKXS: jax.Array) -> jax.Array:
        return _mixed_of_pages(w_BKXS, lambda *at: block(v_BKSH, *at), v_BKSH.shape[3], size, each)

    def by_blocks() -> jax.Array:
        return attend_by(q_BTNH, scores, mixed, k_BKSH.shape[1], seen, spec, rows.selected_scales)

    if slots_R is not None:
        return by_blocks()
    whole = lambda: attend_rows(q_BTNH, rows, seen, spec)  # noqa: E731
    return jax.lax.cond(2 * blocks <= B * (S // size), by_blocks, whole)


def block_size(capacity: int) -> int | None:
    """Tokens of a block of rows with this capacity; None: rows are so short that they are read whole."""
    return next((size for size in _BLOCKS if capacity % size == 0 and capacity >= 2 * size), None)


def attend_pages(q_BTNH: jax.Array, pages: Pages, seen: Visibility, spec: AttentionSpec) -> jax.Array:
    """See dispatch.attend_pages. XLA compiles a gather of whole rows to a slow scalar loop; loops over pages are faster."""
    if seen.bias_BNTS is None and pages.scales is None:
        return _attend_in_turn(q_BTNH, pages, seen, spec)
    P = pages.keys.shape[2]
    each = _each_page(_by_page(seen.visible_BTS, P))

    def page(pool: jax.Array, slot: jax.Array, entry: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(pool, pages.table_BM[slot, entry])

    def values(slot: jax.Array, entry: jax.Array) -> jax.Array:
        written_P = jax.lax.dynamic_slice(pages.written_BS, (slot, entry * P), (1, P))[0]
        return jnp.where(written_P[:, None], page(pages.values, slot, entry), 0)

    def scores(q_BKXH: jax.Array) -> jax.Array:
        capacity = pages.table_BM.shape[1] * P
        return _scores_of_pages(q_BKXH, lambda *at: page(pages.keys, *at), capacity, P, each)

    def mixed(w_BKXS: jax.Array) -> jax.Array:
        return _mixed_of_pages(w_BKXS, values, pages.values.shape[3], P, each)

    return attend_by(q_BTNH, scores, mixed, pages.keys.shape[1], seen, spec, scales_of(pages))


def _by_page(visible_BTS: jax.Array, size: int) -> jax.Array:
    """[B, M] bool, which pages of this size hold a token that any query sees."""
    B, T, _ = visible_BTS.shape
    return visible_BTS.reshape(B, T, -1, size).any(axis=(1, 3))


Carry = TypeVar("Carry")


class Loop(Protocol):
    """loop(body, initial): folds body(slot, index of the page in the slot's table, carry) -> carry over pages."""

    def __call__(self, body: Callable[[jax.Array, jax.Array, Carry], Carry], first: Carry) -> Carry: ...


class Softmax(NamedTuple):
    """A softmax in progress over some scores of each query, [B, K, X], and the values that it weighs.

    Attributes:
      largest: the largest score.
      total: sum of exp(score - largest).
      mixed: [B, K, X, H] sum of exp(score - largest) times the value.
    """

    largest: jax.Array
    total: jax.Array
    mixed: jax.Array


Part = Callable[[jax.Array, jax.Array], jax.Array]
"""part(slot, index of the page in the slot's table) -> its keys or values [1, K, P, H]."""


def _each_page(seen_BM: jax.Array) -> Loop:
    """A loop over all pages of all slots that hold a visible token."""
    B, M = seen_BM.shape
    (order,) = jnp.nonzero(seen_BM.reshape(-1), size=B * M, fill_value=0)
    count, order = jnp.sum(seen_BM, dtype=jnp.int32), order.astype(jnp.int32)

    def loop(body: Callable[[jax.Array, jax.Array, Carry], Carry], first: Carry) -> Carry:
        return jax.lax.fori_loop(0, count, lambda i, created: body(order[i] // M, order[i] % M, created), first)

    return loop


def _attend_in_turn(
    q_BTNH: jax.Array,
    pages: Pages,
    seen: Visibility,
    spec: AttentionSpec,
) -> jax.Array:
    """Attention that adds page after page to a softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).

    Scores of whole slots would be an array as long as the longest row that may come, read several times for each token.
    The pages that most slots have are added for all slots at once, on all cores; the rest one by one.

    Args:
      q_BTNH, pages, seen, spec: as in dispatch.attend_pages, without a bias and scales.
    """
    (B, T, N, H), K, P = q_BTNH.shape, pages.keys.shape[1], pages.keys.shape[2]
    q_BKXH = jnp.moveaxis((q_BTNH * spec.scale).reshape(B, T, K, N // K, H), 1, 3).reshape(B, K, -1, H)
    seen_BM = _by_page(seen.visible_BTS, P)

    def add_to_all(entry: jax.Array, so_far: Softmax) -> Softmax:
        page_B = jax.lax.dynamic_index_in_dim(pages.table_BM, entry, 1, keepdims=False)
        k_BKPH, v_BKPH = (x.at[page_B].get(mode="promise_in_bounds") for x in pages[:2])
        tokens = lambda x, axis: jax.lax.dynamic_slice_in_dim(x, entry * P, P, axis)  # noqa: E731
        v_BKPH = jnp.where(tokens(pages.written_BS, 1)[:, None, :, None], v_BKPH, 0)
        return _added(so_far, q_BKXH, k_BKPH, v_BKPH, tokens(seen.visible_BTS, 2), spec)

    def add_to_one(slot: jax.Array, entry: jax.Array, so_far: Softmax) -> Softmax:
        page = pages.table_BM[slot, entry]
        k_1KPH, v_1KPH = (jax.lax.dynamic_index_in_dim(x, page) for x in pages[:2])
        written_P = jax.lax.dynamic_slice(pages.written_BS, (slot, entry * P), (1, P))[0]
        v_1KPH = jnp.where(written_P[:, None], v_1KPH, 0)
        visible_1TP = jax.lax.dynamic_slice(seen.visible_BTS, (slot, 0, entry * P), (1, T, P))
        before = Softmax(*(jax.lax.dynamic_index_in_dim(x, slot) for x in so_far))
        new = _added(before, jax.lax.dynamic_index_in_dim(q_BKXH, slot), k_1KPH, v_1KPH, visible_1TP, spec)
        put = lambda old, item: jax.lax.dynamic_update_slice_in_dim(old, item, slot, axis=0)  # noqa: E731
        return Softmax(*map(put, so_far, new))

    shape, zeros = q_BKXH.shape[:3], jnp.zeros(q_BKXH.shape, jnp.float32)
    result = Softmax(jnp.full(shape, MASKED), zeros[..., 0], zeros)
    if B > 1:
        common = jnp.sum(jnp.cumprod(_in_most(seen_BM)), dtype=jnp.int32)
        result = jax.lax.fori_loop(0, common, add_to_all, result)
        seen_BM = seen_BM & (jnp.arange(seen_BM.shape[1], dtype=jnp.int32) >= common)
    result = _each_page(seen_BM)(add_to_one, result)
    total = result.total
    if seen.sinks_N is not None:
        sinks_KX = jnp.repeat(seen.sinks_N.reshape(K, N // K), T, axis=1)
        total = total + jnp.exp(sinks_KX - result.largest)
    y_BKXH = result.mixed / jnp.where(total > 0, total, 1.0)[..., None]  # a free slot sees nothing
    y_BKGTH = y_BKXH.reshape(B, K, N // K, T, H)
    return jnp.moveaxis(y_BKGTH, 3, 1).reshape(q_BTNH.shape).astype(q_BTNH.dtype)


def _added(
    before: Softmax,
    q_RKXH: jax.Array,
    k_RKPH: jax.Array,
    v_RKPH: jax.Array,
    visible_RTP: jax.Array,
    spec: AttentionSpec,
) -> Softmax:
    """The softmax of R slots with a page of each; X counts the queries of a key/value head, their tokens last."""
    k_RKPH, v_RKPH = k_RKPH.astype(q_RKXH.dtype), v_RKPH.astype(q_RKXH.dtype)
    groups = q_RKXH.shape[2] // visible_RTP.shape[1]
    scores = jax.lax.dot_general(q_RKXH, k_RKPH, (((3,), (3,)), _BATCHED), preferred_element_type=jnp.float32)
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    scores = jnp.where(jnp.tile(visible_RTP, (1, groups, 1))[:, None], scores, MASKED)
    largest = jnp.maximum(before.largest, jnp.max(scores, axis=-1))
    weights, shrunk = jnp.exp(scores - largest[..., None]), jnp.exp(before.largest - largest)
    dims = (((3,), (2,)), _BATCHED)
    values = jax.lax.dot_general(weights.astype(v_RKPH.dtype), v_RKPH, dims, preferred_element_type=jnp.float32)
    total = before.total * shrunk + jnp.sum(weights, axis=-1)
    return Softmax(largest, total, before.mixed * shrunk[..., None] + values)


def _in_most(seen_BM: jax.Array) -> jax.Array:
    """[M] int32, 1 for entries of the table that so many slots see that adding them to all slots takes less time."""
    # A page costs 0.4 of its time alone when all slots' pages are added at once (30 November 2026, two cores of an AMD EPYC).
    return (5 * jnp.sum(seen_BM, axis=0, dtype=jnp.int32) >= 2 * len(seen_BM)).astype(jnp.int32)


def _scores_of_pages(q_BKXH: jax.Array, keys_of: Part, capacity: int, size: int, each: Loop) -> jax.Array:
    """Products [B, K, X, capacity] of queries and keys in pages of this size; 0 where a slot has no page."""
    B, K, X, _ = q_BKXH.shape

    def body(slot: jax.Array, entry: jax.Array, carry: jax.Array) -> jax.Array:
        k_1KPH = keys_of(slot, entry).astype(q_BKXH.dtype)
        q_1KXH = jax.lax.dynamic_index_in_dim(q_BKXH, slot)
        dims = (((3,), (3,)), ((0, 1), (0, 1)))
        new = jax.lax.dot_general(q_1KXH, k_1KPH, dims, preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice(carry, new, (slot, 0, 0, entry * size))

    return each(body, jnp.zeros((B, K, X, capacity), jnp.float32))


def _mixed_of_pages(w_BKXS: jax.Array, values_of: Part, head_size: int, size: int, each: Loop) -> jax.Array:
    """Weighted sums [B, K, X, H] of the values in pages of this size."""
    B, K, X, _ = w_BKXS.shape

    def body(slot: jax.Array, entry: jax.Array, carry: jax.Array) -> jax.Array:
        v_1KPH = values_of(slot, entry).astype(w_BKXS.dtype)
        w_1KXP = jax.lax.dynamic_slice(w_BKXS, (slot, 0, 0, entry * size), (1, K, X, size))
        dims = (((3,), (2,)), ((0, 1), (0, 1)))
        new = jax.lax.dot_general(w_1KXP, v_1KPH, dims, preferred_element_type=jnp.float32)
        old = jax.lax.dynamic_index_in_dim(carry, slot)
        return jax.lax.dynamic_update_slice(carry, old + new, (slot, 0, 0, 0))

    return each(body, jnp.zeros((B, K, X, head_size), jnp.float32)).astype(w_BKXS.dtype)
