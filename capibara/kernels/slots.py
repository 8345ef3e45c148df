"""Reads and writes some rows of an array: those of the slots that a decode step computes.

XLA's CPU back end compiles a gather or scatter of rows to a slow scalar loop; slices are copied at the speed of memory,
and written in place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def take(x_Bx: jax.Array, slots_R: jax.Array) -> jax.Array:
    """The rows of these slots, [R, ...]."""
    return jnp.concatenate([jax.lax.dynamic_slice_in_dim(x_Bx, slot, 1) for slot in slots_R])


def put(x_Bx: jax.Array, rows_Rx: jax.Array, slots_R: jax.Array) -> jax.Array:
    """The array with these rows in the slots, which differ from each other."""
    for row in range(len(slots_R)):
        x_Bx = jax.lax.dynamic_update_slice_in_dim(x_Bx, rows_Rx[row : row + 1], slots_R[row], axis=0)
    return x_Bx
