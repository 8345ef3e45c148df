"""A cache whose rows lie in pages of one pool, taken as they grow: PagedAttention (Kwon et al. 2023, arXiv:2309.06180).

A layer that sees whole rows has, in place of a row for each slot, `key_pages` and `value_pages` [N + 1, K, P, H] of P
tokens each, in 8 bits with `key_scale_pages` and `value_scale_pages` [N + 1, K, P]. A table [B, M] int32 says which page
has the tokens from m * P on of each slot; page 0 is nobody's, and takes what is written where a slot has no page.
A layer with a window shorter than the rows keeps a row of its last places for each slot, as in `cache`.

Shapes do not depend on lengths, so nothing is compiled again as rows grow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from capibara import sharding
from capibara.kernels import paged_attention
from capibara.kernels.attention.spec import AttentionSpec
from capibara.models.cache import dense
from capibara.models.cache.dense import Cache, LayerCache, PrefillInputs

_NAMES = ("key", "value", "key_scale", "value_scale")
_WRITTEN_APART = 32  # as in `cache`: most tokens that a CPU writes one by one


class Sizes(NamedTuple):
    """Of a pool: pages in all, and the tokens of each."""

    pages: int
    page_size: int

    def of_slot(self, length: int) -> int:
        """Pages of a row of so many tokens."""
        return -(-length // self.page_size)


def empty(rows: Cache, length: int, sizes: Sizes) -> Cache:
    """A cache in pages in which nothing was read.

    Args:
      rows: what `start_cache` gives for as many slots of `length` places; its shapes are enough.
      length: places of a slot.
      sizes: of the pool, which all layers have alike.
    """

    def pool(x) -> jax.Array:
        return jnp.zeros((sizes.pages + 1, x.shape[1], sizes.page_size, *x.shape[3:]), x.dtype)

    def layer(of_rows: LayerCache) -> LayerCache:
        if is_short(of_rows, length):
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), of_rows)
        return {f"{name}_pages": pool(x) for name, x in of_rows.items()}

    return {"lengths": jnp.zeros(rows["lengths"].shape, jnp.int32), "layers": tuple(map(layer, rows["layers"]))}


def axes(kept: Cache) -> Any:
    """The logical axes of every array of a cache, in pages or not; a page is on every device that has a slot."""
    named = dense.axes(kept)
    layers = tuple(
        {name: (None, *of[1:]) if name.endswith("_pages") else of for name, of in layer.items()}
        for layer in named["layers"]
    )
    return named | {"layers": layers}


def shares(rows: Cache, length: int) -> bool:
    """Whether any layer of what `start_cache` gives for rows of `length` places would lie in pages."""
    return not all(is_short(layer, length) for layer in rows["layers"])


def is_short(layer: LayerCache, length: int) -> bool:
    """Whether a layer's rows have fewer places than `length`, those of its window: it has nothing to share."""
    return layer["key"].shape[2] < length


def is_paged(layer: LayerCache) -> bool:
    """Whether a layer's keys and values lie in pages."""
    return "key_pages" in layer


def with_table(kept: Cache, table: jax.Array | None) -> Cache:
    """The cache as a model reads it, its layers in pages with the table; None: there are no pages."""
    if table is None:
        return kept
    layers = tuple(layer | {"table": table} if is_paged(layer) else layer for layer in kept["layers"])
    return kept | {"layers": layers}


def without_table(kept: Cache) -> Cache:
    """What is kept of it between the steps."""
    layers = tuple({name: x for name, x in layer.items() if name != "table"} for layer in kept["layers"])
    return kept | {"layers": layers}


def put_row(kept: Cache, row: Cache, slot: jax.Array, table: jax.Array | None) -> Cache:
    """The cache with a row, a cache of one row, in a slot; what lies beyond the slot's pages is nobody's."""
    if table is None:
        return dense.put_rows(kept, row, slot)

    def put(layer: LayerCache, new: LayerCache) -> LayerCache:
        if not is_paged(layer):
            return dense.put_rows(layer, new, slot)
        return {f"{name}_pages": _put(layer[f"{name}_pages"], x[0], table[slot]) for name, x in new.items()}

    lengths = dense.put_rows(kept["lengths"], row["lengths"], slot)
    return kept | {"lengths": lengths, "layers": tuple(map(put, kept["layers"], row["layers"]))}


def _put(pool: jax.Array, new_KSx: jax.Array, table_M: jax.Array) -> jax.Array:
    P, S = pool.shape[2], new_KSx.shape[1]
    M = -(-S // P)
    new_KSx = jnp.pad(new_KSx, ((0, 0), (0, M * P - S), *((0, 0),) * (new_KSx.ndim - 2)))
    new_MKPx = jnp.swapaxes(new_KSx.reshape(new_KSx.shape[0], M, P, *new_KSx.shape[2:]), 0, 1)
    return pool.at[table_M[:M]].set(new_MKPx, mode="promise_in_bounds")


def row(kept: Cache, slot: jax.Array, places: int, table: jax.Array | None) -> Cache:
    """The cache of one slot as a row, cut to its first places."""

    def of_slot(x: jax.Array) -> jax.Array:
        x = jax.lax.dynamic_slice_in_dim(x, slot, 1)
        return x[:, :, :places] if x.ndim > 2 else x

    def of_layer(layer: LayerCache) -> LayerCache:
        if not is_paged(layer):
            return jax.tree.map(of_slot, layer)
        needed = -(-places // layer["key_pages"].shape[2])
        pages = jax.lax.dynamic_slice(table, (slot, 0), (1, needed))
        pools = {name: layer[f"{name}_pages"] for name in _NAMES if f"{name}_pages" in layer}
        return {name: _gathered(pool, pages)[:, :, :places] for name, pool in pools.items()}

    rest = {name: of_slot(x) for name, x in kept.items() if name != "layers"}
    return rest | {"layers": tuple(map(of_layer, kept["layers"]))}


def _gathered(pool: jax.Array, table_BM: jax.Array) -> jax.Array:
    """The pages of each slot side by side, [B, K, M * P, ...]."""
    # Each head's part is brought to its place at once: nothing is transposed afterwards.
    heads_K1 = jnp.arange(pool.shape[1], dtype=jnp.int32)[:, None]
    x_BKMPx = pool.at[table_BM[:, None], heads_K1].get(mode="promise_in_bounds")
    return x_BKMPx.reshape(*x_BKMPx.shape[:2], -1, *x_BKMPx.shape[4:])


def write(layer: LayerCache, k_BTKH: jax.Array, v_BTKH: jax.Array, now: PrefillInputs) -> LayerCache:
    """The layer's cache with the keys and values of the tokens that are read now."""
    P, M = layer["key_pages"].shape[2], layer["table"].shape[1]
    new = dense.as_stored(layer["key_pages"].dtype, k_BTKH, v_BTKH)
    inside_BT = now.real & (now.positions < M * P)
    taken_BT = jnp.take_along_axis(layer["table"], jnp.clip(now.positions // P, 0, M - 1), axis=1)
    page_BT, place_BT = jnp.where(inside_BT, taken_BT, 0), now.positions % P
    return layer | {f"{name}_pages": _written(layer[f"{name}_pages"], x, page_BT, place_BT) for name, x in new.items()}


def _written(pool: jax.Array, new_BTKx: jax.Array, page_BT: jax.Array, place_BT: jax.Array) -> jax.Array:
    page, place, new = page_BT.reshape(-1), place_BT.reshape(-1), new_BTKx.reshape(-1, *new_BTKx.shape[2:])
    if not _one_by_one() or len(page) > _WRITTEN_APART:
        if dense.whole_places(pool):
            return pool.at[page, :, place].set(new, mode="promise_in_bounds")
        heads_K = jnp.arange(pool.shape[1], dtype=jnp.int32)
        return pool.at[page[:, None], heads_K, place[:, None]].set(new, mode="promise_in_bounds")
    for token in range(len(page)):
        at = (page[token], 0, place[token], *(0,) * (pool.ndim - 3))
        pool = jax.lax.dynamic_update_slice(pool, new[token][None, :, None], at)
    return pool


def _one_by_one() -> bool:
    """Whether a loop over pages is quicker than one gather: XLA makes a slow loop over numbers of that on a CPU."""
    return sharding.platform() == "cpu" and not sharding.active()


def attend(
    q_BTNH: jax.Array, layer: LayerCache, kind: AttentionSpec, now: PrefillInputs, bias=None, sinks_N=None
) -> jax.Array:
    """Self-attention of the tokens that are read now, which the layer's cache has already.

    Args:
      q_BTNH: queries.
      layer: the cache with these tokens.
      kind: mask, scale and cap.
      now: the tokens.
      bias, sinks_N: as of `cache.attend`.

    Returns:
      [B, T, N, H] in the dtype of the queries.
    """
    P, table_BM = layer["key_pages"].shape[2], layer["table"]
    plain = bias is None and sinks_N is None and "key_scale_pages" not in layer
    if paged_attention.supported(q_BTNH, layer["key_pages"], kind, table_BM.shape[1] * P, plain=plain):
        has_B = jnp.sum(table_BM > 0, axis=1, dtype=jnp.int32) * P  # a slot without pages has nothing to read
        there_B = jnp.minimum(now.lengths + now.counts, has_B)
        return paged_attention.attend(q_BTNH, layer["key_pages"], layer["value_pages"], there_B, table_BM, kind)
    places_S = jnp.arange(table_BM.shape[1] * P, dtype=jnp.int32)
    there_BS = (places_S < (now.lengths + now.counts)[:, None]) & (jnp.repeat(table_BM, P, axis=1) > 0)
    positions_BS = jnp.where(there_BS, places_S, -1)
    back_BTS = now.positions[:, :, None] - places_S
    visible_BTS = there_BS[:, None, :] & (back_BTS >= 0)
    if kind.window is not None:
        visible_BTS &= back_BTS < kind.window
    bias_BNTS = None if bias is None else bias(now.positions, positions_BS)
    scales = None
    if "key_scale_pages" in layer:
        scales = tuple(_gathered(layer[f"{name}_scale_pages"], table_BM) for name in ("key", "value"))
        # What others left may be no number, which a weight of 0 does not hide.
        scales = scales[0], jnp.where(there_BS[:, None], scales[1], 0)
    if not _one_by_one():
        keys, values = (_gathered(layer[f"{name}_pages"], table_BM) for name in ("key", "value"))
        values = jnp.where(there_BS[:, None, :, None], values, 0)
        return dense.attend_to(q_BTNH, keys, values, visible_BTS, kind, bias_BNTS, scales, sinks_N)
    each = _each_page(visible_BTS.any(axis=1), P)
    scores = lambda q: _scores(q, layer["key_pages"], table_BM, each)  # noqa: E731
    mixed = lambda w: _mixed(w, layer["value_pages"], table_BM, there_BS, each)  # noqa: E731
    heads, rest = layer["key_pages"].shape[1], (visible_BTS, kind, bias_BNTS, scales, sinks_N)
    return dense.attend_by(q_BTNH, scores, mixed, heads, *rest)


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


def _scores(q_BKXH: jax.Array, pool: jax.Array, table_BM: jax.Array, each: Loop) -> jax.Array:
    """Products [B, K, X, S] of queries and keys; 0 where a slot has no page."""
    (B, K, X, _), P = q_BKXH.shape, pool.shape[2]

    def body(slot, place, made):
        k_1KPH = _page(pool, table_BM, slot, place).astype(q_BKXH.dtype)
        q_1KXH = jax.lax.dynamic_index_in_dim(q_BKXH, slot)
        dims = (((3,), (3,)), ((0, 1), (0, 1)))
        new = jax.lax.dot_general(q_1KXH, k_1KPH, dims, preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice(made, new, (slot, 0, 0, place * P))

    return each(body, jnp.zeros((B, K, X, table_BM.shape[1] * P), jnp.float32))


def _mixed(w_BKXS: jax.Array, pool: jax.Array, table_BM: jax.Array, there_BS: jax.Array, each: Loop) -> jax.Array:
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
