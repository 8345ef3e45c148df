"""The decoder-only transformer, in every shape its configuration can say."""

from __future__ import annotations

import dataclasses
import enum
import math

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.config import configurable
from capibara.models import layers, stack
from capibara.models.attention import Attention
from capibara.models.layers import Activation, Norm, NormKind
from capibara.models.stack import LayerLoop
from capibara.sharding import Remat, constrain
from capibara.types import UserError


class Positions(enum.StrEnum):
    ROPE = "rope"
    LEARNED = "learned"
    NONE = "none"


class Head(enum.StrEnum):
    """Whether the output projection shares the token embedding's weights."""

    TIED = "tied"
    SEPARATE = "separate"


class ComputeDtype(enum.StrEnum):
    """Dtype of activations and matmuls; parameters stay float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and variants of a decoder.

    Attributes:
      vocab_size: rows of the token embedding; at least the vocabulary's size.
      embed_dim, num_layers, num_heads, mlp_dim: width, depth, query heads, hidden width of the MLP.
      num_kv_heads: key/value heads; None: as many as query heads.
      head_dim: size of a head; None: embed_dim / num_heads.
      norm, norm_eps: kind of normalisation and its epsilon.
      activation: of the MLP.
      positions: rotary, learned or none; `rope_theta` and `max_length` belong to the first two.
      head: tied or separate output projection.
      bias: biases in projections and MLP.
      dtype: compute dtype.
      layer_loop: scan over layers, or unrolled.
    """

    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    mlp_dim: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    norm: NormKind = NormKind.RMS
    norm_eps: float = 1e-6
    activation: Activation = Activation.SWIGLU
    positions: Positions = Positions.ROPE
    rope_theta: float = 10_000.0
    max_length: int | None = None
    head: Head = Head.TIED
    bias: bool = False
    dtype: ComputeDtype = ComputeDtype.BFLOAT16
    layer_loop: LayerLoop = LayerLoop.SCAN

    def __post_init__(self):
        for name in ("vocab_size", "embed_dim", "num_layers", "num_heads", "mlp_dim", "kv_heads"):
            if getattr(self, name) < 1:
                raise UserError(f"DecoderConfig.{name} is {getattr(self, name)}, must be at least 1")
        for name, default in (("head_dim", "embed_dim / num_heads"), ("max_length", "no limit")):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"DecoderConfig.{name} is {value}, must be at least 1, or None: {default}")
        for name, usual in (("norm_eps", 1e-6), ("rope_theta", 10_000.0)):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise UserError(f"DecoderConfig.{name} is {value}, must be finite and above 0: try {usual}")
        if self.num_heads % self.kv_heads:
            divisors = [d for d in range(1, self.num_heads + 1) if self.num_heads % d == 0]
            nearest = min(divisors, key=lambda d: abs(d - self.kv_heads))
            raise UserError(
                f"DecoderConfig.num_kv_heads ({self.kv_heads}) must divide num_heads ({self.num_heads}): try {nearest}"
            )
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise UserError(
                f"DecoderConfig.embed_dim ({self.embed_dim}) must be a multiple of num_heads ({self.num_heads}), "
                "or set DecoderConfig.head_dim"
            )
        if self.positions is Positions.ROPE and self.head_size % 2:
            raise UserError(f"DecoderConfig.head_dim ({self.head_size}) must be even for rotary positions")
        if self.positions is Positions.LEARNED and self.max_length is None:
            raise UserError("DecoderConfig.max_length has no value, learned positions need one: set it to the row length")

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        return self.embed_dim // self.num_heads if self.head_dim is None else self.head_dim


class MLP(nnx.Module):
    """Two projections with an activation between, or three where the activation is gated."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        D, F = config.embed_dim, config.mlp_dim
        self.config = config
        self.up = layers.param(rngs, (D, F), ("embed", "mlp"), layers.fan_in(0))
        if config.activation.gated:
            self.gate = layers.param(rngs, (D, F), ("embed", "mlp"), layers.fan_in(0))
        self.down = layers.param(rngs, (F, D), ("mlp", "embed"), layers.fan_in(0, scale=0.5 / config.num_layers))
        if config.bias:
            self.up_bias = layers.param(rngs, (F,), ("mlp",), layers.zeros)
            self.down_bias = layers.param(rngs, (D,), ("norm",), layers.zeros)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        dtype = x_BTD.dtype
        h = layers.dense(x_BTD, self.up[...])
        if self.config.bias:
            h = h + self.up_bias[...].astype(dtype)
        if self.config.activation.gated:
            h = self.config.activation(layers.dense(x_BTD, self.gate[...])) * h
        else:
            h = self.config.activation(h)
        h = constrain(h, ("batch", "act_time", "act_mlp"))
        y = layers.dense(h, self.down[...])
        return y + self.down_bias[...].astype(dtype) if self.config.bias else y


class Block(nnx.Module):
    """Pre-norm residual layer: attention, then MLP."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.attention_norm = Norm(config.embed_dim, kind=config.norm, eps=config.norm_eps, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = Norm(config.embed_dim, kind=config.norm, eps=config.norm_eps, rngs=rngs)
        self.mlp = MLP(config, rngs)

    def __call__(self, x_BTD: jax.Array, angles, segment_ids_BT: jax.Array) -> jax.Array:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), angles, segment_ids_BT)
        x_BTD = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return constrain(x_BTD, ("batch", "act_time", "act_embed"))


class Decoder(nnx.Module):
    """Embedding, layers, final norm; `head` gives the output projection."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        V, D = config.vocab_size, config.embed_dim
        self.config = config
        self.embedding = layers.param(rngs, (V, D), ("vocab", "embed"), layers.normal(0.02))
        if config.positions is Positions.LEARNED:
            shape = (config.max_length, D)
            self.position_embedding = layers.param(rngs, shape, ("position", "embed"), layers.normal(0.02))
        self.layers = stack.stacked(lambda rngs: Block(config, rngs), rngs, config.num_layers)
        self.final_norm = Norm(D, kind=config.norm, eps=config.norm_eps, rngs=rngs)
        if config.head is Head.SEPARATE:
            self.output = layers.param(rngs, (V, D), ("vocab", "embed"), layers.normal(D**-0.5))

    def __call__(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array, remat: Remat
    ) -> jax.Array:
        """The final hidden states [B, T, D], normalised, in the compute dtype."""
        config = self.config
        x = self.embedding[...][tokens_BT]
        if config.positions is Positions.LEARNED:
            x = x + self.position_embedding[...][positions_BT]
        x = constrain(x.astype(config.dtype.value), ("batch", "act_time", "act_embed"))
        angles = None
        if config.positions is Positions.ROPE:
            angles = layers.rope_angles(positions_BT, config.head_size, config.rope_theta)
        x = stack.run(
            self.layers, x, lambda block, x: block(x, angles, segment_ids_BT), config.layer_loop, remat
        )
        return self.final_norm(x)

    def head(self) -> jax.Array:
        """The output projection [V, D]: logits are hidden @ head.T."""
        return self.embedding[...] if self.config.head is Head.TIED else self.output[...]
