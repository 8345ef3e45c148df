"""The reference implementation of attention, which materialises all scores; the other back ends must agree with it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara.kernels.attention.signature import AttentionInputs
from capibara.kernels.attention.spec import AttentionSpec
from capibara.kernels.attention.streaming import positions_in_documents
from capibara.sharding import constrain

_MASKED = -1e30  # finite, so that a fully masked row yields a number


def unsupported_reason(inputs: AttentionInputs, spec: AttentionSpec) -> str | None:
    """None: it supports everything."""
    del inputs, spec
    return None


def attend(inputs: AttentionInputs, spec: AttentionSpec) -> jax.Array:
    """See signature.AttentionKernel."""
    (B, T, N, H), (S, K) = inputs.q_BTNH.shape, inputs.k_BSKH.shape[1:3]
    # Each context shard has its own queries and the keys of all shards.
    k_BSKH, v_BSKH = (constrain(x, ("batch", None, "act_kv_heads", None)) for x in (inputs.k_BSKH, inputs.v_BSKH))
    q_BTKGH = inputs.q_BTNH.reshape(B, T, K, N // K, H) * spec.scale
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    if inputs.bias_NTS is not None:
        scores = scores + inputs.bias_NTS.reshape(K, N // K, T, S).astype(jnp.float32)
    if inputs.row_bias_BNTS is not None:
        scores = scores + inputs.row_bias_BNTS.reshape(scores.shape)
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    scores = jnp.where(_visible(inputs, spec)[:, None, None], scores, _MASKED)
    if inputs.sinks_N is not None:
        sinks = jnp.broadcast_to(inputs.sinks_N.reshape(K, N // K, 1, 1), (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v_BSKH.dtype)
    probabilities = probabilities if inputs.sinks_N is None else probabilities[..., :S]
    if inputs.drop is not None:
        probabilities = inputs.drop(probabilities.reshape(B, N, T, S)).reshape(probabilities.shape)
    return jnp.einsum("BKGTS,BSKH->BTKGH", probabilities, v_BSKH).reshape(B, T, N, H)


def _visible(inputs: AttentionInputs, spec: AttentionSpec) -> jax.Array:
    """[B, T, S] bool: which keys each query sees."""
    T, S, prefix_BT = inputs.q_BTNH.shape[1], inputs.k_BSKH.shape[1], inputs.prefix_BT
    q_row_positions_T = jnp.arange(T) if inputs.q_row_positions_T is None else inputs.q_row_positions_T
    kv_row_positions_S = jnp.arange(S) if inputs.kv_row_positions_S is None else inputs.kv_row_positions_S
    back_TS = jnp.asarray(q_row_positions_T[:, None] - kv_row_positions_S[None, :])
    visible_BTS = inputs.q_segments_BT[:, :, None] == inputs.kv_segments_BS[:, None, :]
    if spec.causal and prefix_BT is not None:
        visible_BTS &= (back_TS >= 0) | ((prefix_BT[:, :, None] > 0) & (prefix_BT[:, None, :] > 0))
    elif spec.causal:
        visible_BTS &= back_TS >= 0
    if spec.window is not None:
        positions_B1S = positions_in_documents(inputs.kv_segments_BS)[:, None] if spec.sink_tokens else back_TS
        visible_BTS &= spec.in_window(back_TS, positions_B1S)
    return visible_BTS
