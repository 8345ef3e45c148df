"""Attention by blocks of queries: most masked scores are never computed, and no [T, T] array is saved.

For platforms without a fused attention kernel. The backward pass recomputes the probabilities from the saved
normalisers, as FlashAttention does (Dao et al. 2022, arXiv:2205.14135). Its products use the operand orders that XLA's
CPU matmul runs at full speed: gradients of keys and values are computed transposed, [H, S].
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.attention.signature import AttentionInputs, needs_whole_rows, reference_only
from capibara.kernels.attention.spec import AttentionSpec

_MASKED = -1e30  # finite, so that a fully masked row yields a number
_MIN_BLOCK, _MAX_BLOCKS = 64, 16


def block_size(length: int) -> int | None:
    """Number of queries in a block for rows of this length; None if the length does not divide into blocks."""
    size = max(_MIN_BLOCK, length // _MAX_BLOCKS)
    return size if length % size == 0 else None


def unsupported_reason(inputs: AttentionInputs, spec: AttentionSpec) -> str | None:
    """See signature.AttentionKernel: it needs whole rows in order that divide into blocks."""
    del spec
    T = inputs.q_BTNH.shape[1]
    odd = f"takes rows of a multiple of 64 tokens, or of 16 above 1024, not of {T}" if block_size(T) is None else None
    return reference_only(inputs) or needs_whole_rows(inputs) or odd


def attend(inputs: AttentionInputs, spec: AttentionSpec, block: int | None = None) -> jax.Array:
    """See signature.AttentionKernel. `block`: queries per block, a divisor of T; None: chosen by T."""
    block = block_size(inputs.q_BTNH.shape[1]) if block is None else block
    return _blockwise(*inputs[:5], inputs.bias_NTS, spec, block, inputs.sinks_N)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _blockwise(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, q_segments_BT: jax.Array, kv_segments_BS: jax.Array,
    bias_NTS: jax.Array | None, spec: AttentionSpec, block: int, sinks_N: jax.Array | None,
) -> jax.Array:  # fmt: skip
    return _forward(q_BTNH, k_BSKH, v_BSKH, q_segments_BT, kv_segments_BS, bias_NTS, spec, block, sinks_N)[0]


def _forward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, q_segments_BT: jax.Array, kv_segments_BS: jax.Array,
    bias_NTS: jax.Array | None, spec: AttentionSpec, block: int, sinks_N: jax.Array | None,
) -> tuple[jax.Array, Any]:  # fmt: skip
    K = k_BSKH.shape[2]
    k_BKSH, v_BKSH = jnp.swapaxes(k_BSKH, 1, 2), jnp.swapaxes(v_BSKH, 1, 2)
    segments = (q_segments_BT, kv_segments_BS)
    queries, outputs, log_z = [], [], []  # by block: sliced once, so that each is laid out once and never copied
    for start in range(0, q_BTNH.shape[1], block):
        q = _queries_first(q_BTNH[:, start : start + block] * spec.scale, K)
        scores, keys = _scores(q, k_BKSH, segments, bias_NTS, spec, start)
        largest, sinks = jnp.max(scores, axis=-1, keepdims=True), _sinks(sinks_N, K, block)
        largest = largest if sinks is None else jnp.maximum(largest, sinks)
        weights = jnp.exp(scores - largest)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        total = total if sinks is None else total + jnp.exp(sinks - largest)
        y = _dot(weights.astype(v_BSKH.dtype), v_BKSH[:, :, keys], 3, 2) / total
        queries.append(q)
        outputs.append(_unfold(y, block).astype(q_BTNH.dtype))
        log_z.append(largest + jnp.log(total))
    saved = (queries, k_BKSH, v_BKSH, segments, bias_NTS, sinks_N, outputs, log_z)
    return jnp.concatenate([_time_first(y) for y in outputs], axis=1), saved


def _backward(spec: AttentionSpec, block: int, saved: Any, dy_BTNH: jax.Array) -> tuple[jax.Array | None, ...]:
    queries, k_BKSH, v_BKSH, segments, bias_NTS, sinks_N, outputs, log_z = saved
    (B, K, S, H), T, dtype = k_BKSH.shape, dy_BTNH.shape[1], dy_BTNH.dtype
    # The ranges of keys visible to blocks of queries begin and end at block boundaries, or at the end of the keys.
    edges = sorted(
        {edge for start in range(0, T, block) for edge in _edges(_visible_keys(spec, start, block, S))} | {0, S}
    )
    dk, dv = ([jnp.zeros((B, K, H, b - a), jnp.float32) for a, b in zip(edges, edges[1:])] for _ in range(2))
    dq, dbias = [], []
    dsinks: jax.Array | float = 0.0
    for index, start in enumerate(range(0, T, block)):
        scores, keys = _scores(queries[index], k_BKSH, segments, bias_NTS, spec, start)
        q, y = _fold(queries[index]), _fold(outputs[index])
        dy = _fold(_queries_first(dy_BTNH[:, start : start + block], K))
        # The softmax's gradient needs only sum(dy * y) of each query (Dao et al. 2022, section 3.1).
        inner = jnp.sum(dy.astype(jnp.float32) * y.astype(jnp.float32), axis=-1, keepdims=True)
        weights = jnp.exp(scores - log_z[index])
        if (sinks := _sinks(sinks_N, K, block)) is not None:  # like a key whose value is 0
            taken = jnp.exp(sinks - log_z[index]) * inner
            dsinks -= jnp.sum(taken.reshape(B, K, -1, block), axis=(0, 3)).reshape(-1)
        dscores = weights * (_dot(dy, v_BKSH[:, :, keys], 3, 3) - inner)
        if spec.soft_cap is not None:
            # Masked scores are far beyond the cap, but their weights are 0.
            dscores = dscores * jnp.maximum(1.0 - jnp.square(scores / spec.soft_cap), 0.0)
        if bias_NTS is not None:
            rows = jnp.sum(dscores.reshape(B, -1, block, dscores.shape[-1]), axis=0)
            dbias.append(jnp.pad(rows, ((0, 0), (0, 0), (keys.start, S - keys.stop))))
        dscores = dscores.astype(dtype)
        dq.append(_unfold(_dot(dscores, k_BKSH[:, :, keys], 3, 2), block))
        dk_HS, dv_HS = _dot(q, dscores, 2, 2), _dot(dy, weights.astype(dtype), 2, 2)
        for part, (a, b) in enumerate(zip(edges, edges[1:])):
            if keys.start <= a and b <= keys.stop:
                columns = slice(a - keys.start, b - keys.start)
                dk[part] += dk_HS[..., columns]
                dv[part] += dv_HS[..., columns]
    dq_BTNH = jnp.concatenate([_time_first(x) for x in dq], axis=1) * spec.scale
    # Transposed part by part: for whole rows XLA would read each column across the whole cache.
    dk_BSKH, dv_BSKH = (jnp.concatenate([jnp.moveaxis(x, 3, 1) for x in parts], axis=1) for parts in (dk, dv))
    dbias_NTS = None if bias_NTS is None else jnp.concatenate(dbias, axis=1).astype(bias_NTS.dtype)
    dsinks_N = None if sinks_N is None else jnp.asarray(dsinks).astype(sinks_N.dtype)
    return dq_BTNH.astype(dtype), dk_BSKH.astype(dtype), dv_BSKH.astype(dtype), None, None, dbias_NTS, dsinks_N


_blockwise.defvjp(_forward, _backward)


def _visible_keys(spec: AttentionSpec, start: int, block: int, key_count: int) -> slice:
    """The keys that a block of queries can see by their positions; the range begins at a block boundary."""
    first, last = 0, key_count
    if spec.causal:
        last = min(start + block, key_count)
    if spec.window is not None:
        first = max(0, start - spec.window + 1) // block * block
        if not spec.causal:
            last = min(-(-(start + block + spec.window - 1) // block) * block, key_count)
    return slice(min(first, last - 1), last)


def _edges(keys: slice) -> tuple[int, int]:
    return keys.start, keys.stop


def _scores(
    q_BKGTH: jax.Array,
    k_BKSH: jax.Array,
    segments: tuple[jax.Array, jax.Array],
    bias_NTS: jax.Array | None,
    spec: AttentionSpec,
    start: int,
) -> tuple[jax.Array, slice]:
    """Masked scores [B, K, G * T, keys] of the block of queries at `start`, and the slice of keys that they cover."""
    B, K, G, block, _ = q_BKGTH.shape
    rows, keys = slice(start, start + block), _visible_keys(spec, start, block, k_BKSH.shape[2])
    scores = _dot(_fold(q_BKGTH), k_BKSH[:, :, keys], 3, 3)
    scores = scores.reshape(B, K, G, block, -1)
    if bias_NTS is not None:
        scores = scores + bias_NTS[:, rows, keys].reshape(K, G, block, -1).astype(jnp.float32)
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    visible = segments[0][:, rows, None] == segments[1][:, None, keys]
    back = jnp.arange(start, start + block)[:, None] - jnp.arange(keys.start, keys.stop)[None, :]
    if spec.causal:
        visible &= back >= 0
    if spec.window is not None:
        visible &= jnp.abs(back) < spec.window
    scores = jnp.where(visible[:, None, None], scores, _MASKED)
    return scores.reshape(B, K, G * block, -1), keys


def _sinks(sinks_N: jax.Array | None, K: int, block: int) -> jax.Array | None:
    """The sink of each row of scores: [1, K, G * block, 1]."""
    return None if sinks_N is None else jnp.repeat(sinks_N.reshape(1, K, -1), block, axis=2)[..., None]


def _dot(a: jax.Array, b: jax.Array, contract_a: int, contract_b: int) -> jax.Array:
    """A product batched over the first two dimensions, accumulated in float32."""
    dimensions = (((contract_a,), (contract_b,)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _queries_first(x_BTNH: jax.Array, K: int) -> jax.Array:
    """[B, T, N, H] -> [B, K, G, T, H]."""
    B, T, N, H = x_BTNH.shape
    return jnp.moveaxis(x_BTNH.reshape(B, T, K, N // K, H), 1, 3)


def _time_first(x_BKGTH: jax.Array) -> jax.Array:
    B, K, G, T, H = x_BKGTH.shape
    return jnp.moveaxis(x_BKGTH, 3, 1).reshape(B, T, K * G, H)


def _fold(x_BKGTX: jax.Array) -> jax.Array:
    """Merges the query heads of each key/value head: [B, K, G * T, X]."""
    B, K, G, T, X = x_BKGTX.shape
    return x_BKGTX.reshape(B, K, G * T, X)


def _unfold(x: jax.Array, block: int) -> jax.Array:
    B, K, rows, H = x.shape
    return x.reshape(B, K, rows // block, block, H)
