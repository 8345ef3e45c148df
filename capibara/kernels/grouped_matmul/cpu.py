"""Grouped products on CPU: a loop over tiles of rows, whose number is known only at run time.

XLA's own ragged_dot there multiplies all rows by all matrices. Shape letters as in dispatch.py.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

Body = Callable[[jax.Array, jax.Array, jax.Array, int, jax.Array], jax.Array]
"""(group, start of a tile, end of the group, rows of the tile, carry) -> carry."""


def _over_tiles(sizes_G: jax.Array, rows: int, tile: int, body: Body, carry: jax.Array) -> jax.Array:
    """Folds `body` over tiles that cover every group.

    A group is cut into the largest tiles that fit, then smaller ones. Only its last tile may exceed its end; what it
    writes there is overwritten: the smallest tiles come first, and tiles of one size run in the order of the groups.
    """
    ends = jnp.cumsum(sizes_G)
    starts = ends - sizes_G
    levels = [size for size in (4 * tile, tile, tile // 4) if 8 <= size <= rows]
    loops = []
    for size in levels:
        left = ends - starts
        count_G = -(-left // size) if size == levels[-1] else left // size
        loops.append((size, starts, count_G))
        starts = starts + count_G * size
    for size, starts, count_G in reversed(loops):
        last_G = jnp.cumsum(count_G)
        index = jnp.arange(rows // size + len(sizes_G), dtype=jnp.int32)
        group = jnp.sum((index[:, None] >= last_G[None, :]).astype(jnp.int32), axis=1)
        group = jnp.minimum(group, len(sizes_G) - 1)
        start = starts[group] + (index - (last_G - count_G)[group]) * size

        def of_tile(
            i: jax.Array, carry: jax.Array, size: int = size, group: jax.Array = group, start: jax.Array = start
        ) -> jax.Array:
            return body(group[i], start[i], ends[group[i]], size, carry)

        carry = jax.lax.fori_loop(0, last_G[-1], of_tile, carry)
    return carry


def matmul(x_MK: jax.Array, w_GKN: jax.Array, sizes_G: jax.Array, tile: int, *, transposed: bool) -> jax.Array:
    """See kernel.GroupedKernel."""
    contracted = 2 if transposed else 1

    def body(group: jax.Array, start: jax.Array, end: jax.Array, size: int, y_MN: jax.Array) -> jax.Array:
        x = jax.lax.dynamic_slice_in_dim(x_MK, start, size)
        w = jax.lax.dynamic_index_in_dim(w_GKN, group, keepdims=False)
        y = _dot(x, w, 1, contracted - 1).astype(y_MN.dtype)
        return jax.lax.dynamic_update_slice_in_dim(y_MN, y, start, 0)

    y_MN = jnp.zeros((x_MK.shape[0], w_GKN.shape[3 - contracted]), x_MK.dtype)
    return _over_tiles(sizes_G, x_MK.shape[0], tile, body, y_MN)


def weight_gradient(x_MK: jax.Array, dy_MN: jax.Array, sizes_G: jax.Array, tile: int) -> jax.Array:
    """See kernel.GroupedKernel."""

    def body(group: jax.Array, start: jax.Array, end: jax.Array, size: int, dw_GKN: jax.Array) -> jax.Array:
        x = jax.lax.dynamic_slice_in_dim(x_MK, start, size)
        dy = jax.lax.dynamic_slice_in_dim(dy_MN, start, size)
        if size < 4 * tile:  # the largest tiles never exceed their group
            # Both are masked: rows after the last group are undefined, and 0 times infinity is not 0.
            real = (start + jnp.arange(size, dtype=jnp.int32) < end)[:, None]
            x, dy = jnp.where(real, x, 0), jnp.where(real, dy, 0)
        total = jax.lax.dynamic_index_in_dim(dw_GKN, group, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(dw_GKN, total + _dot(x, dy, 0, 0), group, 0)

    dw_GKN = jnp.zeros((sizes_G.shape[0], x_MK.shape[1], dy_MN.shape[1]), jnp.float32)
    return _over_tiles(sizes_G, x_MK.shape[0], tile, body, dw_GKN)


def _dot(a: jax.Array, b: jax.Array, contract_a: int, contract_b: int) -> jax.Array:
    return jax.lax.dot_general(a, b, (((contract_a,), (contract_b,)), ((), ())), preferred_element_type=jnp.float32)
