"""Causal self-attention within documents: the projections, and the product of queries, keys and values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.models import layers
from capibara.models.blockwise import block_size, blockwise_attention
from capibara.sharding import constrain

_MASKED = -1e30  # finite, so that a row with nothing to see stays a number


def dot_product_attention(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_ids_BT: jax.Array
) -> jax.Array:
    """softmax(q k^T / sqrt(H)) v, causal by place in the row and within one segment; softmax in float32.

    Args:
      q_BTNH: queries, N = K * G heads; query head n reads key/value head n // G.
      k_BSKH: keys, S = T.
      v_BSKH: values.
      segment_ids_BT: document number of each place; a place sees only places of its own number.

    Returns:
      [B, T, N, H] in the dtype of the queries.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H) * H**-0.5
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    causal_TS = jnp.arange(T)[:, None] >= jnp.arange(T)[None, :]
    visible_BTS = causal_TS & (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])
    scores = jnp.where(visible_BTS[:, None, None], scores, _MASKED)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v_BSKH.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", probabilities, v_BSKH).reshape(B, T, N, H)


def attend(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """`dot_product_attention` by the way that is fastest for the platform and the shape; the numbers agree."""
    block = block_size(q_BTNH.shape[1])
    if jax.default_backend() == "cpu" and block is not None:
        return blockwise_attention(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, block)
    return dot_product_attention(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT)


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023); multi-head where num_kv_heads equals num_heads."""

    def __init__(self, config, rngs: nnx.Rngs):
        D, N, K, H = config.embed_dim, config.num_heads, config.kv_heads, config.head_size
        self.config = config
        into = layers.fan_in(0)
        self.query = layers.param(rngs, (D, N, H), ("embed", "heads", "head_dim"), into)
        self.key = layers.param(rngs, (D, K, H), ("embed", "kv_heads", "head_dim"), into)
        self.value = layers.param(rngs, (D, K, H), ("embed", "kv_heads", "head_dim"), into)
        # The sum over 2 L residual branches keeps its variance (Radford et al. 2019).
        out = layers.fan_in(0, 1, scale=0.5 / config.num_layers)
        self.out = layers.param(rngs, (N, H, D), ("heads", "head_dim", "embed"), out)
        if config.bias:
            self.query_bias = layers.param(rngs, (N, H), ("heads", "head_dim"), layers.zeros)
            self.key_bias = layers.param(rngs, (K, H), ("kv_heads", "head_dim"), layers.zeros)
            self.value_bias = layers.param(rngs, (K, H), ("kv_heads", "head_dim"), layers.zeros)
            self.out_bias = layers.param(rngs, (D,), ("norm",), layers.zeros)

    def __call__(self, x_BTD: jax.Array, angles: tuple[jax.Array, jax.Array] | None, segment_ids_BT: jax.Array):
        dtype = x_BTD.dtype
        q, k, v = (layers.dense(x_BTD, weight[...]) for weight in (self.query, self.key, self.value))
        if self.config.bias:
            q, k, v = (
                q + self.query_bias[...].astype(dtype),
                k + self.key_bias[...].astype(dtype),
                v + self.value_bias[...].astype(dtype),
            )
        q = constrain(q, ("batch", "act_time", "act_heads", None))
        k = constrain(k, ("batch", "act_time", "act_kv_heads", None))
        v = constrain(v, ("batch", "act_time", "act_kv_heads", None))
        if angles is not None:
            q, k = layers.rotate(q, angles), layers.rotate(k, angles)
        y = attend(q, k, v, segment_ids_BT)
        y = layers.dense(y, self.out[...], in_dims=2)
        return y + self.out_bias[...].astype(dtype) if self.config.bias else y
