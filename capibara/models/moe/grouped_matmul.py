"""Rows sorted by group, each group times its own matrix: the product of a mixture of experts without a capacity.

Letters: M rows, K inputs and N outputs of a matrix, G groups.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from capibara import sharding
from capibara.models.adapters.lora_experts import Weight

_TPU_ROWS, _TPU_WIDTH = 512, 1024  # of a tile; with the width in both directions 10 MiB of VMEM in bfloat16


def row_tile(rows: int, groups: int) -> int:
    """How many rows are multiplied at once where `groups` groups share `rows` rows: a quarter of a group's mean."""
    quarter = 1 << (max(1, rows // (4 * groups)) - 1).bit_length()
    smallest, largest = (128, _TPU_ROWS) if sharding.platform() == "tpu" else (8, 128)
    return min(largest, max(smallest, quarter))


def padded_rows(rows: int, tile: int) -> int:
    """Rows that the input of `grouped_matmul` must have so that groups of up to `rows` rows in all fit."""
    return (-(-rows // tile) + 1) * tile


def grouped_matmul(x_MK: jax.Array, w_GKN: Weight, sizes_G: jax.Array, tile: int) -> jax.Array:
    """x[rows of group g] @ w[g] for every group, in time proportional to the rows that the groups have.

    On CPU a loop over tiles of rows with a trip count known at run time: XLA's own ragged_dot there multiplies all
    rows with all matrices. On TPU the grouped kernels of MegaBlocks (Gale et al. 2022, arXiv:2211.15841) that JAX
    has; on GPU ragged_dot.

    Args:
      x_MK: the first sizes[0] rows are of group 0, the next sizes[1] of group 1 and so on. M is given by `padded_rows`.
      w_GKN: in the dtype of x; or one that has no gradient, of which the backward pass keeps only what is stored.
      sizes_G: int32 rows of each group; their sum is at most the `rows` given to `padded_rows`.
      tile: of `row_tile`.

    Returns:
      [M, N] in the dtype of x, summed in float32. Rows after the last group are undefined, in the gradient by x too.
    """
    # Asked once: the backward pass may be traced where the mesh is no longer active.
    if not isinstance(w_GKN, jax.Array):
        return _frozen_product(x_MK, w_GKN, sizes_G, tile, sharding.platform())
    return _product(x_MK, w_GKN, sizes_G, tile, sharding.platform())


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _product(x_MK, w_GKN, sizes_G, tile: int, platform: str) -> jax.Array:
    return _matmul(x_MK, w_GKN, sizes_G, tile, platform)


def _forward(x_MK, w_GKN, sizes_G, tile, platform):
    return _matmul(x_MK, w_GKN, sizes_G, tile, platform), (x_MK, w_GKN, sizes_G)


def _backward(tile, platform, saved, dy_MN):
    x_MK, w_GKN, sizes_G = saved
    dw_GKN = _weight_gradient(x_MK, dy_MN, sizes_G, tile, platform)
    return _matmul(dy_MN, w_GKN, sizes_G, tile, platform, transposed=True), dw_GKN.astype(w_GKN.dtype), None


_product.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _frozen_product(x_MK, weight, sizes_G, tile: int, platform: str) -> jax.Array:
    return _matmul(x_MK, weight.astype(x_MK.dtype), sizes_G, tile, platform)


def _frozen_forward(x_MK, weight, sizes_G, tile, platform):
    return _frozen_product(x_MK, weight, sizes_G, tile, platform), (weight, sizes_G)


def _frozen_backward(tile, platform, saved, dy_MN):
    weight, sizes_G = saved
    return _matmul(dy_MN, weight.astype(dy_MN.dtype), sizes_G, tile, platform, transposed=True), None, None


_frozen_product.defvjp(_frozen_forward, _frozen_backward)


def _matmul(x_MK, w_GKN, sizes_G, tile: int, platform: str, *, transposed: bool = False) -> jax.Array:
    """Each group times its matrix, or its matrix transposed."""
    match platform:
        case "cpu":
            return _cpu_matmul(x_MK, w_GKN, sizes_G, tile, 2 if transposed else 1)
        case "tpu":
            from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

            tiling = _tpu_tiling(tile, x_MK.shape[1], w_GKN.shape[1 if transposed else 2], x_MK.dtype)
            return gmm(x_MK, w_GKN, sizes_G, x_MK.dtype, tiling, transpose_rhs=transposed)
        case _:
            w_GKN = jnp.swapaxes(w_GKN, 1, 2) if transposed else w_GKN
            y_MN = jax.lax.ragged_dot(x_MK, w_GKN, sizes_G, preferred_element_type=jnp.float32)
            return y_MN.astype(x_MK.dtype)


def _weight_gradient(x_MK, dy_MN, sizes_G, tile: int, platform: str) -> jax.Array:
    """Each group's x^T dy: [G, K, N], in float32 or the dtype of x."""
    match platform:
        case "cpu":
            return _cpu_weight_gradient(x_MK, dy_MN, sizes_G, tile)
        case "tpu":
            from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

            tiling = _tpu_tiling(tile, x_MK.shape[1], dy_MN.shape[1], x_MK.dtype)
            return tgmm(x_MK.swapaxes(0, 1), dy_MN, sizes_G, x_MK.dtype, tiling)
        case _:
            dimensions = jax.lax.RaggedDotDimensionNumbers(
                dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
            )
            return jax.lax.ragged_dot_general(x_MK, dy_MN, sizes_G, dimensions, preferred_element_type=jnp.float32)


def _tpu_tiling(tile: int, inputs: int, outputs: int, dtype) -> tuple[int, int, int]:
    width = _TPU_WIDTH * 2 // jnp.dtype(dtype).itemsize
    return tile, min(width, inputs), min(width, outputs)


def _over_tiles(sizes_G, rows: int, tile: int, body, carry):
    """Folds `body(group, start, end, tile size, carry)` over tiles that cover every group; `end` is the group's.

    A group is cut into the largest tiles that fit, then smaller ones; only its last one may reach beyond its end, and
    what it writes there is written anew: the smallest tiles come first, and of one size the groups are in order.
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

        def one(i, carry, size=size, group=group, start=start):
            return body(group[i], start[i], ends[group[i]], size, carry)

        carry = jax.lax.fori_loop(0, last_G[-1], one, carry)
    return carry


def _cpu_matmul(x_MK, w_GKN, sizes_G, tile: int, contracted: int) -> jax.Array:
    def body(group, start, end, size, y_MN):
        x = jax.lax.dynamic_slice_in_dim(x_MK, start, size)
        w = jax.lax.dynamic_index_in_dim(w_GKN, group, keepdims=False)
        y = _dot(x, w, 1, contracted - 1).astype(y_MN.dtype)
        return jax.lax.dynamic_update_slice_in_dim(y_MN, y, start, 0)

    y_MN = jnp.zeros((x_MK.shape[0], w_GKN.shape[3 - contracted]), x_MK.dtype)
    return _over_tiles(sizes_G, x_MK.shape[0], tile, body, y_MN)


def _cpu_weight_gradient(x_MK, dy_MN, sizes_G, tile: int) -> jax.Array:
    def body(group, start, end, size, dw_GKN):
        x = jax.lax.dynamic_slice_in_dim(x_MK, start, size)
        dy = jax.lax.dynamic_slice_in_dim(dy_MN, start, size)
        if size < 4 * tile:  # the largest tiles end within their group
            # Both are cut: what lies after the last group is undefined, and 0 times an infinity is none.
            real = (start + jnp.arange(size, dtype=jnp.int32) < end)[:, None]
            x, dy = jnp.where(real, x, 0), jnp.where(real, dy, 0)
        total = jax.lax.dynamic_index_in_dim(dw_GKN, group, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(dw_GKN, total + _dot(x, dy, 0, 0), group, 0)

    dw_GKN = jnp.zeros((sizes_G.shape[0], x_MK.shape[1], dy_MN.shape[1]), jnp.float32)
    return _over_tiles(sizes_G, x_MK.shape[0], tile, body, dw_GKN)


def _dot(a, b, contract_a: int, contract_b: int) -> jax.Array:
    return jax.lax.dot_general(a, b, (((contract_a,), (contract_b,)), ((), ())), preferred_element_type=jnp.float32)
