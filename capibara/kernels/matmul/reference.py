"""The reference products, in the order of the formula; all other implementations must agree with them."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def contracted(x: jax.Array, weight: jax.Array, in_dims: int) -> jax.Array:
    """The product over the last `in_dims` dimensions of x and the first ones of the weight, in x's dtype.

    Contracts dimensions without merging them: the partitioner cannot merge two if the second is sharded.
    """
    dims = tuple(range(x.ndim - in_dims, x.ndim)), tuple(range(in_dims))
    return jax.lax.dot_general(x, weight.astype(x.dtype), (dims, ((), ())), preferred_element_type=x.dtype)


def logits(hidden_BTD: jax.Array, head_VD: jax.Array) -> jax.Array:
    """`hidden @ head.T` [B, T, V] in float32; both operands have the same dtype."""
    return jnp.einsum("BTD,VD->BTV", hidden_BTD, head_VD, preferred_element_type=jnp.float32)
