"""Attention: the projections, and the choice of who multiplies queries, keys and values."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from capibara import sharding
from capibara.core.types import UserError
from capibara.kernels.attention.blockwise import block_size, blockwise_attention
from capibara.kernels.attention.spec import AttentionSpec
from capibara.models.cache import dense, paged
from capibara.models.layers import layers, rope
from capibara.models.layers.dropout import Dropout, Site
from capibara.sharding import constrain

_MASKED = -1e30  # finite, so that a row with nothing to see stays a number


class AttentionBackend(enum.StrEnum):
    """Who computes attention; the numbers agree.

    auto: splash on TPU, cudnn on GPU, blockwise on CPU, each where it supports the layer, else xla. splash: the Pallas
    kernel; cudnn: NVIDIA's fused kernel; blockwise: blocks of queries, nothing [T, T] kept; xla: the plain formula.
    """

    AUTO = "auto"
    SPLASH = "splash"
    CUDNN = "cudnn"
    BLOCKWISE = "blockwise"
    XLA = "xla"


# What is fastest where; and where else it does not run.
_BEST = {
    "tpu": AttentionBackend.SPLASH,
    "gpu": AttentionBackend.CUDNN,
    "cpu": AttentionBackend.BLOCKWISE,
}
_PLATFORM = {AttentionBackend.SPLASH: "tpu", AttentionBackend.CUDNN: "gpu"}


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    kind: AttentionSpec,
    q_segments_BT: jax.Array,
    kv_segments_BS: jax.Array,
    q_places_T: jax.Array | None = None,
    kv_places_S: jax.Array | None = None,
    bias_NTS: jax.Array | None = None,
    prefix_BT: jax.Array | None = None,
    drop: Callable[[jax.Array], jax.Array] | None = None,
    sinks_N: jax.Array | None = None,
    backend: AttentionBackend = AttentionBackend.AUTO,
) -> jax.Array:
    """softmax(scores) v by the way that is fastest for the platform and the shape; softmax in float32.

    Args:
      q_BTNH: queries, N = K * G heads; query head n reads key/value head n // G.
      k_BSKH, v_BSKH: keys and values.
      kind: mask, scale and cap of the scores.
      q_segments_BT, kv_segments_BS: document numbers; a query sees only keys of its own number.
      q_places_T, kv_places_S: places in the row where rows are not in order (sharding.balanced); None: in order.
      bias_NTS: added to the scores (T5's relative positions).
      prefix_BT: of self-attention: queries with a 1 see later keys with a 1, too (a prefix LM's inputs).
      drop: probabilities [B, N, T, S] -> those that dropout leaves.
      sinks_N: float32, a logit of each query head in the softmax's denominator, as of a key whose value is 0.
      backend: who computes it.

    Returns:
      [B, T, N, H] in the dtype of the queries.

    Raises:
      UserError: the named back end cannot compute this on this platform.
    """
    segments = {"q_segments_BT": q_segments_BT, "kv_segments_BS": kv_segments_BS}
    places = {"q_places_T": q_places_T, "kv_places_S": kv_places_S}
    in_order = q_places_T is None and kv_places_S is None
    rest = (in_order, backend, _plain_alone(prefix_BT, drop), sinks_N is not None)
    match _choose(q_BTNH, k_BSKH, kind, bias_NTS, *rest):
        case AttentionBackend.SPLASH:
            from capibara.kernels.attention import splash  # Pallas takes a second to import

            # It names its own output, in the kernel's layout: this one would be kept beside that.
            return splash.sharded_splash(q_BTNH, k_BSKH, v_BSKH, kind=kind, **segments, **places, sinks_N=sinks_N)
        case AttentionBackend.CUDNN:
            from capibara.kernels.attention import cudnn

            y = cudnn.cudnn_attention(q_BTNH, k_BSKH, v_BSKH, kind=kind, **segments)
        case AttentionBackend.BLOCKWISE:
            of_blocks = (*segments.values(), bias_NTS, kind, block_size(q_BTNH.shape[1]))
            y = blockwise_attention(q_BTNH, k_BSKH, v_BSKH, *of_blocks, sinks_N)
        case _:
            # Each context shard has its queries and everybody's keys.
            k_BSKH, v_BSKH = (constrain(x, ("batch", None, "act_kv_heads", None)) for x in (k_BSKH, v_BSKH))
            of_scores = {"bias_NTS": bias_NTS, "prefix_BT": prefix_BT, "drop": drop, "sinks_N": sinks_N}
            y = dot_product_attention(q_BTNH, k_BSKH, v_BSKH, kind=kind, **of_scores, **segments, **places)
    return checkpoint_name(y, "attention")


def _plain_alone(prefix_BT: jax.Array | None, drop: Callable[[jax.Array], jax.Array] | None) -> str | None:
    """What only the plain formula does of these, as an objection to the others; None: nothing."""
    if prefix_BT is not None:
        return "lets no inputs see each other both ways"
    return None if drop is None else "drops no probabilities"


def _choose(
    q_BTNH, k_BSKH, kind, bias_NTS, in_order: bool, backend: AttentionBackend, plain: str | None, sinks: bool = False
) -> AttentionBackend:
    """The back end for AUTO (`plain`: why only the plain formula will do, or None); one that the user named is only checked, so that none computes what it cannot."""
    mesh, _ = sharding.active() or (None, None)
    whole_rows = in_order and (mesh is None or mesh.shape["context"] == 1)
    platform = sharding.platform()
    best = _BEST.get(platform, AttentionBackend.BLOCKWISE)
    if sinks and best is AttentionBackend.CUDNN:
        best = AttentionBackend.BLOCKWISE
    chosen = best if backend is AttentionBackend.AUTO else backend
    if plain is not None and chosen is not AttentionBackend.XLA:
        objection = plain
    elif chosen in _PLATFORM and _PLATFORM[chosen] != platform:
        objection = f"runs on {_PLATFORM[chosen].upper()} only, not on {platform.upper()}"
    elif chosen in (AttentionBackend.CUDNN, AttentionBackend.BLOCKWISE) and not whole_rows:
        objection = "needs whole rows in their order on each device, but Plan.context cuts and reorders them"
    elif chosen is AttentionBackend.CUDNN and sinks:
        objection = "has no attention sinks"
    else:
        objection = _shape_objection(chosen, q_BTNH, k_BSKH, kind, bias_NTS)
    if objection is None:
        return chosen
    if backend is AttentionBackend.AUTO:
        return AttentionBackend.XLA
    raise UserError(f"attention is {str(backend)!r}, which {objection}: set 'auto'")


def _shape_objection(backend: AttentionBackend, q_BTNH, k_BSKH, kind: AttentionSpec, bias_NTS) -> str | None:
    """Why the back end cannot compute this attention; None where it can."""
    T, H = q_BTNH.shape[1], q_BTNH.shape[-1]
    given = f"{q_BTNH.dtype}, head_dim {H}, {T} queries, {k_BSKH.shape[1]} keys, {kind}"
    given += "" if bias_NTS is None else ", relative positions"
    match backend:
        case AttentionBackend.SPLASH:
            from capibara.kernels.attention import splash  # Pallas takes a second to import

            if not splash.supported(q_BTNH, k_BSKH, kind=kind, bias_NTS=bias_NTS):
                takes = "head_dim up to 256, no relative positions, as many keys as queries if causal or windowed"
                return f"takes {takes}, not {given}"
        case AttentionBackend.CUDNN:
            from capibara.kernels.attention import cudnn

            if not cudnn.supported(q_BTNH, k_BSKH, kind=kind, bias_NTS=bias_NTS):
                takes = "16-bit floats, head_dim up to 128 in eights, even lengths, as many keys as queries if causal"
                return f"takes {takes}, windows only if causal, no soft cap and no relative positions, not {given}"
        case AttentionBackend.BLOCKWISE:
            if block_size(T) is None:
                return f"takes rows of a multiple of 64 places, or of 16 above 1024, not of {T}"
    return None


def dot_product_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    kind: AttentionSpec,
    q_segments_BT: jax.Array,
    kv_segments_BS: jax.Array,
    q_places_T: jax.Array | None = None,
    kv_places_S: jax.Array | None = None,
    bias_NTS: jax.Array | None = None,
    prefix_BT: jax.Array | None = None,
    drop: Callable[[jax.Array], jax.Array] | None = None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """The plain formula, with all scores at once; what every other back end must agree with."""
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H) * kind.scale
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    if bias_NTS is not None:
        scores = scores + bias_NTS.reshape(K, N // K, T, S).astype(jnp.float32)
    if kind.soft_cap is not None:
        scores = kind.soft_cap * jnp.tanh(scores / kind.soft_cap)
    q_places_T = jnp.arange(T) if q_places_T is None else q_places_T
    kv_places_S = jnp.arange(S) if kv_places_S is None else kv_places_S
    back_TS = q_places_T[:, None] - kv_places_S[None, :]
    visible_BTS = q_segments_BT[:, :, None] == kv_segments_BS[:, None, :]
    if kind.causal and prefix_BT is not None:
        visible_BTS &= (back_TS >= 0) | ((prefix_BT[:, :, None] > 0) & (prefix_BT[:, None, :] > 0))
    elif kind.causal:
        visible_BTS &= back_TS >= 0
    if kind.window is not None:
        visible_BTS &= jnp.abs(back_TS) < kind.window
    scores = jnp.where(visible_BTS[:, None, None], scores, _MASKED)
    if sinks_N is not None:
        sinks = jnp.broadcast_to(sinks_N.reshape(K, N // K, 1, 1), (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v_BSKH.dtype)
    probabilities = probabilities if sinks_N is None else probabilities[..., :S]
    if drop is not None:
        probabilities = drop(probabilities.reshape(B, N, T, S)).reshape(probabilities.shape)
    return jnp.einsum("BKGTS,BSKH->BTKGH", probabilities, v_BSKH).reshape(B, T, N, H)


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245); multi-head where num_kv_heads equals num_heads."""

    def __init__(self, config, rngs: nnx.Rngs):
        D, N, K, H = config.embed_dim, config.num_heads, config.kv_heads, config.head_size
        self.config = config
        into = layers.fan_in(0)
        # Whatever scales the scores (nothing does in T5), they begin with variance 1.
        scale = H**-0.5 if config.attention_scale is None else config.attention_scale
        to_queries = layers.fan_in(0, scale=1.0 / (H * scale**2))
        self.query = layers.param(rngs, (D, N, H), ("embed", "heads", "head_dim"), to_queries)
        self.key = layers.param(rngs, (D, K, H), ("embed", "kv_heads", "head_dim"), into)
        self.value = layers.param(rngs, (D, K, H), ("embed", "kv_heads", "head_dim"), into)
        # The sum over 2 L residual branches keeps its variance (Radford et al. 2019).
        out = layers.fan_in(0, 1, scale=0.5 / config.num_layers)
        self.out = layers.param(rngs, (N, H, D), ("heads", "head_dim", "embed"), out)
        if config.bias.of_heads:
            self.query_bias = layers.param(rngs, (N, H), ("heads", "head_dim"), layers.zeros)
            self.key_bias = layers.param(rngs, (K, H), ("kv_heads", "head_dim"), layers.zeros)
            self.value_bias = layers.param(rngs, (K, H), ("kv_heads", "head_dim"), layers.zeros)
        if config.bias.of_attention:
            self.out_bias = layers.param(rngs, (D,), ("norm",), layers.zeros)
        if config.attention_sinks is layers.AttentionSinks.HEAD:
            self.sinks = layers.param(rngs, (N,), ("heads",), layers.zeros)
        if config.qk_norm is layers.QKNorm.HEAD:
            norm = {"kind": layers.NormKind.RMS, "eps": config.norm_eps, "rngs": rngs, "scale": config.norm_scale}
            self.query_norm = layers.Norm(H, **norm)
            self.key_norm = layers.Norm(H, **norm)

    def __call__(
        self,
        x_BTD: jax.Array,
        *,
        kind: AttentionSpec,
        segment_ids_BT: jax.Array,
        angles: rope.Angles | None = None,
        places_T: jax.Array | None = None,
        bias_NTS: jax.Array | None = None,
        prefix_BT: jax.Array | None = None,
        encoded_BSD: jax.Array | None = None,
        encoded_segments_BS: jax.Array | None = None,
        drop: Dropout | None = None,
        heads: tuple[jax.Array, jax.Array, jax.Array] | None = None,
    ) -> jax.Array:
        """Self-attention of x_BTD, or its attention to `encoded_BSD`.

        `angles` turn queries and keys, `heads` are queries, keys and values where a block made them itself, the rest is
        as in `attend`.
        """
        itself = encoded_BSD is None
        q, k, v = self._heads(x_BTD, x_BTD if itself else encoded_BSD, angles) if heads is None else heads
        site = Site.PROBABILITIES if itself else Site.CROSS_PROBABILITIES
        y = attend(
            checkpoint_name(q, "query"),
            checkpoint_name(k, "key"),
            checkpoint_name(v, "value"),
            kind=kind,
            q_segments_BT=segment_ids_BT,
            kv_segments_BS=segment_ids_BT if itself else encoded_segments_BS,
            q_places_T=places_T,
            kv_places_S=places_T if itself else None,
            bias_NTS=bias_NTS,
            prefix_BT=prefix_BT,
            drop=None if drop is None else functools.partial(drop, site=site),
            sinks_N=self.sinks_N,
            backend=self.config.attention,
        )
        return self._output(y)

    def cached(
        self,
        x_BTD: jax.Array,
        layer: dense.LayerCache,
        now: dense.PrefillInputs,
        *,
        kind: AttentionSpec,
        angles: rope.Angles | None = None,
        bias_NTS: jax.Array | None = None,
        bias_at=None,
        prefix_BT: jax.Array | None = None,
        heads: tuple[jax.Array, jax.Array, jax.Array] | None = None,
        written: dense.LayerCache | None = None,
    ) -> tuple[jax.Array, dense.LayerCache]:
        """Self-attention of the tokens that are read now to themselves and to those in the cache; and the new cache.

        Of rows that have read nothing before `bias_NTS` is added to the scores, of others `bias_at` (`cache.attend`);
        `prefix_BT` as in `attend`, of rows that have read nothing before; `heads` as in `__call__`; `written`: the new
        cache, where another layer wrote these keys and values.
        """
        q, k, v = self._heads(x_BTD, x_BTD, angles) if heads is None else heads
        in_pages = paged.is_paged(layer)
        written = (paged if in_pages else dense).write(layer, k, v, now) if written is None else written
        if now.is_prefill and not dense.multiplied_as_kept(layer, q):
            segments = now.real.astype(jnp.int32)
            of_rows = {
                "q_segments_BT": segments,
                "kv_segments_BS": segments,
                "bias_NTS": bias_NTS,
                "prefix_BT": prefix_BT,
                "sinks_N": self.sinks_N,
            }
            k, v = dense.as_kept(layer, k, v)
            y = attend(q, k, v, kind=kind, **of_rows, backend=self.config.attention)
        elif in_pages:
            y = paged.attend(q, written, kind, now, bias_at, self.sinks_N)
        else:
            y = dense.attend(q, written, layer, (k, v), kind, now, bias_at, prefix_BT, self.sinks_N)
        return self._output(y), written

    def keys_values(self, encoded_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, K, S, H] of what was encoded, for `to_encoded`."""
        _, k, v = self._heads(encoded_BSD, encoded_BSD, None)
        return jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)

    def to_encoded(self, x_BTD: jax.Array, k_BKSH, v_BKSH, segments_BS: jax.Array, kind: AttentionSpec) -> jax.Array:
        """Attention of x_BTD, each row one document, to the keys and values of what was encoded."""
        q, _, _ = self._heads(x_BTD, x_BTD, None)
        visible = jnp.broadcast_to((segments_BS == 1)[:, None], (*x_BTD.shape[:2], segments_BS.shape[1]))
        return self._output(dense.attend_to(q, k_BKSH, v_BKSH, visible, kind, sinks_N=self.sinks_N))

    @property
    def sinks_N(self) -> jax.Array | None:
        """The heads' sinks in float32; None: they have none."""
        if self.config.attention_sinks is not layers.AttentionSinks.HEAD:
            return None
        return self.sinks[...].astype(jnp.float32)

    def _output(self, y: jax.Array) -> jax.Array:
        y = constrain(y, ("batch", "act_time", "act_heads", None))
        y = self._dense("out", y, in_dims=2)
        if self.config.bias.of_attention:
            y = y + self.out_bias[...].astype(y.dtype)
        return checkpoint_name(y, "attention_out")

    def _dense(self, name: str, x: jax.Array, in_dims: int = 1) -> jax.Array:
        weight, adapter = getattr(self, name)[...], layers.adapter_of(self, name)
        return layers.dense(x, weight, in_dims, self.config.quantization, adapter)

    def _heads(
        self, x_BTD: jax.Array, y_BSD: jax.Array, angles: rope.Angles | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries of x, keys and values of y, normalised and turned."""
        q, k, v = self._projections(x_BTD, y_BSD)
        if self.config.qk_norm is layers.QKNorm.HEAD:
            q, k = self.query_norm(q), self.key_norm(k)
        if angles is not None:
            q, k = rope.rotate(q, angles), rope.rotate(k, angles)
        return q, k, v

    def _projections(self, x_BTD: jax.Array, y_BSD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries of x, keys and values of y."""
        dtype = x_BTD.dtype
        into = (("query", x_BTD), ("key", y_BSD), ("value", y_BSD))
        q, k, v = (self._dense(name, x) for name, x in into)
        if self.config.bias.of_heads:
            q = q + self.query_bias[...].astype(dtype)
            k = k + self.key_bias[...].astype(dtype)
            v = v + self.value_bias[...].astype(dtype)
        q = constrain(q, ("batch", "act_time", "act_heads", None))
        k = constrain(k, ("batch", "act_time", "act_kv_heads", None))
        v = constrain(v, ("batch", "act_time", "act_kv_heads", None))
        return q, k, v
