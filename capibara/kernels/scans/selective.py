"""The selective scan of Mamba: a decay for each channel, entry of its state and token.

h_t = exp(-s_t a) h_(t-1) + s_t x_t k_t, y_t = h_t q_t, for each channel (Gu and Dao 2023, arXiv:2312.00752).
Shape letters: B rows, T tokens, n chunks, C tokens of a chunk, I channels, K entries of a channel's state.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara.kernels.scans import chunks

CHUNK = 32  # tokens whose states are in memory at once: [B, C, K, I] float32


def attend(
    x_BTI: jax.Array,
    step_BTI: jax.Array,
    rate_KI: jax.Array,
    k_BTK: jax.Array,
    q_BTK: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    state_BKI: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Results and the final state.

    Args:
      x_BTI: inputs.
      step_BTI: steps, at least 0. A token with a step of 0 leaves the state as it is.
      rate_KI: by which a state decays in a step of 1, above 0.
      k_BTK, q_BTK: what all channels' inputs and states are multiplied with.
      segment_ids_BT: documents, each of which begins with an empty state; None: each row is one document.
      state_BKI: what earlier tokens of the rows have left; None: nothing.

    Returns:
      [B, T, I] and [B, K, I], float32.
    """
    B, T, width = x_BTI.shape
    size = min(CHUNK, T)
    begins = chunks.begins(segment_ids_BT, (B, T))

    @jax.checkpoint  # the states of a chunk's tokens are computed again where their gradients are
    def step(state_BKI: jax.Array, chunk: tuple) -> tuple[jax.Array, jax.Array]:
        written_BCI, step_BCI, k_BCK, q_BCK, begins_BC = chunk
        decay_BCKI = jnp.exp(-step_BCI[:, :, None] * rate_KI)
        decay_BCKI = jnp.where(begins_BC[:, :, None, None], 0, decay_BCKI)
        added_BCKI = written_BCI[:, :, None] * k_BCK[..., None]
        added_BCKI = added_BCKI.at[:, 0].add(decay_BCKI[:, 0] * state_BKI)
        _, states_BCKI = jax.lax.associative_scan(chunks.one_after_another, (decay_BCKI, added_BCKI), axis=1)
        return states_BCKI[:, -1], jnp.einsum("BCKI,BCK->BCI", states_BCKI, q_BCK)

    if state_BKI is None:
        state_BKI = jnp.zeros((B, rate_KI.shape[0], width), jnp.float32)
    x, s, k, q = (x.astype(jnp.float32) for x in (x_BTI, step_BTI, k_BTK, q_BTK))
    state_BKI, y = chunks.over(step, state_BKI, tuple(_cut(x, size) for x in (x * s, s, k, q, begins)))
    return jnp.swapaxes(y, 0, 1).reshape(B, -1, width)[:, :T], state_BKI


def _cut(x_BTx: jax.Array, size: int) -> jax.Array:
    """[B, T, ...] -> [n, B, C, ...]; the last chunk is filled with zeros."""
    B, T = x_BTx.shape[:2]
    x = jnp.pad(x_BTx, ((0, 0), (0, -T % size), *((0, 0),) * (x_BTx.ndim - 2)))
    return jnp.swapaxes(x.reshape(B, -1, size, *x.shape[2:]), 0, 1)
