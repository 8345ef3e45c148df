"""Products in the operand orders that XLA's CPU back end runs at full speed, and weights stored in those orders."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.matmul.transposition import transposed


@jax.tree_util.register_pytree_node_class
class OutputFirst:
    """A weight [in ..., out ...] stored as a matrix [out, in].

    XLA's CPU back end copies the second operand of a product into blocks. For few tokens it is fastest with the weight
    as the first operand: 8 tokens take 70% of the time.
    """

    def __init__(self, matrix_OI: jax.Array, outer: tuple[int, ...]):
        self.matrix_OI, self.outer = matrix_OI, outer

    @classmethod
    def of(cls, weight: jax.Array, in_dims: int) -> OutputFirst:
        """Converts a weight from the layout of the parameters."""
        inner = math.prod(weight.shape[:in_dims])
        return cls(weight.reshape(inner, -1).T, weight.shape[in_dims:])

    def product(self, x: jax.Array, in_dims: int) -> jax.Array:
        """See dispatch.matmul."""
        leading = x.shape[:-in_dims]
        x_NI = x.reshape(math.prod(leading), -1)
        weight_OI = self.matrix_OI.astype(x.dtype)
        if len(weight_OI) > weight_OI.shape[1] and is_faster_in_pairs(weight_OI, x_NI):
            y = product_in_pairs(weight_OI, x_NI)
        elif 1 < len(x_NI) <= _FEW_TOKENS:  # without the barrier XLA would swap the operands
            y = jax.lax.optimization_barrier(weight_OI @ x_NI.T).T
        else:
            y = x_NI @ weight_OI.T
        return y.reshape(*leading, *self.outer)

    def __getitem__(self, index: Any) -> OutputFirst:
        if index is not Ellipsis:
            raise TypeError("a weight with its outputs first cannot be indexed: use `[...]`")
        return self

    def tree_flatten(self) -> tuple[tuple[jax.Array], tuple[int, ...]]:
        """The matrix, and the dimensions that its outputs stand for."""
        return (self.matrix_OI,), self.outer

    @classmethod
    def tree_unflatten(cls, outer: tuple[int, ...], children: tuple[jax.Array]) -> OutputFirst:
        """The inverse of `tree_flatten`."""
        return cls(children[0], outer)


_FEW_TOKENS = 32
_PAIRED_TOKENS = range(4, 9)


def is_faster_in_pairs(weight_OI: jax.Array, x_NI: jax.Array) -> bool:
    """Whether `product_in_pairs` is faster on a CPU: for 4 to 8 tokens in float32 and many outputs."""
    return len(x_NI) in _PAIRED_TOKENS and len(weight_OI) % 2 == 0 and x_NI.dtype == weight_OI.dtype == jnp.float32


def product_in_pairs(weight_OI: jax.Array, x_NI: jax.Array) -> jax.Array:
    """`x @ weight.T` [N, O] with the weight as the first operand, two of its rows merged into one.

    XLA's CPU product uses vectors of 16 columns; 8 tokens fill only half of each. Two consecutive rows of the weight,
    times the tokens padded with zeros, fill it in half as many products; the zeros change no sum.
    """
    (O, I), zeros_NI = weight_OI.shape, jnp.zeros_like(x_NI)
    columns = jax.lax.optimization_barrier(jnp.block([[x_NI, zeros_NI], [zeros_NI, x_NI]]))
    pairs = weight_OI.reshape(O // 2, 2 * I) @ columns.T
    return jax.lax.optimization_barrier(pairs).reshape(O, -1).T


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


def logits_of_one(hidden_B1D: jax.Array, head_VD: jax.Array, *, in_pairs: bool) -> jax.Array:
    """See reference.logits; for one token per row. The head is the first operand, in pairs of rows if that pays."""
    if in_pairs and is_faster_in_pairs(head_VD, hidden_B1D[:, 0]):
        return product_in_pairs(head_VD, hidden_B1D[:, 0])[:, None]
    logits = jnp.einsum("VD,BTD->VBT", head_VD, hidden_B1D, preferred_element_type=jnp.float32)
    return jnp.moveaxis(logits, 0, -1)
