"""The bidirectional encoder of BERT with its masked-language-model head (Devlin et al. 2019, arXiv:1810.04805)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.config import configurable
from capibara.core.types import Batch, UserError
from capibara.models.architectures.registry import model_of
from capibara.models.layers import dropout, embedding, layers, stack
from capibara.models.layers.dropout import Site
from capibara.models.layers.layers import Activation, Bias, Norm, NormKind
from capibara.models.parts import transformer
from capibara.models.parts.config import (
    OF_DECODERS,
    EmbeddingNorm,
    EmbeddingScale,
    Head,
    LayerKind,
    NormPlacement,
    TransformerConfig,
    refuse,
)
from capibara.models.parts.transformer import Block, Rows, Shared
from capibara.sharding import RematPolicy, constrain

_PATTERN = (LayerKind.GLOBAL,)
_PARAMETERS = (Activation.XIELU,)  # activations with parameters


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(TransformerConfig):
    """Sizes and variants of an encoder; see also TransformerConfig. Defaults are BERT's.

    Attributes:
      token_types: number of token types with an embedding ("segments" in BERT); 0: there are none. A batch without an
        entry `token_types` [B, T] uses the first one.
      task_types: number of tasks with an embedding, of which all rows have the first (ERNIE); 0: there are none.
      max_length: longest row; its positions are learned.
      position_offset: the table's row of a document's first token (RoBERTa: 2).
      embedding_dim: width of the embeddings, which a projection widens to embed_dim, and of the head (ELECTRA); None:
        embed_dim, without a projection.
      embedding_norm: whether the sum of the embeddings is normalised (not in Megatron's BERT).
      transform_activation: of the transform before the head; None: the layers', or gelu where that is gated.
    """

    norm: NormKind = NormKind.LAYER
    norm_eps: float = 1e-12
    norm_placement: NormPlacement = NormPlacement.POST
    activation: Activation = Activation.GELU_EXACT
    bias: Bias = Bias.ALL
    max_length: int | None = 512
    token_types: int = 2
    task_types: int = 0
    position_offset: int = 0
    embedding_dim: int | None = None
    embedding_norm: EmbeddingNorm = EmbeddingNorm.LAYER
    transform_activation: Activation | None = None

    @property
    def data_kind(self) -> str:
        return "masked"

    @property
    def embedding_width(self) -> int:
        """The width of the embeddings and of the head."""
        return self.embed_dim if self.embedding_dim is None else self.embedding_dim

    @property
    def before_head(self) -> Activation:
        """The transform's activation: it has no second projection for a gated one."""
        if self.transform_activation is not None:
            return self.transform_activation
        return Activation.GELU if self.activation.gated else self.activation

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(self, *(name for name in OF_DECODERS if name != "embedding_norm"))
        if self.max_length is None:
            raise UserError("EncoderConfig.max_length has no value, learned positions need one: set the row length")
        for name in ("token_types", "task_types", "position_offset"):
            if getattr(self, name) < 0:
                raise UserError(f"EncoderConfig.{name} is {getattr(self, name)}, must be at least 0: 0 is none")
        if self.embedding_dim is not None and (self.embedding_dim < 1 or self.embedding_dim == self.embed_dim):
            raise UserError(
                f"EncoderConfig.embedding_dim is {self.embedding_dim}, must be at least 1 and not embed_dim "
                f"({self.embed_dim}): leave it out for one width"
            )
        if self.transform_activation in (*_PARAMETERS, *(one for one in Activation if one.gated)):
            raise UserError(
                f"EncoderConfig.transform_activation is {str(self.transform_activation)!r}, the transform has one projection "
                "and no parameters for it: try 'gelu'"
            )


@model_of(EncoderConfig)
class Encoder(nnx.Module):
    """Embeddings, layers, and the transform before the output projection; `head` returns the latter."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        V, D, E = config.vocab_size, config.embed_dim, config.embedding_width
        assert config.max_length is not None, "the configuration checks it"
        self.config = config
        small, rows = layers.normal(0.02), config.max_length + config.position_offset
        self.embedding = layers.param(rngs, (V, E), ("vocab", "embed"), small)
        self.position_embedding = layers.param(rngs, (rows, E), ("position", "embed"), small)
        if config.token_types:
            self.type_embedding = layers.param(rngs, (config.token_types, E), ("position", "embed"), small)
        if config.task_types:
            self.task_embedding = layers.param(rngs, (config.task_types, E), ("position", "embed"), small)
        if config.embedding_norm is EmbeddingNorm.LAYER:
            self.embedding_norm = self._norm(E, rngs)
        if config.embedding_dim is not None:
            self.projection = layers.param(rngs, (E, D), ("norm", "embed"), layers.fan_in(0))
            self.projection_bias = layers.param(rngs, (D,), ("norm",), layers.zeros)
        self.layers = stack.stacked(lambda rngs: Block(config, rngs), rngs, config.num_layers)
        if config.norm_placement is not NormPlacement.POST:
            self.final_norm = config.make_norm(rngs)
        self.transform = layers.param(rngs, (D, E), ("embed", "norm"), layers.fan_in(0))
        self.transform_bias = layers.param(rngs, (E,), ("norm",), layers.zeros)
        self.transform_norm = self._norm(E, rngs)
        if config.head is Head.SEPARATE:
            self.output = layers.param(rngs, (V, E), ("vocab", "embed"), layers.normal(E**-0.5))
        self.output_bias = layers.param(rngs, (V,), ("vocab",), layers.zeros)

    def _norm(self, width: int, rngs: nnx.Rngs) -> Norm:
        config = self.config
        return Norm(width, kind=config.norm, eps=config.norm_eps, rngs=rngs, scale=config.norm_scale)

    def __call__(self, batch: Batch, remat: RematPolicy, step: jax.Array | None) -> tuple[jax.Array, stack.Stats]:
        """The input of the head, [B, T, E + 1] in the compute dtype, and the layers' statistics.

        The last of its E + 1 columns is 1, for the output bias.
        """
        config = self.config
        rows = Rows(batch["segment_ids"], domains=batch.get("domains"))
        shared = Shared(row_positions=batch.get("row_positions"), step=step)
        kind = config.attention_kind(causal=False)

        drop = dropout.of_step(config.dropout_rate, step, batch["tokens"])

        def apply(
            block: Block, x: jax.Array, rows: Rows, layer_kind: LayerKind, number: jax.Array | int = 0
        ) -> tuple[jax.Array, stack.Stats]:
            own = shared if drop is None else shared._replace(drop=drop.at(Site.LAYERS).at(number))
            return block(x, rows, own, kind, layer_kind)

        x = dropout.apply(drop, self._embed(batch), Site.EMBEDDING)
        loop, numbered = config.layer_loop, drop is not None
        x, stats = stack.run(
            self.layers, x, rows, apply, _PATTERN, loop, remat, all_trained=config.lora is None, numbered=numbered
        )
        if config.norm_placement is not NormPlacement.POST:
            x = self.final_norm(x)
        x = constrain(x, ("batch", "act_time", "act_embed"))
        x = layers.dense(x, self.transform[...]) + self.transform_bias[...].astype(x.dtype)
        x = self.transform_norm(config.before_head(x))
        return jnp.pad(x, ((0, 0), (0, 0), (0, 1)), constant_values=1), stats

    def head(self) -> jax.Array:
        """The output projection [V, E + 1], its last column the bias: logits are hidden @ head.T."""
        head_VD = self.embedding[...] if self.config.head is Head.TIED else self.output[...]
        dtype = jnp.promote_types(head_VD.dtype, self.config.dtype.value)  # not that of a frozen embedding for the bias
        return jnp.concatenate([head_VD.astype(dtype), self.output_bias[...][:, None].astype(dtype)], axis=1)

    def _embed(self, batch: Batch) -> jax.Array:
        config = self.config
        x = embedding.lookup(self.embedding[...], batch["tokens"], config.dtype.value)
        if config.embedding_scale is EmbeddingScale.SQRT_DIM:
            x = x * config.embed_dim**0.5
        at = batch["positions"]
        positions = self.position_embedding[...][at + config.position_offset if config.position_offset else at]
        added = positions.astype(jnp.float32)  # in case they are stored in a smaller dtype
        if config.token_types:
            types = self.type_embedding[...][batch["token_types"] if "token_types" in batch else 0]
            added = added + types.astype(jnp.float32)
        if config.task_types:
            added = added + self.task_embedding[...][0].astype(jnp.float32)
        x = x + added.astype(x.dtype)
        if config.embedding_norm is EmbeddingNorm.LAYER:
            x = self.embedding_norm(x)
        if config.embedding_dim is not None:
            x = layers.dense(x, self.projection[...]) + self.projection_bias[...].astype(x.dtype)
        return transformer.residual(x)
