"""Fast matrix transposition on XLA's CPU back end."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara import sharding

_ROWS, _MOST_PARTS = 8, 64
LARGE_BYTES = 2**20  # smaller matrices stay in the CPU's cache, and each part takes time to compile


def transposed(x: jax.Array) -> jax.Array:
    """x.T [N, M] of x [M, N], computed once.

    XLA's CPU back end would repeat the transposition in each operation that reads it, column by column across the whole
    CPU cache; a few rows at a time it is three times as fast. On several devices it is a plain transpose: slicing
    sharded rows would move them between devices.
    """
    if sharding.platform() != "cpu" or sharding.active():
        return x.T
    size = max(_ROWS, -(-len(x) // _MOST_PARTS)) if x.nbytes >= LARGE_BYTES else len(x)
    parts = [x[start : start + size].T for start in range(0, len(x), size)]
    return jax.lax.optimization_barrier(jnp.concatenate(parts, axis=1))
