"""A gated recurrence of each channel: h_t = exp(d_t) h_(t-1) + x_t, for all tokens at once by an associative scan.

Shape letters: B rows, T tokens, I channels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara.kernels.scans import chunks


def recur(
    x_BTI: jax.Array,
    log_decay_BTI: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    state_BI: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The states after each token, and after the last one.

    Args:
      x_BTI: what tokens add. A token that adds 0 with a log decay of 0 leaves the state as it is.
      log_decay_BTI: at most 0.
      segment_ids_BT: documents, each of which begins with an empty state; None: each row is one document.
      state_BI: what earlier tokens of the rows have left; None: nothing.

    Returns:
      [B, T, I] and [B, I], float32.
    """
    x, decay = jnp.asarray(x_BTI, jnp.float32), jnp.exp(log_decay_BTI.astype(jnp.float32))
    decay = jnp.where(chunks.begins(segment_ids_BT, x.shape[:2])[..., None], 0, decay)
    if state_BI is not None:
        x = x.at[:, 0].add(decay[:, 0] * state_BI)
    _, states = jax.lax.associative_scan(chunks.one_after_another, (decay, x), axis=1)
    return states, states[:, -1]
