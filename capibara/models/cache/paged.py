"""A paged key-value cache: rows are pages of one pool, allocated as they grow (Kwon et al. 2023, arXiv:2309.06180).

A layer with full attention has `key_pages` and `value_pages` [N + 1, K, P, H] with P tokens per page instead of one row
per slot; in 8 bits also `key_scale_pages` and `value_scale_pages` [N + 1, K, P]. A table [B, M] int32 maps tokens
m * P to (m + 1) * P - 1 of each slot to a page. Page 0 belongs to no slot: writes of slots without a page go there.
A layer whose window is shorter than the rows keeps its last tokens as one row per slot, as in `dense`.

Shapes do not depend on lengths, so nothing is recompiled as rows grow.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from capibara.kernels import cache_writes
from capibara.kernels.attention.spec import AttentionSpec
from capibara.kernels.cached_attention import dispatch as cached_attention
from capibara.models.cache import dense
from capibara.models.cache.dense import Cache, LayerCache, PrefillInputs, has_keys, of_state

_NAMES = ("key", "value", "key_scale", "value_scale")


class Sizes(NamedTuple):
    """Size of a pool: number of pages, and tokens per page."""

    pages: int
    page_size: int

    def of_slot(self, length: int) -> int:
        """Number of pages for a row of `length` tokens."""
        return -(-length // self.page_size)


def empty(rows: Cache, length: int, sizes: Sizes) -> Cache:
    """An empty paged cache.

    Args:
      rows: the result of `start_cache` for the same slots with a capacity of `length`; shapes are enough.
      length: token capacity of a slot.
      sizes: size of the pool, the same for all layers.
    """

    def pool(x: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros((sizes.pages + 1, x.shape[1], sizes.page_size, *x.shape[3:]), x.dtype)

    def layer(of_rows: LayerCache) -> LayerCache:
        if is_short(of_rows, length):
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), of_rows)
        return {
            name if of_state(name) else f"{name}_pages": jnp.zeros(x.shape, x.dtype) if of_state(name) else pool(x)
            for name, x in of_rows.items()
        }

    return {"lengths": jnp.zeros(rows["lengths"].shape, jnp.int32), "layers": tuple(map(layer, rows["layers"]))}


def axes(cache: Cache) -> Any:
    """The logical axes of every array of a cache, paged or dense; every device that has slots has all pages."""
    named = dense.axes(cache)
    layers = tuple(
        {name: (None, *of[1:]) if name.endswith("_pages") else of for name, of in layer.items()}
        for layer in named["layers"]
    )
    return named | {"layers": layers}


def capacity(cache: Cache) -> int:
    """The most tokens that a row of a cache, paged or dense, has room for; 0: no layer keeps keys."""

    def of_layer(layer: LayerCache) -> int:
        if "key_pages" in layer:
            return layer["key_pages"].shape[2] * layer["table"].shape[1]
        return layer["key"].shape[2]

    return max((of_layer(layer) for layer in cache["layers"] if has_keys(layer)), default=0)


def shares(rows: Cache, length: int) -> bool:
    """Whether any layer of a `start_cache` result with a capacity of `length` would be paged."""
    return not all(is_short(layer, length) for layer in rows["layers"])


def is_short(layer: LayerCache, length: int) -> bool:
    """Whether a layer's memory does not grow to `length`: it has a window, or a state. Such a layer is not paged."""
    return not has_keys(layer) or layer["key"].shape[2] < length


def is_paged(layer: LayerCache) -> bool:
    """Whether a layer's keys and values are stored in pages."""
    return "key_pages" in layer


def with_table(cache: Cache, table: jax.Array | None) -> Cache:
    """The cache as a model reads it, with the page table in its paged layers; None: the cache has no pages."""
    if table is None:
        return cache
    layers = tuple(layer | {"table": table} if is_paged(layer) else layer for layer in cache["layers"])
    return cache | {"layers": layers}


def without_table(cache: Cache) -> Cache:
    """The cache as it is stored between steps, without the page table."""
    layers = tuple({name: x for name, x in layer.items() if name != "table"} for layer in cache["layers"])
    return cache | {"layers": layers}


def put_row(cache: Cache, row: Cache, slot: jax.Array, table: jax.Array | None) -> Cache:
    """Copies a cache of one row into a slot; tokens beyond the slot's pages go to page 0."""
    if table is None:
        return dense.put_rows(cache, row, slot)

    def put(layer: LayerCache, new: LayerCache) -> LayerCache:
        if not is_paged(layer):
            return dense.put_rows(layer, new, slot)
        pools = {
            f"{name}_pages": _put(layer[f"{name}_pages"], x[0], table[slot])
            for name, x in new.items()
            if not of_state(name)
        }
        state = {name: x for name, x in layer.items() if of_state(name)}
        return pools | dense.put_rows(state, {name: new[name] for name in state}, slot)

    lengths = dense.put_rows(cache["lengths"], row["lengths"], slot)
    return cache | {"lengths": lengths, "layers": tuple(map(put, cache["layers"], row["layers"]))}


def _put(pool: jax.Array, new_KSx: jax.Array, table_M: jax.Array) -> jax.Array:
    P, S = pool.shape[2], new_KSx.shape[1]
    M = -(-S // P)
    new_KSx = jnp.pad(new_KSx, ((0, 0), (0, M * P - S), *((0, 0),) * (new_KSx.ndim - 2)))
    new_MKPx = jnp.swapaxes(new_KSx.reshape(new_KSx.shape[0], M, P, *new_KSx.shape[2:]), 0, 1)
    return pool.at[table_M[:M]].set(new_MKPx, mode="promise_in_bounds")


def row(cache: Cache, slot: jax.Array, length: int, table: jax.Array | None) -> Cache:
    """Copies one slot of the cache as a row, cut to its first `length` tokens."""

    def of_slot(x: jax.Array) -> jax.Array:
        x = jax.lax.dynamic_slice_in_dim(x, slot, 1)
        return x[:, :, :length] if x.ndim > 2 else x

    def of_layer(layer: LayerCache) -> LayerCache:
        state = {name: jax.lax.dynamic_slice_in_dim(x, slot, 1) for name, x in layer.items() if of_state(name)}
        if not is_paged(layer):
            return state | {name: of_slot(x) for name, x in layer.items() if not of_state(name)}
        assert table is not None, "slots have pages"
        needed = -(-length // layer["key_pages"].shape[2])
        pages = jax.lax.dynamic_slice(table, (slot, 0), (1, needed))
        pools = {name: layer[f"{name}_pages"] for name in _NAMES if f"{name}_pages" in layer}
        return state | {name: cached_attention.gathered(pool, pages)[:, :, :length] for name, pool in pools.items()}

    rest = {name: of_slot(x) for name, x in cache.items() if name != "layers"}
    return rest | {"layers": tuple(map(of_layer, cache["layers"]))}


def write(layer: LayerCache, k_BTKH: jax.Array, v_BTKH: jax.Array, now: PrefillInputs) -> LayerCache:
    """The layer's cache, updated with the keys and values of the new tokens."""
    P, M = layer["key_pages"].shape[2], layer["table"].shape[1]
    new = dense.as_stored(layer["key_pages"].dtype, k_BTKH, v_BTKH)
    inside_BT = now.real & (now.positions < M * P)
    taken_BT = jnp.take_along_axis(layer["table"], jnp.clip(now.positions // P, 0, M - 1), axis=1)
    page_BT, offset_BT = jnp.where(inside_BT, taken_BT, 0), now.positions % P
    return layer | {
        f"{name}_pages": cache_writes.into_pages(layer[f"{name}_pages"], x, page_BT, offset_BT)
        for name, x in new.items()
    }


def attend(
    q_BTNH: jax.Array,
    layer: LayerCache,
    kind: AttentionSpec,
    now: PrefillInputs,
    bias: dense.PositionBias | None = None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Self-attention of the new tokens over a cache that holds them already.

    Args:
      q_BTNH: queries.
      layer: the cache, with the new tokens.
      kind: mask, scale and soft cap.
      now: the new tokens.
      bias, sinks_N: as in `dense.attend`.

    Returns:
      [B, T, N, H] in the queries' dtype.
    """
    P, table_BM = layer["key_pages"].shape[2], layer["table"]
    allocated_B = jnp.sum(table_BM > 0, axis=1, dtype=jnp.int32) * P  # a slot without pages reads nothing
    slot_positions_S = jnp.arange(table_BM.shape[1] * P, dtype=jnp.int32)
    written_BS = (slot_positions_S < (now.lengths + now.counts)[:, None]) & (jnp.repeat(table_BM, P, axis=1) > 0)
    positions_BS = jnp.where(written_BS, slot_positions_S, -1)
    back_BTS = now.positions[:, :, None] - slot_positions_S
    visible_BTS = written_BS[:, None, :] & (back_BTS >= 0)
    if kind.window is not None:
        visible_BTS &= kind.in_window(back_BTS, slot_positions_S)
    if kind.window is not None and kind.in_blocks:
        visible_BTS &= now.positions[:, :, None] // kind.window == slot_positions_S // kind.window
    bias_BNTS = None if bias is None else bias(now.positions, positions_BS)
    scales = (layer["key_scale_pages"], layer["value_scale_pages"]) if "key_scale_pages" in layer else None
    pages = cached_attention.Pages(layer["key_pages"], layer["value_pages"], table_BM, written_BS, scales)
    seen = cached_attention.Visibility(
        visible_BTS, bias_BNTS, jnp.minimum(now.lengths + now.counts, allocated_B), sinks_N
    )
    return cached_attention.attend_pages(q_BTNH, pages, seen, kind)
