"""The small parts of every model. A parameter's shape, dtype, logical axes and initialiser stand in one place."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from capibara import sharding
from capibara.kernels.quantized_matmul import Quantization, quantized_matmul
from capibara.kernels.transposition import transposed
from capibara.models.adapters.quantized_weights import Blocks, Whole, frozen_matmul

Initializer = Callable[..., jax.Array]


def param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], init: Initializer) -> nnx.Param:
    """A float32 parameter that carries the logical names of its dimensions."""
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} and axes {axes} differ in length")
    return nnx.Param(init(rngs.params(), shape, jnp.float32), axes=axes)


def normal(std: float) -> Initializer:
    """Normal, cut at two standard deviations, with the standard deviation of what is left."""
    return jax.nn.initializers.truncated_normal(std / 0.87962566103423978)


def fan_in(*in_axes: int, scale: float = 1.0) -> Initializer:
    """Truncated normal of variance scale / fan-in, the fan-in being the product of `in_axes`."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        size = 1
        for axis in in_axes:
            size *= shape[axis]
        return normal((scale / size) ** 0.5)(key, shape, dtype)

    return init


zeros = jax.nn.initializers.zeros
ones = jax.nn.initializers.ones


def adapter_of(module: nnx.Module, name: str) -> Callable[..., jax.Array] | None:
    """What `dense` adds to the product with a module's weight of this name (models/adapters/lora.py)."""
    return getattr(module, f"{name}_lora", None)


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
        """As of `dense`."""
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


def dense(
    x: jax.Array,
    weight: jax.Array | Whole | Blocks | OutputFirst,
    in_dims: int = 1,
    quantization: Quantization = Quantization.NONE,
    adapter: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """Contracts the last `in_dims` dimensions of x with the first of the weight, in x's dtype.

    Args:
      x: [B, T, in ...].
      weight: [in ..., out ...]; one that is frozen has no gradient, and its product is not in 8 bits.
      in_dims: how many dimensions `in ...` has.
      quantization: 8-bit operands, or none.
      adapter: (x, the product, weight) -> what it makes of it; None: the product it is.

    Returns:
      [B, T, out ...].
    """
    frozen = isinstance(weight, Whole | Blocks)
    y = frozen_matmul(x, weight, in_dims) if frozen else _product(x, weight, in_dims, quantization)
    return y if adapter is None else adapter(x, y, weight)


def _product(x: jax.Array, weight: jax.Array | OutputFirst, in_dims: int, quantization: Quantization) -> jax.Array:
    if isinstance(weight, OutputFirst):
        return weight.product(x, in_dims)
    if quantization is not Quantization.NONE or not _as_matrices():
        return quantized_matmul(x, weight, quantization, in_dims)
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


def _as_matrices() -> bool:
    """Whether a product is better written with batch and time as one dimension.

    A weight gradient that contracts them as two costs XLA's CPU back end a transposed copy of the output gradient and
    its slower matmul. The partitioner, though, cannot join dimensions of which the second is sharded: it would
    gather every activation.
    """
    mesh, rules = sharding.active() or (None, None)
    return sharding.platform() == "cpu" and (mesh is None or all(mesh.shape[a] == 1 for a in rules.act_residual))


def gradients_together(x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
    """Its arguments; on TPU their gradients come out together: none goes on before all of them are there.

    Around a part of a layer it makes the backward pass finish the part's weight gradients before it enters the part
    below. The TPU's scheduler would leave them for later, to have something to do beside collectives, and keep all that
    they are made of: for an MLP three arrays [B, T, F].
    """
    return _gradients_together((x, *weights)) if sharding.platform() == "tpu" else (x, *weights)


@jax.custom_vjp
def _gradients_together(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return arrays


_gradients_together.defvjp(
    lambda arrays: (arrays, None), lambda _, gradients: (jax.lax.optimization_barrier(gradients),)
)


class Bias(enum.StrEnum):
    """Which projections have a bias.

    None; those to queries, keys and values (Qwen 2); all of attention (Llama's attention_bias); all of the MLP (Llama's
    mlp_bias); all of both (GPT-2).
    """

    NONE = "none"
    QKV = "qkv"
    ATTENTION = "attention"
    MLP = "mlp"
    ALL = "all"

    @property
    def of_heads(self) -> bool:
        """Whether queries, keys and values have one."""
        return self not in (Bias.NONE, Bias.MLP)

    @property
    def of_attention(self) -> bool:
        """Whether all of attention has."""
        return self in (Bias.ATTENTION, Bias.ALL)

    @property
    def of_mlp(self) -> bool:
        """Whether the MLP has."""
        return self in (Bias.MLP, Bias.ALL)


class QKNorm(enum.StrEnum):
    """RMSNorm of every head's queries and keys before they are rotated (Qwen 3, Gemma 3), or none."""

    NONE = "none"
    HEAD = "head"


class AttentionSinks(enum.StrEnum):
    """A logit of every head that takes part in the softmax and has no value (gpt-oss, arXiv:2508.10925), or none."""

    NONE = "none"
    HEAD = "head"


class NormKind(enum.StrEnum):
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) or LayerNorm (Ba et al. 2016, arXiv:1607.06450)."""

    RMS = "rms"
    LAYER = "layer"


class NormScale(enum.StrEnum):
    """What the scale parameter is: the factor itself, or (Gemma) what is added to 1."""

    ONE = "one"
    OFFSET = "offset"


class Norm(nnx.Module):
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm (Ba et al. 2016) over the last axis, computed in float32."""

    def __init__(self, size: int, *, kind: NormKind, eps: float, rngs: nnx.Rngs, scale: NormScale = NormScale.ONE):
        self.kind = kind
        self.eps = eps
        self.offset = 1.0 if scale is NormScale.OFFSET else 0.0
        self.scale = param(rngs, (size,), ("norm",), zeros if scale is NormScale.OFFSET else ones)
        if kind is NormKind.LAYER:
            self.bias = param(rngs, (size,), ("norm",), zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = x.dtype
        x = x.astype(jnp.float32)
        if self.kind is NormKind.LAYER:
            x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        x = x * (self.scale[...] + self.offset)
        if self.kind is NormKind.LAYER:
            x = x + self.bias[...]
        return x.astype(dtype)


class Activation(enum.StrEnum):
    """SwiGLU and GeGLU (Shazeer 2020) are gated: two projections in; the others have one.

    gelu and geglu use the tanh approximation, gelu_exact the error function (BERT, GPT-NeoX). clamped_swiglu is
    gpt-oss's; `ClampedSwiglu` computes it.
    """

    SWIGLU = "swiglu"
    CLAMPED_SWIGLU = "clamped_swiglu"
    GEGLU = "geglu"
    GELU = "gelu"
    GELU_EXACT = "gelu_exact"
    RELU = "relu"

    @property
    def gated(self) -> bool:
        return self in (Activation.SWIGLU, Activation.CLAMPED_SWIGLU, Activation.GEGLU)

    def __call__(self, x: jax.Array) -> jax.Array:
        match self:
            case Activation.SWIGLU:
                return jax.nn.silu(x)
            case Activation.RELU:
                return jax.nn.relu(x)
            case _:
                return jax.nn.gelu(x, approximate=self is not Activation.GELU_EXACT)

    def gate(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """activation(gate) * up, of a gated one; both of the same shape and dtype.

        XLA's CPU back end would make and keep its parts one by one, each in a pass over memory; there the two alone are
        kept for the backward pass.
        """
        return _gated(self, gate, up) if sharding.platform() == "cpu" else self(gate) * up


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    return activation(gate) * up


def _gated_forward(activation: Activation, gate: jax.Array, up: jax.Array):
    return _gated(activation, gate, up), (gate, up)


def _gated_backward(activation: Activation, kept, upstream: jax.Array):
    # Without the first barrier XLA would find what both passes compute, and keep that; without the second what both
    # gradients compute would be written and read again, which takes longer than to compute it twice.
    gate, up = jax.lax.optimization_barrier(kept)
    _, pull = jax.vjp(lambda gate: activation(gate) * up, gate)
    return *pull(upstream), upstream * activation(jax.lax.optimization_barrier(gate))


_gated.defvjp(_gated_forward, _gated_backward)


@dataclasses.dataclass(frozen=True)
class ClampedSwiglu:
    """The gated activation of gpt-oss (OpenAI 2025, arXiv:2508.10925): g * sigmoid(alpha * g) * (u + 1), g and u clamped.

    Attributes:
      alpha: slope of the sigmoid.
      limit: the gate is at most this, the other projection between this and its negative; gradients end there.
    """

    alpha: float
    limit: float
    gated: ClassVar[bool] = True

    def gate(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Of both projections, of the same shape and dtype."""
        gate = jnp.where(gate > self.limit, jnp.asarray(self.limit, gate.dtype), gate)
        up = jnp.where(jnp.abs(up) > self.limit, jnp.sign(up) * jnp.asarray(self.limit, up.dtype), up)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


Gating = Activation | ClampedSwiglu
