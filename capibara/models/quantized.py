"""Matrix products in 8 bits for training, with scales found anew from every operand.

Why not qwix 0.1.8: its product with a gradient (dot_general_qt) is no public interface, fails under JAX's strict dtype
promotion, and keeps scales and sums in the compute dtype (in bfloat16 its int8 error is a tenth larger than ours). The
tests compare with it where it is installed.
"""

from __future__ import annotations

import enum
import functools

import jax
import jax.numpy as jnp

_LARGEST = {jnp.int8: 127.0, jnp.float8_e4m3fn: 448.0, jnp.float8_e5m2: 57344.0}


class Quantization(enum.StrEnum):
    """Number formats of the products in projections and MLPs; embeddings, head, router and norms stay as they are.

    int8: the product and its gradient by the inputs are int8 x int8 -> int32. The gradient by the weights stays in the
    compute dtype: it sums over all tokens of the batch, and 8 bits there is what makes training diverge (SwitchBack,
    Wortsman et al. 2023, arXiv:2304.13013).

    fp8: e4m3 for inputs and weights, e5m2 for output gradients in both backward products (Micikevicius et al. 2022,
    arXiv:2209.05433), sums in float32.
    """

    NONE = "none"
    INT8 = "int8"
    FP8 = "fp8"


def quantized_matmul(x: jax.Array, w: jax.Array, quantization: Quantization) -> jax.Array:
    """x @ w with both operands rounded to 8 bits, one scale for each row of x and each column of w.

    Args:
      x: [M, K] floating point; M tokens.
      w: [K, N] in any floating-point dtype.
      quantization: the format.

    Returns:
      [M, N] in the dtype of x. Gradients are in the dtypes of x and w.
    """
    return x @ w.astype(x.dtype) if quantization is Quantization.NONE else _matmul(x, w, quantization)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x, w, quantization: Quantization) -> jax.Array:
    kind = jnp.int8 if quantization is Quantization.INT8 else jnp.float8_e4m3fn
    return _scaled_dot(x, kind, 1, w, kind, 0).astype(x.dtype)


def _forward(x, w, quantization):
    # The operands are kept as they came, not in 8 bits: projections that share an input share one residual.
    return _matmul(x, w, quantization), (x, w)


def _backward(quantization, residuals, g):
    x, w = residuals
    if quantization is Quantization.INT8:
        dx = _scaled_dot(g, jnp.int8, 1, w, jnp.int8, 1)
        dw = _dot(x, g, 0, 0, x.dtype)
    else:
        dx = _scaled_dot(g, jnp.float8_e5m2, 1, w, jnp.float8_e4m3fn, 1)
        dw = _scaled_dot(x, jnp.float8_e4m3fn, 0, g, jnp.float8_e5m2, 0)
    return dx.astype(x.dtype), dw.astype(w.dtype)


_matmul.defvjp(_forward, _backward)


def _scaled_dot(a, a_kind, a_dim: int, b, b_kind, b_dim: int) -> jax.Array:
    """float32 [rows of a, rows of b]: the product over dimension a_dim of a and b_dim of b, both rounded."""
    a, a_scale = quantize(a, a_kind, a_dim)
    b, b_scale = quantize(b, b_kind, b_dim)
    sums = _dot(a, b, a_dim, b_dim, jnp.int32 if a_kind == jnp.int8 else jnp.float32)
    return sums.astype(jnp.float32) * jnp.squeeze(a_scale, a_dim)[:, None] * jnp.squeeze(b_scale, b_dim)[None, :]


def quantize(x: jax.Array, kind: jax.typing.DTypeLike, dim: int) -> tuple[jax.Array, jax.Array]:
    """x rounded to `kind`, and float32 scales of size 1 along `dim`: x is about values * scale.

    The largest magnitude along `dim` becomes the largest number of the format, so nothing is clipped.
    """
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=dim, keepdims=True)
    scale = jnp.where(largest > 0, largest, 1.0) / _LARGEST[kind]
    x = x / scale
    if kind == jnp.int8:
        return jnp.round(x).astype(kind), scale
    # The division may round above the format's largest number, whose neighbour in e4m3fn is NaN.
    return jnp.clip(x, -_LARGEST[kind], _LARGEST[kind]).astype(kind), scale


def _dot(a, b, a_dim: int, b_dim: int, dtype) -> jax.Array:
    return jax.lax.dot_general(a, b, (((a_dim,), (b_dim,)), ((), ())), preferred_element_type=dtype)
