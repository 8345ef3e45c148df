"""The bidirectional encoder of BERT with its masked-language-model head (Devlin et al. 2019, arXiv:1810.04805)."""

from __future__ import annotations

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.config import configurable
from capibara.core.types import Batch, UserError
from capibara.kernels.attention.dispatch import AttentionBackend
from capibara.kernels.attention.spec import AttentionSpec
from capibara.kernels.rotary import Pairs
from capibara.models.architectures.registry import model_of
from capibara.models.layers import dropout, embedding, layers, stack
from capibara.models.layers.dropout import Site
from capibara.models.layers.layers import Activation, AttentionSinks, Bias, Norm, NormKind
from capibara.models.layers.relative import RelativeBias
from capibara.models.layers.rope import Rope
from capibara.models.parts import head, transformer
from capibara.models.parts.config import (
    OF_DECODERS,
    EmbeddingNorm,
    EmbeddingScale,
    FirstNorm,
    Head,
    HeadBias,
    NormPlacement,
    Positions,
    Residual,
    TransformerConfig,
    refuse,
)
from capibara.models.parts.disentangled import Disentangled, DisentangledBlock, TableNorm
from capibara.models.parts.head import Transform, TransformBias, Transformed, Transforming
from capibara.models.parts.kinds import LayerKind, Patterned
from capibara.models.parts.transformer import Block, Rows, Shared
from capibara.sharding import RematPolicy, constrain

_OWN = ("embedding_norm", "head_bias")  # which decoders and encoders compute


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(Transformed, Patterned, TransformerConfig):
    """Sizes and variants of an encoder; see also TransformerConfig. Defaults are BERT's.

    Attributes:
      token_types: number of token types with an embedding ("segments" in BERT); 0: there are none. A batch without an
        entry `token_types` [B, T] uses the first one.
      task_types: number of tasks with an embedding, of which all rows have the first (ERNIE); 0: there are none.
      positions, rope: learned, rotary as configured by `rope`, or none.
      max_length: longest row; learned positions need one.
      position_offset: for learned positions: the table's row of a document's first token (RoBERTa: 2).
      relative_buckets, relative_distance: number of buckets of T5's relative positions in addition to the others (MPNet),
        and the distance from which on all share the last; 0: there are none.
      disentangled: scores of contents with distances (DeBERTa), in addition to the positions; None: there are none.
      window: number of positions visible to a query of a local layer in each direction, its own included.
      layer_pattern: kinds of the first layers, global or local, repeated over all layers.
      layer_repeats: how often each layer is applied, one time after the other, before the next one (ALBERT); above 1 all
        layers are global, without experts and alike.
      first_norm: whether the first layer's attention has a norm of its input.
      token_dropout: number of the token in masked places, whose embedding is 0 while those of the others are scaled by the
        share of such places in training over that in the document (ESM-2); None: it is a token as others.
      embedding_dim: width of the embeddings, which a projection widens to embed_dim, and of the head (ELECTRA); None:
        embed_dim, without a projection.
      embedding_norm: whether the sum of the embeddings is normalised (not in Megatron's BERT).
      transform: what stands before the head.
      transform_activation: of the transform before the head; None: the layers', or gelu where that is gated.
      transform_bias: whether that transform's projection has a bias.
    """

    norm: NormKind = NormKind.LAYER
    norm_eps: float = 1e-12
    norm_placement: NormPlacement = NormPlacement.POST
    activation: Activation = Activation.GELU_EXACT
    bias: Bias = Bias.ALL
    max_length: int | None = 512
    token_types: int = 2
    task_types: int = 0
    positions: Positions = Positions.LEARNED
    rope: Rope = Rope()
    position_offset: int = 0
    relative_buckets: int = 0
    relative_distance: int = 128
    disentangled: Disentangled | None = None
    window: int | None = None
    layer_pattern: tuple[LayerKind, ...] = (LayerKind.GLOBAL,)
    layer_repeats: int = 1
    first_norm: FirstNorm = FirstNorm.LAYER
    token_dropout: int | None = None
    embedding_dim: int | None = None
    embedding_norm: EmbeddingNorm = EmbeddingNorm.LAYER
    head_bias: HeadBias = HeadBias.VOCAB
    transform: Transform = Transform.DENSE
    transform_activation: Activation | None = None
    transform_bias: TransformBias = TransformBias.EMBED

    @property
    def data_kind(self) -> str:
        return "masked"

    @property
    def rotary_pairs(self) -> Pairs:
        return self.rope.pairs

    @property
    def depth(self) -> int:
        return self.num_layers * self.layer_repeats

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(self.window if kind is LayerKind.LOCAL else None for kind in self.kinds)

    @property
    def module_layers(self) -> dict[str, tuple[int, ...]]:
        return {} if self.first_norm is FirstNorm.LAYER else {"attention_norm": tuple(range(1, self.num_layers))}

    def attention_kind(self, *, causal: bool, window: int | None = None) -> AttentionSpec:
        kind = super().attention_kind(causal=causal, window=window)
        if self.disentangled is None or self.attention_scale is not None:
            return kind
        return dataclasses.replace(kind, scale=(self.head_size * (1 + self.disentangled.terms.number)) ** -0.5)

    @property
    def embedding_width(self) -> int:
        """The width of the embeddings and of the head."""
        return self.embed_dim if self.embedding_dim is None else self.embedding_dim

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(self, *(name for name in OF_DECODERS if name not in _OWN))
        _check_positions(self)
        _check_disentangled(self)
        _check_layers(self)
        for name in ("token_types", "task_types", "position_offset"):
            if getattr(self, name) < 0:
                raise UserError(f"EncoderConfig.{name} is {getattr(self, name)}, must be at least 0: 0 is none")
        if self.token_dropout is not None and not 0 <= self.token_dropout < self.vocab_size:
            raise UserError(
                f"EncoderConfig.token_dropout is {self.token_dropout}, must be a token, below vocab_size ({self.vocab_size}), or None"
            )
        if self.embedding_dim is not None and (self.embedding_dim < 1 or self.embedding_dim == self.embed_dim):
            raise UserError(
                f"EncoderConfig.embedding_dim is {self.embedding_dim}, must be at least 1 and not embed_dim "
                f"({self.embed_dim}): leave it out for one width"
            )
        head.check(self)
        if self.transform is Transform.NONE and self.embedding_dim is not None:
            raise UserError(
                f"EncoderConfig.embedding_dim ({self.embedding_dim}) is of the transform before the head, and transform is "
                "'none': leave it out, or write 'dense'"
            )


def _check_positions(config: EncoderConfig) -> None:
    positions = str(config.positions)
    if config.positions not in (Positions.LEARNED, Positions.ROPE, Positions.NONE):
        raise UserError(f"EncoderConfig.positions is {positions!r}, must be 'learned', 'rope' or 'none'")
    if config.positions is Positions.LEARNED and config.max_length is None:
        raise UserError("EncoderConfig.max_length has no value, learned positions need one: set the row length")
    if config.positions is not Positions.ROPE and config.rope != Rope():
        raise UserError(f"EncoderConfig.rope is set, but positions ({positions!r}) are not rotary: leave it out")
    if config.positions is not Positions.LEARNED and config.position_offset:
        raise UserError(
            f"EncoderConfig.position_offset ({config.position_offset}) is for learned positions: leave it out"
        )
    if config.positions is Positions.ROPE:
        if config.rotary_size % 2 or not config.rope.rotated_dims(config.rotary_size):
            raise UserError(
                f"EncoderConfig.head_dim ({config.head_size}) must be even, and at least 2 of its dimensions rotated (Rope."
                f"fraction is {config.rope.fraction}): try 64"
            )
        config.rope.check(config.rotary_size)
    buckets, distance = config.relative_buckets, config.relative_distance
    if buckets < 0 or buckets % 4 or (distance <= buckets // 4 if buckets else distance != 128):
        raise UserError(
            f"EncoderConfig.relative_buckets ({buckets}) must be a multiple of 4, and relative_distance ({distance}) above a "
            "quarter of it, or 128 without buckets: try 32 and 128"
        )
    if buckets and config.attention in (AttentionBackend.SPLASH, AttentionBackend.CUDNN):
        raise UserError(
            f"EncoderConfig.attention ({str(config.attention)!r}) cannot add relative positions: try 'auto'"
        )


def _check_disentangled(config: EncoderConfig) -> None:
    if config.disentangled is None:
        return
    if config.kv_heads != config.num_heads or config.attention_sinks is not AttentionSinks.NONE:
        raise UserError(
            "EncoderConfig.disentangled is for heads with keys of their own and without sinks: leave num_kv_heads and "
            "attention_sinks out"
        )
    if config.positions is Positions.ROPE or config.relative_buckets or config.first_norm is FirstNorm.NONE:
        raise UserError(
            "EncoderConfig.disentangled has distances of its own, and is not for rotary positions, relative_buckets or "
            "first_norm: set positions to 'none' or 'learned', and leave the others out"
        )
    if config.attention not in (AttentionBackend.AUTO, AttentionBackend.XLA):
        raise UserError(
            f"EncoderConfig.attention ({str(config.attention)!r}) cannot score contents with distances: try 'auto'"
        )


def _check_layers(config: EncoderConfig) -> None:
    kinds = {str(kind) for kind in config.layer_pattern}
    if not kinds or not kinds <= {"global", "local"}:
        raise UserError(
            f"EncoderConfig.layer_pattern is {[*map(str, config.layer_pattern)]}, must be of 'global' and 'local'"
        )
    window = config.window
    if (window is not None) != ("local" in kinds) or (window is not None and not 1 <= window < 2**31):
        raise UserError(
            f"EncoderConfig.window is {window}, must be at least 1 where layer_pattern has local layers, and None elsewhere"
        )
    if config.layer_repeats < 1:
        raise UserError(
            f"EncoderConfig.layer_repeats is {config.layer_repeats}, must be at least 1: 1 applies layers once"
        )
    alike = config.first_norm is FirstNorm.LAYER and config.moe is None and kinds == {"global"}
    if config.layer_repeats > 1 and not alike:
        raise UserError(
            f"EncoderConfig.layer_repeats ({config.layer_repeats}) is for layers that are alike: leave it out, or first_norm, "
            "moe and window"
        )
    if config.first_norm is FirstNorm.LAYER:
        return
    fits = config.norm_placement is NormPlacement.PRE and config.residual is Residual.SEQUENTIAL
    if not fits or config.num_layers < 2:
        raise UserError(
            f"EncoderConfig.first_norm 'none' is for norm_placement 'pre', residual 'sequential' and num_layers of at least "
            f"2, not for {str(config.norm_placement)!r}, {str(config.residual)!r} and {config.num_layers}: leave it out"
        )


_MASKED = 0.15 * 0.8  # share of the tokens that ESM's training masked


def unmasked_scale(masked_BT: jax.Array, segments_BT: jax.Array) -> jax.Array:
    """The factor of each token's embedding [B, T]: 0 in masked places, elsewhere such that a document's sum is as in training."""
    count = functools.partial(jax.ops.segment_sum, num_segments=segments_BT.shape[1] + 1)

    def of_row(masked_T: jax.Array, segments_T: jax.Array) -> jax.Array:
        real = count(jnp.ones(segments_T.shape, jnp.float32), segments_T)
        seen = real - count(masked_T.astype(jnp.float32), segments_T)
        return jnp.where(masked_T, 0.0, ((1 - _MASKED) * real / jnp.maximum(seen, 1))[segments_T])

    return jax.vmap(of_row)(masked_BT, segments_BT)


@model_of(EncoderConfig)
class Encoder(Transforming, nnx.Module):
    """Embeddings, layers, and the transform before the output projection; `head` returns the latter."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        V, D, E = config.vocab_size, config.embed_dim, config.embedding_width
        self.config = config
        small = layers.normal(0.02)
        self.embedding = layers.param(rngs, (V, E), ("vocab", "embed"), small)
        if config.positions is Positions.LEARNED:
            assert config.max_length is not None, "the configuration checks it"
            rows = config.max_length + config.position_offset
            self.position_embedding = layers.param(rngs, (rows, E), ("position", "embed"), small)
        if config.relative_buckets:
            self.relative_bias = RelativeBias(config, rngs, bidirectional=True)
        if config.token_types:
            self.type_embedding = layers.param(rngs, (config.token_types, E), ("position", "embed"), small)
        if config.task_types:
            self.task_embedding = layers.param(rngs, (config.task_types, E), ("position", "embed"), small)
        if config.embedding_norm is EmbeddingNorm.LAYER:
            self.embedding_norm = self._norm(E, rngs)
        if config.embedding_dim is not None:
            self.projection = layers.param(rngs, (E, D), ("norm", "embed"), layers.fan_in(0))
            self.projection_bias = layers.param(rngs, (D,), ("norm",), layers.zeros)
        if config.disentangled is not None:
            shape = (config.disentangled.rows, D)
            self.relative_embedding = layers.param(rngs, shape, ("position", "embed"), layers.normal(1.0))
            if config.disentangled.norm is TableNorm.LAYER:
                self.relative_norm = config.make_norm(rngs)
        self.layers = stack.stacked(self._block, rngs, config.num_layers)
        for module, numbers in config.module_layers.items():
            stack.keep_layers(getattr(self.layers, module), numbers)
        if config.norm_placement is not NormPlacement.POST:
            self.final_norm = config.make_norm(rngs)
        if config.transform is Transform.DENSE:
            self.make_transform(config, (D, E), self._norm(E, rngs), rngs)
        if config.head is Head.SEPARATE:
            self.output = layers.param(rngs, (V, E), ("vocab", "embed"), layers.normal(E**-0.5))
        if config.head_bias is HeadBias.VOCAB:
            self.output_bias = layers.param(rngs, (V,), ("vocab",), layers.zeros)

    def _block(self, rngs: nnx.Rngs) -> Block:
        config = self.config
        if config.disentangled is not None:
            return DisentangledBlock(config, config.disentangled, rngs)
        return Block(config, rngs)

    def _norm(self, width: int, rngs: nnx.Rngs) -> Norm:
        config = self.config
        return Norm(width, kind=config.norm, eps=config.norm_eps, rngs=rngs, scale=config.norm_scale)

    def __call__(self, batch: Batch, remat: RematPolicy, step: jax.Array | None) -> tuple[jax.Array, stack.Stats]:
        """The input of the head, [B, T, E + 1] in the compute dtype, and the layers' statistics.

        The last of its E + 1 columns is 1, for the output bias; without one there are E.
        """
        config = self.config
        row_positions = batch.get("row_positions")
        angles = None
        if config.positions is Positions.ROPE:
            angles = transformer.rotary(config, config.rope, batch["positions"], set(config.layer_pattern))
        rows = Rows(batch["segment_ids"], angles, domains=batch.get("domains"))
        shared = Shared(row_positions=row_positions, step=step)
        if config.relative_buckets:
            shared = shared._replace(bias=self.relative_bias(batch["tokens"].shape[1], row_positions))
        if config.disentangled is not None:
            distances_RD = self.relative_embedding[...].astype(config.dtype.value)
            normed = config.disentangled.norm is TableNorm.LAYER
            shared = shared._replace(distances_RD=self.relative_norm(distances_RD) if normed else distances_RD)
        windows = {LayerKind.GLOBAL: None, LayerKind.LOCAL: config.window}
        specs = {kind: config.attention_kind(causal=False, window=window) for kind, window in windows.items()}
        drop = dropout.of_step(config.dropout_rate, step, batch["tokens"])

        def apply(
            block: Block, x: jax.Array, rows: Rows, entry: tuple[LayerKind, bool], number: jax.Array | int = 0
        ) -> tuple[jax.Array, stack.Stats]:
            kind, bare = entry
            layer_shared = shared._replace(bare=bare)
            layer_shared = layer_shared if drop is None else layer_shared._replace(drop=drop.at(Site.LAYERS).at(number))
            return block(x, rows, layer_shared, specs[kind], kind)

        x = dropout.apply(drop, self._embed(batch), Site.EMBEDDING)
        parts: list[stack.Stats] = []
        first = int(config.first_norm is FirstNorm.NONE)
        for start, stop in [(0, 1), (1, config.num_layers)] if first else [(0, config.num_layers)]:
            at = start % len(config.layer_pattern)
            pattern = config.layer_pattern[at:] + config.layer_pattern[:at]
            entries = [(kind, stop <= first) for kind in pattern]
            x, stats = stack.run(
                self.layers, x, rows, apply, entries, config.layer_loop, remat, all_trained=config.lora is None,
                numbered=drop is not None, span=(start, stop) if first else None, some=config.module_layers,
                repeats=config.layer_repeats,
            )  # fmt: skip
            parts.append(stats)
        stats = jax.tree.map(lambda *s: jnp.concatenate(s), *parts) if first else parts[0]
        return self._transformed(x), stats

    def _transformed(self, x: jax.Array) -> jax.Array:
        """The last layer's output, as the head reads it."""
        config = self.config
        if config.norm_placement is not NormPlacement.POST:
            x = self.final_norm(x)
        x = constrain(x, ("batch", "act_time", "act_embed"))
        if config.transform is Transform.DENSE:
            x = self.transformed(config, x)
        return jnp.pad(x, ((0, 0), (0, 0), (0, 1)), constant_values=1) if config.head_bias is HeadBias.VOCAB else x

    def head(self) -> jax.Array:
        """The output projection [V, E + 1], its last column the bias, if any: logits are hidden @ head.T."""
        head_VD = self.embedding[...] if self.config.head is Head.TIED else self.output[...]
        if self.config.head_bias is HeadBias.NONE:
            return head_VD
        dtype = jnp.promote_types(head_VD.dtype, self.config.dtype.value)  # not that of a frozen embedding for the bias
        return jnp.concatenate([head_VD.astype(dtype), self.output_bias[...][:, None].astype(dtype)], axis=1)

    def _embed(self, batch: Batch) -> jax.Array:
        config = self.config
        x = embedding.lookup(self.embedding[...], batch["tokens"], config.dtype.value)
        if config.embedding_scale is EmbeddingScale.SQRT_DIM:
            x = x * config.embed_dim**0.5
        if config.token_dropout is not None:
            unmasked = unmasked_scale(batch["tokens"] == config.token_dropout, batch["segment_ids"])
            x = x * unmasked[..., None].astype(x.dtype)
        added: list[jax.Array] = []
        if config.token_types:
            added.append(self.type_embedding[...][batch["token_types"] if "token_types" in batch else 0])
        if config.task_types:
            added.append(self.task_embedding[...][0])
        if config.positions is Positions.LEARNED:
            at = batch["positions"]
            at = at + config.position_offset if config.position_offset else at
            added.insert(0, self.position_embedding[...][at])
        if added:  # in float32, in case they are stored in a smaller dtype
            total = functools.reduce(operator.add, (item.astype(jnp.float32) for item in added))
            x = x + total.astype(x.dtype)
        if config.embedding_norm is EmbeddingNorm.LAYER:
            x = self.embedding_norm(x)
        if config.embedding_dim is not None:
            x = layers.dense(x, self.projection[...]) + self.projection_bias[...].astype(x.dtype)
        return transformer.residual(x)
