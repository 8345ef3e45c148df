"""Attention to a cache by the plain formula, with all scores at once: what the kernel and the CPU's loops must agree with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from capibara.kernels.attention.spec import AttentionSpec

_MASKED = -1e30  # finite, so that a row with nothing to see stays a number
_BATCHED = ((0, 1), (0, 1))


class Rows(NamedTuple):
    """Keys and values of B rows with S places each, K key/value heads.

    Attributes:
      k_BKSH: keys.
      v_BKSH: values.
      scales: [B, K, S] of keys and of values in 8 bits; None: they are as they are.
    """

    k_BKSH: jax.Array
    v_BKSH: jax.Array
    scales: tuple[jax.Array, jax.Array] | None = None


class Pages(NamedTuple):
    """Keys and values in pages of P places of one pool.

    Attributes:
      keys, values: [pages, K, P, H].
      table_BM: int32, the pages of each row in their order; 0: none.
      there_BS: bool, which of the M * P places of each row have been written.
      scales: [pages, K, P] of keys and of values in 8 bits; None: they are as they are.
    """

    keys: jax.Array
    values: jax.Array
    table_BM: jax.Array
    there_BS: jax.Array
    scales: tuple[jax.Array, jax.Array] | None = None


class Seen(NamedTuple):
    """What each query sees.

    Attributes:
      visible_BTS: bool, which places.
      bias_BNTS: added to the scores.
      first_B: of one query a row that sees the first places of its row, or the last of a window, and no others: how
        many of them are there; None: `visible_BTS` alone says.
      sinks_N: float32, a logit of each query head in the softmax's denominator; None: none.
    """

    visible_BTS: jax.Array
    bias_BNTS: jax.Array | None = None
    first_B: jax.Array | None = None
    sinks_N: jax.Array | None = None


def attend_rows(q_BTNH: jax.Array, rows: Rows, seen: Seen, spec: AttentionSpec) -> jax.Array:
    """As dispatch.attend_rows."""
    k_BKSH, v_BKSH = (x.astype(q_BTNH.dtype) for x in rows[:2])

    def scores(q_BKXH: jax.Array) -> jax.Array:
        return jax.lax.dot_general(q_BKXH, k_BKSH, (((3,), (3,)), _BATCHED), preferred_element_type=jnp.float32)

    def mixed(w_BKXS: jax.Array) -> jax.Array:
        return jax.lax.dot_general(w_BKXS, v_BKSH, (((3,), (2,)), _BATCHED))

    return attend_by(q_BTNH, scores, mixed, k_BKSH.shape[1], seen, spec, rows.scales)


def rows_of(pages: Pages) -> Rows:
    """The pages of each row side by side; 0 for values that are not there."""
    scales = scales_of(pages)
    keys, values = (gathered(pool, pages.table_BM) for pool in (pages.keys, pages.values))
    return Rows(keys, jnp.where(pages.there_BS[:, None, :, None], values, 0), scales)


def scales_of(pages: Pages) -> tuple[jax.Array, jax.Array] | None:
    """Those of each row."""
    if pages.scales is None:
        return None
    of_keys, of_values = (gathered(pool, pages.table_BM) for pool in pages.scales)
    # What others left may be no number, which a weight of 0 does not hide.
    return of_keys, jnp.where(pages.there_BS[:, None], of_values, 0)


def gathered(pool: jax.Array, table_BM: jax.Array) -> jax.Array:
    """The pages of each row side by side, [B, K, M * P, ...]."""
    # Each head's part is brought to its place at once: nothing is transposed afterwards.
    heads_K1 = jnp.arange(pool.shape[1], dtype=jnp.int32)[:, None]
    x_BKMPx = pool.at[table_BM[:, None], heads_K1].get(mode="promise_in_bounds")
    return x_BKMPx.reshape(*x_BKMPx.shape[:2], -1, *x_BKMPx.shape[4:])


def attend_by(
    q_BTNH: jax.Array,
    scores_of: Callable[[jax.Array], jax.Array],
    mixed: Callable[[jax.Array], jax.Array],
    kv_heads: int,
    seen: Seen,
    spec: AttentionSpec,
    scales: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """`softmax(scores) v`, whoever multiplies; softmax in float32.

    `scores_of`: queries [B, K, X, H] -> products with the keys [B, K, X, S], float32; `mixed`: weights [B, K, X, S] ->
    sums of the values [B, K, X, H]. X are the queries of one key/value head.
    """
    (B, T, N, H), K, S = q_BTNH.shape, kv_heads, seen.visible_BTS.shape[2]
    G = N // K
    q_BKXH = jnp.moveaxis((q_BTNH * spec.scale).reshape(B, T, K, G, H), 1, 3).reshape(B, K, G * T, H)
    scores = scores_of(q_BKXH).reshape(B, K, G, T, S)
    if scales is not None:
        scores = scores * scales[0][:, :, None, None]
    if seen.bias_BNTS is not None:
        scores = scores + seen.bias_BNTS.reshape(B, K, G, T, S).astype(jnp.float32)
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    scores = jnp.where(seen.visible_BTS[:, None, None], scores, _MASKED)
    weights = (
        jax.nn.softmax(scores, axis=-1) if seen.sinks_N is None else _softmax(scores, seen.sinks_N.reshape(K, G, 1, 1))
    )
    if scales is not None:
        weights = weights * scales[1][:, :, None, None]
    y_BKXH = mixed(weights.astype(q_BTNH.dtype).reshape(B, K, G * T, S))
    return jnp.moveaxis(y_BKXH.reshape(B, K, G, T, H), 3, 1).reshape(B, T, N, H)


def _softmax(scores: jax.Array, sinks: jax.Array) -> jax.Array:
    """Along the last axis, beside a logit that has no weight of its own."""
    largest = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks)
    weights = jnp.exp(scores - largest)
    return weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sinks - largest))
