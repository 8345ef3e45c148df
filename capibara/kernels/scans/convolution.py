"""Causal convolution of each channel along a row, within its documents. Shape letters: B rows, T tokens, K taps."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def convolve(
    x_BTx: jax.Array,
    weight_xK: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    before_BKx: jax.Array | None = None,
) -> jax.Array:
    """y_t = sum over k of w_k x_(t - K + 1 + k), where tokens of other documents count as 0.

    Args:
      x_BTx: inputs, with any shape of channels.
      weight_xK: a weight for each channel and tap, the current token's last.
      segment_ids_BT: documents; None: each row is one.
      before_BKx: the last K - 1 inputs of each row before these; None: zeros.

    Returns:
      Like x.
    """
    K, T = weight_xK.shape[-1], x_BTx.shape[1]
    weight_Kx = jnp.moveaxis(weight_xK, -1, 0).astype(x_BTx.dtype)
    whole = _extended(x_BTx, before_BKx, K)
    y = jnp.zeros_like(x_BTx)
    for tap in range(K):
        back = K - 1 - tap
        shifted = jax.lax.slice_in_dim(whole, tap, tap + T, axis=1)
        if segment_ids_BT is not None and back:
            earlier = jnp.pad(segment_ids_BT, ((0, 0), (back, 0)), constant_values=-1)[:, :T]
            same = (earlier == segment_ids_BT).reshape(*segment_ids_BT.shape, *(1,) * (x_BTx.ndim - 2))
            shifted = jnp.where(same, shifted, 0)
        y = y + shifted * weight_Kx[tap]
    return y


def last_inputs(x_BTx: jax.Array, before_BKx: jax.Array, counts_B: jax.Array) -> jax.Array:
    """The last K - 1 inputs [B, K - 1, ...] of rows of which `counts` of these are real."""
    retained = before_BKx.shape[1]
    whole = _extended(x_BTx, before_BKx, retained + 1)
    index_BK = counts_B[:, None] + jnp.arange(retained, dtype=counts_B.dtype)
    index = index_BK.reshape(*index_BK.shape, *(1,) * (x_BTx.ndim - 2))
    return jnp.take_along_axis(whole, index, axis=1).astype(before_BKx.dtype)


def _extended(x_BTx: jax.Array, before_BKx: jax.Array | None, taps: int) -> jax.Array:
    if before_BKx is None:
        return jnp.pad(x_BTx, ((0, 0), (taps - 1, 0), *((0, 0),) * (x_BTx.ndim - 2)))
    return jnp.concatenate([before_BKx.astype(x_BTx.dtype), x_BTx], axis=1)
