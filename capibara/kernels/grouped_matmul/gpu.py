"""Grouped products by XLA's ragged_dot: on GPU, and on platforms without their own implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def matmul(x_MK: jax.Array, w_GKN: jax.Array, sizes_G: jax.Array, tile: int, *, transposed: bool) -> jax.Array:
    """See kernel.GroupedKernel."""
    del tile
    w_GKN = jnp.swapaxes(w_GKN, 1, 2) if transposed else w_GKN
    y_MN = jax.lax.ragged_dot(x_MK, w_GKN, sizes_G, preferred_element_type=jnp.float32)
    return y_MN.astype(x_MK.dtype)


def weight_gradient(x_MK: jax.Array, dy_MN: jax.Array, sizes_G: jax.Array, tile: int) -> jax.Array:
    """See kernel.GroupedKernel."""
    del tile
    dimensions = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    return jax.lax.ragged_dot_general(x_MK, dy_MN, sizes_G, dimensions, preferred_element_type=jnp.float32)
