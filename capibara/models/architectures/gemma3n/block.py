"""A layer of Gemma 3n, over several residual streams."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.core import projections
from capibara.kernels import rotary
from capibara.kernels.attention.spec import AttentionSpec
from capibara.models.architectures.gemma3n import parts
from capibara.models.architectures.gemma3n.config import Gemma3nConfig
from capibara.models.cache import dense
from capibara.models.parts.attention import Attention
from capibara.models.parts.transformer import MLP, within
from capibara.sharding import constrain

KeysValues = tuple[jax.Array, jax.Array]


class LayerInputs(NamedTuple):
    """The inputs of a layer beside the streams.

    Attributes:
      embedding: [B, T, P] the layer's embedding of each token.
      sparsity: of its MLP.
      width: of its MLP, where layers differ; None: mlp_dim.
      training: whether this is a train step.
    """

    embedding: jax.Array
    sparsity: float
    width: jax.Array | int | None
    training: bool


class Gemma3nAttention(Attention):
    """Attention whose values are normalised too, or that reads another layer's keys and values."""

    def heads(
        self, x_BTD: jax.Array, angles: rotary.Angles, shared: KeysValues | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries of x, and its keys and values; or the shared ones."""
        if shared is not None:
            q = constrain(self._dense(projections.QUERY, x_BTD), ("batch", "act_time", "act_heads", None))
            return rotary.rotate(self.query_norm(q), angles), *shared
        q, k, v = self._heads(x_BTD, x_BTD, angles)
        squares = jnp.mean(jnp.square(v.astype(jnp.float32)), axis=-1, keepdims=True)
        return q, k, (v * jax.lax.rsqrt(squares + self.config.norm_eps)).astype(v.dtype)


class Gemma3nBlock(nnx.Module):
    """Attention and an MLP on the first stream, with AltUp, LAuReL and the per-layer embedding around them."""

    def __init__(self, config: Gemma3nConfig, rngs: nnx.Rngs):
        self.config = config
        self.attention = Gemma3nAttention(config, rngs)
        self.mlp = MLP(config, rngs)
        self.attention_norm, self.attention_post_norm = config.make_norm(rngs), config.make_norm(rngs)
        self.mlp_norm, self.mlp_post_norm = config.make_norm(rngs), config.make_norm(rngs)
        self.altup = parts.AltUp(config, rngs)
        self.laurel = parts.Laurel(config, rngs)
        self.per_layer = parts.PerLayerInput(config, rngs)

    def __call__(
        self,
        x_SBTD: jax.Array,
        inputs: LayerInputs,
        shared: KeysValues | None,
        kind: AttentionSpec,
        angles: rotary.Angles,
        segment_ids_BT: jax.Array,
        row_positions_T: jax.Array | None,
    ) -> tuple[jax.Array, KeysValues]:
        """The streams after the layer, and the keys and values that its attention read.

        Args:
          x_SBTD: the streams.
          inputs: what else is the layer's own.
          shared: keys and values of an earlier layer; None: it makes its own.
          kind: mask and scores.
          angles: of rotary positions.
          segment_ids_BT: document numbers.
          row_positions_T: column of each token in the row as it was before sharding.balanced; None: in order.
        """
        kept: list[KeysValues] = []

        def attention(x: jax.Array) -> jax.Array:
            q, k, v = self.attention.heads(x, angles, shared)
            kept.append((k, v))
            return self.attention(
                x, kind=kind, segment_ids_BT=segment_ids_BT, row_positions_T=row_positions_T, heads=(q, k, v)
            )

        x_SBTD = self._around(x_SBTD, inputs, attention)
        return x_SBTD, kept[0]

    def cached(
        self,
        x_SBTD: jax.Array,
        inputs: LayerInputs,
        source: CachedLayer,
        now: dense.PrefillInputs,
        kind: AttentionSpec,
        angles: rotary.Angles,
    ) -> tuple[jax.Array, CachedLayer]:
        """The streams for the tokens that are read now, and the cache of the layer whose keys and values it read."""
        kept: list[CachedLayer] = []

        def attention(x: jax.Array) -> jax.Array:
            q, k, v = self.attention.heads(x, angles, source.keys_values)
            y, after = self.attention.cached(x, source.before, now, kind=kind, heads=(q, k, v), written=source.after)
            kept.append(CachedLayer(source.before, after, (k, v)))
            return y

        x_SBTD = self._around(x_SBTD, inputs, attention)
        return x_SBTD, kept[0]

    def _around(self, x_SBTD: jax.Array, inputs: LayerInputs, attention: Callable[[jax.Array], jax.Array]) -> jax.Array:
        with jax.named_scope("altup"):
            predicted = self.altup.predict(x_SBTD, inputs.training)
        active = predicted[0]
        with jax.named_scope("attention"):
            x = self.attention_norm(active)
            attended = active + self.attention_post_norm(attention(within(x)))
        with jax.named_scope("laurel"):
            x = constrain((attended + self.laurel(x)) * math.sqrt(0.5), parts.STREAMS[1:])
        with jax.named_scope("mlp"):
            gate = functools.partial(parts.gate, inputs.sparsity, inputs.width)
            y = self.mlp(
                within(self.mlp_norm(x)), on_gate=gate if inputs.sparsity or inputs.width is not None else None
            )
            x = x + self.mlp_post_norm(y)
        with jax.named_scope("altup"):
            corrected = self.altup.correct(predicted, x, inputs.training)
            first = corrected[0] * self.altup.correct_scale[...].astype(x.dtype)
        with jax.named_scope("per_layer"):
            added = self.per_layer(constrain(first, parts.STREAMS[1:]), inputs.embedding)
        return constrain(jnp.concatenate([corrected[:1], corrected[1:] + added]), parts.STREAMS)


class CachedLayer(NamedTuple):
    """The cache of a layer while tokens are read.

    Attributes:
      before: as it was.
      after: with the tokens that are read now; None: they are not written yet.
      keys_values: theirs, [B, T, K, H]; None: they are not made yet.
    """

    before: dense.LayerCache
    after: dense.LayerCache | None = None
    keys_values: KeysValues | None = None
