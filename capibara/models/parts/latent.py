"""Multi-head latent attention: keys and values of all heads from one small vector of each token, which is cached.

Shape letters: Q query latents, C latents of keys and values, R rotated dimensions of a head, V dimensions of a head's
values, H of its queries and keys (R of them rotated).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.core import projections
from capibara.core.projections import Projection
from capibara.core.types import UserError
from capibara.kernels import rotary
from capibara.kernels.attention.dispatch import attend
from capibara.kernels.attention.signature import AttentionInputs
from capibara.kernels.attention.spec import AttentionSpec
from capibara.models.cache import dense, paged
from capibara.models.layers import layers
from capibara.models.layers.dropout import Dropout, Site
from capibara.models.parts.attention import attend_cached, gated, make_gate
from capibara.models.parts.config import TransformerConfig
from capibara.models.parts.indexer import IndexQueries, KeyIndexer, cached_values
from capibara.models.parts.latent_sizes import LatentAttention, QueryLatents
from capibara.sharding import constrain


class Latent(nnx.Module):
    """A layer's latent attention, in the place of parts.attention.Attention.

    Training computes every head's keys and values. A cache has one vector of C + R values for each token, as key and as
    value, and attention to it is that of N query heads to one head of keys: what expands latents is applied to queries and
    to results.
    """

    def __init__(self, config: TransformerConfig, latent: LatentAttention, rngs: nnx.Rngs):
        D, N, H, R, V = config.embed_dim, config.num_heads, config.head_size, latent.rotary_dim, latent.value_dim
        self.config, self.latent = config, latent
        if latent.query_rank is None:
            self.query = layers.projection(rngs, projections.QUERY, (D, N, H))
        else:
            self.query_down = layers.projection(rngs, projections.QUERY_DOWN, (D, latent.query_rank))
            self.query_norm = self._norm(latent.query_rank, rngs)
            inputs = latent.query_rank * (1 + (latent.queries is QueryLatents.BOTH))
            self.query_up = layers.projection(rngs, projections.QUERY_UP, (inputs, N, H))
        if latent.indexer is not None:
            assert latent.query_rank is not None, "LatentAttention sees to it"
            self.indexer = KeyIndexer(latent.indexer, D, latent.query_rank, rngs)
        self.kv_down = layers.projection(rngs, projections.KV_DOWN, (D, latent.kv_rank))
        self.key_rotary = layers.projection(rngs, projections.KEY_ROTARY, (D, R))
        self.kv_norm = self._norm(latent.kv_rank, rngs)
        self.key_up = layers.projection(rngs, projections.KEY_UP, (latent.kv_rank, N, H - R))
        self.value_up = layers.projection(rngs, projections.VALUE_UP, (latent.kv_rank, N, V))
        self.out = layers.projection(rngs, projections.OUT, (N, V, D), 0.5 / config.num_layers)
        if latent.queries is QueryLatents.BOTH:
            gate = layers.projection(rngs, projections.LATENT_GATE, (inputs, N, V))
            setattr(self, projections.LATENT_GATE.name, gate)
        else:
            make_gate(self, config, rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        *,
        kind: AttentionSpec,
        segment_ids_BT: jax.Array,
        angles: rotary.Angles | None = None,
        row_positions_T: jax.Array | None = None,
        bias_NTS: jax.Array | None = None,
        prefix_BT: jax.Array | None = None,
        drop: Dropout | None = None,
        query_scale_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Self-attention of x_BTD; as parts.attention.Attention."""
        q_BTNH = self._queries(x_BTD, angles, query_scale_BT)
        c_BTC, r_BT1R = self._latents(x_BTD, angles)
        k = layers.dense(c_BTC, self.key_up[...])
        k_BTNH = jnp.concatenate([k, jnp.broadcast_to(r_BT1R, (*k.shape[:3], r_BT1R.shape[-1]))], axis=-1)
        v = layers.dense(c_BTC, self.value_up[...])
        v_BTNH = jnp.pad(v, ((0, 0),) * 3 + ((0, k_BTNH.shape[-1] - v.shape[-1]),))  # back ends have one size of heads
        k_BTNH, v_BTNH = (constrain(y, ("batch", "act_time", "act_kv_heads", None)) for y in (k_BTNH, v_BTNH))
        inputs = AttentionInputs(
            layers.named(q_BTNH, projections.QUERY),
            layers.named(k_BTNH, projections.KEY),
            layers.named(v_BTNH, projections.VALUE),
            q_segments_BT=segment_ids_BT,
            kv_segments_BS=segment_ids_BT,
            q_row_positions_T=row_positions_T,
            kv_row_positions_S=row_positions_T,
            bias_NTS=bias_NTS,
            row_bias_BNTS=self._chosen(x_BTD, angles, segment_ids_BT, row_positions_T),
            prefix_BT=prefix_BT,
            drop=None if drop is None else lambda p_BNTS: drop(p_BNTS, Site.PROBABILITIES),
        )
        return self._output(attend(inputs, kind, self.config.attention)[..., : self.latent.value_dim], x_BTD)

    def cached(
        self,
        x_BTD: jax.Array,
        layer: dense.LayerCache,
        now: dense.PrefillInputs,
        *,
        kind: AttentionSpec,
        angles: rotary.Angles | None = None,
        bias_NTS: jax.Array | None = None,
        bias_at: dense.PositionBias | None = None,
        prefix_BT: jax.Array | None = None,
        query_scale_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, dense.LayerCache]:
        """As parts.attention.Attention.cached."""
        q_BTNH = self._queries(x_BTD, angles, query_scale_BT)
        c_BTC, r_BT1R = self._latents(x_BTD, angles)
        C, R = self.latent.kv_rank, self.latent.rotary_dim
        width = self.latent.cached_dim - C
        # q . (W c) = (W^T q) . c, and the sum over tokens of p (W c) = W (the sum over tokens of p c).
        absorbed = jnp.einsum("BTNh,CNh->BTNC", q_BTNH[..., :-R], self.key_up[...].astype(q_BTNH.dtype))
        rotated = jnp.pad(q_BTNH[..., -R:], ((0, 0),) * 3 + ((0, width - R),))
        q = constrain(jnp.concatenate([absorbed, rotated], axis=-1), ("batch", "act_time", "act_heads", None))
        k = jnp.concatenate([c_BTC[:, :, None], r_BT1R], axis=-1)
        k = jnp.pad(k, ((0, 0),) * 3 + ((0, width - R),))
        v = c_BTC[:, :, None]
        after: dense.LayerCache | None = None
        if self.latent.indexer is None:
            v = jnp.pad(v, ((0, 0),) * 3 + ((0, width),))
        else:
            keys = self.indexer.keys(x_BTD, angles)[:, :, None].astype(v.dtype)
            v = jnp.concatenate([v, jnp.pad(keys, ((0, 0),) * 3 + ((0, width - keys.shape[-1]),))], axis=-1)
            after = (paged if paged.is_paged(layer) else dense).write(layer, k, v, now)
            if paged.capacity({"layers": (layer,)}) > self.latent.indexer.top:
                bias_at = self._chosen_at(x_BTD, angles, functools.partial(cached_values, layer, after, v, now))
        of_prefill = now.is_prefill and not dense.attends_quantized_cache(layer, q)
        row_bias = self._chosen(x_BTD, angles, now.real.astype(jnp.int32)) if of_prefill else None
        y, written = attend_cached(
            self.config, q, k, v, layer, now, kind, bias_NTS=bias_NTS, bias_at=bias_at, prefix_BT=prefix_BT,
            row_bias_BNTS=row_bias, written=after,
        )  # fmt: skip
        y = jnp.einsum("BTNC,CNV->BTNV", y[..., :C], self.value_up[...].astype(y.dtype))
        return self._output(y, x_BTD), written

    def _chosen(
        self,
        x_BTD: jax.Array,
        angles: rotary.Angles | None,
        segments_BT: jax.Array,
        row_positions_T: jax.Array | None = None,
    ) -> jax.Array | None:
        """What is added to the scores of whole rows, [B, N, T, T]; None: queries see all keys."""
        if self.latent.indexer is None or x_BTD.shape[1] <= self.latent.indexer.top:
            return None
        if row_positions_T is not None:
            raise UserError(
                "Plan.context is above 1, and LatentAttention.indexer chooses keys of whole rows: set Plan.context to 1, and "
                "share out by fsdp, tensor or data"
            )
        causal_TT = jnp.tril(jnp.ones((x_BTD.shape[1],) * 2, bool))
        visible_BTT = (segments_BT[:, :, None] == segments_BT[:, None, :]) & causal_TT
        keys = self.indexer.keys(x_BTD, angles)
        return self.indexer.bias(self._index_queries(x_BTD, angles), keys, visible_BTT, self.config.num_heads)

    def _chosen_at(
        self, x_BTD: jax.Array, angles: rotary.Angles | None, values: Callable[[], jax.Array]
    ) -> dense.PositionBias:
        """What is added to the scores of cached keys, whose values [B, 1, S, H] have the indexer's keys at their ends."""

        def bias(positions_BT: jax.Array, of_keys_BS: jax.Array) -> jax.Array:
            start, queries = self.latent.kv_rank, self._index_queries(x_BTD, angles)
            keys = values()[:, 0, :, start : start + queries.heads.shape[-1]]
            visible = (of_keys_BS[:, None] >= 0) & (of_keys_BS[:, None] <= positions_BT[..., None])
            return self.indexer.bias(queries, keys, visible, self.config.num_heads)

        return bias

    def _index_queries(self, x_BTD: jax.Array, angles: rotary.Angles | None) -> IndexQueries:
        latents_BTQ = self.query_norm(self._dense(projections.QUERY_DOWN, x_BTD))
        return self.indexer.queries(x_BTD, latents_BTQ, angles)

    def _norm(self, size: int, rngs: nnx.Rngs) -> layers.Norm:
        return layers.Norm(size, kind=layers.NormKind.RMS, eps=self.latent.norm_eps, rngs=rngs)

    def _queries(self, x_BTD: jax.Array, angles: rotary.Angles | None, scale_BT: jax.Array | None = None) -> jax.Array:
        """[B, T, N, H], the last R dimensions rotated, all scaled."""
        if self.latent.query_rank is None:
            q = self._dense(projections.QUERY, x_BTD)
        else:
            q = self._dense(projections.QUERY_UP, self._query_latents(x_BTD))
        plain, rotated = q[..., : -self.latent.rotary_dim], q[..., -self.latent.rotary_dim :]
        q = q if angles is None else jnp.concatenate([plain, self._rotated(rotated, angles)], axis=-1)
        q = q if scale_BT is None else q * scale_BT[:, :, None, None].astype(q.dtype)
        return constrain(q, ("batch", "act_time", "act_heads", None))

    def _query_latents(self, x_BTD: jax.Array) -> jax.Array:
        """What queries are computed from."""
        latents = self._dense(projections.QUERY_DOWN, x_BTD)
        if self.latent.queries is QueryLatents.BOTH:
            return jnp.concatenate([self.query_norm(latents), latents], axis=-1)
        return self.query_norm(latents)

    def _latents(self, x_BTD: jax.Array, angles: rotary.Angles | None) -> tuple[jax.Array, jax.Array]:
        """The normalised latents [B, T, C], and the rotated keys that all heads share [B, T, 1, R]."""
        c_BTC = self.kv_norm(self._dense(projections.KV_DOWN, x_BTD))
        r_BT1R = self._dense(projections.KEY_ROTARY, x_BTD)[:, :, None]
        return c_BTC, r_BT1R if angles is None else self._rotated(r_BT1R, angles)

    def _rotated(self, x_BTNR: jax.Array, angles: rotary.Angles) -> jax.Array:
        return rotary.rotate(x_BTNR, angles, self.config.rotary_pairs)

    def _output(self, y_BTNV: jax.Array, x_BTD: jax.Array) -> jax.Array:
        y = constrain(y_BTNV, ("batch", "act_time", "act_heads", None))
        if self.latent.queries is QueryLatents.BOTH:
            gate = self._dense(projections.LATENT_GATE, self._query_latents(x_BTD))
            y = gated(self.config.attention_gate, y, lambda _: gate)
        else:
            y = gated(self.config.attention_gate, y, lambda by: self._dense(by, x_BTD))
        return layers.named(self._dense(projections.OUT, y), projections.OUT)

    def _dense(self, by: Projection, x: jax.Array) -> jax.Array:
        weight, adapter = getattr(self, by.name)[...], layers.adapter_of(self, by.name)
        return layers.dense(x, weight, len(by.in_axes), self.config.quantization, adapter)
