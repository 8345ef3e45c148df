"""Products in the orders of operands that XLA's CPU back end runs at full speed, and weights that lie in those orders."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.matmul.transposition import transposed


@jax.tree_util.register_pytree_node_class
class OutputFirst:
    """A weight [in ..., out ...] that lies in memory as a matrix [out, in].

    XLA's CPU back end copies the second operand of a product into blocks. Of few tokens it multiplies fastest with the
    weight as the first one: 8 tokens in 70% of the time.
    """

    def __init__(self, matrix_OI: jax.Array, outer: tuple[int, ...]):
        self.matrix_OI, self.outer = matrix_OI, outer

    @classmethod
    def of(cls, weight: jax.Array, in_dims: int) -> OutputFirst:
        """From a weight as parameters hold it."""
        inner = math.prod(weight.shape[:in_dims])
        return cls(weight.reshape(inner, -1).T, weight.shape[in_dims:])

    def product(self, x: jax.Array, in_dims: int) -> jax.Array:
        """As of dispatch.matmul."""
        leading = x.shape[:-in_dims]
        x_NI = x.reshape(math.prod(leading), -1)
        weight_OI = self.matrix_OI.astype(x.dtype)
        if len(weight_OI) > weight_OI.shape[1] and pays_in_pairs(weight_OI, x_NI):
            y = product_in_pairs(weight_OI, x_NI)
        elif 1 < len(x_NI) <= _FEW_TOKENS:  # without the barrier XLA would swap the operands
            y = jax.lax.optimization_barrier(weight_OI @ x_NI.T).T
        else:
            y = x_NI @ weight_OI.T
        return y.reshape(*leading, *self.outer)

    def __getitem__(self, index: Any) -> OutputFirst:
        if index is not Ellipsis:
            raise TypeError("a weight with its outputs first has no parts")
        return self

    def tree_flatten(self):
        return (self.matrix_OI,), self.outer

    @classmethod
    def tree_unflatten(cls, outer, children):
        return cls(*children, outer)


_FEW_TOKENS = 32
_PAIRED_TOKENS = range(4, 9)


def pays_in_pairs(weight_OI: jax.Array, x_NI: jax.Array) -> bool:
    """Whether `product_in_pairs` is quicker on a CPU: of 4 to 8 tokens in float32, where outputs are many."""
    return len(x_NI) in _PAIRED_TOKENS and len(weight_OI) % 2 == 0 and x_NI.dtype == weight_OI.dtype == jnp.float32


def product_in_pairs(weight_OI: jax.Array, x_NI: jax.Array) -> jax.Array:
    """`x @ weight.T` [N, O], with the weight as the first operand and two of its rows as one.

    XLA's CPU product has vectors of 16 columns: of 8 tokens half of each lies idle. Two rows of the weight that lie one
    after the other, times the tokens beside zeros, fill it, in half as many parts; the zeros change no sum.
    """
    (O, I), zeros_NI = weight_OI.shape, jnp.zeros_like(x_NI)
    columns = jax.lax.optimization_barrier(jnp.block([[x_NI, zeros_NI], [zeros_NI, x_NI]]))
    pairs = weight_OI.reshape(O // 2, 2 * I) @ columns.T
    return jax.lax.optimization_barrier(pairs).reshape(O, -1).T


def as_matrices(x: jax.Array, weight: jax.Array, in_dims: int) -> jax.Array:
    """As reference.contracted, with all leading dimensions of x as one."""
    leading, inner, outer = x.shape[:-in_dims], x.shape[x.ndim - in_dims :], weight.shape[in_dims:]
    size = math.prod(inner)
    y = _matmul(x.reshape(-1, size), weight.astype(x.dtype).reshape(size, -1))
    return y.reshape(*leading, *outer)


@jax.custom_vjp
def _matmul(x_NI: jax.Array, weight_IO: jax.Array) -> jax.Array:
    """`x @ weight`, whose weight gradient has the order of operands that XLA's CPU matmul runs at full speed.

    x.T @ dy runs so only where dy is wider than x. Where it is narrower the gradient's transpose is made, and where both
    are alike (attention's projections) x is transposed first: once for all weights that it is multiplied with.
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


def logits_of_one(hidden_B1D: jax.Array, head_VD: jax.Array, *, in_pairs: bool) -> jax.Array:
    """As reference.logits, of one token a row, with the head as the first operand; `in_pairs`: perhaps two rows as one."""
    if in_pairs and pays_in_pairs(head_VD, hidden_B1D[:, 0]):
        return product_in_pairs(head_VD, hidden_B1D[:, 0])[:, None]
    logits = jnp.einsum("VD,BTD->VBT", head_VD, hidden_B1D, preferred_element_type=jnp.float32)
    return jnp.moveaxis(logits, 0, -1)
