"""Multiplies groups of rows by a matrix each; chooses the implementation by platform.

Shape letters: M rows, K inputs and N outputs of a matrix, G groups.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from capibara import sharding
from capibara.kernels.grouped_matmul import cpu, gpu, tpu
from capibara.kernels.grouped_matmul.kernel import GroupedKernel, StoredWeight, Transposed


def row_tile(rows: int, groups: int) -> int:
    """Rows per tile if `groups` groups share `rows` rows: a quarter of the mean group size."""
    quarter = 1 << (max(1, rows // (4 * groups)) - 1).bit_length()
    smallest, largest = (128, 512) if sharding.platform() == "tpu" else (8, 128)
    return min(largest, max(smallest, quarter))


def padded_rows(rows: int, tile: int) -> int:
    """Number of rows that the input of `grouped_matmul` needs, so that groups with up to `rows` rows in total fit."""
    return (-(-rows // tile) + 1) * tile


def weighs_inputs() -> bool:
    """Whether factors of a product's rows are faster at its inputs, in the pass that makes them, than at its results."""
    return sharding.platform() != "cpu"


def lays_out_gathered() -> bool:
    """Whether weights that devices gather for a product are laid out for it before: on TPU, whose tiles have an order."""
    return sharding.platform() == "tpu"


def grouped_matmul(
    x_MK: jax.Array, w_GKN: jax.Array | Transposed | StoredWeight, sizes_G: jax.Array, tile: int
) -> jax.Array:
    """`x[rows of group g] @ w[g]` for every group, in time proportional to the number of rows in groups.

    Args:
      x_MK: the first sizes[0] rows belong to group 0, the next sizes[1] to group 1 and so on. M comes from
        `padded_rows`.
      w_GKN: in x's dtype, transposed or not; or a frozen weight, of which the backward pass saves only the storage format.
      sizes_G: int32, rows of each group; their sum is at most the `rows` passed to `padded_rows`.
      tile: from `row_tile`.

    Returns:
      [M, N] in x's dtype, accumulated in float32. Rows after the last group are undefined, also in the gradient for x.
    """
    # Determined here: the backward pass may be traced where the mesh is no longer active.
    if isinstance(w_GKN, Transposed):
        return _product(x_MK, w_GKN.w_GNK, sizes_G, tile, True, sharding.platform())
    if not isinstance(w_GKN, jax.Array):
        return _frozen_product(x_MK, w_GKN, sizes_G, tile, sharding.platform())
    return _product(x_MK, w_GKN, sizes_G, tile, False, sharding.platform())


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _product(
    x_MK: jax.Array, w: jax.Array, sizes_G: jax.Array, tile: int, transposed: bool, platform: str
) -> jax.Array:
    return _kernel(platform).matmul(x_MK, w, sizes_G, tile, transposed=transposed)


def _forward(
    x_MK: jax.Array, w: jax.Array, sizes_G: jax.Array, tile: int, transposed: bool, platform: str
) -> tuple[jax.Array, Any]:
    return _product(x_MK, w, sizes_G, tile, transposed, platform), (x_MK, w, sizes_G)


def _backward(
    tile: int, transposed: bool, platform: str, saved: Any, dy_MN: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x_MK, w, sizes_G = saved
    dw = _kernel(platform).weight_gradient(x_MK, dy_MN, sizes_G, tile).astype(w.dtype)
    dx_MK = _kernel(platform).matmul(dy_MN, w, sizes_G, tile, transposed=not transposed)
    return dx_MK, jnp.swapaxes(dw, 1, 2) if transposed else dw, None


_product.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _frozen_product(x_MK: jax.Array, weight: StoredWeight, sizes_G: jax.Array, tile: int, platform: str) -> jax.Array:
    return _kernel(platform).matmul(x_MK, weight.astype(x_MK.dtype), sizes_G, tile, transposed=False)


def _frozen_forward(
    x_MK: jax.Array, weight: StoredWeight, sizes_G: jax.Array, tile: int, platform: str
) -> tuple[jax.Array, Any]:
    return _frozen_product(x_MK, weight, sizes_G, tile, platform), (weight, sizes_G)


def _frozen_backward(tile: int, platform: str, saved: Any, dy_MN: jax.Array) -> tuple[jax.Array, None, None]:
    weight, sizes_G = saved
    dx_MK = _kernel(platform).matmul(dy_MN, weight.astype(dy_MN.dtype), sizes_G, tile, transposed=True)
    return dx_MK, None, None


_frozen_product.defvjp(_frozen_forward, _frozen_backward)


def _kernel(platform: str) -> GroupedKernel:
    match platform:
        case "cpu":
            return cpu
        case "tpu":
            return tpu
    return gpu
