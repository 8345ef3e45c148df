"""The index of the largest of many numbers, such as the logits of a vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara import sharding


def argmax(x: jax.Array) -> jax.Array:
    """`jnp.argmax` along the last axis: the first of the largest ones, or the first NaN; int32.

    XLA's CPU back end compares values and their indices one by one. Two reductions, of values and of indices, use the vector
    units: of 8 x 49,152 logits on two cores 0.2 ms in place of 1.9 ms (30 November 2026, jax 0.10.2).
    """
    if sharding.platform() != "cpu":
        return jnp.argmax(x, axis=-1).astype(jnp.int32)
    is_largest = (x == jnp.max(x, axis=-1, keepdims=True)) | (x != x)
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return jnp.min(jnp.where(is_largest, index, x.shape[-1]), axis=-1)
