"""The decoder of Gemma 3n."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.models.architectures.gemma3n import parts
from capibara.models.architectures.gemma3n.block import Gemma3nBlock
from capibara.models.architectures.gemma3n.config import Gemma3nConfig
from capibara.models.architectures.registry import model_of
from capibara.models.architectures.shared_keys.model import SharedKeysDecoder
from capibara.models.layers import layers
from capibara.models.parts.transformer import residual
from capibara.sharding import constrain

_LEAST_SQUARE = 1e-5  # of a projected stream


@model_of(Gemma3nConfig)
class Gemma3n(SharedKeysDecoder):
    """Embeddings, layers over several streams, final norm."""

    config: Gemma3nConfig

    def __init__(self, config: Gemma3nConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        D, others = config.embed_dim, config.streams - 1
        self.stream_projections = layers.param(rngs, (others, D, D), (None, "embed", None), layers.fan_in(1))
        self.stream_unprojections = layers.param(rngs, (others, D, D), (None, "embed", None), layers.fan_in(1))

    def _block(self, rngs: nnx.Rngs) -> Gemma3nBlock:
        return Gemma3nBlock(self.config, rngs)

    def _entered(self, embedding_BTD: jax.Array) -> jax.Array:
        return self._streams(embedding_BTD)

    def _left(self, x: jax.Array) -> jax.Array:
        return self._joined(x)

    def _streams(self, x_BTD: jax.Array) -> jax.Array:
        """[S, B, T, D]: the embedding and projections of it, all of its magnitude."""
        size = parts.magnitude(x_BTD, jnp.finfo(jnp.float32).tiny)
        others = [self._of_size(x_BTD, weight, size) for weight in self.stream_projections[...]]
        return constrain(jnp.stack([x_BTD, *others]), parts.STREAMS)

    def _joined(self, x_SBTD: jax.Array) -> jax.Array:
        """[B, T, D]: the mean of the first stream and projections of the others, all of its magnitude."""
        size = parts.magnitude(x_SBTD[0], jnp.finfo(jnp.float32).tiny)
        others = [self._of_size(x, weight, size) for x, weight in zip(x_SBTD[1:], self.stream_unprojections[...])]
        return residual(sum(others, x_SBTD[0]) / self.config.streams)

    def _of_size(self, x_BTD: jax.Array, weight_DD: jax.Array, size_BT1: jax.Array) -> jax.Array:
        y_BTD = residual(layers.dense(x_BTD, weight_DD))
        return y_BTD * (size_BT1 / parts.magnitude(y_BTD, _LEAST_SQUARE)).astype(y_BTD.dtype)
