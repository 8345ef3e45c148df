"""Attention to a window and to a document's first tokens, in time and memory proportional to the row's length.

Queries are computed in blocks at least as long as the window: a block sees the keys of two blocks, and the sinks of the
document that holds the first of them. Documents that begin later have their sinks within the two blocks.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from capibara.kernels.attention.signature import AttentionInputs, needs_whole_rows, reference_only
from capibara.kernels.attention.spec import AttentionSpec

_MASKED = -1e30  # finite, so that a fully masked row yields a number
_SHORTEST = 128  # queries of a block: shorter ones would not fill a matrix unit


def unsupported_reason(inputs: AttentionInputs, spec: AttentionSpec) -> str | None:
    """See signature.AttentionKernel: it needs causal windows in whole rows in order."""
    plain = spec.causal and spec.window is not None and inputs.bias_NTS is None
    other = None if plain else f"takes causal windows without relative positions, not {inputs.described(spec)}"
    return reference_only(inputs) or needs_whole_rows(inputs) or other


def positions_in_documents(segments_BT: jax.Array) -> jax.Array:
    """[B, T] int32: the position of each token in its document; `segments_BT` are document numbers."""
    index_T = jnp.arange(segments_BT.shape[1], dtype=jnp.int32)
    return index_T - _starts(segments_BT)


def _starts(segments_BT: jax.Array) -> jax.Array:
    """[B, T] int32: the column at which each token's document starts."""
    index_T = jnp.arange(segments_BT.shape[1], dtype=jnp.int32)
    first_BT = jnp.diff(segments_BT, axis=1, prepend=segments_BT[:, :1] - 1) != 0
    return jax.lax.cummax(jnp.where(first_BT, index_T, 0), axis=1)


def attend(inputs: AttentionInputs, spec: AttentionSpec) -> jax.Array:
    """See signature.AttentionKernel."""
    assert spec.window is not None, "unsupported_reason has checked it"
    (B, T, N, H), K = inputs.q_BTNH.shape, inputs.k_BSKH.shape[2]
    size = min(T, max(spec.window, _SHORTEST))
    count = -(-T // size)
    segments_BT, starts_BT = inputs.kv_segments_BS, _starts(inputs.kv_segments_BS)
    # Keys of a block and of the one before it; the first of these is at column (block - 1) * size.
    k, v, segments, starts = (_pairs(x, size, count) for x in (inputs.k_BSKH, inputs.v_BSKH, segments_BT, starts_BT))
    before_n = (jnp.arange(count, dtype=jnp.int32) - 1) * size
    columns_nS = before_n[:, None] + jnp.arange(2 * size, dtype=jnp.int32)
    sinks_nBs = jnp.moveaxis(starts_BT[:, jnp.clip(before_n, 0)], 1, 0)[..., None] + jnp.arange(spec.sink_tokens)
    taken_nBs = jnp.clip(sinks_nBs, 0, T - 1)
    of_sinks = lambda x: jax.vmap(
        lambda taken: jnp.take_along_axis(x, taken.reshape(*taken.shape, *(1,) * (x.ndim - 2)), axis=1)
    )(taken_nBs)  # noqa: E731, E501
    # A sink at or behind the first key of the two blocks is one of these.
    beyond_nBs = jnp.where(sinks_nBs < before_n[:, None, None], sinks_nBs, T)
    blocks = {
        "q": _blocks(inputs.q_BTNH, size, count),
        "q_segments": _blocks(inputs.q_segments_BT, size, count),
        "q_columns": jnp.arange(count * size, dtype=jnp.int32).reshape(count, size),
        "k": jnp.concatenate([of_sinks(inputs.k_BSKH), k], axis=2),
        "v": jnp.concatenate([of_sinks(inputs.v_BSKH), v], axis=2),
        "segments": jnp.concatenate([of_sinks(segments_BT), segments], axis=2),
        "starts": jnp.concatenate([of_sinks(starts_BT), starts], axis=2),
        "columns": jnp.concatenate([beyond_nBs, jnp.broadcast_to(columns_nS[:, None], (count, B, 2 * size))], axis=2),
    }
    y_nBtNH = jax.lax.map(jax.checkpoint(functools.partial(_block, spec=spec, K=K, sinks_N=inputs.sinks_N)), blocks)
    return jnp.moveaxis(y_nBtNH, 0, 1).reshape(B, count * size, N, H)[:, :T]


def _block(block: dict[str, jax.Array], spec: AttentionSpec, K: int, sinks_N: jax.Array | None) -> jax.Array:
    """Attention [B, t, N, H] of a block's queries."""
    assert spec.window is not None, "unsupported_reason has checked it"
    B, t, N, H = block["q"].shape
    q_BtKGH = block["q"].reshape(B, t, K, N // K, H) * spec.scale
    scores = jnp.einsum("BtKGH,BSKH->BKGtS", q_BtKGH, block["k"], preferred_element_type=jnp.float32)
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    back_BtS = block["q_columns"][None, :, None] - block["columns"][:, None]
    positions_B1S = (block["columns"] - block["starts"])[:, None]
    visible_BtS = (block["q_segments"][:, :, None] == block["segments"][:, None]) & (back_BtS >= 0)
    visible_BtS &= spec.in_window(back_BtS, positions_B1S) & (block["columns"][:, None] >= 0)
    scores = jnp.where(visible_BtS[:, None, None], scores, _MASKED)
    if sinks_N is not None:
        logits = jnp.broadcast_to(sinks_N.reshape(K, N // K, 1, 1), (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, logits], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(block["v"].dtype)[..., : block["v"].shape[1]]
    return jnp.einsum("BKGtS,BSKH->BtKGH", weights, block["v"]).reshape(B, t, N, H)


def _blocks(x_BTx: jax.Array, size: int, count: int) -> jax.Array:
    """[count, B, size, ...], padded with zeros at the end."""
    x_BTx = jnp.pad(x_BTx, ((0, 0), (0, count * size - x_BTx.shape[1]), *((0, 0),) * (x_BTx.ndim - 2)))
    return jnp.moveaxis(x_BTx.reshape(x_BTx.shape[0], count, size, *x_BTx.shape[2:]), 1, 0)


def _pairs(x_BTx: jax.Array, size: int, count: int) -> jax.Array:
    """[count, B, 2 * size, ...]: each block behind the one before it, which is zeros for the first."""
    blocks = _blocks(x_BTx, size, count)
    before = jnp.concatenate([jnp.zeros_like(blocks[:1]), blocks[:-1]])
    return jnp.concatenate([before, blocks], axis=2)
