"""Products as the formula says, for the compiler to arrange: what every other way must agree with."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def contracted(x: jax.Array, weight: jax.Array, in_dims: int) -> jax.Array:
    """The product over the last `in_dims` dimensions of x and the first of the weight, in x's dtype.

    Dimensions are contracted as they are, not joined: the partitioner cannot join two of which the second is sharded.
    """
    dims = tuple(range(x.ndim - in_dims, x.ndim)), tuple(range(in_dims))
    return jax.lax.dot_general(x, weight.astype(x.dtype), (dims, ((), ())), preferred_element_type=x.dtype)


def logits(hidden_BTD: jax.Array, head_VD: jax.Array) -> jax.Array:
    """`hidden @ head.T` [B, T, V] in float32; both of one dtype."""
    return jnp.einsum("BTD,VD->BTV", hidden_BTD, head_VD, preferred_element_type=jnp.float32)
