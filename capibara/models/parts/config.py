"""The configuration common to all transformers, and its variants."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.core.types import UserError
from capibara.kernels.attention.dispatch import AttentionBackend
from capibara.kernels.attention.spec import AttentionSpec
from capibara.kernels.matmul.quantized import Quantization
from capibara.kernels.rotary import Pairs
from capibara.models.adapters.lora import Lora
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
from capibara.models.layers.stack import LayerLoop
from capibara.models.mixers.mixer import Mixer
from capibara.models.parts.kinds import LayerKind, Layers
from capibara.models.parts.latent_sizes import LatentAttention, QueryLatents
from capibara.models.parts.multipliers import Multipliers
from capibara.models.parts.router import Moe, Weighted
from capibara.models.parts.streaming import StreamingHeads


class Positions(enum.StrEnum):
    """Position encoding: rotary, a learned table, fixed sines, T5's relative biases, ALiBi's slopes, or none.

    alibi_rounded: ALiBi in bfloat16 and divided by sqrt(head_dim) (Falcon).
    """

    ROPE = "rope"
    LEARNED = "learned"
    SINUSOIDAL = "sinusoidal"
    RELATIVE = "relative"
    ALIBI = "alibi"
    ALIBI_ROUNDED = "alibi_rounded"
    NONE = "none"

    @property
    def biases(self) -> bool:
        """Whether they are a bias of the attention scores."""
        return self in (Positions.RELATIVE, Positions.ALIBI, Positions.ALIBI_ROUNDED)

    @property
    def added(self) -> bool:
        """Whether they are added to the token embeddings."""
        return self in (Positions.LEARNED, Positions.SINUSOIDAL)


class Head(enum.StrEnum):
    """What reads the final hidden states.

    TIED, SEPARATE: an output projection that is the token embedding, or has its own weights.
    SCORE: one score in the place of logits, for reward models.
    """

    TIED = "tied"
    SEPARATE = "separate"
    SCORE = "score"


class HeadBias(enum.StrEnum):
    """Whether the output projection has a bias for each entry of the vocabulary (GPT-J, Phi; untrained in BART)."""

    NONE = "none"
    VOCAB = "vocab"


class ComputeDtype(enum.StrEnum):
    """Dtype of activations and matmuls; parameters stay float32. float16 trains with a dynamic loss scale."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class NormPlacement(enum.StrEnum):
    """What a block normalises.

    pre: the inputs of its branches. post: the sums after its residuals (BERT). sandwich: inputs and outputs of its
    branches (Gemma 2). output: their outputs alone (OLMo 2). mixed: inputs in recurrent layers, outputs in the others
    (OLMo Hybrid). stream: the residual stream itself, to which a branch adds what it makes of the same values
    (MiniMax-Text-01).
    """

    PRE = "pre"
    POST = "post"
    SANDWICH = "sandwich"
    OUTPUT = "output"
    MIXED = "mixed"
    STREAM = "stream"

    def of(self, kind: LayerKind) -> NormPlacement:
        """The placement in a layer of this kind."""
        if self is not NormPlacement.MIXED:
            return self
        return NormPlacement.PRE if kind is LayerKind.RECURRENT else NormPlacement.OUTPUT

    @property
    def of_inputs(self) -> bool:
        """Whether the inputs of a block's branches are normalised, in some layers at least."""
        return self in (NormPlacement.PRE, NormPlacement.SANDWICH, NormPlacement.MIXED, NormPlacement.STREAM)

    @property
    def of_outputs(self) -> bool:
        """Whether the outputs of a block's branches are normalised before they are added, in some layers at least."""
        return self in (NormPlacement.SANDWICH, NormPlacement.OUTPUT, NormPlacement.MIXED)


class Residual(enum.StrEnum):
    """Whether the MLP follows attention, or both have the same input, each with its norm (GPT-NeoX) or one (GPT-J)."""

    SEQUENTIAL = "sequential"
    PARALLEL = "parallel"
    SHARED = "shared"


class EmbeddingNorm(enum.StrEnum):
    """Whether the token embeddings are normalised, as the layers are (BLOOM, nanochat)."""

    NONE = "none"
    LAYER = "layer"


class InnerNorm(enum.StrEnum):
    """Whether what the last projections of attention and of the MLP read is normalised, as the layers are (BitNet)."""

    NONE = "none"
    LAYER = "layer"


class AttentionGate(enum.StrEnum):
    """What of a projection of its inputs multiplies attention's results.

    sigmoid, softplus: that of a value for each dimension of each head (AFMoE, Qwen3-Next; Laguna). head_sigmoid,
    head_softplus: that of one value for each head (LFM3; Laguna).
    """

    NONE = "none"
    SIGMOID = "sigmoid"
    SOFTPLUS = "softplus"
    HEAD_SIGMOID = "head_sigmoid"
    HEAD_SOFTPLUS = "head_softplus"

    @property
    def of_heads(self) -> bool:
        """Whether a head has one factor."""
        return self in (AttentionGate.HEAD_SIGMOID, AttentionGate.HEAD_SOFTPLUS)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The factors, from the projection's results."""
        if self in (AttentionGate.SOFTPLUS, AttentionGate.HEAD_SOFTPLUS):
            return jax.nn.softplus(x.astype(jnp.float32)).astype(x.dtype)
        return jax.nn.sigmoid(x)


class EmbeddingScale(enum.StrEnum):
    """Factor of the embeddings: none, or sqrt(embed_dim) (Gemma).

    sqrt_dim scales the sum of tokens and positions, tokens the tokens before positions are added (BioGPT, XGLM).
    """

    NONE = "none"
    SQRT_DIM = "sqrt_dim"
    TOKENS = "tokens"


class FirstNorm(enum.StrEnum):
    """Whether attention of the first layer has a norm of its input, as in the others (not in ModernBERT)."""

    LAYER = "layer"
    NONE = "none"


class FinalNorm(enum.StrEnum):
    """Whether the last layer's output is normalised, as the layers are, before the head (not in GPT)."""

    LAYER = "layer"
    NONE = "none"


class InputsAttention(enum.StrEnum):
    """Whether an example's inputs attend causally, or to each other in both directions.

    The latter makes a prefix LM (Raffel et al. 2020, arXiv:1910.10683, section 3.2.1).
    """

    CAUSAL = "causal"
    BIDIRECTIONAL = "bidirectional"


class WindowKind(enum.StrEnum):
    """What a query of a local layer sees: the last `window` positions, or the block of `window` positions that it is in.

    Blocks start at the first token of each document (Llama 4).
    """

    SLIDING = "sliding"
    BLOCK = "block"


class GrowthLayers(enum.StrEnum):
    """The layers whose queries grow: all (Ministral 3), or the unrotated ones, counting positions from 1 (Llama 4)."""

    ALL = "all"
    UNROTATED = "unrotated"


GATES = "retrieval_gates"
"""The parameter [L, K] with the gates of streaming heads."""
OF_DECODERS = (
    "attention_gate", "channel_mixer", "embedding_multiplier", "embedding_norm", "head_bias", "inner_norm", "latent",
    "mixer", "multipliers", "streaming",
)  # fmt: skip
_NOT_LATENT = (
    "bias",
    "qk_norm",
    "attention_sinks",
    "attention_clip",
    "num_kv_heads",
    "inner_norm",
    "streaming",
)  # of other attention
_POSITIVE = {  # fields that must be above 0 where they are set, and what each usually is
    "norm_eps": "1e-6",
    "attention_scale": "None",
    "attention_soft_cap": "None",
    "logit_soft_cap": "None",
    "attention_clip": "None",
    "embedding_multiplier": "1.0",
    "residual_multiplier": "1.0",
    "swiglu_alpha": "1.702",
    "swiglu_limit": "7.0",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig(Layers):
    """Sizes and variants common to all transformers.

    Attributes:
      vocab_size: rows of the token embedding; at least the size of the vocabulary.
      embed_dim, num_layers, num_heads, mlp_dim: width, depth, query heads, hidden width of the MLP (0: the
        layers have no MLP, as in Mamba).
      num_kv_heads, head_dim: key/value heads, size of a head; None: as many as query heads, embed_dim / num_heads.
      norm, norm_eps, norm_scale, norm_placement: kind, epsilon, scale parameter and placement of normalisation.
      activation, bias, residual: variants of the blocks.
      swiglu_alpha, swiglu_limit: of the activations "clamped_swiglu" and, the limit alone, "limited_swiglu" (ClampedSwiglu).
      qk_norm: normalisation of queries and keys.
      attention_sinks: a learned logit per head in the softmax's denominator, or none.
      attention_scale: factor of q k^T; None: head_dim**-0.5.
      attention_soft_cap, logit_soft_cap: scores and logits become cap * tanh(x / cap); None: no cap.
      attention_gate: whether attention's results have a gate.
      attention_clip: queries, keys and values are clipped to at most this magnitude (MPT, OLMo); None: they are not.
      embedding_multiplier, residual_multiplier: factors of the token embeddings, and of what a block's branches add to
        the residual stream (Granite).
      multipliers: factors within the branches.
      embedding_norm: whether the token embeddings are normalised.
      inner_norm: whether the inputs of the last projections of attention and of the MLP are normalised.
      head_bias: whether the output projection has a bias.
      attention, max_length: back end of attention; longest row, which learned positions need, or None: no limit.
      latent: multi-head latent attention, whose queries have head_dim; None: attention as the fields above have it.
      mixer, channel_mixer: what recurrent layers have in place of attention (ShortConv, GatedDelta, ...), and all layers in place
        of an MLP (ChannelMix); None: there is none.
      streaming: key/value heads that see a document's first and last tokens alone; None: all see all.
      moe: a mixture of experts in place of every MLP; None: none.
      embedding_scale, head: factor of the token embeddings; kind of output projection.
      value_head: whether there is a value of each position beside the logits, of the same hidden states; for @Ppo().
      quantization: of the matmuls with weights, in training too.
      lora: adapters; only they are trained then. None: all parameters are trained.
      dtype, layer_loop: compute dtype; scan over layers, or unrolled.
      dropout_rate: dropout rate in training, on embeddings, attention probabilities, branches and MLPs, as in T5X; 0:
        no dropout. A rate above 0 makes attention use the reference implementation.
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
    attention_clip: float | None = None
    attention_gate: AttentionGate = AttentionGate.NONE
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    multipliers: Multipliers = Multipliers()
    embedding_norm: EmbeddingNorm = EmbeddingNorm.NONE
    inner_norm: InnerNorm = InnerNorm.NONE
    head_bias: HeadBias = HeadBias.NONE
    attention: AttentionBackend = AttentionBackend.AUTO
    max_length: int | None = None
    latent: LatentAttention | None = None
    mixer: Mixer | None = None
    channel_mixer: Mixer | None = None
    streaming: StreamingHeads | None = None
    moe: Moe | None = None
    embedding_scale: EmbeddingScale = EmbeddingScale.NONE
    head: Head = Head.TIED
    value_head: bool = False
    quantization: Quantization = Quantization.NONE
    lora: Lora | None = None
    dtype: ComputeDtype = ComputeDtype.BFLOAT16
    layer_loop: LayerLoop = LayerLoop.SCAN
    dropout_rate: float = 0.0

    def __post_init__(self) -> None:
        class_name = type(self).__name__
        _check_numbers(self)
        _check_variants(self)
        if self.num_heads % self.kv_heads:
            divisors = [d for d in range(1, self.num_heads + 1) if self.num_heads % d == 0]
            nearest = min(divisors, key=lambda d: abs(d - self.kv_heads))
            raise UserError(
                f"{class_name}.num_kv_heads ({self.kv_heads}) must divide num_heads ({self.num_heads}): try {nearest}"
            )
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise UserError(
                f"{class_name}.embed_dim ({self.embed_dim}) must be a multiple of num_heads ({self.num_heads}), "
                f"or set {class_name}.head_dim"
            )

    @property
    def untrained(self) -> frozenset[str]:
        """Names of parameters that no training changes."""
        if self.latent is None or self.latent.indexer is None:
            return frozenset()
        names = ("index_query", "index_key", "index_weight", "norm/scale", "norm/bias")
        return frozenset(f"layers/attention/indexer/{name}" for name in names)

    @property
    def streams(self) -> int:
        """Number of residual streams."""
        return 1

    @property
    def mixed_norms(self) -> bool:
        return self.norm_placement is NormPlacement.MIXED

    @property
    def data_kind(self) -> str:
        """The Dataset.kind that the model is trained on."""
        return "causal"

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        return self.embed_dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def gating(self) -> Gating:
        """The activation, with its parameters if it has any."""
        clamped: dict[Activation, Gating] = {Activation.LIMITED_SWIGLU: ClampedSwiglu(1.0, self.swiglu_limit, 0.0)}
        clamped[Activation.CLAMPED_SWIGLU] = ClampedSwiglu(self.swiglu_alpha, self.swiglu_limit)
        return clamped.get(self.activation, self.activation)

    @property
    def embedded_dim(self) -> int:
        """Values per token that are embedded once and kept beside the residual stream until their layers read them."""
        return 0

    @property
    def rotary_size(self) -> int:
        """The part of a head that has rotary positions."""
        return self.head_size if self.latent is None else self.latent.rotary_dim

    @property
    def value_size(self) -> int:
        """The size of a head's values."""
        return self.head_size if self.latent is None else self.latent.value_dim

    @property
    def cached_heads(self) -> tuple[int, int]:
        """Number and size of the heads of keys and values that a cache has for each token."""
        if self.latent is None:
            return self.kv_heads, self.head_size
        return 1, self.latent.cached_dim

    @property
    def cached_head_counts(self) -> tuple[int, ...]:
        """Numbers of heads of keys and values that the layers' caches have, each once."""
        return tuple(dict.fromkeys(self.attention_of(kind).cached_heads[0] for kind in self.kinds))

    @property
    def attended_sizes(self) -> tuple[int, ...]:
        """For each layer, the sizes of all heads' queries and values together, that meet each key."""
        configs = [self.attention_of(kind) for kind in self.kinds]
        return tuple(of_layer.num_heads * (of_layer.head_size + of_layer.value_size) for of_layer in configs)

    @property
    def unplanned(self) -> str | None:
        """Why a search does not know what a step of the model needs; None: it does."""
        if self.latent is None or self.latent.indexer is None:
            return None
        return (
            "LatentAttention.indexer chooses keys, whose cost a search does not know: choose the mesh yourself "
            "(--gin.Plan.fsdp=8, ...) and ask `capibara prove`"
        )

    def emulated(self, values: dict[str, Any], factor: float) -> dict[str, Any]:
        """Further fields of a model that is this one with `values`, its width multiplied by the factor."""
        return {}

    def attention_of(self, kind: LayerKind) -> TransformerConfig:
        """The configuration that has the sizes of heads in layers of this kind."""
        return self

    @property
    def rotary_pairs(self) -> Pairs:
        """Which dimensions of a head its rotary positions rotate together."""
        return Pairs.HALVES

    def attention_kind(self, *, causal: bool, window: int | None = None) -> AttentionSpec:
        """The attention spec of a layer."""
        scale = self.head_size**-0.5 if self.attention_scale is None else self.attention_scale
        return AttentionSpec(causal=causal, window=window, soft_cap=self.attention_soft_cap, scale=scale)

    def make_norm(self, rngs: nnx.Rngs) -> Norm:
        """A norm for the residual stream."""
        return Norm(self.embed_dim, kind=self.norm, eps=self.norm_eps, rngs=rngs, scale=self.norm_scale)


def trains(config: TransformerConfig) -> Callable[[str], bool] | None:
    """Whether training changes a parameter, by its name; None: it changes all."""
    if config.has_gates:
        return lambda name: name == GATES
    frozen = ("mtp/",) if config.mtp_windows and not config.trains_mtp else ()
    if config.lora is None and not config.untrained and not frozen:
        return None
    return lambda name: (
        name not in config.untrained
        and not name.startswith(frozen)
        and (config.lora is None or config.lora.trains(name))
    )


def longest_encoded(config: TransformerConfig) -> int | None:
    """The longest row of an encoder beside a decoder; None: no limit. Positions that are added have a table for it."""
    return config.max_length if getattr(config, "positions", Positions.NONE).added else None


def _check_numbers(config: TransformerConfig) -> None:
    class_name = type(config).__name__
    if not 0 <= config.dropout_rate < 1:
        raise UserError(f"{class_name}.dropout_rate is {config.dropout_rate}, must be from 0 to below 1: try 0.1")
    for name in ("vocab_size", "embed_dim", "num_layers", "num_heads", "mlp_dim", "kv_heads"):
        least = 0 if name == "mlp_dim" else 1
        if getattr(config, name) < least:
            raise UserError(f"{class_name}.{name} is {getattr(config, name)}, must be at least {least}")
        if getattr(config, name) >= 2**31:
            raise UserError(f"{class_name}.{name} is {getattr(config, name)}, must be below 2**31: no device has room")
    for name, default in (("head_dim", "embed_dim / num_heads"), ("max_length", "no limit")):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UserError(f"{class_name}.{name} is {value}, must be at least 1, or None: {default}")
    for name, usual in _POSITIVE.items():
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{class_name}.{name} is {value}, must be finite and above 0: try {usual}")


def _check_variants(config: TransformerConfig) -> None:
    class_name = type(config).__name__
    alpha, limit = config.activation is Activation.CLAMPED_SWIGLU, isinstance(config.gating, ClampedSwiglu)
    if (not alpha and config.swiglu_alpha != 1.702) or (not limit and config.swiglu_limit != 7.0):
        raise UserError(
            f"{class_name}.swiglu_alpha and swiglu_limit are for the activation 'clamped_swiglu', the limit for 'limited_swiglu', "
            f"too, not for {str(config.activation)!r}: leave them out"
        )
    if config.moe is not None and len(config.dense_layers) == config.num_layers:
        raise UserError(
            f"Moe.first_dense ({config.moe.first_dense}) and pattern ({', '.join(config.moe.pattern)}) leave none of "
            f"{class_name}.num_layers ({config.num_layers}) layers experts: try "
            f"{max(0, config.num_layers - len(config.moe.pattern))} first ones, or leave {class_name}.moe out"
        )
    if config.moe is not None and config.moe.hash_layers and not config.has_entries:
        raise UserError(
            f"Moe.hash_layers ({config.moe.hash_layers}) is for DeepseekV4Config, not for {class_name}: leave it out"
        )
    _check_multipliers(config)
    if config.activation is Activation.XIELU and config.moe is not None:
        raise UserError(f"{class_name}.activation ('xielu') has parameters, experts have none for it: try 'silu'")
    if config.residual is Residual.SHARED and config.norm_placement is not NormPlacement.PRE:
        raise UserError(
            f"{class_name}.residual ('shared') has one norm for both branches, norm_placement is "
            f"{str(config.norm_placement)!r}: set {class_name}.norm_placement = 'pre', or residual = 'parallel'"
        )
    if config.latent is not None:
        _check_latent(config, config.latent)
    if config.inner_norm is not InnerNorm.NONE and config.moe is not None:
        raise UserError(f"{class_name}.inner_norm is for MLPs, not for experts: leave it out, or moe")
    if config.moe is not None and config.bias is Bias.ATTENTION_DOWN:
        raise UserError(f"{class_name}.bias ('attention_down') is for MLPs, not for experts: write 'attention'")
    if config.moe is not None and config.moe.weighted is Weighted.INPUTS and config.bias.of_mlp:
        raise UserError(
            f"Moe.weighted is 'inputs', must be with experts without biases, {class_name}.bias is {str(config.bias)!r}: write 'none'"
        )
    positions = getattr(config, "positions", Positions.NONE)
    if config.embedding_scale is EmbeddingScale.TOKENS and not positions.added:
        raise UserError(
            f"{class_name}.embedding_scale ('tokens') is for positions that are added to the tokens, and positions are "
            f"{str(positions)!r}: write 'sqrt_dim'"
        )
    if config.head is Head.SCORE and (config.data_kind != "causal" or config.head_bias is not HeadBias.NONE):
        raise UserError(
            f"{class_name}.head is 'score', which causal decoders without head_bias have alone: set it to 'tied' or 'separate'"
        )
    if config.value_head and (config.data_kind != "causal" or config.head is Head.SCORE):
        raise UserError(
            f"{class_name}.value_head is True, which causal decoders with logits have alone: set it to False, or {class_name}.head = 'tied'"
        )


def _check_multipliers(config: TransformerConfig) -> None:
    class_name, multipliers = type(config).__name__, config.multipliers
    if multipliers.mlp_gate != 1 and config.moe is not None:
        raise UserError(
            f"Multipliers.mlp_gate ({multipliers.mlp_gate}) must be 1.0 with {class_name}.moe, it is of MLPs: leave it out, or moe"
        )
    of_mixers = (multipliers.mixer_input, multipliers.mixer_output, multipliers.mixer_residual)
    if config.mixer is None and of_mixers != (1.0, 1.0, 1.0):
        raise UserError(
            f"Multipliers.mixer_input, mixer_output and mixer_residual {of_mixers} must be 1.0 where {class_name}.mixer is None: "
            "leave them out"
        )
    in_stream = config.norm_placement is NormPlacement.STREAM
    if multipliers.residuals != (1.0, 1.0, 1.0) and not in_stream:
        raise UserError(
            f"Multipliers.attention_residual, mixer_residual and mlp_residual {multipliers.residuals} must be 1.0 where "
            f"{class_name}.norm_placement is {str(config.norm_placement)!r}: leave them out, or write 'stream'"
        )
    if in_stream and config.residual is not Residual.SEQUENTIAL:
        raise UserError(
            f"{class_name}.norm_placement is 'stream' and residual {str(config.residual)!r}, which has no such norms: write "
            "'sequential'"
        )
    if multipliers.mlp_gate != 1 and not config.activation.gated:
        raise UserError(
            f"Multipliers.mlp_gate ({multipliers.mlp_gate}) must be 1.0 without a gate, {class_name}.activation is "
            f"{str(config.activation)!r}: leave it out, or try 'swiglu'"
        )


def _check_latent(config: TransformerConfig, latent: LatentAttention) -> None:
    class_name, size = type(config).__name__, config.head_size
    if latent.rotary_dim >= size or latent.value_dim > size:
        raise UserError(
            f"{class_name}.head_dim ({size}) must be above LatentAttention.rotary_dim ({latent.rotary_dim}) and at least its "
            f"value_dim ({latent.value_dim}): try {latent.rotary_dim + latent.value_dim}"
        )
    if latent.queries is QueryLatents.BOTH and config.attention_gate is not AttentionGate.SIGMOID:
        raise UserError(
            f"{class_name}.attention_gate is {str(config.attention_gate)!r}, must be 'sigmoid' where LatentAttention.queries is 'both'"
        )
    if latent.indexer is not None and (
        LayerKind.LOCAL in config.kinds or getattr(config, "inputs_attention", "causal") != "causal"
    ):
        raise UserError(
            f"LatentAttention.indexer is for causal layers without a window, {class_name}.layer_pattern or inputs_attention has others: "
            "leave it out, or these"
        )
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name in _NOT_LATENT:
        if getattr(config, name) != defaults[name]:
            raise UserError(
                f"{class_name}.{name} ({getattr(config, name)!s}) has no effect with {class_name}.latent: leave it out, or latent"
            )


def refuse(config: TransformerConfig, *names: str) -> None:
    """Refuses fields that only decoders compute.

    Raises:
      UserError: one of them has another value than its default.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name in names:
        value = getattr(config, name)
        if value != defaults[name]:
            raise UserError(f"{type(config).__name__}.{name} ({value!s}) is for decoders only: leave it out")
    if not config.mlp_dim:
        raise UserError(f"{type(config).__name__}.mlp_dim is 0, must be at least 1")
    if config.moe is not None and config.dense_layers:
        raise UserError(
            f"Moe.first_dense ({config.moe.first_dense}) and pattern ({', '.join(config.moe.pattern)}) are for decoders only: "
            "leave them out"
        )
    if config.norm_placement in (NormPlacement.MIXED, NormPlacement.STREAM):
        raise UserError(
            f"{type(config).__name__}.norm_placement ({str(config.norm_placement)!r}) is for decoders only: try 'pre'"
        )
    if config.qk_norm is QKNorm.UNIT:
        raise UserError(f"{type(config).__name__}.qk_norm ('unit') is for decoders only: try 'head'")
    if config.activation is Activation.XIELU:
        raise UserError(f"{type(config).__name__}.activation ('xielu') is for decoders only: try 'gelu'")


def _check_channel_mixer(config: TransformerConfig) -> None:
    """Refuses what a channel mixer, which is in the place of every MLP, has no place for."""
    if config.channel_mixer is None:
        return
    unsupported = {
        "mixer is None": config.mixer is None,
        "moe is set": config.moe is not None,
        "its layers have one branch": config.one_branch,
        f"bias is {str(config.bias)!r}": config.bias.of_down,
        f"activation is {str(config.activation)!r}, not 'relu2'": config.activation is not Activation.RELU2,
        f"inner_norm is {str(config.inner_norm)!r}": config.inner_norm is not InnerNorm.NONE,
    }
    for option, is_set in unsupported.items():
        if is_set:
            raise UserError(f"DecoderConfig.channel_mixer is not supported where {option}: leave it out")


def check_branches(config: TransformerConfig) -> None:
    """Refuses what a layer of one branch, or with a channel mixer, has no place for."""
    _check_channel_mixer(config)
    if not config.one_branch:
        return
    if LayerKind.FEED_FORWARD in config.kinds and not config.mlp_dim:
        raise UserError("DecoderConfig.mlp_dim is 0, and layer_pattern has feed_forward layers: try 4 x embed_dim")
    if not config.mlp_dim and config.moe is not None:
        raise UserError("DecoderConfig.mlp_dim is 0, the layers have no MLP, and moe is set: leave it out")
    unsupported = {
        f"residual is {str(config.residual)!r}": config.residual is not Residual.SEQUENTIAL,
        f"norm_placement is {str(config.norm_placement)!r}": config.norm_placement is not NormPlacement.PRE,
        f"Moe.first_dense is {config.first_dense}": config.first_dense > 0,
        "Moe.pattern has 'dense'": len(config.dense_layers) > config.first_dense,
    }
    for option, is_set in unsupported.items():
        if is_set:
            raise UserError(f"DecoderConfig's layers have one branch each, and {option}: leave it out")
