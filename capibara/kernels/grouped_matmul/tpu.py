"""Grouped products on TPU, by JAX's MegaBlocks kernels (Gale et al. 2022, arXiv:2211.15841)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

NAME = "gmm"
"""The kernel's name in compiled programs."""

_LANES = 128
_WIDTH = 1024  # width of a tile of 512 rows; 10 MiB of VMEM in bfloat16, in both directions
_WHOLE_ROWS, _WHOLE_INPUTS = 128, 4096  # most rows of a tile, and inputs of a matrix, that a tile has whole
_WHOLE_BYTES = 4 * 2**20  # of such a tile's part of a matrix; VMEM holds two


def matmul(x_MK: jax.Array, w_GKN: jax.Array, sizes_G: jax.Array, tile: int, *, transposed: bool) -> jax.Array:
    """See kernel.GroupedKernel."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm  # importing Pallas takes a second

    tiling = _tiling(tile, x_MK.shape[1], w_GKN.shape[1 if transposed else 2], x_MK.dtype)
    if _stored_by_columns(*w_GKN.shape[1:]):
        w_GKN, transposed = jnp.swapaxes(w_GKN, 1, 2), not transposed  # moves nothing then
    return gmm(x_MK, w_GKN, sizes_G, x_MK.dtype, tiling, transpose_rhs=transposed)


def weight_gradient(x_MK: jax.Array, dy_MN: jax.Array, sizes_G: jax.Array, tile: int) -> jax.Array:
    """See kernel.GroupedKernel."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    widths = (_width(size, _largest(x_MK.dtype)) for size in (x_MK.shape[1], dy_MN.shape[1]))
    return tgmm(x_MK.swapaxes(0, 1), dy_MN, sizes_G, x_MK.dtype, (tile, *widths))


def bytes_moved(rows: int, groups: int, inputs: int, outputs: int, tile: int) -> float:
    """HBM traffic of a product in bfloat16 if each of `groups` groups has as many of the rows: rows, matrices, results.

    Args:
      rows: of all groups.
      groups: that have rows.
      inputs, outputs: of a matrix.
      tile: rows of a tile.
    """
    _, width_in, width_out = _tiling(tile, inputs, outputs, jnp.dtype(jnp.bfloat16))
    tiles = -(-rows // tile)
    whole, visits = width_in >= inputs, tiles + groups - 1  # most of them: each group begins within a tile
    matrices = (groups if whole else visits) * min(_padded(inputs) * outputs, inputs * _padded(outputs))
    return 2.0 * (-(-outputs // width_out) * (tiles if whole else visits) * tile * inputs + matrices + rows * outputs)


def _stored_by_columns(rows: int, columns: int) -> bool:
    """Whether a TPU stores matrices of this size that are a program's arguments by columns, which pads them less.

    The kernel takes them by rows: XLA copied all experts in each decode step (gpt-oss 20B on v5e-4: 13.3 GB of 25.5).
    """
    return _padded(rows) * columns < rows * _padded(columns)


def _padded(size: int) -> int:
    return -(-size // _LANES) * _LANES


def _tiling(tile: int, inputs: int, outputs: int, dtype: jnp.dtype) -> tuple[int, int, int]:
    """Rows, inputs and outputs of a tile.

    With all inputs in a tile, the tiles of a group read its matrix once, else once each: with tiles of 128 rows that takes longer
    than the products (Qwen3 30B-A3B on v6e-64: 4.9 GB a product for 1.5 GB, computed in 0.45 ms; `bytes_moved`).
    """
    if tile <= _WHOLE_ROWS and inputs <= _WHOLE_INPUTS:
        most = _WHOLE_BYTES // (inputs * jnp.dtype(dtype).itemsize) // _LANES * _LANES
        if most >= min(outputs, 2 * _LANES):
            return tile, inputs, _width(outputs, min(most, _largest(dtype)))
    return tile, _width(inputs, _largest(dtype)), _width(outputs, _largest(dtype))


def _largest(dtype: jnp.dtype) -> int:
    return _WIDTH * 2 // jnp.dtype(dtype).itemsize


def _width(size: int, largest: int) -> int:
    """The width of tiles that together exceed a size least, of at least half the largest; kernels compute whole tiles."""
    if size <= largest:
        return size
    return min(range(largest, largest // 2 - 1, -_LANES), key=lambda width: -(-size // width) * width)
