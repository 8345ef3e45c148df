"""The basic layers. Each parameter's shape, dtype, logical axes and initialiser are declared in one place."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from capibara.core.projections import Axes, Projection
from capibara.kernels.gate import gated
from capibara.kernels.matmul.dispatch import matmul
from capibara.kernels.matmul.quantized import Quantization
from capibara.models.layers.quantized_weights import Blocks, Whole, frozen_matmul

Initializer = Callable[..., jax.Array]


def next_key(rngs: nnx.Rngs) -> jax.Array:
    """The key that `rngs.params()` gives, counted alike.

    That compares the shardings of the old and the new count, and of tracers JAX writes a long message that there is none.
    """
    key, count = rngs.params.key.get_value(), rngs.params.count.get_value()
    rngs.params.count.set_value(count + 1)
    return jax.random.fold_in(key, count)


def param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: Axes, init: Initializer) -> nnx.Param:
    """A float32 parameter with a logical axis name for each dimension."""
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} and axes {axes} differ in length: give one axis name per dimension")
    return nnx.Param(init(next_key(rngs), shape, jnp.float32), axes=axes)


def projection(rngs: nnx.Rngs, declared: Projection, shape: tuple[int, ...], scale: float = 1.0) -> nnx.Param:
    """The weight of a projection: a size for each declared axis; its variance is `scale` over what it contracts."""
    return param(rngs, shape, declared.axes, fan_in(*declared.contracted, scale=scale))


def normal(std: float) -> Initializer:
    """Normal distribution truncated at two standard deviations, rescaled to have standard deviation `std`."""
    return jax.nn.initializers.truncated_normal(std / 0.87962566103423978)


def fan_in(*in_axes: int, scale: float = 1.0) -> Initializer:
    """Truncated normal distribution of variance scale / fan-in, where fan-in is the product of `in_axes`."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        size = 1
        for axis in in_axes:
            size *= shape[axis]
        return normal((scale / size) ** 0.5)(key, shape, dtype)

    return init


zeros = jax.nn.initializers.zeros
ones = jax.nn.initializers.ones


def named(result: jax.Array, of: Projection) -> jax.Array:
    """A projection's result, under the name that Plan.remat_names has for it."""
    assert of.result is not None
    return checkpoint_name(result, of.result)


def adapter_of(module: nnx.Module, name: str) -> Callable[..., jax.Array] | None:
    """The adapter of a module's weight with this name, or None (models/adapters/lora.py)."""
    return getattr(module, f"{name}_lora", None)


def dense(
    x: jax.Array,
    weight: jax.Array | Whole | Blocks,
    in_dims: int = 1,
    quantization: Quantization = Quantization.NONE,
    adapter: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """Contracts the last `in_dims` dimensions of x with the first of the weight, in x's dtype.

    Args:
      x: [B, T, in ...].
      weight: [in ..., out ...]; a frozen one gets no gradient, and its product is not quantized.
      in_dims: number of dimensions in `in ...`.
      quantization: operand format of the product: 8 bits, or none.
      adapter: (x, product, weight) -> the product with the adapter's; None: no adapter.

    Returns:
      [B, T, out ...].
    """
    if isinstance(weight, Whole | Blocks):
        y = frozen_matmul(x, weight, in_dims)
    else:
        y = matmul(x, weight, in_dims, quantization)
    return y if adapter is None else adapter(x, y, weight)


def sines(positions_BT: jax.Array, size: int) -> jax.Array:
    """Sinusoidal positions [B, T, size] in float32: sines of all wavelengths, from 2 pi to 2e4 pi, then cosines."""
    half = size // 2
    frequency = np.exp(np.arange(half) * (-np.log(10_000.0) / (half - 1))).astype(np.float32)
    angle_BTF = positions_BT[..., None].astype(jnp.float32) * frequency
    return jnp.concatenate([jnp.sin(angle_BTF), jnp.cos(angle_BTF)], axis=-1)


def sine_table(length: int, size: int) -> np.ndarray:
    """Sinusoidal positions [length, size] in float32: sines of wavelengths from 2 pi to below 2e4 pi, then cosines.

    The wavelengths are those of Vaswani et al. 2017 (arXiv:1706.03762), those of `sines` end at 2e4 pi.
    """
    angle_LF = np.arange(length)[:, None] / np.power(10_000.0, 2 * (np.arange(size) // 2) / size)
    return np.concatenate([np.sin(angle_LF[:, 0::2]), np.cos(angle_LF[:, 1::2])], axis=1).astype(np.float32)


class Bias(enum.StrEnum):
    """Which projections have a bias.

    none: no projection. qkv: queries, keys and values (Qwen 2). out: attention's output projection. attention: all of
    attention (Llama's attention_bias). mlp: all of the MLP (Llama's mlp_bias). qkv_mlp, out_mlp (GPT-Neo): two of them.
    attention_down: attention and the MLP's last projection (GTE). all: attention and the MLP (GPT-2).
    """

    NONE = "none"
    QKV = "qkv"
    OUT = "out"
    ATTENTION = "attention"
    MLP = "mlp"
    QKV_MLP = "qkv_mlp"
    OUT_MLP = "out_mlp"
    ATTENTION_DOWN = "attention_down"
    ALL = "all"

    @property
    def of_heads(self) -> bool:
        """Whether queries, keys and values have a bias."""
        return self in (Bias.QKV, Bias.ATTENTION, Bias.QKV_MLP, Bias.ATTENTION_DOWN, Bias.ALL)

    @property
    def of_out(self) -> bool:
        """Whether attention's output projection has a bias."""
        return self in (Bias.OUT, Bias.ATTENTION, Bias.OUT_MLP, Bias.ATTENTION_DOWN, Bias.ALL)

    @property
    def of_mlp(self) -> bool:
        """Whether all of the MLP's projections have a bias."""
        return self in (Bias.MLP, Bias.QKV_MLP, Bias.OUT_MLP, Bias.ALL)

    @property
    def of_down(self) -> bool:
        """Whether the MLP's last projection has a bias."""
        return self.of_mlp or self is Bias.ATTENTION_DOWN


class QKNorm(enum.StrEnum):
    """Normalisation of queries and keys.

    none: no norm. head: an RMSNorm of each head before rotation (Qwen 3, Gemma 3). rotated: the same after rotation
    (HunYuan, nanochat). layer: a LayerNorm of each head, with a bias (Phi, Persimmon). heads: a LayerNorm of each head
    with a scale of its own and no bias (Cohere, StableLM). whole: an RMSNorm over all heads together (OLMo 2). unit: an
    RMSNorm of each head after rotation, without a scale, in layers with rotary positions (Llama 4).
    """

    NONE = "none"
    HEAD = "head"
    ROTATED = "rotated"
    LAYER = "layer"
    HEADS = "heads"
    WHOLE = "whole"
    UNIT = "unit"


class AttentionSinks(enum.StrEnum):
    """Whether each head has a learned logit in the softmax's denominator (gpt-oss, arXiv:2508.10925)."""

    NONE = "none"
    HEAD = "head"


class NormKind(enum.StrEnum):
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) or LayerNorm (Ba et al. 2016, arXiv:1607.06450).

    layer_unbiased: a LayerNorm without a bias (Cohere, MPT).
    """

    RMS = "rms"
    LAYER = "layer"
    LAYER_UNBIASED = "layer_unbiased"


class NormScale(enum.StrEnum):
    """Meaning of the scale parameter: the factor itself, (Gemma) its offset from 1, or no parameters at all (OLMo)."""

    ONE = "one"
    OFFSET = "offset"
    NONE = "none"


def blocks(segment_ids_BT: jax.Array, positions_BT: jax.Array, size: int) -> jax.Array:
    """[B, T] a number for each block of `size` positions of each document of a row; 0 for padding, as in the argument."""
    most = segment_ids_BT.shape[1] // size + 1  # blocks of a document
    return jnp.where(segment_ids_BT > 0, segment_ids_BT * most + positions_BT // size % most, 0)


def counted(segment_ids_BT: jax.Array) -> jax.Array:
    """[B, T] the position of each token in its document, which lies in one piece."""
    index = jnp.broadcast_to(jnp.arange(segment_ids_BT.shape[1], dtype=jnp.int32), segment_ids_BT.shape)
    starts = jnp.pad(segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1], ((0, 0), (1, 0)))
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


class Norm(nnx.Module):
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm (Ba et al. 2016), computed in float32.

    It is over the last axis, or over all axes of the parameters where `whole`.
    """

    def __init__(
        self,
        size: int | tuple[int, ...],
        *,
        kind: NormKind,
        eps: float,
        rngs: nnx.Rngs,
        scale: NormScale = NormScale.ONE,
        axes: Axes = ("norm",),
        whole: bool = False,
    ):
        shape = (size,) if isinstance(size, int) else size
        self.kind = kind
        self.eps = eps
        self.over = tuple(range(-len(shape), 0)) if whole else -1
        self.offset = 1.0 if scale is NormScale.OFFSET else 0.0
        self.scaled = scale is not NormScale.NONE
        if self.scaled:
            self.scale = param(rngs, shape, axes, zeros if scale is NormScale.OFFSET else ones)
        if self.scaled and kind is NormKind.LAYER:
            self.bias = param(rngs, shape, axes, zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = x.dtype
        x = x.astype(jnp.float32)
        if self.kind is not NormKind.RMS:
            x = x - jnp.mean(x, axis=self.over, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=self.over, keepdims=True) + self.eps)
        if self.scaled:
            x = x * (self.scale[...] + self.offset)
        if self.scaled and self.kind is NormKind.LAYER:
            x = x + self.bias[...]
        return x.astype(dtype)


class Activation(enum.StrEnum):
    """Activation of the MLP. SwiGLU and GeGLU (Shazeer 2020) are gated: they take two projections, the others one.

    gelu and geglu use the tanh approximation, gelu_exact and geglu_exact the error function (BERT, GPT-NeoX). relu2 is
    the square of ReLU (So et al. 2021, arXiv:2109.08668), reglu2 is gated by it (BitNet). clamped_swiglu is gpt-oss's;
    `ClampedSwiglu` computes it, and limited_swiglu: SwiGLU with clamped projections (DeepSeek-V4). xielu has parameters (Apertus); `Xielu` computes it.
    """

    SWIGLU = "swiglu"
    CLAMPED_SWIGLU = "clamped_swiglu"
    LIMITED_SWIGLU = "limited_swiglu"
    GEGLU = "geglu"
    GEGLU_EXACT = "geglu_exact"
    REGLU = "reglu"
    REGLU2 = "reglu2"
    SILU = "silu"
    GELU = "gelu"
    GELU_EXACT = "gelu_exact"
    RELU = "relu"
    RELU2 = "relu2"
    XIELU = "xielu"

    @property
    def gated(self) -> bool:
        return self in _GATED

    def __call__(self, x: jax.Array) -> jax.Array:
        match self:
            case Activation.SWIGLU | Activation.SILU:
                return jax.nn.silu(x)
            case Activation.RELU | Activation.REGLU:
                return jax.nn.relu(x)
            case Activation.RELU2 | Activation.REGLU2:
                return jnp.square(jax.nn.relu(x))
            case _:
                return jax.nn.gelu(x, approximate=self not in (Activation.GELU_EXACT, Activation.GEGLU_EXACT))

    def gate(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """activation(gate) * up, for a gated activation; both of the same shape and dtype."""
        once = self in (Activation.GEGLU, Activation.GEGLU_EXACT)
        return gated(self, gate, up, once=once, once_if_few=self is Activation.SWIGLU)


_GATED = (
    Activation.SWIGLU,
    Activation.CLAMPED_SWIGLU,
    Activation.LIMITED_SWIGLU,
    Activation.GEGLU,
    Activation.GEGLU_EXACT,
    Activation.REGLU,
    Activation.REGLU2,
)


@dataclasses.dataclass(frozen=True)
class ClampedSwiglu:
    """The gated activation of gpt-oss (OpenAI 2025, arXiv:2508.10925): g * sigmoid(alpha * g) * (u + offset), g and u clamped.

    Attributes:
      alpha: slope of the sigmoid.
      limit: the gate is clamped to at most this, the other projection to +-limit; clamped values get no gradient.
      offset: 1 in gpt-oss, 0 in DeepSeek-V4.
    """

    alpha: float
    limit: float
    offset: float = 1.0
    gated: ClassVar[bool] = True

    def gate(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Combines both projections, which have the same shape and dtype."""
        gate = jnp.where(gate > self.limit, jnp.asarray(self.limit, gate.dtype), gate)
        up = jnp.where(jnp.abs(up) > self.limit, jnp.sign(up) * jnp.asarray(self.limit, up.dtype), up)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + self.offset)


class Xielu(nnx.Module):
    """xIELU (Huang and Schlag 2024, arXiv:2411.13010): a parabola above 0, an exponential below, each with a learned factor.

    The slope at 0 and the largest exponent are of the checkpoint, and are not trained.
    """

    def __init__(self, rngs: nnx.Rngs):
        def inverse(x: float) -> Initializer:
            """What softplus makes x of."""
            return jax.nn.initializers.constant(float(np.log(np.expm1(x))))

        self.above = param(rngs, (1,), ("norm",), inverse(0.8))
        self.below = param(rngs, (1,), ("norm",), inverse(0.3))
        self.slope = param(rngs, (), (), jax.nn.initializers.constant(0.5))
        self.most = param(rngs, (), (), jax.nn.initializers.constant(-1e-6))

    def __call__(self, x: jax.Array) -> jax.Array:
        slope, most = (jax.lax.stop_gradient(item[...].astype(x.dtype)) for item in (self.slope, self.most))
        above, below = (jax.nn.softplus(item[...].astype(x.dtype)) for item in (self.above, self.below))
        positive = above * x * x + slope * x
        return jnp.where(x > 0, positive, (jnp.expm1(jnp.minimum(x, most)) - x) * (slope + below) + slope * x)


Gating = Activation | ClampedSwiglu
