"""DeepSeek sparse attention: a query sees the keys alone that an indexer scores highest (DeepSeek-V3.2, 2025).

Shape letters: M heads of the indexer, I size of a head, Q query latents.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.core import projections
from capibara.kernels import rotary
from capibara.kernels.cached_attention import dispatch as cached_attention
from capibara.models.cache import dense, paged
from capibara.models.layers import layers
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
    """Scores of keys for each query; nothing trains its weights, since which keys are chosen has no gradient."""

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

        def add(total_BTS: jax.Array, head: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            q_BTI, weight_BT = head
            scores = jnp.einsum("BTI,BSI->BTS", q_BTI.astype(jnp.float32), k_BSI.astype(jnp.float32))
            return total_BTS + weight_BT[..., None] * jax.nn.relu(scores), None

        of_heads = jnp.moveaxis(queries.heads, 2, 0), jnp.moveaxis(queries.weights, 2, 0)
        total_BTS, _ = jax.lax.scan(add, jnp.zeros(visible_BTS.shape, jnp.float32), of_heads)
        total_BTS = jax.lax.stop_gradient(jnp.where(visible_BTS, total_BTS, -jnp.inf))
        _, best_BTk = jax.lax.top_k(total_BTS, min(self.sizes.top, total_BTS.shape[-1]))
        chosen_BTS = jnp.put_along_axis(jnp.zeros(visible_BTS.shape, bool), best_BTk, True, axis=-1, inplace=False)
        bias_BTS = jnp.where(chosen_BTS, 0.0, _UNSEEN)
        B, T, S = bias_BTS.shape
        return jnp.broadcast_to(bias_BTS[:, None], (B, num_heads, T, S))

    def _rotated(self, x_BTNI: jax.Array, angles: rotary.Angles | None) -> jax.Array:
        return x_BTNI if angles is None else rotary.rotate(x_BTNI, angles, self.sizes.pairs)


def cached_values(
    before: dense.LayerCache, written: dense.LayerCache, v_BT1H: jax.Array, now: dense.PrefillInputs
) -> jax.Array:
    """The values [B, S, H] of a cache of one head, in the order in which attention to it reads them."""
    names = ("value", "value_scale")
    if paged.is_paged(written):
        pools = {name: written[f"{name}_pages"] for name in names if f"{name}_pages" in written}
        rows = {name: cached_attention.gathered(pool, written["table"]) for name, pool in pools.items()}
    elif now.positions.shape[1] == 1:
        of_rows = dense.rows_of(written)
        rows = {name: of_rows[name] for name in names if name in of_rows}
    else:
        before = dense.rows_of(before)
        stored = dense.as_stored(before["value"].dtype, v_BT1H, v_BT1H)
        rows = {
            name: jnp.concatenate([before[name], jnp.swapaxes(stored[name], 1, 2)], axis=2)
            for name in names
            if name in before
        }
    values = rows["value"][:, 0].astype(jnp.float32)
    return values * rows["value_scale"][:, 0, :, None] if "value_scale" in rows else values
