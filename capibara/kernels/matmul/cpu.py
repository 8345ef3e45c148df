"""Products in the operand orders that XLA's CPU back end runs at full speed."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from capibara.kernels.matmul.transposition import transposed


def as_matrices(x: jax.Array, weight: jax.Array, in_dims: int) -> jax.Array:
    """See reference.contracted; merges all leading dimensions of x into one."""
    leading, inner, outer = x.shape[:-in_dims], x.shape[x.ndim - in_dims :], weight.shape[in_dims:]
    size = math.prod(inner)
    y = _matmul(x.reshape(-1, size), weight.astype(x.dtype).reshape(size, -1))
    return y.reshape(*leading, *outer)


@jax.custom_vjp
def _matmul(x_NI: jax.Array, weight_IO: jax.Array) -> jax.Array:
    """`x @ weight` with a weight gradient in the operand order that XLA's CPU matmul runs at full speed.

    x.T @ dy is fast only if dy is wider than x. If it is narrower, the transposed gradient is computed; if both are
    equal (attention's projections), x is transposed first, once for all weights that it is multiplied by.
    """
    return x_NI @ weight_IO


def _matmul_backward(operands: tuple[jax.Array, jax.Array], dy_NO: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_NI, weight_IO = operands
    if x_NI.shape[1] > dy_NO.shape[1]:  # without the barrier XLA would fold the transposition into the product
        dweight_IO = transposed(jax.lax.optimization_barrier(dy_NO.T @ x_NI))
    elif x_NI.shape[1] == dy_NO.shape[1]:
        dweight_IO = transposed(x_NI) @ dy_NO
    else:
        dweight_IO = x_NI.T @ dy_NO
    return dy_NO @ weight_IO.T, dweight_IO


_matmul.defvjp(lambda x_NI, weight_IO: (x_NI @ weight_IO, (x_NI, weight_IO)), _matmul_backward)


def logits_of_one(hidden_B1D: jax.Array, head_VD: jax.Array) -> jax.Array:
    """See reference.logits; for one token per row. With the head as the second operand one row takes twice the time."""
    logits = jnp.einsum("VD,BTD->VBT", head_VD, hidden_B1D, preferred_element_type=jnp.float32)
    return jnp.moveaxis(logits, 0, -1)
