"""Attention to a window of tokens and to entries for earlier windows. All heads share one key, which is its value, too.

B rows, T new tokens, Q queries of a block, S keys of tokens, J entries, N heads, H head_dim, G groups of heads.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.core import projections
from capibara.core.projections import Projection
from capibara.core.types import UserError
from capibara.kernels import rotary
from capibara.kernels.scans import convolution
from capibara.models.architectures.deepseek_v4.compressor import (
    Compressor,
    Entries,
    ends_of_cache,
    ends_of_rows,
    turned,
    windows_of_rows,
)
from capibara.models.architectures.deepseek_v4.config import DeepseekV4Config
from capibara.models.cache.dense import STATE, LayerCache, PrefillInputs
from capibara.models.layers import layers
from capibara.models.parts import indexer
from capibara.models.parts.indexer import IndexQueries
from capibara.models.parts.kinds import LayerKind
from capibara.sharding import constrain

_LEAST_BLOCK = 128  # queries whose scores are computed at once
_UNSEEN = -1e30
_WINDOW, _ENTRY, _INDEX = f"{STATE}_window", "entry", "index"


class Queries(NamedTuple):
    """What queries are, and what they may see.

    Attributes:
      heads: [B, T, N, H].
      documents: [B, T]; a query sees tokens and entries of its own.
      places: [B, T] where they are, in the order of the entries' ends.
      of_index: by which an indexer chooses entries; None: they see all.
    """

    heads: jax.Array
    documents: jax.Array
    places: jax.Array
    of_index: IndexQueries | None


class EntryIndexer(nnx.Module):
    """Chooses entries by entries of its own. Nothing trains it, since which are chosen has no gradient."""

    def __init__(self, config: DeepseekV4Config, rngs: nnx.Rngs):
        sizes, D = config.indexer, config.embed_dim
        self.config = config
        shape = (config.query_rank, sizes.heads, sizes.head_dim)
        self.index_query = layers.projection(rngs, projections.INDEX_QUERY, shape)
        self.index_weight = layers.projection(rngs, projections.INDEX_WEIGHT, (D, sizes.heads))
        by = (projections.INDEX_KEY, projections.INDEX_GATE)
        self.compressor = Compressor(config, LayerKind.COMPRESSED_SPARSE, sizes.head_dim, by, rngs)

    def queries(self, x_BTD: jax.Array, latents_BTQ: jax.Array, angles: rotary.Angles) -> IndexQueries:
        """Those of tokens, by the latents of their queries."""
        sizes = self.config.indexer
        heads = turned(layers.dense(latents_BTQ, self.index_query[...]), angles, sizes.pairs)
        weights = layers.dense(x_BTD, self.index_weight[...]).astype(jnp.float32)
        return IndexQueries(heads * sizes.head_dim**-0.5, weights * sizes.heads**-0.5)


class EntryAttention(nnx.Module):
    """A layer's attention, in the place of parts.attention.Attention."""

    def __init__(self, config: DeepseekV4Config, kind: LayerKind, rngs: nnx.Rngs):
        D, N, H, G, R = config.embed_dim, config.num_heads, config.head_size, config.out_groups, config.out_rank
        self.config, self.kind = config, kind
        norm = lambda size: layers.Norm(size, kind=layers.NormKind.RMS, eps=config.norm_eps, rngs=rngs)  # noqa: E731
        self.query_down = layers.projection(rngs, projections.QUERY_DOWN, (D, config.query_rank))
        self.query_norm = norm(config.query_rank)
        self.query_up = layers.projection(rngs, projections.QUERY_UP, (config.query_rank, N, H))
        self.kv_down = layers.projection(rngs, projections.KV_DOWN, (D, H))
        self.kv_norm = norm(H)
        self.sinks = layers.param(rngs, (N,), ("heads",), layers.zeros)
        shape = (G, N // G * H, R)
        self.group_out = layers.param(rngs, shape, projections.GROUP_OUT.axes, layers.fan_in(1))
        self.out = layers.projection(rngs, projections.OUT, (G, R, D), 0.5 / config.num_layers)
        if kind.compresses:
            by = (projections.ENTRY_KEY, projections.ENTRY_GATE)
            self.compressor = Compressor(config, kind, H, by, rngs)
        if kind is LayerKind.COMPRESSED_SPARSE:
            self.indexer = EntryIndexer(config, rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        segment_ids_BT: jax.Array,
        angles: rotary.Angles,
        row_positions_T: jax.Array | None = None,
    ) -> jax.Array:
        """The results for packed rows.

        Raises:
          UserError: rows are divided.
        """
        if row_positions_T is not None:
            raise UserError(
                "Plan.context is above 1, and entries stand for windows of whole rows: set Plan.context to 1, and share out by "
                "fsdp, tensor or data"
            )
        B, T, _ = x_BTD.shape
        places = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
        queries = self._queries(x_BTD, angles, segment_ids_BT, places)
        keys, entries = self._keys(x_BTD, angles), None
        if self.kind.compresses and T >= self.compressor.rate:
            windows = windows_of_rows(segment_ids_BT, self.compressor.rate)
            documents = jnp.take_along_axis(segment_ids_BT, windows.ends, axis=1)
            index_keys = None
            if self.kind is LayerKind.COMPRESSED_SPARSE:
                by = self.indexer.compressor
                index_keys = by.entries(by.inputs(x_BTD), windows)
            computed = self.compressor.entries(self.compressor.inputs(x_BTD), windows)
            entries = Entries(computed, documents, ends_of_rows(windows), index_keys)
        before = jnp.zeros((B, self.config.width - 1, keys.shape[-1]), keys.dtype)
        outside = jnp.full(before.shape[:2], -1, segment_ids_BT.dtype)
        documents = jnp.concatenate([outside, segment_ids_BT], axis=1)
        y = self._attend(queries, jnp.concatenate([before, keys], axis=1), documents, entries)
        return self._output(y, angles)

    def empty_state(self, batch: int, length: int, dtype: jax.typing.DTypeLike) -> LayerCache:
        """The state of rows of up to `length` tokens that have read nothing."""
        state = {_WINDOW: jnp.zeros((batch, self.config.width - 1, self.config.head_size), dtype)}
        if self.kind.compresses:
            state |= self.compressor.empty_state(_ENTRY, batch, length, dtype)
        if self.kind is LayerKind.COMPRESSED_SPARSE:
            state |= self.indexer.compressor.empty_state(_INDEX, batch, length, dtype)
        return state

    def cached(
        self, x_BTD: jax.Array, layer: LayerCache, now: PrefillInputs, angles: rotary.Angles
    ) -> tuple[jax.Array, LayerCache]:
        """The results for the next tokens of rows, and their updated state."""
        documents = now.real.astype(jnp.int32)
        queries, keys = self._queries(x_BTD, angles, documents, now.positions), self._keys(x_BTD, angles)
        before, entries = layer[_WINDOW], None
        state = {_WINDOW: convolution.last_inputs(keys, before, now.counts)}
        if self.kind.compresses:
            computed, new = self.compressor.cached(_ENTRY, x_BTD, layer, now)
            state, index_keys = state | new, None
            if self.kind is LayerKind.COMPRESSED_SPARSE:
                index_keys, new = self.indexer.compressor.cached(_INDEX, x_BTD, layer, now)
                state |= new
                index_keys = index_keys.astype(keys.dtype)
            ends = ends_of_cache(computed, now.lengths + now.counts, self.compressor.rate)
            entries = Entries(computed.astype(keys.dtype), jnp.ones_like(ends), ends, index_keys)
        places = now.lengths[:, None] - jnp.arange(before.shape[1], 0, -1, dtype=jnp.int32)
        documents = jnp.concatenate([jnp.where(places >= 0, 1, -1), documents], axis=1)
        y = self._attend(queries, jnp.concatenate([before.astype(keys.dtype), keys], axis=1), documents, entries)
        return self._output(y, angles), state

    def _queries(self, x_BTD: jax.Array, angles: rotary.Angles, documents: jax.Array, places: jax.Array) -> Queries:
        latents = self.query_norm(self._dense(projections.QUERY_DOWN, x_BTD))
        q = self._dense(projections.QUERY_UP, latents)
        squares = jnp.mean(jnp.square(q.astype(jnp.float32)), axis=-1, keepdims=True)
        q = q * jax.lax.rsqrt(squares + self.config.norm_eps).astype(q.dtype)
        q = constrain(turned(q, angles, self.config.rotary_pairs), ("batch", "act_time", "act_heads", None))
        has_indexer = self.kind is LayerKind.COMPRESSED_SPARSE
        of_index = self.indexer.queries(x_BTD, latents, angles) if has_indexer else None
        return Queries(layers.named(q, projections.QUERY), documents, places, of_index)

    def _keys(self, x_BTD: jax.Array, angles: rotary.Angles) -> jax.Array:
        """[B, T, H]."""
        keys = self.kv_norm(self._dense(projections.KV_DOWN, x_BTD))[:, :, None]
        return layers.named(turned(keys, angles, self.config.rotary_pairs)[:, :, 0], projections.KEY)

    def _attend(
        self, queries: Queries, k_BSH: jax.Array, documents_BS: jax.Array, entries: Entries | None
    ) -> jax.Array:
        """[B, T, N, H]: a block of queries after the other, so that no scores of whole rows lie in memory.

        Args:
          queries: of T tokens.
          k_BSH, documents_BS: keys of these and of the window - 1 tokens before them.
          entries: None: there are none.
        """
        T, before = queries.places.shape[1], self.config.width - 1
        size = max(_LEAST_BLOCK, before)
        if T <= size:
            return self._attend_block(queries, k_BSH, documents_BS, entries)
        count = -(-T // size)

        def blocks(x: jax.Array) -> jax.Array:
            x = jnp.pad(x, ((0, 0), (0, count * size - T), *((0, 0),) * (x.ndim - 2)))
            return jnp.moveaxis(x.reshape(len(x), count, size, *x.shape[2:]), 1, 0)

        def with_before(x: jax.Array) -> jax.Array:
            first, rest = x[:, :before], blocks(x[:, before:])
            ends = rest[:-1, :, size - before :]
            return jnp.concatenate([jnp.concatenate([first[None], ends]), rest], axis=2)

        @jax.checkpoint
        def block(inputs: tuple[Queries, jax.Array, jax.Array]) -> jax.Array:
            return self._attend_block(*inputs, entries)

        y = jax.lax.map(block, (jax.tree.map(blocks, queries), with_before(k_BSH), with_before(documents_BS)))
        y = jnp.moveaxis(y, 0, 1)
        return y.reshape(len(k_BSH), count * size, *y.shape[3:])[:, :T]

    def _attend_block(
        self, queries: Queries, k_BSH: jax.Array, documents_BS: jax.Array, entries: Entries | None
    ) -> jax.Array:
        q, (Q, S), window = queries.heads, (queries.heads.shape[1], k_BSH.shape[1]), self.config.width
        back_QS = jnp.arange(Q)[:, None] + window - 1 - jnp.arange(S)
        sees_BQS = (queries.documents[:, :, None] == documents_BS[:, None]) & (back_QS >= 0) & (back_QS < window)
        parts = [self._scores(q, k_BSH, sees_BQS)]
        if entries is not None:
            sees_BQJ = (queries.documents[:, :, None] == entries.documents[:, None]) & (
                entries.ends[:, None] <= queries.places[:, :, None]
            )
            entries, sees_BQJ = self._chosen(queries, entries, sees_BQJ)
            parts.append(self._scores(q, entries.keys, sees_BQJ))
        sinks = self.sinks[...].astype(jnp.float32)[:, None, None]
        parts.append(jnp.broadcast_to(sinks, (len(q), *sinks.shape[:1], Q, 1)))
        shares = jax.nn.softmax(jnp.concatenate(parts, axis=-1), axis=-1).astype(q.dtype)
        y = jnp.einsum("BNQS,BSH->BQNH", shares[..., :S], k_BSH)
        if entries is not None:
            y = y + jnp.einsum("BNQJ,BJH->BQNH", shares[..., S:-1], entries.keys)
        return y

    def _chosen(self, queries: Queries, entries: Entries, sees_BQJ: jax.Array) -> tuple[Entries, jax.Array]:
        """The entries that queries see, and which of them each sees."""
        top = self.config.indexer.top
        if entries.index_keys is None or queries.of_index is None or sees_BQJ.shape[-1] <= top:
            return entries, sees_BQJ
        best_BQk = indexer.best(queries.of_index, entries.index_keys, sees_BQJ, top)
        if sees_BQJ.shape[1] == 1:  # a decode step reads these alone
            taken = jnp.take_along_axis(entries.keys, best_BQk[:, 0, :, None], axis=1)
            return entries._replace(keys=taken), jnp.take_along_axis(sees_BQJ, best_BQk, axis=-1)
        chosen = jnp.put_along_axis(jnp.zeros(sees_BQJ.shape, bool), best_BQk, True, axis=-1, inplace=False)
        return entries, chosen & sees_BQJ

    def _scores(self, q_BQNH: jax.Array, k_BSH: jax.Array, sees_BQS: jax.Array) -> jax.Array:
        """[B, N, Q, S] in float32."""
        scores = jnp.einsum("BQNH,BSH->BNQS", q_BQNH, k_BSH, preferred_element_type=jnp.float32)
        return jnp.where(sees_BQS[:, None], scores * self.config.head_size**-0.5, _UNSEEN)

    def _output(self, y_BTNH: jax.Array, angles: rotary.Angles) -> jax.Array:
        B, T, _, _ = y_BTNH.shape
        y = turned(y_BTNH, angles, self.config.rotary_pairs, back=True)
        y = constrain(y, ("batch", "act_time", "act_heads", None)).reshape(B, T, self.config.out_groups, -1)
        y = jnp.einsum("BTGx,GxR->BTGR", y, self.group_out[...].astype(y.dtype))
        return layers.named(self._dense(projections.OUT, y), projections.OUT)

    def _dense(self, by: Projection, x: jax.Array) -> jax.Array:
        weight, adapter = getattr(self, by.name)[...], layers.adapter_of(self, by.name)
        return layers.dense(x, weight, len(by.in_axes), self.config.quantization, adapter)
