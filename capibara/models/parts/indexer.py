"""Sparse attention: a query sees the keys, or the blocks of keys, alone that an indexer scores highest.

Shape letters: M heads of the indexer, I size of a head, Q query latents, J blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.core import projections
from capibara.core.types import UserError
from capibara.kernels import rotary
from capibara.kernels.cached_attention import dispatch as cached_attention
from capibara.models.cache import dense, paged
from capibara.models.layers import layers
from capibara.models.parts.config import TransformerConfig
from capibara.models.parts.kinds import BlockIndexer
from capibara.models.parts.latent_sizes import Indexer

_UNSEEN = -1e30  # added to the scores of keys that are not chosen


class IndexQueries(NamedTuple):
    """What keys are scored with.

    Attributes:
      heads: [B, T, M, I].
      weights: [B, T, M], of the heads.
    """

    heads: jax.Array
    weights: jax.Array


class KeyIndexer(nnx.Module):
    """Scores of keys for each query (DeepSeek-V3.2, 2025).

    Nothing trains its weights, since which keys are chosen has no gradient.
    """

    def __init__(self, sizes: Indexer, embed_dim: int, query_rank: int, rngs: nnx.Rngs):
        self.sizes = sizes
        shape = (query_rank, sizes.heads, sizes.head_dim)
        self.index_query = layers.projection(rngs, projections.INDEX_QUERY, shape)
        self.index_key = layers.projection(rngs, projections.INDEX_KEY, (embed_dim, sizes.head_dim))
        self.index_weight = layers.projection(rngs, projections.INDEX_WEIGHT, (embed_dim, sizes.heads))
        self.norm = layers.Norm(sizes.head_dim, kind=layers.NormKind.LAYER, eps=1e-6, rngs=rngs)

    def queries(self, x_BTD: jax.Array, latents_BTQ: jax.Array, angles: rotary.Angles | None) -> IndexQueries:
        """The queries of tokens."""
        heads = self._rotated(layers.dense(latents_BTQ, self.index_query[...]), angles)
        weights = layers.dense(x_BTD, self.index_weight[...]).astype(jnp.float32)
        return IndexQueries(heads * self.sizes.head_dim**-0.5, weights * self.sizes.heads**-0.5)

    def keys(self, x_BTD: jax.Array, angles: rotary.Angles | None) -> jax.Array:
        """The keys of tokens, [B, T, I]."""
        keys = self.norm(layers.dense(x_BTD, self.index_key[...]))
        return self._rotated(keys[:, :, None], angles)[:, :, 0]

    def bias(self, queries: IndexQueries, k_BSI: jax.Array, visible_BTS: jax.Array, num_heads: int) -> jax.Array:
        """What is added to the scores so that each query sees the best of its visible keys alone, [B, N, T, S]."""
        best_BTk = best(queries, k_BSI, visible_BTS, self.sizes.top)
        chosen_BTS = jnp.put_along_axis(jnp.zeros(visible_BTS.shape, bool), best_BTk, True, axis=-1, inplace=False)
        bias_BTS = jnp.where(chosen_BTS, 0.0, _UNSEEN)
        B, T, S = bias_BTS.shape
        return jnp.broadcast_to(bias_BTS[:, None], (B, num_heads, T, S))

    def _rotated(self, x_BTNI: jax.Array, angles: rotary.Angles | None) -> jax.Array:
        return x_BTNI if angles is None else rotary.rotate(x_BTNI, angles, self.sizes.pairs)


def best(queries: IndexQueries, k_BSI: jax.Array, visible_BTS: jax.Array, top: int) -> jax.Array:
    """The numbers [B, T, k] of the keys that score highest; where fewer are visible, of others, too."""

    def add(total_BTS: jax.Array, head: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        q_BTI, weight_BT = head
        scores = jnp.einsum("BTI,BSI->BTS", q_BTI.astype(jnp.float32), k_BSI.astype(jnp.float32))
        return total_BTS + weight_BT[..., None] * jax.nn.relu(scores), None

    of_heads = jnp.moveaxis(queries.heads, 2, 0), jnp.moveaxis(queries.weights, 2, 0)
    total_BTS, _ = jax.lax.scan(add, jnp.zeros(visible_BTS.shape, jnp.float32), of_heads)
    total_BTS = jax.lax.stop_gradient(jnp.where(visible_BTS, total_BTS, -jnp.inf))
    return jax.lax.top_k(total_BTS, min(top, total_BTS.shape[-1]))[1]


class Blocks(NamedTuple):
    """Where keys are that queries may see.

    Attributes:
      of_queries, of_keys: [B, T], [B, S], numbers of blocks in their documents.
      visible: [B, T, S], whether a query may see a key.
      numbers: [B, S], numbers of the keys' blocks in the row, below `total`.
      total: how many blocks a row may have.
    """

    of_queries: jax.Array
    of_keys: jax.Array
    visible: jax.Array
    numbers: jax.Array
    total: int


def blocks_of_rows(segment_ids_BT: jax.Array, block: int) -> Blocks:
    """The blocks of so many tokens in packed rows."""
    T, positions = segment_ids_BT.shape[1], layers.counted(segment_ids_BT)
    visible = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]) & jnp.tril(jnp.ones((T, T), bool))
    numbers = jnp.cumsum(positions % block == 0, axis=1) - 1
    return Blocks(positions // block, positions // block, visible, numbers, T)


def blocks_of_cache(positions_BT: jax.Array, of_keys_BS: jax.Array, block: int) -> Blocks:
    """The blocks of cached keys at these positions, which are negative where there is none."""
    visible = (of_keys_BS[:, None] >= 0) & (of_keys_BS[:, None] <= positions_BT[..., None])
    of_keys = jnp.maximum(of_keys_BS, 0) // block
    return Blocks(positions_BT // block, of_keys, visible, of_keys, of_keys_BS.shape[1] // block + 1)


class CachedChoice(NamedTuple):
    """What attention to a cache reads where queries see some keys alone.

    Attributes:
      q, k, v: as they are cached.
      written: the updated cache.
      bias_at: what is added to the scores of cached keys (dense.attend); None: queries see all.
      row_bias: [B, N, T, T], what is added to those of a prefill; None: queries see all.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    written: dense.LayerCache
    bias_at: dense.PositionBias | None
    row_bias: jax.Array | None


class BlockChooser(nnx.Module):
    """Scores of blocks of keys for each query, those of their best keys; nothing trains its weights.

    A cache has its keys behind the values, a part of them for each key/value head.
    """

    def __init__(self, config: TransformerConfig, sizes: BlockIndexer, rngs: nnx.Rngs):
        D, M, I = config.embed_dim, sizes.heads, sizes.head_dim
        self.config, self.sizes = config, sizes
        self.block_query = layers.projection(rngs, projections.BLOCK_QUERY, (D, M, I))
        self.block_key = layers.projection(rngs, projections.BLOCK_KEY, (D, I))
        self.query_norm, self.key_norm = (
            layers.Norm(I, kind=layers.NormKind.RMS, eps=config.norm_eps, rngs=rngs, scale=config.norm_scale)
            for _ in range(2)
        )

    def of_rows(
        self,
        x_BTD: jax.Array,
        angles: rotary.Angles | None,
        segments_BT: jax.Array,
        row_positions_T: jax.Array | None = None,
    ) -> jax.Array | None:
        """What is added to the scores of whole rows, [B, N, T, T]; None: queries see all keys."""
        if self._sees_all(x_BTD.shape[1]):
            return None
        if row_positions_T is not None:
            raise UserError(
                "Plan.context is above 1, and DecoderConfig.block_indexer chooses keys of whole rows: set Plan.context to 1, and "
                "share out by fsdp, tensor or data"
            )
        blocks = blocks_of_rows(segments_BT, self.sizes.block)
        return self.bias(self.queries(x_BTD, angles), self.keys(x_BTD, angles), blocks)

    def of_cache(
        self,
        x_BTD: jax.Array,
        angles: rotary.Angles | None,
        heads: tuple[jax.Array, jax.Array, jax.Array],
        layer: dense.LayerCache,
        now: dense.PrefillInputs,
    ) -> CachedChoice:
        """The same for cached tokens; `heads` are the queries, keys and values of the new ones."""
        K, size = self.config.cached_heads
        padding = size - self.config.head_size
        keys = self.keys(x_BTD, angles).astype(heads[2].dtype)
        parts_BTKE = jnp.pad(keys, ((0, 0), (0, 0), (0, K * padding - keys.shape[-1])))
        parts_BTKE = parts_BTKE.reshape(*keys.shape[:2], K, padding)
        q, k = (jnp.pad(x, ((0, 0),) * 3 + ((0, padding),)) for x in heads[:2])
        v = jnp.concatenate([heads[2], parts_BTKE], axis=-1)
        written = (paged if paged.is_paged(layer) else dense).write(layer, k, v, now)

        def bias(positions_BT: jax.Array, of_keys_BS: jax.Array) -> jax.Array:
            stored_BSKE = jnp.swapaxes(cached_values(layer, written, v, now)[..., -padding:], 1, 2)
            keys_BSI = stored_BSKE.reshape(*stored_BSKE.shape[:2], -1)[..., : keys.shape[-1]]
            blocks = blocks_of_cache(positions_BT, of_keys_BS, self.sizes.block)
            return self.bias(self.queries(x_BTD, angles), keys_BSI, blocks)

        of_prefill = now.is_prefill and not dense.attends_quantized_cache(layer, q)
        row_bias = self.of_rows(x_BTD, angles, now.real.astype(jnp.int32)) if of_prefill else None
        sees_all = self._sees_all(paged.capacity({"layers": (layer,)}))
        return CachedChoice(q, k, v, written, None if sees_all else bias, row_bias)

    def _sees_all(self, length: int) -> bool:
        return length <= self.sizes.top * self.sizes.block

    def queries(self, x_BTD: jax.Array, angles: rotary.Angles | None) -> jax.Array:
        """The queries of tokens, [B, T, M, I]."""
        return self._rotated(self.query_norm(layers.dense(x_BTD, self.block_query[...])), angles)

    def keys(self, x_BTD: jax.Array, angles: rotary.Angles | None) -> jax.Array:
        """The keys of tokens, [B, T, I]."""
        keys = self.key_norm(layers.dense(x_BTD, self.block_key[...]))
        return self._rotated(keys[:, :, None], angles)[:, :, 0]

    def bias(self, q_BTMI: jax.Array, k_BSI: jax.Array, blocks: Blocks) -> jax.Array:
        """What is added to the scores so that each query sees its best blocks alone, [B, N, T, S]."""
        best = jax.vmap(lambda scores_TS, of_S: jax.ops.segment_max(scores_TS.T, of_S, blocks.total).T)
        back_BTS = blocks.of_queries[:, :, None] - blocks.of_keys[:, None, :]
        recent_BTS = (back_BTS < self.sizes.recent) & blocks.visible

        def chosen(q_BTI: jax.Array) -> jax.Array:
            scores = jnp.einsum("BTI,BSI->BTS", q_BTI.astype(jnp.float32), k_BSI.astype(jnp.float32))
            scores = jnp.where(recent_BTS, jnp.inf, jnp.where(blocks.visible, scores, -jnp.inf))
            scores_BTJ = best(jax.lax.stop_gradient(scores), blocks.numbers)
            _, top_BTk = jax.lax.top_k(scores_BTJ, min(self.sizes.top, blocks.total))
            chosen_BTJ = jnp.put_along_axis(jnp.zeros(scores_BTJ.shape, bool), top_BTk, True, axis=-1, inplace=False)
            return jnp.take_along_axis(chosen_BTJ, blocks.numbers[:, None], axis=-1)

        chosen_MBTS = jax.lax.map(chosen, jnp.moveaxis(q_BTMI, 2, 0))
        bias_BMTS = jnp.moveaxis(jnp.where(chosen_MBTS, 0.0, _UNSEEN), 0, 1)
        return jnp.repeat(bias_BMTS, self.config.num_heads // self.sizes.heads, axis=1)

    def _rotated(self, x_BTNI: jax.Array, angles: rotary.Angles | None) -> jax.Array:
        return x_BTNI if angles is None else rotary.rotate(x_BTNI, angles, self.config.rotary_pairs)


def cached_values(
    before: dense.LayerCache, written: dense.LayerCache, v_BTKH: jax.Array, now: dense.PrefillInputs
) -> jax.Array:
    """The values [B, K, S, H] of a cache, in the order in which attention to it reads them."""
    names = ("value", "value_scale")
    if paged.is_paged(written):
        pools = {name: written[f"{name}_pages"] for name in names if f"{name}_pages" in written}
        rows = {name: cached_attention.gathered(pool, written["table"]) for name, pool in pools.items()}
    elif now.positions.shape[1] == 1:
        of_rows = dense.rows_of(written)
        rows = {name: of_rows[name] for name in names if name in of_rows}
    else:
        before = dense.rows_of(before)
        stored = dense.as_stored(before["value"].dtype, v_BTKH, v_BTKH)
        rows = {
            name: jnp.concatenate([before[name], jnp.swapaxes(stored[name], 1, 2)], axis=2)
            for name in names
            if name in before
        }
    values = rows["value"].astype(jnp.float32)
    return values * rows["value_scale"][..., None] if "value_scale" in rows else values
