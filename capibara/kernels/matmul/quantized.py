"""8-bit matrix products for training, with scales computed from every operand.

Why not qwix 0.1.8: its differentiable product (dot_general_qt) is not a public interface, fails under JAX's strict
dtype promotion, and keeps scales and sums in the compute dtype (in bfloat16 its int8 error is a tenth larger than
ours). The tests compare with it if it is installed.
"""

from __future__ import annotations

import enum
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from capibara.kernels.matmul import reference

_LARGEST: dict[object, float] = {jnp.int8: 127.0, jnp.float8_e4m3fn: 448.0, jnp.float8_e5m2: 57344.0}


class Quantization(enum.StrEnum):
    """Number formats of the products in projections and MLPs; embeddings, head, router and norms are not quantized.

    Computing scales and rounding take a pass each over every operand, so it pays for wide layers on chips that support
    the format. The TPU compiler estimates that an int8 product takes half as long as a bfloat16 one on v5e; with the
    passes, a 2048 x 8192 projection gains only 2 percent there, and loses on v6e. fp8 is for TPU7x and GPUs from Hopper
    on.

    int8: the product and its gradient with respect to the inputs are int8 x int8 -> int32. The weight gradient stays in
    the compute dtype: it sums over all tokens of the batch, and computing it in 8 bits makes training diverge
    (SwitchBack, Wortsman et al. 2023, arXiv:2304.13013).

    fp8: e4m3 for inputs and weights, e5m2 for output gradients in both backward products (Micikevicius et al. 2022,
    arXiv:2209.05433), accumulated in float32.
    """

    NONE = "none"
    INT8 = "int8"
    FP8 = "fp8"


def quantized_matmul(x: jax.Array, w: jax.Array, quantization: Quantization, in_dims: int = 1) -> jax.Array:
    """Contracts the last `in_dims` dimensions of x with the first ones of w, both rounded to 8 bits.

    There is one scale per token (leading index of x) and one per output of w.

    Args:
      x: [..., in ...] floating point.
      w: [in ..., out ...] in any floating-point dtype.
      quantization: the format.
      in_dims: number of dimensions in `in ...`.

    Returns:
      [..., out ...] in x's dtype. Gradients have the dtypes of x and w.
    """
    if quantization is Quantization.NONE:
        return reference.contracted(x, w, in_dims)
    return _matmul(x, w, quantization, in_dims)


# Contracts dimensions without merging them: the partitioner cannot merge two if the second is sharded.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _matmul(x: jax.Array, w: jax.Array, quantization: Quantization, in_dims: int) -> jax.Array:
    kind = jnp.int8 if quantization is Quantization.INT8 else jnp.float8_e4m3fn
    x_dims, w_dims = _contracted(x, in_dims)
    return _scaled_dot(x, kind, x_dims, w, kind, w_dims).astype(x.dtype)


def _forward(
    x: jax.Array, w: jax.Array, quantization: Quantization, in_dims: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # Saves the operands unquantized: projections that share an input share one residual.
    return _matmul(x, w, quantization, in_dims), (x, w)


def _backward(
    quantization: Quantization, in_dims: int, residuals: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    leading = tuple(range(x.ndim - in_dims))
    outputs = tuple(range(len(leading), g.ndim)), tuple(range(in_dims, w.ndim))
    if quantization is Quantization.INT8:
        dx = _scaled_dot(g, jnp.int8, outputs[0], w, jnp.int8, outputs[1])
        dw = _dot(x, g, leading, leading, x.dtype)
    else:
        dx = _scaled_dot(g, jnp.float8_e5m2, outputs[0], w, jnp.float8_e4m3fn, outputs[1])
        dw = _scaled_dot(x, jnp.float8_e4m3fn, leading, g, jnp.float8_e5m2, leading)
    return dx.astype(x.dtype), dw.astype(w.dtype)


_matmul.defvjp(_forward, _backward)


def _contracted(x: jax.Array, in_dims: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(range(x.ndim - in_dims, x.ndim)), tuple(range(in_dims))


def _scaled_dot(
    a: jax.Array, a_kind: DTypeLike, a_dims: tuple[int, ...], b: jax.Array, b_kind: DTypeLike, b_dims: tuple[int, ...]
) -> jax.Array:
    """float32 [rest of a ..., rest of b ...]: the product over a_dims and b_dims of a and b, both rounded."""
    a, a_scale = quantize(a, a_kind, a_dims)
    b, b_scale = quantize(b, b_kind, b_dims)
    sums = _dot(a, b, a_dims, b_dims, jnp.int32 if a_kind == jnp.int8 else jnp.float32)
    a_scale, b_scale = jnp.squeeze(a_scale, a_dims), jnp.squeeze(b_scale, b_dims)
    return sums.astype(jnp.float32) * a_scale.reshape(*a_scale.shape, *([1] * b_scale.ndim)) * b_scale


def quantize(x: jax.Array, kind: DTypeLike, dims: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Rounds `x` to `kind`: returns values and float32 scales of size 1 along `dims`; x is about values * scale.

    The largest magnitude along `dims` maps to the largest number of the format, so nothing is clipped.
    """
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=dims, keepdims=True)
    scale = jnp.where(largest > 0, largest, 1.0) / _LARGEST[kind]
    x = x / scale
    if kind == jnp.int8:
        return jnp.round(x).astype(kind), scale
    # The division may round up past the format's largest number, whose neighbour in e4m3fn is NaN.
    return jnp.clip(x, -_LARGEST[kind], _LARGEST[kind]).astype(kind), scale


def _dot(a: jax.Array, b: jax.Array, a_dims: tuple[int, ...], b_dims: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    return jax.lax.dot_general(a, b, ((a_dims, b_dims), ((), ())), preferred_element_type=dtype)
