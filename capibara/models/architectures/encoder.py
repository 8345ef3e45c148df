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
from capibara.models.layers.layers import Activation, Bias, NormKind
from capibara.models.parts import transformer
from capibara.models.parts.config import (
    OF_DECODERS,
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


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(TransformerConfig):
    """Sizes and variants of an encoder; see also TransformerConfig. Defaults are BERT's.

    Attributes:
      token_types: number of token types with an embedding ("segments" in BERT). A batch without an entry `token_types`
        [B, T] uses the first one.
      max_length: longest row; its positions are learned.
    """

    norm: NormKind = NormKind.LAYER
    norm_eps: float = 1e-12
    norm_placement: NormPlacement = NormPlacement.POST
    activation: Activation = Activation.GELU_EXACT
    bias: Bias = Bias.ALL
    max_length: int | None = 512
    token_types: int = 2

    @property
    def data_kind(self) -> str:
        return "masked"

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(self, *OF_DECODERS)
        if self.max_length is None:
            raise UserError("EncoderConfig.max_length has no value, learned positions need one: set the row length")
        if self.token_types < 1:
            raise UserError(f"EncoderConfig.token_types is {self.token_types}, must be at least 1")


@model_of(EncoderConfig)
class Encoder(nnx.Module):
    """Embeddings, layers, and the transform before the output projection; `head` returns the latter."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        V, D = config.vocab_size, config.embed_dim
        assert config.max_length is not None, "the configuration checks it"
        self.config = config
        small = layers.normal(0.02)
        self.embedding = layers.param(rngs, (V, D), ("vocab", "embed"), small)
        self.position_embedding = layers.param(rngs, (config.max_length, D), ("position", "embed"), small)
        self.type_embedding = layers.param(rngs, (config.token_types, D), ("position", "embed"), small)
        self.embedding_norm = config.make_norm(rngs)
        self.layers = stack.stacked(lambda rngs: Block(config, rngs), rngs, config.num_layers)
        if config.norm_placement is not NormPlacement.POST:
            self.final_norm = config.make_norm(rngs)
        self.transform = layers.param(rngs, (D, D), ("embed", "norm"), layers.fan_in(0))
        self.transform_bias = layers.param(rngs, (D,), ("norm",), layers.zeros)
        self.transform_norm = config.make_norm(rngs)
        if config.head is Head.SEPARATE:
            self.output = layers.param(rngs, (V, D), ("vocab", "embed"), layers.normal(D**-0.5))
        self.output_bias = layers.param(rngs, (V,), ("vocab",), layers.zeros)

    def __call__(self, batch: Batch, remat: RematPolicy, step: jax.Array | None) -> tuple[jax.Array, stack.Stats]:
        """The input of the head, [B, T, D + 1] in the compute dtype, and the layers' statistics.

        The last of its D + 1 columns is 1, for the output bias.
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
        # The transform uses the encoder's activation, except a gated one, which needs two projections.
        activation = Activation.GELU if config.activation.gated else config.activation
        x = self.transform_norm(activation(x))
        return jnp.pad(x, ((0, 0), (0, 0), (0, 1)), constant_values=1), stats

    def head(self) -> jax.Array:
        """The output projection [V, D + 1], its last column the bias: logits are hidden @ head.T."""
        head_VD = self.embedding[...] if self.config.head is Head.TIED else self.output[...]
        dtype = jnp.promote_types(head_VD.dtype, self.config.dtype.value)  # not that of a frozen embedding for the bias
        return jnp.concatenate([head_VD.astype(dtype), self.output_bias[...][:, None].astype(dtype)], axis=1)

    def _embed(self, batch: Batch) -> jax.Array:
        config = self.config
        x = embedding.lookup(self.embedding[...], batch["tokens"], config.dtype.value)
        if config.embedding_scale is EmbeddingScale.SQRT_DIM:
            x = x * config.embed_dim**0.5
        types = self.type_embedding[...][batch["token_types"] if "token_types" in batch else 0]
        positions = self.position_embedding[...][batch["positions"]]
        # In float32, in case they are stored in a smaller dtype.
        x = x + (positions.astype(jnp.float32) + types.astype(jnp.float32)).astype(x.dtype)
        return transformer.residual(self.embedding_norm(x))
