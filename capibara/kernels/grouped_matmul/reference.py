"""The reference for grouped products, which multiplies every row by every matrix; the others must agree with it."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def matmul(x_MK: jax.Array, w_GKN: jax.Array, sizes_G: jax.Array, tile: int, *, transposed: bool) -> jax.Array:
    """See kernel.GroupedKernel; rows after the last group become 0."""
    del tile
    w_GKN = jnp.swapaxes(w_GKN, 1, 2) if transposed else w_GKN
    every_GMN = jnp.einsum("MK,GKN->GMN", x_MK, w_GKN, preferred_element_type=jnp.float32)
    return jnp.sum(jnp.where(_of_group(sizes_G, len(x_MK)), every_GMN, 0.0), axis=0).astype(x_MK.dtype)


def weight_gradient(x_MK: jax.Array, dy_MN: jax.Array, sizes_G: jax.Array, tile: int) -> jax.Array:
    """See kernel.GroupedKernel."""
    del tile
    own_GMK = jnp.where(_of_group(sizes_G, len(x_MK)), x_MK, jnp.zeros((), x_MK.dtype))
    dy_MN = jnp.where(jnp.any(_of_group(sizes_G, len(x_MK)), axis=0), dy_MN, jnp.zeros((), dy_MN.dtype))
    return jnp.einsum("GMK,MN->GKN", own_GMK, dy_MN, preferred_element_type=jnp.float32)


def _of_group(sizes_G: jax.Array, rows: int) -> jax.Array:
    """[G, M, 1] bool: which group each row belongs to."""
    ends_G1, row_M = jnp.cumsum(sizes_G)[:, None], jnp.arange(rows, dtype=jnp.int32)
    return ((row_M >= ends_G1 - sizes_G[:, None]) & (row_M < ends_G1))[..., None]
