"""Keys and values of new tokens into the arrays of a cache: rows [B, K, S, ...] or pages of a pool [pages, K, P, ...].

The references are one scatter. XLA's CPU back end makes a slow loop over numbers of that: of few tokens each is written
by itself there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara import sharding

_WRITTEN_APART = 32  # most tokens that are written one by one


def append(old_BKSx: jax.Array, new_BKx: jax.Array, place_B: jax.Array) -> jax.Array:
    """The rows with one more token each, at these places."""
    if _one_by_one(len(place_B)):
        return _append_apart(old_BKSx, new_BKx, place_B)
    return append_reference(old_BKSx, new_BKx, place_B)


def append_reference(old_BKSx: jax.Array, new_BKx: jax.Array, place_B: jax.Array) -> jax.Array:
    """`append` by a scatter."""
    if _whole_places(old_BKSx):
        return old_BKSx.at[jnp.arange(len(place_B), dtype=jnp.int32), :, place_B].set(new_BKx)
    # Rows and heads are batches of the scatter: nothing is asked of other devices.
    place_BK = jnp.broadcast_to(place_B[:, None], new_BKx.shape[:2])
    return jax.vmap(jax.vmap(lambda old, new, place: old.at[place].set(new)))(old_BKSx, new_BKx, place_BK)


def _append_apart(old_BKSx: jax.Array, new_BKx: jax.Array, place_B: jax.Array) -> jax.Array:
    for row in range(len(place_B)):
        one, rest = new_BKx[row][None, :, None], (0,) * (old_BKSx.ndim - 3)
        old_BKSx = jax.lax.dynamic_update_slice(old_BKSx, one, (row, 0, place_B[row], *rest))
    return old_BKSx


def into_pages(pool: jax.Array, new_BTKx: jax.Array, page_BT: jax.Array, place_BT: jax.Array) -> jax.Array:
    """The pool with new tokens, each at a place of a page."""
    page, place, new = page_BT.reshape(-1), place_BT.reshape(-1), new_BTKx.reshape(-1, *new_BTKx.shape[2:])
    way = _into_pages_apart if _one_by_one(len(page)) else into_pages_reference
    return way(pool, new, page, place)


def into_pages_reference(pool: jax.Array, new_NKx: jax.Array, page_N: jax.Array, place_N: jax.Array) -> jax.Array:
    """`into_pages` of N tokens by a scatter."""
    if _whole_places(pool):
        return pool.at[page_N, :, place_N].set(new_NKx, mode="promise_in_bounds")
    heads_K = jnp.arange(pool.shape[1], dtype=jnp.int32)
    return pool.at[page_N[:, None], heads_K, place_N[:, None]].set(new_NKx, mode="promise_in_bounds")


def _into_pages_apart(pool: jax.Array, new_NKx: jax.Array, page_N: jax.Array, place_N: jax.Array) -> jax.Array:
    for token in range(len(page_N)):
        at = (page_N[token], 0, place_N[token], *(0,) * (pool.ndim - 3))
        pool = jax.lax.dynamic_update_slice(pool, new_NKx[token][None, :, None], at)
    return pool


def _one_by_one(tokens: int) -> bool:
    return sharding.platform() == "cpu" and not sharding.active() and tokens <= _WRITTEN_APART


def _whole_places(x: jax.Array) -> bool:
    """Whether all heads of a place are written by one update of a scatter.

    A TPU packs four rows of 8 bits into one, and has the heads in a tile's rows for such updates: XLA then turned the whole
    cache before and after each of them. An update for each head writes it where it lies.
    """
    return x.dtype.itemsize > 1 and x.ndim > 3  # the scales go with what is in 8 bits
