"""The attention layer: projections, attention, and the use of the key-value cache."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.core import projections
from capibara.core.projections import Projection
from capibara.kernels import rotary
from capibara.kernels.attention.dispatch import attend
from capibara.kernels.attention.signature import AttentionInputs
from capibara.kernels.attention.spec import AttentionSpec
from capibara.kernels.cached_attention import dispatch as cached_attention
from capibara.models.cache import dense, paged
from capibara.models.cache.streaming import as_ring, ring_of, whole_of
from capibara.models.layers import layers
from capibara.models.layers.dropout import Dropout, Site
from capibara.models.parts.config import AttentionGate, InnerNorm, TransformerConfig
from capibara.models.parts.indexer import BlockChooser
from capibara.models.parts.streaming import Heads, by_heads, mixed
from capibara.sharding import constrain


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245); multi-head if num_kv_heads == num_heads.

    Attributes:
      indexer: chooses the blocks of keys that queries see; None: they see all.
    """

    indexer: BlockChooser | None = None

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        D, N, K, H = config.embed_dim, config.num_heads, config.kv_heads, config.head_size
        V = config.value_size
        self.config = config
        # Whatever the scale of the scores (T5 has none), they start with variance 1.
        scale = H**-0.5 if config.attention_scale is None else config.attention_scale
        self.query = layers.projection(rngs, projections.QUERY, (D, N, H), 1.0 / (H * scale**2))
        self.key = layers.projection(rngs, projections.KEY, (D, K, H))
        self.value = layers.projection(rngs, projections.VALUE, (D, K, V))
        # Keeps the variance of the sum over 2 L residual branches (Radford et al. 2019).
        self.out = layers.projection(rngs, projections.OUT, (N, V, D), 0.5 / config.depth)
        if config.block_sizes is not None:
            self.indexer = BlockChooser(config, config.block_sizes, rngs)
        make_gate(self, config, rngs)
        if config.bias.of_heads:
            self.query_bias = layers.param(rngs, (N, H), projections.QUERY.out_axes, layers.zeros)
            self.key_bias = layers.param(rngs, (K, H), projections.KEY.out_axes, layers.zeros)
            self.value_bias = layers.param(rngs, (K, V), projections.VALUE.out_axes, layers.zeros)
        if config.bias.of_out:
            self.out_bias = layers.param(rngs, (D,), ("norm",), layers.zeros)
        if config.attention_sinks is layers.AttentionSinks.HEAD:
            self.sinks = layers.param(rngs, (N,), ("heads",), layers.zeros)
        if config.qk_norm is not layers.QKNorm.NONE:
            self.query_norm, self.key_norm = (
                _norm(config, projections.QUERY, N, rngs),
                _norm(config, projections.KEY, K, rngs),
            )
        if config.inner_norm is not InnerNorm.NONE:
            norm = functools.partial(layers.Norm, kind=config.norm, eps=config.norm_eps, scale=config.norm_scale)
            self.out_norm = norm((N, V), rngs=rngs, axes=projections.QUERY.out_axes, whole=True)

    def __call__(
        self,
        x_BTD: jax.Array,
        *,
        kind: AttentionSpec,
        segment_ids_BT: jax.Array,
        angles: rotary.Angles | None = None,
        row_positions_T: jax.Array | None = None,
        bias_NTS: jax.Array | None = None,
        row_bias_BNTS: jax.Array | None = None,
        prefix_BT: jax.Array | None = None,
        encoded_BSD: jax.Array | None = None,
        encoded_segments_BS: jax.Array | None = None,
        drop: Dropout | None = None,
        heads: tuple[jax.Array, jax.Array, jax.Array] | None = None,
        query_scale_BT: jax.Array | None = None,
        share_K: jax.Array | None = None,
    ) -> jax.Array:
        """Self-attention of x_BTD, or cross-attention to `encoded_BSD`.

        `angles` rotate queries and keys; `query_scale_BT` are factors of the queries; `heads` are queries, keys and
        values that the block has computed already; `share_K` is how much each key/value head retrieves, the rest it
        streams (parts.streaming); None: all. See `attend` and `AttentionInputs` for the others.
        """
        if encoded_BSD is None:
            source, segments, site = x_BTD, segment_ids_BT, Site.PROBABILITIES
        else:
            assert encoded_segments_BS is not None, "what is encoded has documents"
            source, segments, site = encoded_BSD, encoded_segments_BS, Site.CROSS_PROBABILITIES
        q, k, v = self._heads(x_BTD, source, angles, query_scale_BT) if heads is None else heads
        if self.indexer is not None:
            row_bias_BNTS = self.indexer.of_rows(x_BTD, angles, segment_ids_BT, row_positions_T)
        inputs = AttentionInputs(
            layers.named(q, projections.QUERY),
            layers.named(k, projections.KEY),
            layers.named(v, projections.VALUE),
            q_segments_BT=segment_ids_BT,
            kv_segments_BS=segments,
            q_row_positions_T=row_positions_T,
            kv_row_positions_S=row_positions_T if encoded_BSD is None else None,
            bias_NTS=bias_NTS,
            row_bias_BNTS=row_bias_BNTS,
            prefix_BT=prefix_BT,
            drop=None if drop is None else lambda p_BNTS: drop(p_BNTS, site),
            sinks_N=self.sinks_N,
        )
        y = attend(inputs, kind, self.config.attention)
        if share_K is not None:
            y = mixed(y, attend(inputs, self.config.streamed(kind), self.config.attention), share_K)
        return self._output(y, x_BTD)

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
        heads: tuple[jax.Array, jax.Array, jax.Array] | None = None,
        written: dense.LayerCache | None = None,
        query_scale_BT: jax.Array | None = None,
        share_K: jax.Array | None = None,
        streaming: tuple[int, ...] = (),
    ) -> tuple[jax.Array, dense.LayerCache]:
        """Self-attention of the new tokens to each other and to the cached ones; also returns the updated cache.

        A prefill adds `bias_NTS` to the scores and uses `prefix_BT` (as in `AttentionInputs`); other steps add
        `bias_at` (as in `dense.attend`). `heads`, `query_scale_BT` and `share_K` are as in `__call__`. `written` is the
        updated cache if another layer has already written these keys and values. `streaming` are the layer's streaming
        heads, whose cache is a ring.
        """
        q, k, v = self._heads(x_BTD, x_BTD, angles, query_scale_BT) if heads is None else heads
        if streaming:
            y, written = _attend_by_heads(self.config, Heads(q, k, v, self.sinks_N), layer, now, kind, streaming)
            return self._output(y, x_BTD), written
        row_bias = None
        if self.indexer is not None:
            q, k, v, written, bias_at, row_bias = self.indexer.of_cache(x_BTD, angles, (q, k, v), layer, now)
        y, written = attend_cached(
            self.config, q, k, v, layer, now, kind, bias_NTS=bias_NTS, bias_at=bias_at, prefix_BT=prefix_BT,
            row_bias_BNTS=row_bias, sinks_N=self.sinks_N, written=written,
        )  # fmt: skip
        if share_K is not None:
            streamed, _ = attend_cached(
                self.config, q, k, v, layer, now, self.config.streamed(kind), bias_NTS=None, bias_at=None, prefix_BT=None,
                sinks_N=self.sinks_N, written=written,
            )  # fmt: skip
            y = mixed(y, streamed, share_K)
        return self._output(y, x_BTD), written

    @property
    def sinks_N(self) -> jax.Array | None:
        """The heads' attention sinks in float32; None: no sinks."""
        if self.config.attention_sinks is not layers.AttentionSinks.HEAD:
            return None
        return self.sinks[...].astype(jnp.float32)

    def _output(self, y: jax.Array, x_BTD: jax.Array) -> jax.Array:
        y = constrain(y[..., : self.config.value_size], ("batch", "act_time", "act_heads", None))
        y = gated(self.config.attention_gate, y, lambda by: self._dense(by, x_BTD))
        y = self.out_norm(y) if self.config.inner_norm is not InnerNorm.NONE else y
        y = self._dense(projections.OUT, y)
        if self.config.bias.of_out:
            y = y + self.out_bias[...].astype(y.dtype)
        return layers.named(y, projections.OUT)

    def _dense(self, by: Projection, x: jax.Array) -> jax.Array:
        weight, adapter = getattr(self, by.name)[...], layers.adapter_of(self, by.name)
        return layers.dense(x, weight, len(by.in_axes), self.config.quantization, adapter)

    def _heads(
        self,
        x_BTD: jax.Array,
        y_BSD: jax.Array,
        angles: rotary.Angles | None,
        query_scale_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries of x, keys and values of y, normalised, rotated and scaled."""
        config = self.config
        q, k, v = self._projections(x_BTD, y_BSD)
        after_rotation = config.qk_norm in (layers.QKNorm.ROTATED, layers.QKNorm.UNIT)
        if config.qk_norm is not layers.QKNorm.NONE and not after_rotation:
            q, k = self.query_norm(q), self.key_norm(k)
        if config.attention_clip is not None:
            q, k, v = (jnp.clip(x, -config.attention_clip, config.attention_clip) for x in (q, k, v))
        if angles is not None:
            q, k = rotary.rotate(q, angles, config.rotary_pairs), rotary.rotate(k, angles, config.rotary_pairs)
        if after_rotation and (angles is not None or config.qk_norm is layers.QKNorm.ROTATED):
            q, k = self.query_norm(q), self.key_norm(k)
        if query_scale_BT is not None:
            q = q * query_scale_BT[:, :, None, None].astype(q.dtype)
        if narrower := config.head_size - config.value_size:  # back ends and caches have one size of heads
            v = jnp.pad(v, ((0, 0),) * 3 + ((0, narrower),))
        return q, k, v

    def _projections(self, x_BTD: jax.Array, y_BSD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries of x, keys and values of y."""
        dtype = x_BTD.dtype
        q = self._dense(projections.QUERY, x_BTD)
        k, v = (self._dense(by, y_BSD) for by in (projections.KEY, projections.VALUE))
        if self.config.bias.of_heads:
            q = q + self.query_bias[...].astype(dtype)
            k = k + self.key_bias[...].astype(dtype)
            v = v + self.value_bias[...].astype(dtype)
        q = constrain(q, ("batch", "act_time", "act_heads", None))
        k = constrain(k, ("batch", "act_time", "act_kv_heads", None))
        v = constrain(v, ("batch", "act_time", "act_kv_heads", None))
        return q, k, v


class CrossAttention(Attention):
    """Attention of a decoder to what an encoder has read."""

    def keys_values(self, encoded_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, K, S, H] of the encoder's output, for `to_encoded`."""
        _, k, v = self._heads(encoded_BSD, encoded_BSD, None)
        return jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)

    def to_encoded(
        self, x_BTD: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, segments_BS: jax.Array, kind: AttentionSpec
    ) -> jax.Array:
        """Cross-attention of x_BTD, each row one document, to cached keys and values of the encoder's output."""
        q, _, _ = self._heads(x_BTD, x_BTD, None)
        visible = jnp.broadcast_to((segments_BS == 1)[:, None], (*x_BTD.shape[:2], segments_BS.shape[1]))
        rows, seen = cached_attention.Rows(k_BKSH, v_BKSH), cached_attention.Visibility(visible, sinks_N=self.sinks_N)
        return self._output(cached_attention.attend_rows(q, rows, seen, kind), x_BTD)


def make_gate(module: nnx.Module, config: TransformerConfig, rngs: nnx.Rngs) -> None:
    """Makes the gate of attention's results in its module."""
    D, N, gate = config.embed_dim, config.num_heads, config.attention_gate
    if gate.of_heads:
        setattr(module, projections.HEAD_GATE.name, layers.projection(rngs, projections.HEAD_GATE, (D, N)))
    elif gate is not AttentionGate.NONE:
        shape = (D, N, config.value_size)
        setattr(module, projections.ATTENTION_GATE.name, layers.projection(rngs, projections.ATTENTION_GATE, shape))


def gated(gate: AttentionGate, y_BTNV: jax.Array, projected: Callable[[Projection], jax.Array]) -> jax.Array:
    """Attention's results after their gate; `projected` gives what a projection makes of attention's inputs."""
    if gate.of_heads:
        return y_BTNV * gate(projected(projections.HEAD_GATE))[..., None]
    return y_BTNV if gate is AttentionGate.NONE else y_BTNV * gate(projected(projections.ATTENTION_GATE))


def attend_cached(
    config: TransformerConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: dense.LayerCache,
    now: dense.PrefillInputs,
    kind: AttentionSpec,
    *,
    bias_NTS: jax.Array | None,
    bias_at: dense.PositionBias | None,
    prefix_BT: jax.Array | None,
    row_bias_BNTS: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
    written: dense.LayerCache | None = None,
    sinks: int = 0,
) -> tuple[jax.Array, dense.LayerCache]:
    """Attention of the new tokens' queries to their keys and values and to the cached ones, and the updated cache.

    The arguments are those of `Attention.cached`; a prefill adds `row_bias_BNTS` to the scores, too. `sinks` are first tokens
    that the cache keeps, as in `dense.cached_positions`.
    """
    in_pages = paged.is_paged(layer)
    if written is None:
        written = paged.write(layer, k, v, now) if in_pages else dense.write(layer, k, v, now, sinks)
    if now.packed is not None:
        heads = Heads(q, *dense.as_cached(layer, k, v), sinks_N)
        return _attend_packed(config, heads, written, now, now.packed, kind, bias_NTS, bias_at), written
    if now.is_prefill and not dense.attends_quantized_cache(layer, q):
        segments = now.segments
        if kind.in_blocks:
            assert kind.window is not None, "the configuration checks it"
            segments = layers.blocks(segments, now.positions, kind.window)
        k, v = dense.as_cached(layer, k, v)
        inputs = AttentionInputs(
            q, k, v, segments, segments, bias_NTS=bias_NTS, row_bias_BNTS=row_bias_BNTS, prefix_BT=prefix_BT,
            sinks_N=sinks_N,
        )  # fmt: skip
        return attend(inputs, kind, config.attention), written
    if in_pages:
        return paged.attend(q, written, kind, now, bias_at, sinks_N), written
    return dense.attend(q, written, layer, (k, v), kind, now, bias_at, prefix_BT, sinks_N, sinks), written


def _attend_packed(
    config: TransformerConfig,
    heads: Heads,
    written: dense.LayerCache,
    now: dense.PrefillInputs,
    packed: dense.Packed,
    kind: AttentionSpec,
    bias_NTS: jax.Array | None,
    bias_at: dense.PositionBias | None,
) -> jax.Array:
    """Attention [N, 1, ...] of next tokens of texts to their pages, and of prompts to themselves and the first one's pages."""
    S = len(packed.ends)
    text_S = packed.documents[:S] == 0
    of_text = lambda x_N: jnp.where(text_S, x_N[:S], 0)  # noqa: E731
    texts = now._replace(lengths=of_text(now.lengths), counts=of_text(now.counts), positions=now.positions[:S])
    of_texts = written | {"table": written["table"][:S]}
    y_S1NH = paged.attend(heads.q_BTNH[:S], of_texts, kind, texts, bias_at, heads.sinks_N)
    q, k, v = (jnp.swapaxes(x, 0, 1) for x in heads[:3])
    documents = packed.documents[None]
    inputs = AttentionInputs(q, k, v, documents, documents, bias_NTS=bias_NTS, sinks_N=heads.sinks_N)
    y = attend(inputs, kind, config.attention)

    def with_pages() -> jax.Array:
        is_first = documents == 1
        count = jnp.sum(is_first, axis=1, dtype=jnp.int32)
        first = now._replace(lengths=packed.length, counts=count, positions=now.positions.T)
        of_first = paged.attend(q, written | {"table": packed.table}, kind, first, bias_at, heads.sinks_N)
        return jnp.where(is_first[..., None, None], of_first, y)

    y = jnp.swapaxes(jax.lax.cond(packed.length[0] > 0, with_pages, lambda: y), 0, 1)
    return y.at[:S].set(jnp.where(text_S[:, None, None, None], y_S1NH, y[:S]))


def _attend_by_heads(
    config: TransformerConfig,
    heads: Heads,
    layer: dense.LayerCache,
    now: dense.PrefillInputs,
    kind: AttentionSpec,
    streaming: tuple[int, ...],
) -> tuple[jax.Array, dense.LayerCache]:
    """Attention of streaming heads to their ring and of the others to the whole cache, and the updated cache."""
    written: dense.LayerCache = {}
    attend, spec = (
        functools.partial(attend_cached, config, bias_NTS=None, bias_at=None, prefix_BT=None),
        config.streamed(kind),
    )

    def retrieve(of: Heads) -> jax.Array:
        y, new = attend(*of[:3], whole_of(layer), now, kind, sinks_N=of.sinks_N)
        written.update(new)
        return y

    def stream(of: Heads) -> jax.Array:
        y, new = attend(*of[:3], ring_of(layer), now, spec, sinks_N=of.sinks_N, sinks=spec.sink_tokens)
        written.update(as_ring(new))
        return y

    return by_heads(heads, streaming, retrieve, stream), written


def _norm(config: TransformerConfig, of: Projection, heads: int, rngs: nnx.Rngs) -> layers.Norm:
    """The norm of queries or keys."""
    norm = functools.partial(layers.Norm, eps=config.norm_eps, rngs=rngs)
    shape = (heads, config.head_size)
    match config.qk_norm:
        case layers.QKNorm.WHOLE:
            return norm(shape, kind=layers.NormKind.RMS, scale=config.norm_scale, axes=of.out_axes, whole=True)
        case layers.QKNorm.HEADS:
            return norm(shape, kind=layers.NormKind.LAYER_UNBIASED, axes=of.out_axes)
        case layers.QKNorm.LAYER:
            return norm(config.head_size, kind=layers.NormKind.LAYER)
        case layers.QKNorm.UNIT:
            return norm(config.head_size, kind=layers.NormKind.RMS, scale=layers.NormScale.NONE)
        case _:
            return norm(config.head_size, kind=layers.NormKind.RMS, scale=config.norm_scale)
