"""Parts of all transformers: the configuration of a layer, the MLP and the residual block."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
from flax import nnx

from capibara.core import projections
from capibara.core.types import UserError
from capibara.kernels.attention.dispatch import AttentionBackend
from capibara.kernels.attention.spec import AttentionSpec
from capibara.kernels.gradients import gradients_together
from capibara.kernels.matmul.quantized import Quantization
from capibara.models.adapters.lora import Lora
from capibara.models.cache import dense
from capibara.models.layers import dropout, layers
from capibara.models.layers.attention import Attention
from capibara.models.layers.dropout import Dropout, Site
from capibara.models.layers.layers import (
    Activation,
    AttentionSinks,
    Bias,
    ClampedSwiglu,
    Gating,
    Norm,
    NormKind,
    NormScale,
    QKNorm,
)
from capibara.models.layers.rope import Angles, Rope, angles
from capibara.models.layers.stack import LayerLoop
from capibara.models.moe.moe import Moe, MoeMLP
from capibara.sharding import constrain


class Positions(enum.StrEnum):
    """Position encoding: rotary, a learned table, T5's relative biases, or none."""

    ROPE = "rope"
    LEARNED = "learned"
    RELATIVE = "relative"
    NONE = "none"


class Head(enum.StrEnum):
    """Whether the output projection is tied to the token embedding or has its own weights."""

    TIED = "tied"
    SEPARATE = "separate"


class ComputeDtype(enum.StrEnum):
    """Dtype of activations and matmuls; parameters stay float32. float16 trains with a dynamic loss scale."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class NormPlacement(enum.StrEnum):
    """What a block normalises: its inputs, the sums after its residuals (BERT), or inputs and outputs (Gemma 2)."""

    PRE = "pre"
    POST = "post"
    SANDWICH = "sandwich"


class Residual(enum.StrEnum):
    """Whether the MLP follows attention, or both have the same input (GPT-NeoX)."""

    SEQUENTIAL = "sequential"
    PARALLEL = "parallel"


class LayerKind(enum.StrEnum):
    """Whether a layer's queries attend to the whole row (global) or to a sliding window (local)."""

    GLOBAL = "global"
    LOCAL = "local"


class EmbeddingScale(enum.StrEnum):
    """Factor of the token embeddings: none, or sqrt(embed_dim) (Gemma)."""

    NONE = "none"
    SQRT_DIM = "sqrt_dim"


_POSITIVE = {  # fields that must be above 0 where they are set, and what each usually is
    "norm_eps": "1e-6",
    "attention_scale": "None",
    "attention_soft_cap": "None",
    "logit_soft_cap": "None",
    "swiglu_alpha": "1.702",
    "swiglu_limit": "7.0",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes and variants common to all transformers.

    Attributes:
      vocab_size: rows of the token embedding; at least the size of the vocabulary.
      embed_dim, num_layers, num_heads, mlp_dim: width, depth, query heads, hidden width of the MLP.
      num_kv_heads: key/value heads; None: as many as query heads.
      head_dim: size of a head; None: embed_dim / num_heads.
      norm, norm_eps, norm_scale, norm_placement: kind, epsilon, scale parameter and placement of normalisation.
      activation, bias, residual: variants of the blocks.
      swiglu_alpha, swiglu_limit: parameters of the activation "clamped_swiglu" (layers.ClampedSwiglu).
      qk_norm: normalisation of queries and keys.
      attention_sinks: a learned logit per head in the softmax's denominator, or none.
      attention_scale: factor of q k^T; None: head_dim**-0.5.
      attention_soft_cap, logit_soft_cap: scores and logits become cap * tanh(x / cap); None: no cap.
      attention: back end of attention.
      max_length: longest row; None: no limit. Learned positions need one.
      moe: a mixture of experts in place of every MLP; None: none.
      embedding_scale, head: factor of the token embeddings; kind of output projection.
      quantization: of the matmuls with weights, in training too.
      lora: adapters; only they are trained then. None: all parameters are trained.
      dtype: compute dtype.
      layer_loop: scan over layers, or unrolled.
      dropout_rate: dropout rate in training, on embeddings, attention probabilities, branches and MLPs, as in T5X; 0:
        no dropout. A rate above 0 makes attention use the reference implementation.
    """

    streams: ClassVar[int] = 1  # residual streams
    data_kind: ClassVar[str] = "causal"  # the Dataset.kind that the model is trained on

    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    mlp_dim: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    norm: NormKind = NormKind.RMS
    norm_eps: float = 1e-6
    norm_scale: NormScale = NormScale.ONE
    norm_placement: NormPlacement = NormPlacement.PRE
    activation: Activation = Activation.SWIGLU
    bias: Bias = Bias.NONE
    residual: Residual = Residual.SEQUENTIAL
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    qk_norm: QKNorm = QKNorm.NONE
    attention_sinks: AttentionSinks = AttentionSinks.NONE
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    attention: AttentionBackend = AttentionBackend.AUTO
    max_length: int | None = None
    moe: Moe | None = None
    embedding_scale: EmbeddingScale = EmbeddingScale.NONE
    head: Head = Head.TIED
    quantization: Quantization = Quantization.NONE
    lora: Lora | None = None
    dtype: ComputeDtype = ComputeDtype.BFLOAT16
    layer_loop: LayerLoop = LayerLoop.SCAN
    dropout_rate: float = 0.0

    def __post_init__(self):
        own = type(self).__name__
        if not 0 <= self.dropout_rate < 1:
            raise UserError(f"{own}.dropout_rate is {self.dropout_rate}, must be from 0 to below 1: try 0.1")
        for name in ("vocab_size", "embed_dim", "num_layers", "num_heads", "mlp_dim", "kv_heads"):
            if getattr(self, name) < 1:
                raise UserError(f"{own}.{name} is {getattr(self, name)}, must be at least 1")
            if getattr(self, name) >= 2**31:
                raise UserError(f"{own}.{name} is {getattr(self, name)}, must be below 2**31: no device has room")
        for name, default in (("head_dim", "embed_dim / num_heads"), ("max_length", "no limit")):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{own}.{name} is {value}, must be at least 1, or None: {default}")
        for name, usual in _POSITIVE.items():
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{own}.{name} is {value}, must be finite and above 0: try {usual}")
        if self.activation is not Activation.CLAMPED_SWIGLU and (self.swiglu_alpha, self.swiglu_limit) != (1.702, 7.0):
            raise UserError(
                f"{own}.swiglu_alpha and swiglu_limit are for the activation 'clamped_swiglu', not for "
                f"{str(self.activation)!r}: leave them out"
            )
        if self.num_heads % self.kv_heads:
            divisors = [d for d in range(1, self.num_heads + 1) if self.num_heads % d == 0]
            nearest = min(divisors, key=lambda d: abs(d - self.kv_heads))
            raise UserError(
                f"{own}.num_kv_heads ({self.kv_heads}) must divide num_heads ({self.num_heads}): try {nearest}"
            )
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise UserError(
                f"{own}.embed_dim ({self.embed_dim}) must be a multiple of num_heads ({self.num_heads}), "
                f"or set {own}.head_dim"
            )

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        return self.embed_dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def gating(self) -> Gating:
        """The activation, with its parameters if it has any."""
        if self.activation is Activation.CLAMPED_SWIGLU:
            return ClampedSwiglu(self.swiglu_alpha, self.swiglu_limit)
        return self.activation

    @property
    def layer_widths(self) -> tuple[int, ...] | None:
        """Hidden widths of the layers' MLPs if they differ (mlp_dim is the largest); None: all are equal."""
        return None

    @property
    def kv_layers(self) -> int:
        """Number of layers, from the first, that compute their own keys and values."""
        return self.num_layers

    @property
    def embedded_dim(self) -> int:
        """Values per token that are embedded once and kept beside the residual stream until their layers read them."""
        return 0

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer, the number of positions visible to a query, its own included; None: all before it."""
        return (None,) * self.num_layers

    @property
    def runs_in_stages(self) -> bool:
        """Whether a pipeline can divide its layers into stages."""
        return True

    def attention_kind(self, *, causal: bool, window: int | None = None) -> AttentionSpec:
        """The attention spec of a layer."""
        scale = self.head_size**-0.5 if self.attention_scale is None else self.attention_scale
        return AttentionSpec(causal=causal, window=window, soft_cap=self.attention_soft_cap, scale=scale)

    def make_norm(self, rngs: nnx.Rngs) -> Norm:
        """A norm for the residual stream."""
        return Norm(self.embed_dim, kind=self.norm, eps=self.norm_eps, rngs=rngs, scale=self.norm_scale)


class Rows(NamedTuple):
    """Per-row inputs of a layer besides the activations; each leaf has the batch axis, or is None.

    Attributes:
      segment_ids: [B, T] document numbers.
      angles: of the rotary positions, by kind of layer.
      domains: [B, T] domain hints.
      encoded, encoded_segments: [B, S, D] output of an encoder and [B, S] its document numbers.
      prefix: [B, T], 1 at a document's inputs, which attend to each other in both directions.
    """

    segment_ids: jax.Array
    angles: dict[LayerKind, Angles] | None = None
    domains: jax.Array | None = None
    encoded: jax.Array | None = None
    encoded_segments: jax.Array | None = None
    prefix: jax.Array | None = None


class Shared(NamedTuple):
    """Inputs of a layer that all rows share, or None.

    Attributes:
      row_positions: [T] column of each token in the row as it was before sharding.balanced; None: in order.
      bias: [N, T, S], added to the attention scores.
      step: int32 scalar, the train step; None outside training.
      drop: the layer's dropout; None: no dropout.
      bias_at: computes the bias for rows that have read tokens before (dense.attend).
    """

    row_positions: jax.Array | None = None
    bias: jax.Array | None = None
    step: jax.Array | None = None
    bias_at: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    drop: Dropout | None = None


class MLP(nnx.Module):
    """Two projections with an activation between them, or three if the activation is gated."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        D, F = config.embed_dim, config.mlp_dim
        self.config = config
        self.up = layers.projection(rngs, projections.UP, (D, F))
        if config.activation.gated:
            self.gate = layers.projection(rngs, projections.GATE, (D, F))
        self.down = layers.projection(rngs, projections.DOWN, (F, D), 0.5 / config.num_layers)
        if config.bias.of_mlp:
            self.up_bias = layers.param(rngs, (F,), ("mlp",), layers.zeros)
            if config.activation.gated:
                self.gate_bias = layers.param(rngs, (F,), ("mlp",), layers.zeros)
            self.down_bias = layers.param(rngs, (D,), ("norm",), layers.zeros)

    def __call__(
        self,
        x_BTD: jax.Array,
        drop: Dropout | None = None,
        on_gate: Callable[[jax.Array], jax.Array] | None = None,
    ) -> jax.Array:
        """[B, T, D]; `on_gate` maps the gate [B, T, F] to the activation's input; None: the gate itself."""
        dtype, quantization = x_BTD.dtype, self.config.quantization
        into = [self.up[...], self.gate[...]] if self.config.activation.gated else [self.up[...]]
        down, up_lora, gate_lora, down_lora = (
            self.down[...],
            *(layers.adapter_of(self, one.name) for one in projections.MLP),
        )
        if self.config.lora is None:  # with adapters these weights have no gradient
            x_BTD, down, *into = gradients_together(x_BTD, down, *into)
        h = layers.dense(x_BTD, into[0], quantization=quantization, adapter=up_lora)
        if self.config.bias.of_mlp:
            h = h + self.up_bias[...].astype(dtype)
        h = layers.named(constrain(h, ("batch", "act_time", "act_mlp")), projections.UP)
        if self.config.activation.gated:
            gate = layers.dense(x_BTD, into[1], quantization=quantization, adapter=gate_lora)
            gate = gate + self.gate_bias[...].astype(dtype) if self.config.bias.of_mlp else gate
            gate = constrain(gate, ("batch", "act_time", "act_mlp"))
            gate = layers.named(gate, projections.GATE)
            h = self.config.gating.gate(gate if on_gate is None else on_gate(gate), h)
        else:
            h = self.config.activation(h)
        h = dropout.apply(drop, h, Site.MLP_INNER)
        y = layers.dense(h, down, quantization=quantization, adapter=down_lora)
        y = y + self.down_bias[...].astype(dtype) if self.config.bias.of_mlp else y
        return layers.named(y, projections.DOWN)


class Block(nnx.Module):
    """A residual layer: self-attention, then an MLP or a mixture of experts."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.config = config
        self.attention = Attention(config, rngs)
        self.mlp = MLP(config, rngs) if config.moe is None else MoeMLP(config, config.moe, rngs)
        self.attention_norm, self.mlp_norm = config.make_norm(rngs), config.make_norm(rngs)
        if config.norm_placement is NormPlacement.SANDWICH:
            self.attention_post_norm, self.mlp_post_norm = config.make_norm(rngs), config.make_norm(rngs)

    def __call__(
        self, x_BTD: jax.Array, rows: Rows, shared: Shared, kind: AttentionSpec, layer_kind: LayerKind
    ) -> tuple[jax.Array, dict[str, Any]]:
        """The layer's output, and its statistics (those of the experts, or none)."""
        stats: dict[str, Any] = {}

        def attention(x):
            angles = None if rows.angles is None else rows.angles[layer_kind]
            y = self.attention(
                x,
                kind=kind,
                segment_ids_BT=rows.segment_ids,
                angles=angles,
                row_positions_T=shared.row_positions,
                bias_NTS=shared.bias,
                prefix_BT=rows.prefix,
                drop=shared.drop,
            )
            return dropout.apply(shared.drop, y, Site.ATTENTION)

        return self._joined(x_BTD, attention, self.mlp_part(rows, shared, stats)), stats

    def cached(
        self,
        x_BTD: jax.Array,
        layer: dense.LayerCache,
        now: dense.PrefillInputs,
        rows: Rows,
        shared: Shared,
        kind: AttentionSpec,
        layer_kind: LayerKind,
    ) -> tuple[jax.Array, dense.LayerCache]:
        """The layer's output for the new tokens, and its updated cache."""
        written: dense.LayerCache = {}

        def attention(x):
            angles = None if rows.angles is None else rows.angles[layer_kind]
            of_scores = {"bias_NTS": shared.bias, "bias_at": shared.bias_at, "prefix_BT": rows.prefix}
            y, new = self.attention.cached(x, layer, now, kind=kind, angles=angles, **of_scores)
            written.update(new)
            return y

        return self._joined(x_BTD, attention, self.mlp_part(rows, shared, {})), written

    def _joined(self, x_BTD: jax.Array, attention, mlp) -> jax.Array:
        if self.config.residual is Residual.PARALLEL:
            y = self._normed(x_BTD, "attention", attention) + self._normed(x_BTD, "mlp", mlp)
            return residual(x_BTD + y)
        x_BTD = self.add(x_BTD, "attention", attention)
        return self.add(x_BTD, "mlp", mlp)

    def mlp_part(self, rows: Rows, shared: Shared, stats: dict[str, Any]) -> Callable[[jax.Array], jax.Array]:
        """The MLP or the experts as a part for `add`; fills `stats` with the experts' statistics."""

        def part(x):
            if self.config.moe is None:
                return dropout.apply(shared.drop, self.mlp(x, shared.drop), Site.MLP)
            y, of_experts = self.mlp(x, rows.segment_ids, rows.domains, shared.step, shared.row_positions)
            stats.update(of_experts)
            return dropout.apply(shared.drop, y, Site.MLP)

        return part

    def add(self, x: jax.Array, name: str, part) -> jax.Array:
        """`x + part(x)`, with the block's norms of that name. Profiles show the name."""
        if self.config.norm_placement is NormPlacement.POST:
            with jax.named_scope(name):
                return residual(getattr(self, f"{name}_norm")(x + part(within(x))))
        return residual(x + self._normed(x, name, part))

    def _normed(self, x: jax.Array, name: str, part) -> jax.Array:
        with jax.named_scope(name):
            y = part(within(getattr(self, f"{name}_norm")(x)))
            if self.config.norm_placement is NormPlacement.SANDWICH:
                y = getattr(self, f"{name}_post_norm")(y)
            return y


def residual(x_BTD: jax.Array) -> jax.Array:
    """Shards the residual stream between blocks."""
    return constrain(x_BTD, ("batch", "act_residual", "act_embed"))


def within(x_BTD: jax.Array) -> jax.Array:
    """Shards the input of a block's projections."""
    return constrain(x_BTD, ("batch", "act_time", "act_embed"))


def rotary(
    config, rope: Rope, positions_BT: jax.Array, kinds: set[LayerKind], length: int | None = None
) -> dict[LayerKind, Angles]:
    """Rotary angles for each kind of layer; equal ones share a table. `length` is as in `rope.angles`."""
    local = {kind: kind is LayerKind.LOCAL and rope.local_theta is not None for kind in kinds}
    tables = {
        flag: angles(positions_BT, rope, config.head_size, local=flag, length=length) for flag in set(local.values())
    }
    return {kind: tables[flag] for kind, flag in local.items()}
