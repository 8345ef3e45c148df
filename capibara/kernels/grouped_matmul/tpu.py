"""Grouped products on TPU, by JAX's MegaBlocks kernels (Gale et al. 2022, arXiv:2211.15841)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_LANES = 128
_WIDTH = 1024  # width of a tile of 512 rows; 10 MiB of VMEM in bfloat16, in both directions


def matmul(x_MK: jax.Array, w_GKN: jax.Array, sizes_G: jax.Array, tile: int, *, transposed: bool) -> jax.Array:
    """See kernel.GroupedKernel."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm  # importing Pallas takes a second

    tiling = _tiling(tile, x_MK.shape[1], w_GKN.shape[1 if transposed else 2], x_MK.dtype)
    return gmm(x_MK, w_GKN, sizes_G, x_MK.dtype, tiling, transpose_rhs=transposed)


def weight_gradient(x_MK: jax.Array, dy_MN: jax.Array, sizes_G: jax.Array, tile: int) -> jax.Array:
    """See kernel.GroupedKernel."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tiling = _tiling(tile, x_MK.shape[1], dy_MN.shape[1], x_MK.dtype)
    return tgmm(x_MK.swapaxes(0, 1), dy_MN, sizes_G, x_MK.dtype, tiling)


def _tiling(tile: int, inputs: int, outputs: int, dtype: jnp.dtype) -> tuple[int, int, int]:
    largest = _WIDTH * 2 // jnp.dtype(dtype).itemsize
    return tile, _width(inputs, largest), _width(outputs, largest)


def _width(size: int, largest: int) -> int:
    """The width of tiles that together exceed a size least, of at least half the largest; kernels compute whole tiles."""
    if size <= largest:
        return size
    return min(range(largest, largest // 2 - 1, -_LANES), key=lambda width: -(-size // width) * width)
