"""The decoder-only transformer, in all variants of its configuration."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.config import configurable
from capibara.core.fields import short
from capibara.core.types import Batch, Params, UserError
from capibara.kernels.attention.dispatch import AttentionBackend
from capibara.kernels.attention.spec import AttentionSpec
from capibara.models.adapters import lora, trainable_tokens, unmerged
from capibara.models.architectures.heads_by_kind import HeadsByKind
from capibara.models.architectures.registry import ReadBatch, model_of
from capibara.models.cache import dense, paged, streaming
from capibara.models.layers import dropout, layers, stack
from capibara.models.layers.dropout import Dropout, Site
from capibara.models.layers.layers import Activation, NormScale, QKNorm
from capibara.models.layers.relative import Alibi, RelativeBias, RoundedAlibi
from capibara.models.layers.rope import Pairs, Rope
from capibara.models.mtp import config as mtp_config
from capibara.models.mtp import module as mtp_module
from capibara.models.mtp.config import Mtp, MtpMlp, Predicted
from capibara.models.mtp.model import Predicting
from capibara.models.parts import head, transformer
from capibara.models.parts.config import (
    ComputeDtype,
    EmbeddingNorm,
    EmbeddingScale,
    FinalNorm,
    FirstNorm,
    GrowthLayers,
    Head,
    HeadBias,
    InputsAttention,
    NormPlacement,
    Positions,
    Residual,
    WindowKind,
    check_branches,
)
from capibara.models.parts.head import Transform, TransformBias, Transformed, Transforming
from capibara.models.parts.kinds import LayerKind, Patterned
from capibara.models.parts.router import MlpKind
from capibara.models.parts.streaming import StreamingHeads, bounded
from capibara.models.parts.transformer import Block, Rows, Shared
from capibara.sharding import RematPolicy, constrain

__all__ = ["ComputeDtype", "Decoder", "DecoderConfig", "Head", "NormScale", "Positions"]


_Entry = tuple[LayerKind, str, bool, nnx.Module | None]
_NEVER = -3e4  # logit of a token without a row of the output projection; finite in float16


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(Transformed, HeadsByKind, Patterned, Predicted):
    """Sizes and variants of a decoder; see also TransformerConfig and HeadsByKind.

    Attributes:
      positions, rope: rotary (configured by `rope`), learned, sinusoidal (sines and cosines that are added to the
        embeddings, Vaswani et al. 2017, arXiv:1706.03762), relative (T5's bias of the scores, one table for all
        layers), alibi (a bias that falls with the distance, Press et al. 2022, arXiv:2108.12409) or no positions. If rotary frequencies depend on the row length, all rows of a cache use those of
        max_length (which an engine sets), or of the cache's capacity.
      position_offset: for learned and sinusoidal positions: the table's row of a document's first token (OPT: 2).
      relative_buckets, relative_distance: for relative positions: the number of buckets, and the distance from which on
        all share the last.
      inputs_attention: whether an example's inputs attend to each other in both directions; Dataset.kind is then
        "prefix".
      output_rows: rows of an output projection of its own; tokens beyond them are read and never predicted (Apertus 1.5);
        None: vocab_size.
      logit_scale: factor of the final hidden states before the head; embed_dim**-0.5 in T5X's tied decoders.
      query_growth, query_growth_length: queries at position p are multiplied by 1 + query_growth * ln(1 + floor(p /
        query_growth_length)) (Llama 4, Ministral 3); 0: they are not.
      query_growth_layers: the layers with such queries.
      final_norm: whether the last layer's output is normalised.
      first_norm: whether the first layer's attention has a norm of its input.
      norm_gate_rank: the norms of what attention and experts read have a gate of this rank, the sigmoid of what an MLP
        makes of their results (A.X-K2); None: they have none.
      transform: what stands before the head (ModernBERT's decoders have BERT's transform).
      transform_activation: of the transform; None: the layers', or gelu where that is gated.
      transform_bias: whether the transform's projection has a bias.
      window: number of positions visible to a query of a local layer, its own included.
      window_kind: whether these are the last ones, or those of a block.
      layer_pattern: kinds of the first layers, repeated over all layers: ("local", "global") alternates (Gemma 2).
      mtp: modules that predict the tokens after the next one (DeepSeek-V3); None: there are none.
    """

    positions: Positions = Positions.ROPE
    rope: Rope = Rope()
    position_offset: int = 0
    window: int | None = None
    layer_pattern: tuple[LayerKind, ...] = (LayerKind.GLOBAL,)
    relative_buckets: int = 32
    relative_distance: int = 128
    inputs_attention: InputsAttention = InputsAttention.CAUSAL
    output_rows: int | None = None
    logit_scale: float = 1.0
    query_growth: float = 0.0
    query_growth_length: int | None = None
    query_growth_layers: GrowthLayers = GrowthLayers.ALL
    window_kind: WindowKind = WindowKind.SLIDING
    final_norm: FinalNorm = FinalNorm.LAYER
    first_norm: FirstNorm = FirstNorm.LAYER
    norm_gate_rank: int | None = None
    transform: Transform = Transform.NONE
    transform_activation: Activation | None = None
    transform_bias: TransformBias = TransformBias.EMBED
    mtp: Mtp | None = None

    @property
    def module_layers(self) -> dict[str, tuple[int, ...]]:
        bare = self.first_norm is FirstNorm.NONE
        return super().module_layers | ({"attention_norm": tuple(range(1, self.num_layers))} if bare else {})

    @property
    def data_kind(self) -> str:
        return "prefix" if self.inputs_attention is InputsAttention.BIDIRECTIONAL else "causal"

    @property
    def rotary_pairs(self) -> Pairs:
        return self.rope.pairs

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(self.window if kind.windowed else None if kind.attends else 0 for kind in self.kinds)

    @property
    def in_blocks(self) -> bool:
        return self.window_kind is WindowKind.BLOCK

    @property
    def of_mtp(self) -> DecoderConfig:
        assert self.mtp is not None, "it has modules"
        kind, moe = self.mtp.kind, self.moe if self.mtp.mlp is MtpMlp.MODEL else None
        return dataclasses.replace(
            self,
            mtp=None,
            layer_pattern=(kind,),
            window=self.window if kind is LayerKind.LOCAL else None,
            mixer=None,
            moe=None
            if moe is None
            else dataclasses.replace(moe, first_dense=0, hash_layers=0, pattern=(MlpKind.EXPERTS,)),
            norm_placement=self.norm_placement.of(kind),
        )

    def __post_init__(self) -> None:
        if not self.layer_pattern and self.num_layers > 0:
            raise UserError('DecoderConfig.layer_pattern is empty: try ("global",)')
        super().__post_init__()
        _check_relative(self)
        self._check_blocks()
        self._check_mixer()
        _check_ends(self)
        self.check_heads()
        if self.streaming is not None:
            _check_streaming(self, self.streaming)
        mtp_config.check(self, DecoderConfig)
        if self.positions is Positions.ROPE and self.rotary_size % 2:
            raise UserError(
                f"DecoderConfig.head_dim ({self.head_size}) must be even for rotary positions: "
                f"try {max(2, self.head_size - 1)}"
            )
        rotated = [self.rope.rotated_dims(self.rotary_size, local=local) for local in (False, True)]
        if self.positions is Positions.ROPE and not min(rotated):
            name = "local_fraction" if rotated[0] else "fraction"
            raise UserError(
                f"Rope.{name} ({getattr(self.rope, name)}) of head_dim ({self.head_size}) must be at least 2 dimensions, or "
                "nothing is rotated: try 0.25, or DecoderConfig.positions = 'none'"
            )
        if self.positions is Positions.ROPE:
            self.rope.check(self.rotary_size)
        if self.positions is not Positions.ROPE and self.rope != Rope():
            raise UserError(
                f"DecoderConfig.rope is set, but positions ({str(self.positions)!r}) are not rotary: leave it out, or set "
                "DecoderConfig.positions = 'rope'"
            )
        if self.positions is Positions.LEARNED and self.max_length is None:
            raise UserError(
                "DecoderConfig.max_length has no value, learned positions need one: set it to the row length"
            )

    def _check_blocks(self) -> None:
        if LayerKind.UNROTATED in self.layer_pattern and self.positions is not Positions.ROPE:
            raise UserError(
                f"DecoderConfig.layer_pattern has layers that are unrotated, positions are {str(self.positions)!r}, for all "
                "layers: write 'global'"
            )
        if not 0 <= self.query_growth < math.inf:
            raise UserError(
                f"DecoderConfig.query_growth is {self.query_growth}, must be finite and at least 0: 0 is none"
            )
        if (self.query_growth > 0) != (self.query_growth_length is not None) or (self.query_growth_length or 1) < 1:
            raise UserError(
                f"DecoderConfig.query_growth_length is {self.query_growth_length}, must be at least 1 with query_growth "
                f"({self.query_growth}) above 0, and None without: try 8192"
            )
        _check_windows(self)
        if self.position_offset < 0 or (self.position_offset and not self.positions.added):
            raise UserError(
                f"DecoderConfig.position_offset is {self.position_offset}, must be at least 0, and is for learned or "
                "sinusoidal positions only: leave it out"
            )
        if self.positions is Positions.SINUSOIDAL and (self.embed_dim % 2 or self.embed_dim < 4):
            raise UserError(
                f"DecoderConfig.embed_dim ({self.embed_dim}) must be even and at least 4 for sinusoidal positions"
            )

    def _check_mixer(self) -> None:
        recurrent = any(kind.mixes for kind in self.kinds)
        attends = any(kind.attends for kind in self.kinds)
        if recurrent and self.mixer is None:
            raise UserError(
                "DecoderConfig.mixer is None, recurrent layers in layer_pattern need one: try @GatedDelta(), or write 'global'"
            )
        if self.mixer is not None and not recurrent:
            raise UserError(
                f"DecoderConfig.mixer is for recurrent layers, layer_pattern has {' and '.join(sorted(set(self.kinds)))}: "
                'try ("recurrent", "recurrent", "recurrent", "global")'
            )
        if not attends and self.positions in (
            Positions.ROPE,
            Positions.RELATIVE,
            Positions.ALIBI,
            Positions.ALIBI_ROUNDED,
        ):
            raise UserError(
                f"DecoderConfig.positions ({str(self.positions)!r}) are of attention, no layer of layer_pattern attends: "
                "write 'none'"
            )
        check_branches(self)
        if self.mixed_norms and (not (recurrent and attends) or LayerKind.HYBRID in self.kinds):
            raise UserError(
                f"DecoderConfig.norm_placement is 'mixed', must have recurrent layers and others that attend alone, layer_pattern has "
                f"{' and '.join(sorted(set(self.kinds)))}: write 'pre'"
            )
        if self.mixer is not None and self.positions.biases:
            raise UserError(
                f"DecoderConfig.mixer is set, and positions ({str(self.positions)!r}) are of attention in every layer: try "
                "'rope'"
            )
        if self.mixer is not None and self.inputs_attention is InputsAttention.BIDIRECTIONAL:
            raise UserError(
                "DecoderConfig.inputs_attention is 'bidirectional', recurrent layers read forwards: write 'causal'"
            )


def _check_streaming(config: DecoderConfig, pattern: StreamingHeads) -> None:
    name = type(config).__name__
    unsupported = {
        f"the model is a {name}": type(config) is not DecoderConfig,
        f"positions are {str(config.positions)!r}": config.positions.biases,
        f"inputs_attention is {str(config.inputs_attention)!r}": config.inputs_attention is not InputsAttention.CAUSAL,
        "lora is set": config.has_gates and config.lora is not None,
    }
    for option, is_set in unsupported.items():
        if is_set:
            raise UserError(f"{name}.streaming is not supported where {option}: leave it out")
    pattern.check(name, config.kv_heads, config.windows)


def _check_windows(config: DecoderConfig) -> None:
    if strange := [kind for kind in config.kinds if kind.compresses and not config.has_entries]:
        raise UserError(
            f"DecoderConfig.layer_pattern has {str(strange[0])!r}, which DeepseekV4Config has alone: write 'local'"
        )
    if config.window is not None and not 1 <= config.window < 2**31:
        raise UserError(f"DecoderConfig.window is {config.window}, must be from 1 to below 2**31, or None: try 4096")
    if (is_local := any(kind.windowed for kind in config.layer_pattern)) and config.window is None:
        raise UserError("DecoderConfig.window has no value, local layers in layer_pattern need one: try 4096")
    if config.window is not None and not is_local:
        raise UserError(
            f"DecoderConfig.window ({config.window}) is for local layers, layer_pattern has none: "
            'set DecoderConfig.layer_pattern = ("local",), or window = None'
        )
    if config.in_blocks and (config.window is None or config.inputs_attention is InputsAttention.BIDIRECTIONAL):
        raise UserError(
            f"DecoderConfig.window_kind is 'block', must have a window (is {config.window}) and inputs_attention 'causal' (is "
            f"{str(config.inputs_attention)!r}): write 'sliding'"
        )
    if config.query_growth_layers is GrowthLayers.UNROTATED and not (
        config.query_growth and LayerKind.UNROTATED in config.layer_pattern
    ):
        raise UserError(
            "DecoderConfig.query_growth_layers is 'unrotated', must have query_growth above 0 and unrotated layers in "
            "layer_pattern: write 'all'"
        )
    if config.qk_norm is QKNorm.UNIT and config.positions is not Positions.ROPE:
        raise UserError(
            f"DecoderConfig.qk_norm is 'unit', of rotated queries and keys, and positions are {str(config.positions)!r}: write "
            "'head'"
        )


def _check_ends(config: DecoderConfig) -> None:
    head.check(config)
    name, rows = type(config).__name__, config.output_rows
    if rows is not None and (
        not 1 <= rows < config.vocab_size
        or config.head is not Head.SEPARATE
        or config.head_bias is not HeadBias.NONE
        or config.logit_soft_cap is not None
    ):
        raise UserError(
            f"{name}.output_rows is {rows}, must be from 1 to below vocab_size ({config.vocab_size}), with head 'separate', without "
            "head_bias and logit_soft_cap: leave it out"
        )
    if config.transform is not Transform.NONE and (config.head is Head.SCORE or config.value_head):
        raise UserError(
            f"{name}.transform is 'dense', must be 'none' with scores or values of hidden states: leave it out, or set "
            f"{name}.head = 'tied' and value_head = False"
        )
    fits = config.norm_placement is NormPlacement.PRE and config.residual is Residual.SEQUENTIAL
    if (rank := config.norm_gate_rank) is not None and (
        rank < 1 or not fits or config.one_branch or config.first_norm is FirstNorm.NONE
    ):
        raise UserError(
            f"{name}.norm_gate_rank is {rank}, must be at least 1, with norm_placement 'pre', residual 'sequential', first_norm "
            "'layer' and two branches in each layer: leave it out"
        )
    if config.first_norm is FirstNorm.LAYER:
        return
    if not fits or config.num_layers < 2 or config.moe is not None or config.mixer is not None or config.one_branch:
        raise UserError(
            f"{name}.first_norm 'none' is for norm_placement 'pre', residual 'sequential' and num_layers of at least 2, without "
            "moe and mixer: leave it out"
        )


def _check_relative(config: DecoderConfig) -> None:
    if config.relative_buckets < 2 or config.relative_buckets % 2:
        raise UserError(f"DecoderConfig.relative_buckets ({config.relative_buckets}) must be even and above 0: try 32")
    if config.relative_distance <= config.relative_buckets // 2:
        raise UserError(
            f"DecoderConfig.relative_distance ({config.relative_distance}) must be above half of relative_buckets "
            f"({config.relative_buckets}): try {4 * config.relative_buckets}"
        )
    if config.positions is not Positions.RELATIVE and (config.relative_buckets, config.relative_distance) != (32, 128):
        raise UserError(
            f"DecoderConfig.relative_buckets and relative_distance are for relative positions, not for "
            f"{str(config.positions)!r}: leave them out"
        )
    if config.positions.biases and config.attention in (AttentionBackend.SPLASH, AttentionBackend.CUDNN):
        raise UserError(
            f"DecoderConfig.attention ({str(config.attention)!r}) cannot add {str(config.positions)} positions: try 'auto'"
        )
    if not 0 < config.logit_scale < math.inf:
        raise UserError(f"DecoderConfig.logit_scale is {config.logit_scale}, must be finite and above 0: try 1.0")


class DecoderBase(Transforming, nnx.Module):
    """Embedding, final norm and head of a decoder, around layers that a subclass makes and runs."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        V, D = config.vocab_size, config.embed_dim
        self.config = config
        self.embedding = layers.param(rngs, (V, D), ("vocab", "embed"), layers.normal(0.02))
        if config.positions is Positions.LEARNED:
            assert config.max_length is not None, "the configuration checks it"
            shape = (config.max_length + config.position_offset, D)
            self.position_embedding = layers.param(rngs, shape, ("position", "embed"), layers.normal(0.02))
        if config.positions is Positions.RELATIVE:
            self.relative_bias = RelativeBias(config, rngs, bidirectional=False)
        if config.embedding_norm is EmbeddingNorm.LAYER:
            self.embedding_norm = config.make_norm(rngs)
        self._make_layers(rngs)
        if config.final_norm is not FinalNorm.NONE:
            self.final_norm = config.make_norm(rngs)
        if config.transform is Transform.DENSE:
            self.make_transform(config, (D, D), config.make_norm(rngs), rngs)
        if config.head is Head.SEPARATE:
            shape = (config.output_rows or V, D)
            self.output = layers.param(rngs, shape, ("vocab", "embed"), layers.normal(D**-0.5))
        if config.head is Head.SCORE:
            self.score = layers.param(rngs, (D,), ("embed",), layers.normal(0.02))
        if config.has_gates:
            shape = (config.num_layers, config.kv_heads)
            self.retrieval_gates = layers.param(rngs, shape, ("norm", "norm"), layers.ones)
        if config.value_head:
            self.critic = layers.param(rngs, (D,), ("embed",), layers.normal(0.02))
        if config.head_bias is HeadBias.VOCAB:
            self.output_bias = layers.param(rngs, (V,), ("vocab",), layers.zeros)

    @abc.abstractmethod
    def _make_layers(self, rngs: nnx.Rngs) -> None:
        """Makes the layers, between the embedding and the final norm."""

    def start_cache(
        self, batch: int, length: int, dtype: jax.typing.DTypeLike, encoder_length: int | None = None, spare: int = 0
    ) -> dense.Cache:
        """An empty cache for rows of up to `length` tokens; see api.Model.start_cache."""
        config = self.config
        windows = {kind: config.window + spare if config.window and kind.windowed else None for kind in LayerKind}
        exact = config.dtype.value if jnp.dtype(dtype) == jnp.int8 else dtype

        def empty(number: int, kind: LayerKind) -> dense.LayerCache:
            layer: dense.LayerCache = {}
            if heads := config.streaming_in(number):
                assert config.streaming is not None, "it has the pattern"
                most = config.streaming.capacity + spare
                layer |= streaming.empty_layer(config.cached_heads, len(heads), batch, length, most, dtype)
            elif kind.attends:
                layer |= dense.empty_layer(config.attention_of(kind), batch, length, dtype, windows[kind])
            if kind.mixes:
                assert config.mixer is not None, "the configuration checks it"
                layer |= config.mixer.empty_state(config, batch, exact)
            if config.channel_mixer is not None:
                layer |= config.channel_mixer.empty_state(config, batch, exact)
            return layer

        of_layers = tuple(empty(number, kind) for number, kind in enumerate(config.kinds))
        if config.mtp is not None:
            of_layers += (mtp_module.cache_layer(config.of_mtp, batch, length, dtype, windows[config.mtp.kind]),)
        return {"lengths": jnp.zeros(batch, jnp.int32), "layers": of_layers}

    def head(self) -> jax.Array:
        """The output projection [V, D]: logits are hidden @ head.T. With a bias [V, D + 1], its last column the bias.

        With output_rows a bias excludes the tokens that have none.

        Of Head.SCORE [1, D].
        """
        if self.config.head is Head.SCORE:
            return self.score[...][None]
        head_VD = trainable_tokens.table(self) if self.config.head is Head.TIED else self.output[...]
        if self.config.output_rows is not None:
            absent = self.config.vocab_size - self.config.output_rows
            bias_V1 = jnp.pad(jnp.zeros((self.config.output_rows, 1)), ((0, absent), (0, 0)), constant_values=_NEVER)
            return jnp.concatenate([jnp.pad(head_VD, ((0, absent), (0, 0))), bias_V1.astype(head_VD.dtype)], axis=1)
        if self.config.head_bias is HeadBias.NONE:
            return head_VD
        dtype = jnp.promote_types(head_VD.dtype, self.config.dtype.value)  # not that of a frozen embedding for the bias
        return jnp.concatenate([head_VD.astype(dtype), self.output_bias[...][:, None].astype(dtype)], axis=1)

    def _normed(self, x: jax.Array, drop: Dropout | None = None) -> jax.Array:
        """Normalises and scales the final hidden states; where the head has a bias, a column of ones is appended."""
        x = self.final_norm(x) if self.config.final_norm is not FinalNorm.NONE else x
        x = dropout.apply(drop, constrain(x, ("batch", "act_time", "act_embed")), Site.FINAL)
        x = self.transformed(self.config, x) if self.config.transform is Transform.DENSE else x
        x = x if self.config.logit_scale == 1 else x * self.config.logit_scale
        has_bias = self.config.head_bias is HeadBias.VOCAB or self.config.output_rows is not None
        return jnp.pad(x, ((0, 0), (0, 0), (0, 1)), constant_values=1) if has_bias else x

    @property
    def _shares(self) -> jax.Array | None:
        """How much each key/value head of each layer retrieves, [L, K] (parts.streaming); None: all alone."""
        if self.config.streaming is None:
            return None
        if self.config.has_gates:
            return bounded(self.retrieval_gates[...])
        return self.config.streaming.shares(self.config.kv_heads)

    @property
    def _distances(self) -> RelativeBias | Alibi | RoundedAlibi | None:
        """What adds a bias to the scores by the distance from query to key; None: nothing."""
        match self.config.positions:
            case Positions.RELATIVE:
                return self.relative_bias
            case Positions.ALIBI:
                return Alibi(self.config.num_heads)
            case Positions.ALIBI_ROUNDED:
                return RoundedAlibi(self.config.num_heads, self.config.head_size)
            case _:
                return None

    def _bias(self, length: int, row_positions: jax.Array | None = None) -> jax.Array | None:
        """The bias of the scores in rows of this length; None: no positions that add one."""
        return None if self._distances is None else self._distances(length, row_positions)

    @property
    def _bias_at(self) -> dense.PositionBias | None:
        return None if self._distances is None else self._distances.at

    def _length(self, cache: dense.Cache) -> int:
        """The token capacity of the cache's rows."""
        return self.config.max_length or paged.capacity(cache)

    def _kinds(self) -> dict[LayerKind, AttentionSpec]:
        config = self.config
        whole = config.attention_kind(causal=True)
        return dict.fromkeys(LayerKind, whole) | {
            LayerKind.LOCAL: dataclasses.replace(
                config.attention_kind(causal=True, window=config.window), in_blocks=config.in_blocks
            )
        }

    def _embed(self, batch: Batch) -> jax.Array:
        config = self.config
        x = trainable_tokens.lookup(self, batch["tokens"], config.dtype.value)
        if config.embedding_scale is EmbeddingScale.TOKENS:
            x = x * config.embed_dim**0.5
        if config.positions is Positions.SINUSOIDAL:
            x = x + layers.sines(batch["positions"] + config.position_offset, config.embed_dim).astype(x.dtype)
        if config.positions is Positions.LEARNED:
            x = x + self.position_embedding[...][batch["positions"] + config.position_offset].astype(x.dtype)
        x = transformer.residual(x)
        if config.embedding_norm is EmbeddingNorm.LAYER:
            x = self.embedding_norm(x)
        if config.embedding_multiplier != 1:
            x = x * config.embedding_multiplier
        return x * config.embed_dim**0.5 if config.embedding_scale is EmbeddingScale.SQRT_DIM else x

    def _rows(self, batch: Batch, length: int | None = None) -> Rows:
        config, angles = self.config, None
        if config.positions is Positions.ROPE:
            angles = transformer.rotary(config, config.rope, batch["positions"], config.rotated_kinds, length)
        prefix = batch["prefix"] if config.inputs_attention is InputsAttention.BIDIRECTIONAL else None
        segments, blocks = batch["segment_ids"], None
        if config.in_blocks:
            assert config.window is not None, "the configuration checks it"
            blocks = layers.blocks(segments, batch["positions"], config.window)
        return Rows(
            segments, angles, batch.get("domains"), prefix=prefix, query_scale=self._query_scale(batch["positions"]),
            blocks=blocks, pathways=transformer.pathways(batch),
            tokens=None if config.moe is None or not config.moe.hash_layers else batch["tokens"],
        )  # fmt: skip

    def _query_scale(self, positions_BT: jax.Array) -> dict[LayerKind, jax.Array] | None:
        """The factors [B, T] of the queries in each kind of layer whose queries grow."""
        config = self.config
        if config.query_growth_length is None:
            return None
        in_all = config.query_growth_layers is GrowthLayers.ALL
        counted = positions_BT.astype(jnp.float32) + (0.0 if in_all else 1.0)
        scale = 1 + config.query_growth * jnp.log1p(jnp.floor(counted / config.query_growth_length))
        return dict.fromkeys(set(config.layer_pattern) if in_all else (LayerKind.UNROTATED,), scale)


@model_of(DecoderConfig)
class Decoder(DecoderBase, Predicting):
    """Embedding, layers and final norm; `head` returns the output projection.

    Attributes:
      block: the class of its layers, built by `block(config, rngs)`.
      layerwise: whether `begin` and `layer` can run it layer by layer.
      reads_embedding: whether layers read the token embeddings beside the stream.
      packs_prompts: see registry.packs_prompts.
    """

    block: ClassVar[type[Block]] = Block
    layerwise: ClassVar[bool] = True
    reads_embedding: ClassVar[bool] = False
    packs_prompts: ClassVar[bool] = True

    def __init_subclass__(cls, **options: bool) -> None:
        super().__init_subclass__(**options)
        if not (isinstance(cls.block, type) and issubclass(cls.block, nnx.Module)):
            raise UserError(f"{cls.__name__}.block is {short(cls.block)}, must be a class that derives from Block")

    def _make_layers(self, rngs: nnx.Rngs) -> None:
        config = self.config
        self.layers = stack.stacked(lambda rngs: self.block(config, rngs), rngs, config.num_layers)
        for module, numbers in config.module_layers.items():
            stack.keep_layers(getattr(self.layers, module), numbers)
        if (mtp := config.mtp) is not None:
            make = lambda rngs: mtp_module.Module(config.of_mtp, mtp, self.block, rngs)  # noqa: E731
            self.mtp = stack.stacked(make, rngs, mtp.layers)

    def __call__(self, batch: Batch, remat: RematPolicy, step: jax.Array | None) -> tuple[jax.Array, stack.Stats]:
        """The final hidden states [B, T, D], normalised, in the compute dtype; and the layers' statistics [L, ...]."""
        config = self.config
        rows, row_positions, kinds = self._rows(batch), batch.get("row_positions"), self._kinds()
        shared = Shared(
            row_positions=row_positions,
            bias=self._bias(batch["tokens"].shape[1], row_positions),
            step=step,
            shares_LK=self._shares,
        )
        drop = dropout.of_step(config.dropout_rate, step, batch["tokens"])

        def apply(
            block: Block, x: jax.Array, rows: Rows, entry: _Entry, number: jax.Array | int = 0
        ) -> tuple[jax.Array, stack.Stats]:
            kind, mlp, is_bare, block_of = entry
            layer_inputs = shared._replace(mlp=mlp, bare=is_bare, number=number, block=block_of)
            layer_inputs = layer_inputs if drop is None else layer_inputs._replace(drop=drop.at(Site.LAYERS).at(number))
            return block(x, rows, layer_inputs, kinds[kind], kind)

        x = dropout.apply(drop, self._embed(batch), Site.EMBEDDING)
        rows = rows._replace(embedded=x) if self.reads_embedding else rows
        x, stats = self._entered(x), []
        blocks = self._shared_blocks()
        for start, stop in self._spans():
            x, of_span = stack.run(
                self.layers,
                x,
                rows,
                apply,
                [(*self._entry(layer), blocks[layer % config.period]) for layer in range(start, start + config.period)],
                config.layer_loop,
                remat,
                all_trained=config.lora is None,
                numbered=drop is not None
                or config.streaming is not None
                or rows.pathways is not None
                or (config.mixer is not None and config.mixer.numbered),
                span=(start, stop) if config.module_layers else None,
                some=config.module_layers,
            )
            stats.append(of_span)
        return self._normed(self._left(x), drop), stack.collected(stats, jnp.concatenate)

    def _entered(self, x_BTD: jax.Array) -> jax.Array:
        """The input of the first layer, from the embeddings."""
        return x_BTD

    def _left(self, x: jax.Array) -> jax.Array:
        """The final hidden states [B, T, D] before their norm, from the output of the last layer."""
        return x

    def _entry(self, layer: int) -> tuple[LayerKind, str, bool]:
        """A layer's kind, the module of its MLP or experts, and whether it has no norm before its attention."""
        mlp = "mlp" if self.config.moe is None else self.config.moe.module(layer)
        return self.config.kind_of(layer), mlp, layer == 0 and self.config.first_norm is FirstNorm.NONE

    def _shared_blocks(self) -> Sequence[nnx.Module | None]:
        """For each layer of a period, the block beside the stack that it reads, too."""
        return (None,) * self.config.period

    def _spans(self) -> list[tuple[int, int]]:
        """Start and end of the layers whose modules repeat."""
        first, count = self.config.first_dense, self.config.num_layers
        cuts = {0, first or int(self.config.first_norm is FirstNorm.NONE), *self.config.cuts, count}
        return list(itertools.pairwise(sorted(cuts)))

    def read(
        self, values: Sequence[Params], batch: ReadBatch, cache: dense.Cache, is_prefill: bool
    ) -> tuple[jax.Array, dense.Cache]:
        """The final hidden states [B, T, D] of the next `counts` tokens, and the updated cache.

        Args:
          values: parameters of the layers, from `stack.unstacked`.
          batch: the next tokens of each row.
          cache: what was read before.
          is_prefill: whether the cache is empty.
        """
        config = self.config
        now = dense.prefill_inputs(batch["tokens"], batch["counts"], cache, is_prefill, batch.get("packed"))
        whole: dict[str, Any] = {"tokens": batch["tokens"], "positions": now.positions, "segment_ids": now.segments}
        if config.inputs_attention is InputsAttention.BIDIRECTIONAL:
            # Later tokens attend to the prefix causally.
            whole["prefix"] = _inputs(batch, now) if is_prefill else None
        rows, kinds, x = self._rows(whole, self._length(cache)), self._kinds(), self._embed(whole)
        rows, x = rows._replace(embedded=x) if self.reads_embedding else rows, self._entered(x)
        of_layers: list[dense.LayerCache] = []
        blocks = self._shared_blocks()
        shared = Shared(
            bias=self._bias(x.shape[1] if now.packed is None else len(x)) if is_prefill or now.packed else None,
            bias_at=self._bias_at,
            shares_LK=self._shares if config.has_gates else None,
        )
        for index, block in enumerate(stack.each(self.layers, values)):
            unmerged.attach(block, batch.get("adapters"), index)
            kind, mlp, is_bare = self._entry(index)
            block_of = blocks[index % config.period]
            layer_inputs = shared._replace(mlp=mlp, bare=is_bare, number=index, block=block_of)
            x, layer = block.cached(x, cache["layers"][index], now, rows, layer_inputs, kinds[kind], kind)
            of_layers.append(layer)
        hidden = self._normed(self._left(x))
        if config.mtp is not None:
            of_layers.append(self.remembered(hidden, batch["tokens"], now, cache))
        return hidden, cache | {"lengths": now.lengths + now.counts, "layers": tuple(of_layers)}

    def begin(self, batch: Batch) -> jax.Array:
        """The input of the first layer, [B, T, D]."""
        return self._embed(batch)

    def layer(self, values: Params, x: jax.Array, batch: Batch, index: int) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The output of one layer, and the inputs of its projections by weight name.

        Args:
          values: the layer's parameters.
          x: the layer's input, [B, T, D].
          batch: the rows.
          index: the layer's entry in layer_pattern.
        """
        (block,) = stack.each(self.layers, [values])
        inputs = lora.tap(block)
        kind = self.config.layer_pattern[index]
        shared = Shared(bias=self._bias(x.shape[1]))
        x, _ = block(x, self._rows(batch), shared, self._kinds()[kind], kind)
        return x, inputs


def _inputs(batch: ReadBatch, now: dense.PrefillInputs) -> jax.Array:
    """[B, T], 1 at the tokens of the prefix."""
    inputs_B1 = jnp.asarray(batch.get("inputs", now.counts))[:, None]
    return (now.positions < jnp.minimum(inputs_B1, now.counts[:, None])).astype(jnp.int32)
