"""A layer that computes keys and values, or reads those of an earlier layer."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.core import projections
from capibara.kernels import rotary
from capibara.kernels.attention.spec import AttentionSpec
from capibara.models.architectures.shared_keys.config import SharedKeysConfig
from capibara.models.cache import dense
from capibara.models.layers.stack import Stats
from capibara.models.parts.attention import Attention
from capibara.models.parts.kinds import LayerKind
from capibara.sharding import constrain

KeysValues = tuple[jax.Array, jax.Array]
Branch = Callable[[jax.Array], jax.Array]


class LayerInputs(NamedTuple):
    """The inputs of a layer beside the residual stream.

    Attributes:
      kind: of the layer.
      embedding: [B, T, P] the layer's embedding of each token; None: it has none.
      sparsity: of its MLP.
      width: of its MLP, where layers differ; None: mlp_dim.
      training: whether this is a train step.
      segment_ids: [B, T] document numbers; 0: padding.
      stats: what experts say of their choice is put into it.
    """

    kind: LayerKind
    embedding: jax.Array | None
    sparsity: float
    width: jax.Array | int | None
    training: bool
    segment_ids: jax.Array
    stats: Stats


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


class NormedAttention(Attention):
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


class SharedKeysBlock(nnx.Module):
    """A layer of a decoder with shared keys and values; a subclass has its parts and puts them together."""

    config: SharedKeysConfig

    @abc.abstractmethod
    def around(self, x: jax.Array, inputs: LayerInputs, attention: Branch) -> jax.Array:
        """The residual stream, or streams, after the layer, whose attention is the given one."""

    def attention_of(self, kind: LayerKind) -> NormedAttention:
        """The attention of a layer of this kind."""
        module = getattr(self, self.config.attention_module(kind))
        assert isinstance(module, NormedAttention), "a subclass makes it"
        return module

    def __call__(
        self,
        x: jax.Array,
        inputs: LayerInputs,
        shared: KeysValues | None,
        spec: AttentionSpec,
        angles: rotary.Angles,
        segment_ids_BT: jax.Array,
        row_positions_T: jax.Array | None,
    ) -> tuple[jax.Array, KeysValues]:
        """The residual stream after the layer, and the keys and values that its attention read.

        Args:
          x: the residual stream, or streams.
          inputs: what else is the layer's own.
          shared: keys and values of an earlier layer; None: it makes its own.
          spec: mask and scores.
          angles: of rotary positions.
          segment_ids_BT: document numbers.
          row_positions_T: column of each token in the row as it was before sharding.balanced; None: in order.
        """
        retained: list[KeysValues] = []
        module = self.attention_of(inputs.kind)

        def attention(x: jax.Array) -> jax.Array:
            q, k, v = module.heads(x, angles, shared)
            retained.append((k, v))
            return module(x, kind=spec, segment_ids_BT=segment_ids_BT, row_positions_T=row_positions_T, heads=(q, k, v))

        x = self.around(x, inputs, attention)
        return x, retained[0]

    def cached(
        self,
        x: jax.Array,
        inputs: LayerInputs,
        source: CachedLayer,
        now: dense.PrefillInputs,
        spec: AttentionSpec,
        angles: rotary.Angles,
    ) -> tuple[jax.Array, CachedLayer]:
        """The stream for the tokens that are read now, and the cache of the layer whose keys and values it read."""
        retained: list[CachedLayer] = []
        module = self.attention_of(inputs.kind)

        def attention(x: jax.Array) -> jax.Array:
            q, k, v = module.heads(x, angles, source.keys_values)
            y, after = module.cached(x, source.before, now, kind=spec, heads=(q, k, v), written=source.after)
            retained.append(CachedLayer(source.before, after, (k, v)))
            return y

        x = self.around(x, inputs, attention)
        return x, retained[0]
