"""The encoder-decoder of T5 and T5 1.1 (Raffel et al. 2020, arXiv:1910.10683; Shazeer 2020, arXiv:2002.05202), and others.

BART (Lewis et al. 2019, arXiv:1910.13461) has learned positions, and its norms after its residuals. T5Gemma (Zhang et al.
2025, arXiv:2504.06225) has Gemma 2's layers, with rotary positions.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.config import configurable
from capibara.core.types import Batch, Params, UserError
from capibara.kernels.attention.dispatch import AttentionBackend
from capibara.kernels.attention.spec import AttentionSpec
from capibara.kernels.rotary import Pairs
from capibara.models.architectures.registry import ReadBatch, model_of
from capibara.models.cache import dense
from capibara.models.layers import dropout, embedding, layers, stack
from capibara.models.layers.dropout import Dropout, Site
from capibara.models.layers.layers import Activation
from capibara.models.layers.relative import RelativeBias
from capibara.models.layers.rope import Angles, Rope
from capibara.models.parts import transformer
from capibara.models.parts.attention import CrossAttention
from capibara.models.parts.config import (
    OF_DECODERS,
    EmbeddingNorm,
    EmbeddingScale,
    FinalNorm,
    Head,
    HeadBias,
    NormPlacement,
    Positions,
    TransformerConfig,
    refuse,
)
from capibara.models.parts.kinds import LayerKind, Patterned
from capibara.models.parts.transformer import Block, Rows, Shared
from capibara.sharding import RematPolicy, constrain

_OWN = ("embedding_norm", "head_bias")  # which decoders and encoder-decoders compute
_BUCKETS = (32, 128)


class RelativeTables(enum.StrEnum):
    """Whether a stack's layers share one table of relative positions (T5) or each has its own (umT5, scalable T5)."""

    SHARED = "shared"
    EACH_LAYER = "each_layer"


class EncoderEmbedding(enum.StrEnum):
    """Whether the encoder reads the decoder's token embedding, or has its own (T5Gemma)."""

    SHARED = "shared"
    OWN = "own"


class Sines(enum.StrEnum):
    """Sinusoidal positions of a stack.

    stored: a tensor that is not trained (Pegasus). computed: the same values without a tensor (Marian). tensor2tensor: computed,
    with wavelengths that end at 2e4 pi (M2M-100).
    """

    STORED = "stored"
    COMPUTED = "computed"
    TENSOR2TENSOR = "tensor2tensor"


class HeadScale(enum.StrEnum):
    """Factor of the final hidden states before a tied head: embed_dim**-0.5 (T5), or none."""

    INVERSE_SQRT_DIM = "inverse_sqrt_dim"
    NONE = "none"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(Patterned, TransformerConfig):
    """Sizes and variants of an encoder-decoder; see also TransformerConfig. Defaults are T5 1.1's.

    T5 itself uses activation "relu" and head "tied".

    Attributes:
      head_scale: factor of the final hidden states before a tied head.
      num_layers: layers of the decoder.
      num_encoder_layers: layers of the encoder; None: as many as the decoder's.
      positions, rope: relative, those that each stack adds to its embeddings (a learned table, or sines as `sines` says), or
        rotary in self-attention, as configured by `rope`.
      sines: which sinusoidal positions.
      max_length: longest row of either side; positions that are added need one.
      position_offset: for positions that are added: that of a document's first token (BART: 2).
      relative_buckets: number of buckets of relative positions; the encoder uses half of them for keys after the query.
      relative_distance: distances from this one on share a bucket.
      relative_tables: whether the layers of a stack share a table.
      encoder_window: number of positions visible to a query of the encoder in each direction, its own included (LongT5's
        local attention), in local layers where layer_pattern has some; None: all.
      window: number of positions visible to a query of the decoder's local layers, its own included.
      layer_pattern: kinds of the first layers of both stacks, global or local, repeated over all layers.
      encoder_embedding: whether the encoder has a token embedding of its own.
      final_norm: whether the last layers' outputs are normalised (not in BART).
    """

    activation: Activation = Activation.GEGLU
    head: Head = Head.SEPARATE
    head_scale: HeadScale = HeadScale.INVERSE_SQRT_DIM
    attention_scale: float | None = 1.0
    num_encoder_layers: int | None = None
    positions: Positions = Positions.RELATIVE
    rope: Rope = Rope()
    sines: Sines = Sines.STORED
    position_offset: int = 0
    relative_buckets: int = 32
    relative_distance: int = 128
    relative_tables: RelativeTables = RelativeTables.SHARED
    encoder_window: int | None = None
    window: int | None = None
    layer_pattern: tuple[LayerKind, ...] = (LayerKind.GLOBAL,)
    encoder_embedding: EncoderEmbedding = EncoderEmbedding.SHARED
    final_norm: FinalNorm = FinalNorm.LAYER

    @property
    def data_kind(self) -> str:
        return "encoder_decoder"

    @property
    def rotary_pairs(self) -> Pairs:
        return self.rope.pairs

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(self.window if kind is LayerKind.LOCAL else None for kind in self.kinds)

    @property
    def encoder_windows(self) -> tuple[int | None, ...]:
        """As `windows`, of the encoder's layers: in each direction."""
        return tuple(self.spans(causal=False)[kind] for kind in self._encoder_kinds)

    def spans(self, *, causal: bool) -> dict[LayerKind, int | None]:
        """The windows of a stack's kinds of layers."""
        if causal:
            return {LayerKind.GLOBAL: None, LayerKind.LOCAL: self.window}
        in_all = self.encoder_window if LayerKind.LOCAL not in self.layer_pattern else None
        return {LayerKind.GLOBAL: in_all, LayerKind.LOCAL: self.encoder_window}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_encoder_layers is not None and self.num_encoder_layers < 1:
            raise UserError(
                f"EncoderDecoderConfig.num_encoder_layers is {self.num_encoder_layers}, must be at least 1, or None: "
                "as many as num_layers"
            )
        if self.encoder_window is not None and not 1 <= self.encoder_window < 2**31:
            raise UserError(
                f"EncoderDecoderConfig.encoder_window is {self.encoder_window}, must be at least 1, or None: no window"
            )
        _check_pattern(self)
        self._check_positions()
        refuse(self, *(name for name in OF_DECODERS if name not in _OWN), "residual")
        if self.embedding_scale is EmbeddingScale.SQRT_DIM and self.positions.added:
            raise UserError(
                f"EncoderDecoderConfig.embedding_scale ('sqrt_dim') would scale {str(self.positions)} positions: write 'tokens'"
            )

    def _check_positions(self) -> None:
        positions = str(self.positions)
        if self.positions not in (Positions.RELATIVE, Positions.ROPE, Positions.LEARNED, Positions.SINUSOIDAL):
            raise UserError(
                f"EncoderDecoderConfig.positions is {positions!r}, must be 'relative', 'rope', 'learned' or 'sinusoidal'"
            )
        _check_rope(self)
        if self.positions.added and self.max_length is None:
            raise UserError(
                f"EncoderDecoderConfig.max_length has no value, {positions} positions need one: set the longest row length"
            )
        if self.position_offset < 0 or (self.position_offset and not self.positions.added):
            raise UserError(
                f"EncoderDecoderConfig.position_offset ({self.position_offset}) is for positions that are added, and must be "
                "at least 0: leave it out"
            )
        if self.sines is not Sines.STORED and self.positions is not Positions.SINUSOIDAL:
            raise UserError(
                f"EncoderDecoderConfig.sines ({str(self.sines)!r}) is for 'sinusoidal' positions, not for {positions!r}: leave it out"
            )
        if self.positions is Positions.SINUSOIDAL and (self.embed_dim % 2 or self.embed_dim < 4):
            raise UserError(
                f"EncoderDecoderConfig.embed_dim ({self.embed_dim}) must be even and at least 4 for sinusoidal positions: try 512"
            )
        if self.positions is not Positions.RELATIVE:
            if (self.relative_buckets, self.relative_distance) != _BUCKETS or self.relative_tables != "shared":
                raise UserError(
                    "EncoderDecoderConfig.relative_buckets, relative_distance and relative_tables are for relative positions, "
                    f"not for {positions!r}: leave them out"
                )
            return
        if self.relative_buckets < 4 or self.relative_buckets % 4:
            raise UserError(
                f"EncoderDecoderConfig.relative_buckets ({self.relative_buckets}) must be a multiple of 4: try 32"
            )
        if self.relative_distance <= self.relative_buckets // 2:
            raise UserError(
                f"EncoderDecoderConfig.relative_distance ({self.relative_distance}) must be above half of "
                f"relative_buckets ({self.relative_buckets}): try {4 * self.relative_buckets}"
            )
        if self.attention in (AttentionBackend.SPLASH, AttentionBackend.CUDNN):
            raise UserError(
                f"EncoderDecoderConfig.attention ({str(self.attention)!r}) cannot add relative positions: try 'auto'"
            )

    @property
    def untrained(self) -> frozenset[str]:
        tables = [f"{side}/position_embedding" for side in ("encoder", "decoder")]
        is_stored = self.positions is Positions.SINUSOIDAL and self.sines is Sines.STORED
        return frozenset({"output_bias", *(tables if is_stored else ())})

    @property
    def has_table(self) -> bool:
        """Whether each stack has a parameter with its positions."""
        return self.positions.added and self.sines is Sines.STORED

    @property
    def encoder_layers(self) -> int:
        return self.num_layers if self.num_encoder_layers is None else self.num_encoder_layers

    @property
    def _encoder_kinds(self) -> tuple[LayerKind, ...]:
        return tuple(self.layer_pattern[layer % len(self.layer_pattern)] for layer in range(self.encoder_layers))


def _check_pattern(config: EncoderDecoderConfig) -> None:
    kinds = {str(kind) for kind in config.layer_pattern}
    if not kinds or not kinds <= {"global", "local"}:
        raise UserError(
            f"EncoderDecoderConfig.layer_pattern is {[*map(str, config.layer_pattern)]}, must be of 'global' and 'local'"
        )
    has_local, window = "local" in kinds, config.window
    if (window is not None) != has_local or (window is not None and not 1 <= window < 2**31):
        raise UserError(
            f"EncoderDecoderConfig.window is {window}, must be at least 1 where layer_pattern has local layers, and None "
            "elsewhere"
        )
    if has_local and config.encoder_window is None:
        raise UserError(
            "EncoderDecoderConfig.encoder_window has no value, local layers in layer_pattern need one: try 4096"
        )


def _check_rope(config: EncoderDecoderConfig) -> None:
    if config.positions is not Positions.ROPE:
        if config.rope != Rope():
            raise UserError(
                f"EncoderDecoderConfig.rope is set, but positions ({str(config.positions)!r}) are not rotary: leave it out"
            )
        return
    if config.rotary_size % 2 or not config.rope.rotated_dims(config.rotary_size):
        raise UserError(
            f"EncoderDecoderConfig.head_dim ({config.head_size}) must be even, and at least 2 of its dimensions rotated "
            f"(Rope.fraction is {config.rope.fraction}): try 64"
        )
    if config.rope.scaling.by_length:
        raise UserError(
            f"Rope.scaling ({str(config.rope.scaling)!r}) depends on the length of rows, which differs between encoder and "
            "decoder: try 'linear' or 'yarn'"
        )
    config.rope.check(config.rotary_size)


class CrossBlock(Block):
    """A decoder layer: self-attention, cross-attention to the encoder's output, then an MLP or a mixture of experts."""

    def __init__(self, config: EncoderDecoderConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.cross_attention = CrossAttention(config, rngs)
        if config.norm_placement is not NormPlacement.OUTPUT:
            self.cross_attention_norm = config.make_norm(rngs)
        if config.norm_placement.of_outputs:
            self.cross_attention_post_norm = config.make_norm(rngs)

    def __call__(
        self, x_BTD: jax.Array, rows: Rows, shared: Shared, kind: AttentionSpec, layer_kind: LayerKind
    ) -> tuple[jax.Array, stack.Stats]:
        """The layer's output, and its statistics (those of the experts, or none)."""
        stats: stack.Stats = {}

        def attention(x: jax.Array) -> jax.Array:
            y = self.attention(
                x,
                kind=kind,
                segment_ids_BT=rows.segment_ids,
                angles=_angles(rows, layer_kind),
                row_positions_T=shared.row_positions,
                bias_NTS=shared.bias,
                drop=shared.drop,
            )
            return dropout.apply(shared.drop, y, Site.ATTENTION)

        def cross_attention(x: jax.Array) -> jax.Array:
            y = self.cross_attention(
                x,
                kind=dataclasses.replace(kind, causal=False, window=None),
                segment_ids_BT=rows.segment_ids,
                encoded_BSD=rows.encoded,
                encoded_segments_BS=rows.encoded_segments,
                drop=shared.drop,
            )
            return dropout.apply(shared.drop, y, Site.CROSS_ATTENTION)

        x_BTD = self.add(x_BTD, "attention", attention)
        x_BTD = self.add(x_BTD, "cross_attention", cross_attention)
        return self.add(x_BTD, "mlp", self.mlp_part(rows, shared, stats)), stats

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
        """Like `Block.cached`; the cache also has keys and values of the encoder's output, which a prefill writes."""
        assert rows.encoded_segments is not None, "the cache has them"
        segments_BS = rows.encoded_segments
        written = dict(layer)
        if rows.encoded is not None:
            across = self.cross_attention.keys_values(rows.encoded)
            for name, x in zip(("cross_key", "cross_value"), across, strict=True):
                written[name] = x.astype(layer[name].dtype)

        def attention(x: jax.Array) -> jax.Array:
            y, new = self.attention.cached(
                x, layer, now, kind=kind, angles=_angles(rows, layer_kind), bias_NTS=shared.bias, bias_at=shared.bias_at
            )
            written.update({name: x for name, x in new.items() if not name.startswith("cross_")})
            return y

        def cross_attention(x: jax.Array) -> jax.Array:
            keys, values = written["cross_key"], written["cross_value"]
            across = dataclasses.replace(kind, window=None)
            return self.cross_attention.to_encoded(x, keys, values, segments_BS, across)

        x_BTD = self.add(x_BTD, "attention", attention)
        x_BTD = self.add(x_BTD, "cross_attention", cross_attention)
        return self.add(x_BTD, "mlp", self.mlp_part(rows, shared, {})), written


def _angles(rows: Rows, kind: LayerKind) -> Angles | None:
    """What rotates queries and keys in a layer of this kind; None: nothing."""
    return None if rows.angles is None else rows.angles[kind]


class Stack(nnx.Module):
    """The layers of the encoder or the decoder, and their final norm."""

    def __init__(
        self, config: EncoderDecoderConfig, rngs: nnx.Rngs, *, block: type[Block], num_layers: int, causal: bool
    ):
        self.config, self.causal = config, causal
        relative = config.positions is Positions.RELATIVE
        if config.has_table:
            assert config.max_length is not None, "the configuration checks it"
            shape = (config.max_length + config.position_offset, config.embed_dim)
            drawn: layers.Initializer = layers.normal(0.02)
            if config.positions is Positions.SINUSOIDAL:
                drawn = lambda key, shape, dtype: jnp.asarray(layers.sine_table(shape[0], shape[1]), dtype)  # noqa: E731
            self.position_embedding = layers.param(rngs, shape, ("position", "embed"), drawn)
        if config.embedding_norm is EmbeddingNorm.LAYER:
            self.embedding_norm = config.make_norm(rngs)
        self.each_has_positions = config.relative_tables is RelativeTables.EACH_LAYER
        if relative and not self.each_has_positions:
            self.relative_bias = RelativeBias(config, rngs, bidirectional=not causal)

        def make(rngs: nnx.Rngs) -> Block:
            created = block(config, rngs)
            if self.each_has_positions:
                created.relative_bias = RelativeBias(config, rngs, bidirectional=not causal)
            return created

        self.layers = stack.stacked(make, rngs, num_layers)
        if config.final_norm is not FinalNorm.NONE:
            self.norm = config.make_norm(rngs)

    def embed(self, x_BTD: jax.Array, positions_BT: jax.Array | None) -> jax.Array:
        """The first layer's input for token embeddings at these positions."""
        config = self.config
        if config.positions.added:
            assert positions_BT is not None, "batches have them"
            x_BTD = x_BTD + self._positions(positions_BT + config.position_offset).astype(x_BTD.dtype)
        return self.embedding_norm(x_BTD) if config.embedding_norm is EmbeddingNorm.LAYER else x_BTD

    def _positions(self, numbers_BT: jax.Array) -> jax.Array:
        """The positions that are added [B, T, D], by their numbers in a table."""
        config = self.config
        if config.has_table:
            return self.position_embedding[...][numbers_BT]
        if config.sines is Sines.TENSOR2TENSOR:
            return layers.sines(numbers_BT, config.embed_dim)
        assert config.max_length is not None, "the configuration checks it"
        # Not at each position: float32 has too few bits for the angles of late ones.
        return jnp.asarray(layers.sine_table(config.max_length + config.position_offset, config.embed_dim))[numbers_BT]

    def angles(self, positions_BT: jax.Array | None) -> dict[LayerKind, Angles] | None:
        """What rotates queries and keys at these positions, in each kind of layer; None: nothing."""
        config = self.config
        if config.positions is not Positions.ROPE:
            return None
        assert positions_BT is not None, "batches have them"
        return transformer.rotary(config, config.rope, positions_BT, set(config.layer_pattern))

    def _kinds(self) -> dict[LayerKind, AttentionSpec]:
        """What a query sees in each kind of layer."""
        spans = self.config.spans(causal=self.causal)
        return {kind: self.config.attention_kind(causal=self.causal, window=window) for kind, window in spans.items()}

    def normed(self, x_BTD: jax.Array) -> jax.Array:
        """The layers' output as what follows reads it."""
        x_BTD = x_BTD if self.config.final_norm is FinalNorm.NONE else self.norm(x_BTD)
        return constrain(x_BTD, ("batch", "act_time", "act_embed"))

    def _distances(self, block: Block | None = None) -> RelativeBias | None:
        """What adds a bias to the scores of a block, or those of all; None: nothing does."""
        relative_bias = None if block is None else block.relative_bias
        if relative_bias is not None or self.each_has_positions or self.config.positions is not Positions.RELATIVE:
            return relative_bias
        return self.relative_bias

    def __call__(
        self,
        x_BTD: jax.Array,
        rows: Rows,
        remat: RematPolicy,
        step: jax.Array | None,
        row_positions: jax.Array | None = None,
        drop: Dropout | None = None,
    ) -> tuple[jax.Array, stack.Stats]:
        """The normalised output [B, T, D], and the layers' statistics [L, ...]."""
        kinds, length = self._kinds(), x_BTD.shape[1]
        common = self._distances()
        all_bias = None if common is None else common(length, row_positions)

        def apply(
            block: Block, x: jax.Array, rows: Rows, layer_kind: LayerKind, number: jax.Array | int = 0
        ) -> tuple[jax.Array, stack.Stats]:
            bias = all_bias if block.relative_bias is None else block.relative_bias(length, row_positions)
            layer_drop = None if drop is None else drop.at(Site.LAYERS).at(number)
            return block(
                x,
                rows,
                Shared(row_positions=row_positions, bias=bias, step=step, drop=layer_drop),
                kinds[layer_kind],
                layer_kind,
            )

        x_BTD = dropout.apply(drop, x_BTD, Site.EMBEDDING)
        loop, numbered = self.config.layer_loop, drop is not None
        x_BTD, stats = stack.run(
            self.layers,
            x_BTD,
            rows,
            apply,
            self.config.layer_pattern,
            loop,
            remat,
            all_trained=self.config.lora is None,
            numbered=numbered,
        )
        x_BTD = self.normed(x_BTD)
        if drop is not None:  # in the encoder every position has its own mask, as in T5X
            x_BTD = drop(x_BTD, Site.FINAL, shared=-2 if self.causal else None)
        return x_BTD, stats

    def read(
        self, values: Sequence[Params], x_BTD: jax.Array, rows: Rows, cache: dense.Cache, now: dense.PrefillInputs
    ) -> tuple[jax.Array, list[dense.LayerCache]]:
        """The normalised output [B, T, D] for the new tokens, and the layers' updated caches."""
        kinds, of_layers = self._kinds(), list[dense.LayerCache]()
        each = zip(stack.each(self.layers, values), cache["layers"], self.config.kinds, strict=True)
        for block, layer, layer_kind in each:
            distances, shared = self._distances(block), Shared()
            if distances is not None:
                shared = Shared(bias=distances(x_BTD.shape[1]) if now.is_prefill else None, bias_at=distances.at)
            x_BTD, layer = block.cached(x_BTD, layer, now, rows, shared, kinds[layer_kind], layer_kind)
            of_layers.append(layer)
        return self.normed(x_BTD), of_layers


@model_of(EncoderDecoderConfig)
class EncoderDecoder(nnx.Module):
    """An embedding, an encoder, and a decoder that attends to its output; `head` returns the output projection."""

    def __init__(self, config: EncoderDecoderConfig, rngs: nnx.Rngs):
        V, D = config.vocab_size, config.embed_dim
        self.config = config
        self.embedding = layers.param(rngs, (V, D), ("vocab", "embed"), layers.normal(1.0))
        if config.encoder_embedding is EncoderEmbedding.OWN:
            self.encoder_embedding = layers.param(rngs, (V, D), ("vocab", "embed"), layers.normal(1.0))
        self.encoder = Stack(config, rngs, block=Block, num_layers=config.encoder_layers, causal=False)
        self.decoder = Stack(config, rngs, block=CrossBlock, num_layers=config.num_layers, causal=True)
        if config.head is Head.SEPARATE:
            self.output = layers.param(rngs, (V, D), ("vocab", "embed"), layers.normal(D**-0.5))
        if config.head_bias is HeadBias.VOCAB:
            self.output_bias = layers.param(rngs, (V,), ("vocab",), layers.zeros)

    def encode(self, batch: Batch, remat: RematPolicy, step: jax.Array | None) -> tuple[jax.Array, stack.Stats]:
        """The encoder's normalised output [B, S, D] in the compute dtype, and its layers' statistics."""
        tokens, positions = batch["encoder_tokens"], batch.get("encoder_positions")
        rows = Rows(batch["encoder_segment_ids"], self.encoder.angles(positions))
        is_shared = self.config.encoder_embedding is EncoderEmbedding.SHARED
        table_VD = self.embedding[...] if is_shared else self.encoder_embedding[...]
        drop = dropout.of_step(self.config.dropout_rate, step, tokens)
        drop = None if drop is None else drop.at(Site.ENCODER)
        x = self.encoder.embed(self._embed(tokens, table_VD), positions)
        return self.encoder(x, rows, remat, step, drop=drop)

    def __call__(self, batch: Batch, remat: RematPolicy, step: jax.Array | None) -> tuple[jax.Array, stack.Stats]:
        """The decoder's final hidden states [B, T, D], normalised, in the compute dtype; and the layers' statistics.

        A batch with the entry `encoded` [B, S, D], the result of `encode`, is not encoded again. Statistics are those
        of the encoder's layers, if it runs, then of the decoder's.
        """
        of_encoder: stack.Stats = {}
        if "encoded" in batch:
            encoded = batch["encoded"]
        else:
            encoded, of_encoder = self.encode(batch, remat, step)
        rows = Rows(
            batch["segment_ids"],
            self.decoder.angles(batch["positions"]),
            domains=batch.get("domains"),
            encoded=encoded,
            encoded_segments=batch["encoder_segment_ids"],
        )
        drop = dropout.of_step(self.config.dropout_rate, step, batch["tokens"])
        x = self.decoder.embed(self._embed(batch["tokens"], self.embedding[...]), batch["positions"])
        x, stats = self.decoder(x, rows, remat, step, batch.get("row_positions"), drop)
        if of_encoder:
            stats = jax.tree.map(lambda *parts: jnp.concatenate(parts), of_encoder, stats)
        return self._scaled(x), stats

    def start_cache(
        self, batch: int, length: int, dtype: jax.typing.DTypeLike, encoder_length: int | None = None, spare: int = 0
    ) -> dense.Cache:
        """An empty cache for decoder rows of up to `length` tokens and encoder rows of `encoder_length`.

        The caches of local layers have room for `spare` tokens beside their window.
        """
        if encoder_length is None:
            raise ValueError("encoder_length is None, the cache of an encoder-decoder needs it: set it")

        def layer(window: int | None) -> dense.LayerCache:
            # The encoder's keys and values are not quantized: there is one copy, no longer than the encoder's input.
            exact = self.config.dtype.value if jnp.dtype(dtype) == jnp.int8 else dtype
            across = dense.empty_layer(self.config, batch, encoder_length, exact)
            most = None if window is None else window + spare
            layer_cache = dense.empty_layer(self.config, batch, length, dtype, most)
            return layer_cache | {f"cross_{name}": x for name, x in across.items()}

        return {
            "lengths": jnp.zeros(batch, jnp.int32),
            "encoder_segment_ids": jnp.zeros((batch, encoder_length), jnp.int32),
            "layers": tuple(layer(window) for window in self.config.windows),
        }

    def read(
        self, values: Sequence[Params], batch: ReadBatch, cache: dense.Cache, is_prefill: bool
    ) -> tuple[jax.Array, dense.Cache]:
        """Like `Decoder.read`. The batch of a prefill also has the encoder's entries, which are encoded here."""
        now = dense.prefill_inputs(batch["tokens"], batch["counts"], cache, is_prefill)
        encoded, segments = None, cache["encoder_segment_ids"]
        if is_prefill:
            encoded = (
                batch["encoded"] if "encoded" in batch else self.encode(cast(Batch, batch), RematPolicy(), None)[0]
            )
            segments = jnp.asarray(batch["encoder_segment_ids"])
        angles = self.decoder.angles(now.positions)
        rows = Rows(now.real.astype(jnp.int32), angles, encoded=encoded, encoded_segments=segments)
        x = self.decoder.embed(self._embed(batch["tokens"], self.embedding[...]), now.positions)
        x, of_layers = self.decoder.read(values, x, rows, cache, now)
        cache = {"lengths": now.lengths + now.counts, "encoder_segment_ids": segments, "layers": tuple(of_layers)}
        return self._scaled(x), cache

    def head(self) -> jax.Array:
        """The output projection [V, D]: logits are hidden @ head.T. With a bias [V, D + 1], its last column the bias."""
        head_VD = self.embedding[...] if self.config.head is Head.TIED else self.output[...]
        if self.config.head_bias is HeadBias.NONE:
            return head_VD
        dtype = jnp.promote_types(head_VD.dtype, self.config.dtype.value)
        return jnp.concatenate([head_VD.astype(dtype), self.output_bias[...][:, None].astype(dtype)], axis=1)

    def _scaled(self, x: jax.Array) -> jax.Array:
        scaled = self.config.head is Head.TIED and self.config.head_scale is HeadScale.INVERSE_SQRT_DIM
        x = x * self.config.embed_dim**-0.5 if scaled else x
        return x if self.config.head_bias is HeadBias.NONE else jnp.pad(x, ((0, 0), (0, 0), (0, 1)), constant_values=1)

    def _embed(self, tokens: jax.Array, table_VD: jax.Array) -> jax.Array:
        config = self.config
        x = transformer.residual(embedding.lookup(table_VD, tokens, config.dtype.value))
        return x if config.embedding_scale is EmbeddingScale.NONE else x * config.embed_dim**0.5
