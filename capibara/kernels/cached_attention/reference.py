"""The reference for attention to a cache, which materialises all scores; the kernel and the CPU's loops must agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from capibara.kernels.attention.spec import AttentionSpec
from capibara.kernels.slots import take

MASKED = -1e30  # finite, so that a fully masked row yields a number
_BATCHED = ((0, 1), (0, 1))


class Rows(NamedTuple):
    """Keys and values of B rows with a capacity of S tokens and K key/value heads.

    Attributes:
      k_BKSH: keys.
      v_BKSH: values.
      scales: [B, K, S] of 8-bit keys and of 8-bit values; None: not quantized.
      slots_R: int32, for queries of R rows alone: which rows these are; None: all, in order.
    """

    k_BKSH: jax.Array
    v_BKSH: jax.Array
    scales: tuple[jax.Array, jax.Array] | None = None
    slots_R: jax.Array | None = None

    @property
    def selected(self) -> Rows:
        """The rows of the queries; copied, unless these are all rows."""
        if self.slots_R is None:
            return self
        return Rows(take(self.k_BKSH, self.slots_R), take(self.v_BKSH, self.slots_R), self.selected_scales)

    @property
    def selected_scales(self) -> tuple[jax.Array, jax.Array] | None:
        """The scales of the queries' rows."""
        if self.scales is None or self.slots_R is None:
            return self.scales
        return take(self.scales[0], self.slots_R), take(self.scales[1], self.slots_R)


class Pages(NamedTuple):
    """Keys and values in pages of P tokens of one pool.

    Attributes:
      keys, values: [pages, K, P, H].
      table_BM: int32, the pages of each row in order; 0: none.
      written_BS: bool, which of the M * P tokens of each row have been written.
      scales: [pages, K, P] of 8-bit keys and of 8-bit values; None: not quantized.
    """

    keys: jax.Array
    values: jax.Array
    table_BM: jax.Array
    written_BS: jax.Array
    scales: tuple[jax.Array, jax.Array] | None = None


class Visibility(NamedTuple):
    """What each query sees, and what is added to its scores.

    Attributes:
      visible_BTS: bool, which cached tokens.
      bias_BNTS: added to the scores.
      first_B: for one query per row that sees exactly the first tokens of its row, or the last ones of a window: their
        number. None: only `visible_BTS` describes them.
      sinks_N: float32, a logit per query head in the softmax's denominator; None: no sinks.
    """

    visible_BTS: jax.Array
    bias_BNTS: jax.Array | None = None
    first_B: jax.Array | None = None
    sinks_N: jax.Array | None = None


def attend_rows(q_BTNH: jax.Array, rows: Rows, seen: Visibility, spec: AttentionSpec) -> jax.Array:
    """See dispatch.attend_rows."""
    k_BKSH, v_BKSH = (x.astype(q_BTNH.dtype) for x in rows[:2])

    def scores(q_BKXH: jax.Array) -> jax.Array:
        return jax.lax.dot_general(q_BKXH, k_BKSH, (((3,), (3,)), _BATCHED), preferred_element_type=jnp.float32)

    def mixed(w_BKXS: jax.Array) -> jax.Array:
        return jax.lax.dot_general(w_BKXS, v_BKSH, (((3,), (2,)), _BATCHED))

    return attend_by(q_BTNH, scores, mixed, k_BKSH.shape[1], seen, spec, rows.scales)


def attend_in_parts(q_BTNH: jax.Array, rows: Rows, seen: Visibility, spec: AttentionSpec, parts: int) -> jax.Array:
    """`attend_rows` for one part of the queries after the other; `parts` divides their number."""

    def part(x: jax.Array | None, axis: int) -> jax.Array | None:
        if x is None:
            return None
        return jnp.moveaxis(x.reshape(*x.shape[:axis], parts, -1, *x.shape[axis + 1 :]), axis, 0)

    def attend(of_part: tuple[jax.Array, jax.Array, jax.Array | None]) -> jax.Array:
        q, visible, bias = of_part
        return attend_rows(q, rows, Visibility(visible, bias, None, seen.sinks_N), spec)

    y = jax.lax.map(attend, (part(q_BTNH, 1), part(seen.visible_BTS, 1), part(seen.bias_BNTS, 2)))
    return jnp.moveaxis(y, 0, 1).reshape(q_BTNH.shape)


def rows_of(pages: Pages) -> Rows:
    """The pages of each row, concatenated; unwritten values are 0."""
    scales = scales_of(pages)
    keys, values = (gathered(pool, pages.table_BM) for pool in (pages.keys, pages.values))
    return Rows(keys, jnp.where(pages.written_BS[:, None, :, None], values, 0), scales)


def scales_of(pages: Pages) -> tuple[jax.Array, jax.Array] | None:
    """The scales of each row."""
    if pages.scales is None:
        return None
    of_keys, of_values = (gathered(pool, pages.table_BM) for pool in pages.scales)
    # Left-over data may be NaN, which a weight of 0 would not hide.
    return of_keys, jnp.where(pages.written_BS[:, None], of_values, 0)


def gathered(pool: jax.Array, table_BM: jax.Array) -> jax.Array:
    """The pages of each row, concatenated: [B, K, M * P, ...]."""
    # Each head's part is moved to its final position at once: nothing is transposed afterwards.
    heads_K1 = jnp.arange(pool.shape[1], dtype=jnp.int32)[:, None]
    x_BKMPx = pool.at[table_BM[:, None], heads_K1].get(mode="promise_in_bounds")
    return x_BKMPx.reshape(*x_BKMPx.shape[:2], -1, *x_BKMPx.shape[4:])


def attend_by(
    q_BTNH: jax.Array,
    scores_of: Callable[[jax.Array], jax.Array],
    mixed: Callable[[jax.Array], jax.Array],
    kv_heads: int,
    seen: Visibility,
    spec: AttentionSpec,
    scales: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """`softmax(scores) v` with these products; softmax in float32.

    `scores_of` maps queries [B, K, X, H] to their products with the keys [B, K, X, S] in float32; `mixed` maps weights
    [B, K, X, S] to weighted sums of the values [B, K, X, H]. X counts the queries of one key/value head.
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
    scores = jnp.where(seen.visible_BTS[:, None, None], scores, MASKED)
    weights = (
        jax.nn.softmax(scores, axis=-1) if seen.sinks_N is None else _softmax(scores, seen.sinks_N.reshape(K, G, 1, 1))
    )
    if scales is not None:
        weights = weights * scales[1][:, :, None, None]
    y_BKXH = mixed(weights.astype(q_BTNH.dtype).reshape(B, K, G * T, S))
    return jnp.moveaxis(y_BKXH.reshape(B, K, G, T, H), 3, 1).reshape(B, T, N, H)


def _softmax(scores: jax.Array, sinks: jax.Array) -> jax.Array:
    """Softmax along the last axis with an additional logit in the denominator."""
    largest = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks)
    weights = jnp.exp(scores - largest)
    return weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sinks - largest))
