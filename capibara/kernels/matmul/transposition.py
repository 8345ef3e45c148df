"""Transposes of matrices that XLA's CPU back end makes quickly."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara import sharding

_ROWS, _MOST_PARTS = 8, 64
_LARGE_BYTES = 2**20  # what is smaller stays in the cache, and each part takes time to compile


def transposed(x: jax.Array) -> jax.Array:
    """x.T [N, M] of x [M, N], made once.

    XLA's CPU back end would transpose again in each operation that reads it, and column by column, through all of the
    cache: of a few rows at a time it is made three times as fast.
    Not on several devices: rows that they share out would be sent about.
    """
    if sharding.platform() != "cpu" or sharding.active():
        return x.T
    size = max(_ROWS, -(-len(x) // _MOST_PARTS)) if x.nbytes >= _LARGE_BYTES else len(x)
    parts = [x[start : start + size].T for start in range(0, len(x), size)]
    return jax.lax.optimization_barrier(jnp.concatenate(parts, axis=1))
