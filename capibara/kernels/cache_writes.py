"""Writes keys and values of new tokens into a cache: rows [B, K, S, ...] or pages of a pool [pages, K, P, ...].

The references are one scatter. XLA's CPU back end compiles a scatter to a slow scalar loop, so there few tokens are
written one by one. On TPU a kernel writes where XLA would move whole rows (token_writes).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara import sharding
from capibara.kernels import token_writes

_WRITTEN_APART = 32  # most tokens that are written one by one


def append(old_BKSx: jax.Array, new_RKx: jax.Array, index_R: jax.Array, slots_R: jax.Array | None = None) -> jax.Array:
    """Writes one token into each of R rows, at these indices; `slots_R` None: into each row of the cache."""
    if slots_R is not None or _one_by_one(len(index_R)):
        return _append_row_by_row(old_BKSx, new_RKx, index_R, slots_R)
    if token_writes.supported(old_BKSx):
        return token_writes.append(old_BKSx, new_RKx, index_R)
    return append_reference(old_BKSx, new_RKx, index_R)


def append_reference(old_BKSx: jax.Array, new_BKx: jax.Array, index_B: jax.Array) -> jax.Array:
    """`append` by a scatter."""
    if _writes_all_heads(old_BKSx):
        return old_BKSx.at[jnp.arange(len(index_B), dtype=jnp.int32), :, index_B].set(new_BKx)
    # Rows and heads are batch dimensions of the scatter, so that it needs no communication.
    index_BK = jnp.broadcast_to(index_B[:, None], new_BKx.shape[:2])
    return jax.vmap(jax.vmap(lambda old, new, index: old.at[index].set(new)))(old_BKSx, new_BKx, index_BK)


def _append_row_by_row(
    old_BKSx: jax.Array, new_RKx: jax.Array, index_R: jax.Array, slots_R: jax.Array | None
) -> jax.Array:
    for row in range(len(index_R)):
        item, rest = new_RKx[row][None, :, None], (0,) * (old_BKSx.ndim - 3)
        slot = row if slots_R is None else slots_R[row]
        old_BKSx = jax.lax.dynamic_update_slice(old_BKSx, item, (slot, 0, index_R[row], *rest))
    return old_BKSx


def into_pages(pool: jax.Array, new_BTKx: jax.Array, page_BT: jax.Array, offset_BT: jax.Array) -> jax.Array:
    """Writes new tokens into the pool, each at an offset in a page."""
    page, offset, new = page_BT.reshape(-1), offset_BT.reshape(-1), new_BTKx.reshape(-1, *new_BTKx.shape[2:])
    way = _into_pages_by_token if _one_by_one(len(page)) else into_pages_reference
    return way(pool, new, page, offset)


def into_pages_reference(pool: jax.Array, new_NKx: jax.Array, page_N: jax.Array, offset_N: jax.Array) -> jax.Array:
    """`into_pages` for N tokens by a scatter."""
    if _writes_all_heads(pool):
        return pool.at[page_N, :, offset_N].set(new_NKx, mode="promise_in_bounds")
    heads_K = jnp.arange(pool.shape[1], dtype=jnp.int32)
    return pool.at[page_N[:, None], heads_K, offset_N[:, None]].set(new_NKx, mode="promise_in_bounds")


def _into_pages_by_token(pool: jax.Array, new_NKx: jax.Array, page_N: jax.Array, offset_N: jax.Array) -> jax.Array:
    for token in range(len(page_N)):
        rest = (0,) * (pool.ndim - 3)
        at: tuple[jax.typing.ArrayLike, ...] = (page_N[token], 0, offset_N[token], *rest)
        pool = jax.lax.dynamic_update_slice(pool, new_NKx[token][None, :, None], at)
    return pool


def _one_by_one(tokens: int) -> bool:
    return sharding.platform() == "cpu" and not sharding.active() and tokens <= _WRITTEN_APART


def _writes_all_heads(x: jax.Array) -> bool:
    """Whether one scatter update writes all heads of a token.

    A TPU packs four 8-bit rows into one, and wants the heads in a tile's rows for such updates: XLA would transpose the
    whole cache before and after each of them. One update per head writes in place.
    """
    return x.dtype.itemsize > 1 and x.ndim > 3  # scales are written like the 8-bit values that they belong to
