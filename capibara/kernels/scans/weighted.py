"""A weighted mean of the tokens before: weights are exponentials of keys, and fall with the distance (RWKV-4).

Each channel is by itself: token t reads the mean of v_j with the weights exp(k_j + (t - 1 - j) d), and of v_t with the weight
exp(k_t + bonus). Shape letters: B rows, T tokens, I channels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara.kernels.scans import chunks, diagonal

_NONE = -1e30  # the exponent of no weight: differences of it are numbers


def attend(
    k_BTI: jax.Array,
    v_BTI: jax.Array,
    log_decay_I: jax.Array,
    bonus_I: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    state_B3I: jax.Array | None = None,
    real_BT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The means, and the state after the last token.

    Args:
      k_BTI: exponents of the weights.
      v_BTI: what is averaged.
      log_decay_I: at most 0.
      bonus_I: added to the exponent of the token that reads.
      segment_ids_BT: documents, each of which begins with an empty state; None: each row is one document.
      state_B3I: what earlier tokens of the rows have left: the weighted sum and the sum of the weights, both divided by the
        exponential of the third; None: nothing.
      real_BT: the tokens that change the state; None: all.

    Returns:
      [B, T, I] and [B, 3, I], float32.
    """
    k, v = k_BTI.astype(jnp.float32), v_BTI.astype(jnp.float32)
    count = k.shape[-1]
    state_B3I = empty(k.shape[0], count) if state_B3I is None else state_B3I
    sums_BI, top_BI = state_B3I[:, :2].reshape(-1, 2 * count), jax.lax.stop_gradient(state_B3I[:, 2])
    begins = chunks.begins(segment_ids_BT, k.shape[:2])[..., None]
    real = jnp.ones_like(begins) if real_BT is None else real_BT[..., None]
    decay = jnp.where(real, log_decay_I.astype(jnp.float32), 0)
    # Sums are divided by the exponential of the largest exponent so far, whose choice changes no result.
    tops = _tops(jnp.where(real, k, _NONE), jnp.where(begins, _NONE, decay), top_BI)
    tops_before = jnp.where(begins, _NONE, _shifted(tops, top_BI))
    weight = jnp.where(real, jnp.exp(jnp.where(real, k - tops, 0)), 0)
    added = jnp.concatenate([weight * v, weight], axis=-1)
    left = jnp.where(begins, 0, decay + tops_before - tops)  # a document's first token reads nothing, whatever this is
    sums, last = diagonal.recur(added, jnp.tile(left, 2), segment_ids_BT, sums_BI)
    before = jnp.where(begins, 0, _shifted(sums, sums_BI))
    reading = k + bonus_I.astype(jnp.float32)
    largest = jax.lax.stop_gradient(jnp.maximum(tops_before, reading))
    earlier, current = jnp.exp(tops_before - largest), jnp.exp(reading - largest)
    y = (earlier * before[..., :count] + current * v) / (earlier * before[..., count:] + current)
    return y, jnp.concatenate([last.reshape(-1, 2, count), tops[:, -1:]], axis=1)


def empty(batch: int, channels: int) -> jax.Array:
    """The state of rows that have read nothing, [B, 3, I]."""
    return jnp.zeros((batch, 3, channels), jnp.float32).at[:, 2].set(_NONE)


def _tops(k_BTI: jax.Array, decay_BTI: jax.Array, before_BI: jax.Array) -> jax.Array:
    """The largest exponents so far, max(t_(j-1) + d_j, k_j), without gradients."""
    k, decay = jax.lax.stop_gradient((k_BTI, decay_BTI))
    k = k.at[:, 0].max(decay[:, 0] + before_BI)
    join = lambda first, second: (first[0] + second[0], jnp.maximum(first[1] + second[0], second[1]))  # noqa: E731
    return jax.lax.associative_scan(join, (decay, k), axis=1)[1]


def _shifted(x_BTI: jax.Array, before_BI: jax.Array) -> jax.Array:
    """What was before each token."""
    return jnp.concatenate([before_BI[:, None], x_BTI[:, :-1]], axis=1)
