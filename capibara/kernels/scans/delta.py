"""The gated delta rule: S_t = exp(d_t) (I - b_t k_t k_t^T) S_(t-1) + b_t k_t v_t^T, y_t = S_t^T q_t.

Yang et al. 2024, "Gated Delta Networks" (arXiv:2412.06464). Within a chunk, what each token writes depends on what the
tokens before it have written: a triangular system, solved for all of them at once (Yang et al. 2024, arXiv:2406.06484).
Kimi Delta Attention has a decay for each channel of a key (Kimi Team 2025, arXiv:2510.26692): exp(d_t) is a diagonal
matrix. Shape letters: B rows, T tokens, n chunks, C tokens of a chunk, H heads, K size of keys, V size of values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara.kernels.scans import chunks

CHUNK = 64
CHANNEL_CHUNK = 16  # with a decay for each channel, whose factors of a chunk are [C, C, K] for each head


def attend(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    log_decay_BTH: jax.Array,
    strength_BTH: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    state_BHKV: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Results and the final state.

    Args:
      q_BTHK, k_BTHK, v_BTHV: queries, keys (of length 1), values.
      log_decay_BTH: at most 0. A token with a strength and a log decay of 0 leaves the state as it is.
      strength_BTH: b, how much of what the state holds for a key is replaced.
      segment_ids_BT, state_BHKV: as in `linear.attend`.

    Returns:
      [B, T, H, V] and [B, H, K, V], float32.
    """
    T, size = q_BTHK.shape[1], min(CHUNK, q_BTHK.shape[1])
    d = chunks.decays(log_decay_BTH.astype(jnp.float32), segment_ids_BT, size)
    q, k, v = (chunks.cut(x.astype(jnp.float32), size) for x in (q_BTHK, k_BTHK, v_BTHV))
    strength = chunks.cut(strength_BTH.astype(jnp.float32), size)[..., None]
    overlap = jnp.einsum("nBHiK,nBHjK->nBHij", k * strength, k) * d.within
    system = jnp.tril(overlap, -1)  # with ones on the diagonal
    right = jnp.concatenate([v * strength, k * strength * d.into[..., None]], axis=-1)
    solved = jax.lax.linalg.triangular_solve(system, right, left_side=True, lower=True, unit_diagonal=True)
    written, read = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    scores = jnp.einsum("nBHiK,nBHjK->nBHij", q, k) * d.within

    def step(state: jax.Array, chunk: tuple) -> tuple[jax.Array, jax.Array]:
        q_into, k_out, scores, written, read, whole = chunk
        new = written - jnp.einsum("BHCK,BHKV->BHCV", read, state)
        y = jnp.einsum("BHCK,BHKV->BHCV", q_into, state) + jnp.einsum("BHij,BHjV->BHiV", scores, new)
        return state * whole[..., None, None] + jnp.einsum("BHCK,BHCV->BHKV", k_out, new), y

    B, H, K = k.shape[1], k.shape[2], k.shape[4]
    state = jnp.zeros((B, H, K, v.shape[-1]), jnp.float32) if state_BHKV is None else state_BHKV
    parts = (q * d.into[..., None], k * d.out[..., None], scores, written, read, d.whole)
    state, y = chunks.over(step, state, parts)
    return chunks.joined(y, T), state


def attend_by_channel(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    log_decay_BTHK: jax.Array,
    strength_BTH: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    state_BHKV: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """As `attend`, with a decay for each channel of the keys."""
    B, T, H, K = k_BTHK.shape
    size = min(CHANNEL_CHUNK, T)
    whole_rows = (q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, strength_BTH[..., None])
    ids_BT = jnp.ones((B, T), jnp.int32) if segment_ids_BT is None else segment_ids_BT
    parts = *(chunks.cut(x.astype(jnp.float32), size) for x in whole_rows), chunks.documents(ids_BT, size)
    causal_CC = jnp.tril(jnp.ones((size, size), bool))
    after_CC = jnp.tril(causal_CC, -1)

    def step(state: jax.Array, chunk: tuple) -> tuple[jax.Array, jax.Array]:
        q, k, v, log_decay, strength, same = chunk
        # As in chunks.decays: sums of the tokens after j up to i, masked before exp.
        sums = jnp.cumsum(jnp.where(after_CC[..., None], log_decay[..., :, None, :], 0), axis=-3)
        seen = same.within[:, None, ..., None] & causal_CC[..., None]
        within = jnp.exp(jnp.where(seen, sums, -jnp.inf))
        total = jnp.cumsum(log_decay, axis=-2)
        into = jnp.where(same.into[:, None, :, None], jnp.exp(total), 0)
        out, whole = within[..., -1, :, :], jnp.where(same.whole[:, None, None], jnp.exp(total[..., -1, :]), 0)
        system = jnp.tril(jnp.einsum("BHiK,BHjK,BHijK->BHij", k * strength, k, within), -1)
        right = jnp.concatenate([v * strength, k * strength * into], axis=-1)
        solved = jax.lax.linalg.triangular_solve(system, right, left_side=True, lower=True, unit_diagonal=True)
        written, read = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
        new = written - jnp.einsum("BHCK,BHKV->BHCV", read, state)
        scores = jnp.einsum("BHiK,BHjK,BHijK->BHij", q, k, within)
        y = jnp.einsum("BHCK,BHKV->BHCV", q * into, state) + jnp.einsum("BHij,BHjV->BHiV", scores, new)
        return state * whole[..., None] + jnp.einsum("BHCK,BHCV->BHKV", k * out, new), y

    state = jnp.zeros((B, H, K, v_BTHV.shape[-1]), jnp.float32) if state_BHKV is None else state_BHKV
    # The factors of a chunk are computed again in the backward pass: all chunks' would be T / C times as large.
    state, y = chunks.over(jax.checkpoint(step), state, parts)
    return chunks.joined(y, T), state
