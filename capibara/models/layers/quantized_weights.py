"""Frozen weights, in floating point or quantized; quantized ones are dequantized where they are used, layer by layer.

Blocks of 64 values along a weight's inputs share a float32 scale, their largest magnitude. A value is stored as the
index of the codebook entry nearest to value / scale. Two 4-bit indices share a byte.

Why not qwix 0.1.8: its NF4 codes are arrays of a 4-bit dtype, which checkpoints cannot store; it has no double
quantization; and its products save the weight in floating point for the backward pass.
"""

from __future__ import annotations

import dataclasses
import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from capibara.core.types import UserError

_BLOCK = 64
_SHARDED_BLOCKS = 16
# NF4 of QLoRA (Dettmers et al. 2023, arXiv:2305.14314, appendix E): quantiles of the normal distribution, including 0.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class BaseDtype(enum.StrEnum):
    """Storage format of the weights of a frozen base.

    bfloat16: embeddings and all weight matrices. int8, int4, nf4: the layers' projections in 8 or 4 bits, other
      matrices
    in bfloat16. Norms, biases and routers stay float32.
    """

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    INT4 = "int4"
    NF4 = "nf4"

    @property
    def in_blocks(self) -> bool:
        return self in (BaseDtype.INT8, BaseDtype.INT4, BaseDtype.NF4)


class Frozen(nnx.Param):
    """A frozen weight, or one of the arrays of a quantized one."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Whole:
    """A frozen weight in floating point."""

    values: jax.Array

    @property
    def ndim(self) -> int:
        return self.values.ndim

    def astype(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        return self.values.astype(dtype)


class FrozenWeight(Frozen):
    """A parameter whose `[...]` returns a Whole."""

    def __getitem__(self, _: object) -> Whole:  # type: ignore[override]  # a Variable gives its array
        return Whole(self.get_value())


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales", "means", "steps"],
    meta_fields=["kind", "dim"],
)
@dataclasses.dataclass(frozen=True)
class Blocks:
    """A weight quantized in blocks.

    Attributes:
      codes: int8 in the weight's shape; or uint8 with half as many entries along `dim`: byte i of a block holds values
        i and i + half a block.
      scales: float32, one per block; int8 with double quantization, where a scale is means + steps * scales.
      means, steps: float32, one for all blocks along `dim`; None without double quantization.
      kind: int8, int4 or nf4.
      dim: the dimension that blocks run along, counted from the last one (-1).
    """

    codes: jax.Array
    scales: jax.Array
    means: jax.Array | None
    steps: jax.Array | None
    kind: BaseDtype
    dim: int

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    def astype(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The weight in floating point."""
        scales = self.scales
        if self.means is not None:
            assert self.steps is not None, "both are there, or neither"
            steps, means = (jnp.expand_dims(x, self.dim) for x in (self.steps, self.means))
            scales = means + steps * scales.astype(jnp.float32)
        axis = self.codes.ndim + self.dim  # of the blocks; the values within a block are the next axis
        count = scales.shape[axis]
        codes = self.codes.reshape(*self.codes.shape[:axis], count, -1, *self.codes.shape[axis + 1 :])
        if self.kind is not BaseDtype.INT8:
            codes = jnp.concatenate([codes & 15, codes >> 4], axis + 1)
        values = _values(codes, self.kind) * jnp.expand_dims(scales, axis + 1)
        return values.reshape(*scales.shape[:axis], -1, *scales.shape[axis + 1 :]).astype(dtype)


def block_size(size: int) -> int:
    """Values per block along a dimension of this size: 64, or its largest even divisor below that.

    Raises:
      UserError: there is no even divisor.
    """
    result = max((block for block in range(2, _BLOCK + 1, 2) if size % block == 0), default=None)
    if result is None:
        raise UserError(f"Lora.base_dtype cannot halve weights with {size} inputs, which must be even: try 'bfloat16'")
    return result


def quantize(weight: jax.Array, kind: BaseDtype, dim: int, *, double: bool = False) -> Blocks:
    """Quantizes a floating-point weight in blocks along `dim` (negative)."""
    weight = weight.astype(jnp.float32)
    axis = weight.ndim + dim
    size = block_size(weight.shape[axis])
    blocked = weight.reshape(*weight.shape[:axis], -1, size, *weight.shape[axis + 1 :])
    scales = jnp.max(jnp.abs(blocked), axis=axis + 1)
    codes = _codes(blocked / jnp.expand_dims(jnp.where(scales > 0, scales, 1.0), axis + 1), kind)
    if kind is not BaseDtype.INT8:
        low, high = jnp.split(codes, 2, axis + 1)
        codes = low | (high << 4)
    codes = codes.reshape(*scales.shape[:axis], -1, *scales.shape[axis + 1 :])
    means = steps = None
    if double:
        means = jnp.mean(scales, axis=axis)
        away = scales - jnp.expand_dims(means, axis)
        steps = jnp.max(jnp.abs(away), axis=axis) / 127
        scales = jnp.round(away / jnp.expand_dims(jnp.where(steps > 0, steps, 1.0), axis)).astype(jnp.int8)
    return Blocks(codes, scales, means, steps, kind, dim)


def _codes(share: jax.Array, kind: BaseDtype) -> jax.Array:
    """The indices of the nearest codebook entries for values from -1 to 1."""
    match kind:
        case BaseDtype.INT8:
            return jnp.round(share * 127).astype(jnp.int8)
        case BaseDtype.INT4:
            return (jnp.round(share * 7) + 8).astype(jnp.uint8)
    book = np.asarray(NF4, np.float64)
    codes = jnp.zeros(share.shape, jnp.uint8)
    for middle in (book[1:] + book[:-1]) / 2:
        codes = codes + (share > np.float32(middle)).astype(jnp.uint8)
    return codes


def _values(codes: jax.Array, kind: BaseDtype) -> jax.Array:
    """The float32 codebook entries of these indices."""
    match kind:
        case BaseDtype.INT8:
            return codes.astype(jnp.float32) / 127
        case BaseDtype.INT4:
            return (codes.astype(jnp.float32) - 8) / 7
    # By selection, bit by bit: a TPU looks up table entries one by one, but selects 1024 values at once.
    values: list = [np.float32(value) for value in NF4]
    for bit in range(4):
        chosen = (codes >> bit) & 1 == 1
        values = [jnp.where(chosen, item, zero) for zero, item in zip(values[::2], values[1::2], strict=True)]
    return values[0]


class StoredWeight(nnx.Module):
    """A quantized parameter; `[...]` returns its Blocks, as that of a Param returns its array.

    Args:
      weight: the parameter to store.
      kind: int8, int4 or nf4.
      dim: the dimension that blocks run along, counted from the last one (-1).
      double: whether to store the scales in 8 bits.
    """

    def __init__(self, weight: nnx.Param, kind: BaseDtype, dim: int, *, double: bool):
        self.kind, self.dim = kind, dim
        blocks, axes = quantize(weight[...], kind, dim, double=double), weight.axes
        self.codes = Frozen(blocks.codes, axes=axes)
        axis = len(axes) + dim
        # A dimension with few blocks is replicated: it might not divide where the weight does.
        of_blocks = axes[axis] if blocks.scales.shape[axis] % _SHARDED_BLOCKS == 0 else None
        self.scales = Frozen(blocks.scales, axes=(*axes[:axis], of_blocks, *axes[axis + 1 :]))
        across = (*axes[:axis], *axes[axis + 1 :])
        self.means = Frozen(blocks.means, axes=across) if double else None
        self.steps = Frozen(blocks.steps, axes=across) if double else None

    def __getitem__(self, _: object) -> Blocks:
        means, steps = (None if part is None else part[...] for part in (self.means, self.steps))
        return Blocks(self.codes[...], self.scales[...], means, steps, self.kind, self.dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def frozen_matmul(x: jax.Array, weight: Whole | Blocks, in_dims: int) -> jax.Array:
    """Contracts the last `in_dims` dimensions of x with the first ones of a frozen weight, in x's dtype.

    The backward pass saves only the weight in its storage format: neither the input nor a copy of the weight in x's
    dtype.
    """
    return _dot(x, weight.astype(x.dtype), range(x.ndim - in_dims, x.ndim), range(in_dims))


def _backward(in_dims: int, weight: Whole | Blocks, g: jax.Array) -> tuple[jax.Array, None]:
    outputs = weight.ndim - in_dims
    return _dot(g, weight.astype(g.dtype), range(g.ndim - outputs, g.ndim), range(in_dims, weight.ndim)), None


frozen_matmul.defvjp(lambda x, weight, in_dims: (frozen_matmul(x, weight, in_dims), weight), _backward)


def _dot(a: jax.Array, b: jax.Array, a_dims: range, b_dims: range) -> jax.Array:
    dims = ((tuple(a_dims), tuple(b_dims)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=a.dtype)
