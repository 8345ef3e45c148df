"""Causal attention a block of queries at a time: what lies above the diagonal is never computed, nothing [T, T] kept.

For back ends without a fused attention kernel. The backward pass recomputes the probabilities from the saved
normalisers, as FlashAttention does (Dao et al. 2022, arXiv:2205.14135), and its products are written in the operand
orders that XLA's CPU matmul runs at full speed: keys' and values' gradients come out transposed, [H, S].
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

_MASKED = -1e30  # finite, so that a row with nothing to see stays a number
_MIN_BLOCK, _MAX_BLOCKS = 64, 16


def block_size(length: int) -> int | None:
    """Queries of a block for rows of this length; None where the length does not divide into blocks."""
    size = max(_MIN_BLOCK, length // _MAX_BLOCKS)
    return size if length % size == 0 else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def blockwise_attention(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_ids_BT: jax.Array, block: int
) -> jax.Array:
    """softmax(q k^T / sqrt(H)) v, causal and within segments, softmax in float32.

    Args:
      q_BTNH: queries; head n reads key/value head n // (N / K).
      k_BSKH: keys, S = T.
      v_BSKH: values.
      segment_ids_BT: document number of each place.
      block: queries of a block; divides T.

    Returns:
      [B, T, N, H] in the dtype of the queries.
    """
    return _forward(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, block)[0]


def _forward(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, block):
    K = k_BSKH.shape[2]
    q_BKGTH = _queries_first(q_BTNH * q_BTNH.shape[-1] ** -0.5, K)
    k_BKSH, v_BKSH = jnp.swapaxes(k_BSKH, 1, 2), jnp.swapaxes(v_BSKH, 1, 2)
    outputs, log_z = [], []
    for start in range(0, q_BTNH.shape[1], block):
        end = start + block
        scores = _scores(q_BKGTH, k_BKSH, segment_ids_BT, start, end)
        largest = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - largest)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        y = _dot(weights.astype(v_BSKH.dtype), v_BKSH[:, :, :end], 3, 2) / total
        outputs.append(_unfold(y, block))
        log_z.append(largest + jnp.log(total))
    y_BKGTH = jnp.concatenate(outputs, axis=3).astype(q_BTNH.dtype)
    return _time_first(y_BKGTH), (q_BKGTH, k_BKSH, v_BKSH, segment_ids_BT, y_BKGTH, log_z)


def _backward(block, saved, dy_BTNH):
    q_BKGTH, k_BKSH, v_BKSH, segment_ids_BT, y_BKGTH, log_z = saved
    B, K, _, T, H = q_BKGTH.shape
    dtype = q_BKGTH.dtype
    dy_BKGTH = _queries_first(dy_BTNH, K)
    # The gradient through the softmax needs only sum(dy * y) of each query (Dao et al. 2022, section 3.1).
    inner_BKGT1 = jnp.sum(dy_BKGTH.astype(jnp.float32) * y_BKGTH.astype(jnp.float32), axis=-1, keepdims=True)
    starts = range(0, T, block)
    dq = []
    dk, dv = ([jnp.zeros((B, K, H, block), jnp.float32) for _ in starts] for _ in range(2))
    for index, start in enumerate(starts):
        end = start + block
        q, dy, inner = (_fold(x[:, :, :, start:end]) for x in (q_BKGTH, dy_BKGTH, inner_BKGT1))
        weights = jnp.exp(_scores(q_BKGTH, k_BKSH, segment_ids_BT, start, end) - log_z[index])
        dweights = _dot(dy, v_BKSH[:, :, :end], 3, 3)
        dscores = (weights * (dweights - inner)).astype(dtype)
        dq.append(_unfold(_dot(dscores, k_BKSH[:, :, :end], 3, 2), block))
        dk_HS = _dot(q, dscores, 2, 2)
        dv_HS = _dot(dy, weights.astype(dtype), 2, 2)
        for seen in range(index + 1):
            columns = slice(seen * block, (seen + 1) * block)
            dk[seen] += dk_HS[..., columns]
            dv[seen] += dv_HS[..., columns]
    dq_BKGTH = jnp.concatenate(dq, axis=3) * H**-0.5
    dk_BSKH, dv_BSKH = (jnp.moveaxis(jnp.concatenate(x, axis=-1), 3, 1).astype(dtype) for x in (dk, dv))
    return _time_first(dq_BKGTH.astype(dtype)), dk_BSKH, dv_BSKH, None


blockwise_attention.defvjp(_forward, _backward)


def _scores(q_BKGTH, k_BKSH, segment_ids_BT, start, end):
    """Masked scores [B, K, G * block, end] of the queries from `start` to `end` with all keys before `end`."""
    B, K, G, _, H = q_BKGTH.shape
    block = end - start
    scores = _dot(_fold(q_BKGTH[:, :, :, start:end]), k_BKSH[:, :, :end], 3, 3)
    causal = jnp.arange(start, end)[:, None] >= jnp.arange(end)[None, :]
    same_document = segment_ids_BT[:, start:end, None] == segment_ids_BT[:, None, :end]
    visible = (causal & same_document)[:, None, None]
    return jnp.where(visible, scores.reshape(B, K, G, block, end), _MASKED).reshape(scores.shape)


def _dot(a, b, contract_a, contract_b):
    """Batched over the first two dimensions, summed in float32."""
    dimensions = (((contract_a,), (contract_b,)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _queries_first(x_BTNH, K):
    """[B, T, N, H] -> [B, K, G, T, H]."""
    B, T, N, H = x_BTNH.shape
    return jnp.moveaxis(x_BTNH.reshape(B, T, K, N // K, H), 1, 3)


def _time_first(x_BKGTH):
    B, K, G, T, H = x_BKGTH.shape
    return jnp.moveaxis(x_BKGTH, 3, 1).reshape(B, T, K * G, H)


def _fold(x_BKGTX):
    """Puts the query heads of a key/value head beside each other: [B, K, G * T, X]."""
    B, K, G, T, X = x_BKGTX.shape
    return x_BKGTX.reshape(B, K, G * T, X)


def _unfold(x, block):
    B, K, rows, H = x.shape
    return x.reshape(B, K, rows // block, block, H)
