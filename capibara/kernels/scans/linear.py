"""Linear attention with a decay for each head: S_t = exp(d_t) S_(t-1) + k_t v_t^T, y_t = S_t^T q_t.

Chunks are computed as attention, and their states one after the other (Dao and Gu 2024, arXiv:2405.21060, section 6).
Shape letters: B rows, T tokens, n chunks, C tokens of a chunk, H heads, K size of keys, V size of values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara.kernels.scans import chunks

CHUNK = 64  # tokens: the quadratic part of a chunk then costs as much as its state does at head size 64


def attend(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    log_decay_BTH: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    state_BHKV: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Results and the final state.

    Args:
      q_BTHK, k_BTHK, v_BTHV: queries, keys, values. A token with k = 0 and a log decay of 0 leaves the state as it is.
      log_decay_BTH: at most 0.
      segment_ids_BT: documents, each of which begins with an empty state; None: each row is one document.
      state_BHKV: what earlier tokens of the rows have left; None: nothing.

    Returns:
      [B, T, H, V] and [B, H, K, V], float32.
    """
    T, size = q_BTHK.shape[1], min(CHUNK, q_BTHK.shape[1])
    d = chunks.decays(log_decay_BTH.astype(jnp.float32), segment_ids_BT, size)
    q, k, v = (chunks.cut(x.astype(jnp.float32), size) for x in (q_BTHK, k_BTHK, v_BTHV))
    y = jnp.einsum("nBHij,nBHjV->nBHiV", jnp.einsum("nBHiK,nBHjK->nBHij", q, k) * d.within, v)
    into, out = q * d.into[..., None], k * d.out[..., None]

    def step(state: jax.Array, chunk: tuple) -> tuple[jax.Array, jax.Array]:
        q, k, v, whole = chunk
        y = jnp.einsum("BHCK,BHKV->BHCV", q, state)
        return state * whole[..., None, None] + jnp.einsum("BHCK,BHCV->BHKV", k, v), y

    B, H, K = k.shape[1], k.shape[2], k.shape[4]
    state = jnp.zeros((B, H, K, v.shape[-1]), jnp.float32) if state_BHKV is None else state_BHKV
    state, of_states = chunks.over(step, state, (into, out, v, d.whole))
    return chunks.joined(y + of_states, T), state
