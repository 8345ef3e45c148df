"""Keys and values of the tokens that a model has read, so that the next token costs the work of one token.

A cache is a dict, a pytree: `lengths` [B] int32, the tokens that each row has read; `layers`, for each layer a dict of
`key` and `value` [B, K, S, H]. The token at position p lies at place p % S: a layer whose queries see a window has no
more places than that, and of a row that is longer than its cache the last S tokens are there. Each layer has arrays of
its own, not a part of one array of all layers: a donated cache is then written in place, and read without a copy.

An encoder-decoder's layers also have `cross_key` and `cross_value` of what was encoded, and the cache
`encoder_segment_ids` [B, S] (0: padding).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from capibara.kernels import cache_writes
from capibara.kernels.attention.spec import AttentionSpec
from capibara.kernels.cached_attention import dispatch as cached_attention
from capibara.sharding import constrain

Cache = dict[str, Any]
LayerCache = dict[str, jax.Array]

_KEYS = ("batch", "act_kv_heads", None, None)
_AT_ONCE = 2048  # most tokens whose scores are all made at once, where another way is as good


class PrefillInputs(NamedTuple):
    """The tokens that are read now, right-padded to T: by a prefill, by its next part, or one of each row by a decode step.

    Attributes:
      lengths: [B] tokens that each row has read before.
      counts: [B] tokens that are read now.
      positions: [B, T] of these tokens.
      is_prefill: whether no row has read any before: the cache is empty. A Python bool: it decides what is compiled.
    """

    lengths: jax.Array
    counts: jax.Array
    positions: jax.Array
    is_prefill: bool

    @property
    def real(self) -> jax.Array:
        """[B, T] bool: no padding."""
        return jnp.arange(self.positions.shape[1], dtype=jnp.int32) < self.counts[:, None]


def prefill_inputs(tokens_BT: jax.Array, counts_B: jax.Array, cache: Cache, is_prefill: bool) -> PrefillInputs:
    """What is read when the rows of a cache are given so many more tokens."""
    steps = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
    return PrefillInputs(cache["lengths"], counts_B, cache["lengths"][:, None] + steps, is_prefill)


def empty_layer(config, batch: int, length: int, dtype: jnp.dtype, window: int | None = None) -> LayerCache:
    """A layer's part of a cache in which nothing was read; `dtype` int8: with scales."""
    places = length if window is None else min(length, window)
    shape = (batch, config.kv_heads, places, config.head_size)
    layer = {"key": jnp.zeros(shape, dtype), "value": jnp.zeros(shape, dtype)}
    if jnp.dtype(dtype) == jnp.int8:
        layer |= {"key_scale": jnp.zeros(shape[:3], jnp.float32), "value_scale": jnp.zeros(shape[:3], jnp.float32)}
    return layer


def axes(cache: Cache) -> Any:
    """The logical axes of every array of a cache."""
    return jax.tree.map(lambda x: _KEYS[: x.ndim] if x.ndim > 2 else ("batch",) + (None,) * (x.ndim - 1), cache)


def places(lengths_B: jax.Array, count: int) -> jax.Array:
    """[B, count]: the position of the token at each place of rows that have read `lengths`; negative: none."""
    last_B1 = lengths_B[:, None] - 1
    return last_B1 - (last_B1 - jnp.arange(count, dtype=jnp.int32)) % count


def write(layer: LayerCache, k_BTKH: jax.Array, v_BTKH: jax.Array, now: PrefillInputs) -> LayerCache:
    """The layer's cache with the keys and values of the tokens that are read now."""
    new = as_stored(layer["key"].dtype, k_BTKH, v_BTKH)
    return layer | {name: constrain(_written(layer[name], x, now), _KEYS[: x.ndim]) for name, x in new.items()}


def as_kept(layer: LayerCache, k_BTKH: jax.Array, v_BTKH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values as the layer's cache will give them back, in their own dtypes.

    What tokens that are read together say to each other is then what they say to later ones: a text does not depend on
    how its prompt was cut.
    """
    dtype = layer["key"].dtype
    if dtype == jnp.int8:
        new = as_stored(dtype, k_BTKH, v_BTKH)
        kept = [new[name].astype(jnp.float32) * new[f"{name}_scale"][..., None] for name in ("key", "value")]
        return kept[0].astype(k_BTKH.dtype), kept[1].astype(v_BTKH.dtype)
    if dtype == k_BTKH.dtype:
        return k_BTKH, v_BTKH
    # XLA may drop a cast and its inverse: it computes in more precision than was asked for.
    bits = {"exponent_bits": jnp.finfo(dtype).nexp, "mantissa_bits": jnp.finfo(dtype).nmant}
    return jax.lax.reduce_precision(k_BTKH, **bits), jax.lax.reduce_precision(v_BTKH, **bits)


def multiplied_as_kept(layer: LayerCache, q_BTNH: jax.Array) -> bool:
    """Whether `attend` is for tokens of rows that have read nothing, too.

    In 16 bits `as_kept` would round what `attend` does not: numbers in 8 bits with their scales. Of a longer piece than an
    engine reads at once all scores would take too much memory.
    """
    return "key_scale" in layer and q_BTNH.dtype.itemsize < 4 and q_BTNH.shape[1] <= _AT_ONCE


def as_stored(dtype: jnp.dtype, k_BTKH: jax.Array, v_BTKH: jax.Array) -> LayerCache:
    """Keys and values as a layer's cache of that dtype holds them, but [B, T, K, ...]."""
    if dtype != jnp.int8:
        return {"key": k_BTKH.astype(dtype), "value": v_BTKH.astype(dtype)}
    (key, key_scale), (value, value_scale) = _in_8_bits(k_BTKH), _in_8_bits(v_BTKH)
    return {"key": key, "value": value, "key_scale": key_scale, "value_scale": value_scale}


def _in_8_bits(x_BTKH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Symmetric int8 numbers, the largest of a token's head being 127, and the scale [B, T, K] of each."""
    x_BTKH = x_BTKH.astype(jnp.float32)
    scale_BTK = jnp.max(jnp.abs(x_BTKH), axis=-1) / 127
    divisor_BTK = jnp.where(scale_BTK > 0, scale_BTK, 1.0)
    return jnp.round(x_BTKH / divisor_BTK[..., None]).astype(jnp.int8), scale_BTK


def _written(old_BKSx: jax.Array, new_BTKx: jax.Array, now: PrefillInputs) -> jax.Array:
    T, S = new_BTKx.shape[1], old_BKSx.shape[2]
    if T == 1:
        return cache_writes.append(old_BKSx, new_BTKx[:, 0], now.lengths % S)
    new_BKTx = jnp.swapaxes(new_BTKx, 1, 2)
    if now.is_prefill and T <= S:  # padding lies at places that no position has yet
        return jax.lax.dynamic_update_slice(old_BKSx, new_BKTx, (0,) * old_BKSx.ndim)
    index_BS = places(now.lengths + now.counts, S) - now.lengths[:, None]
    index_B1Sx = jnp.expand_dims(index_BS, (1, *range(3, old_BKSx.ndim)))
    taken = jnp.take_along_axis(new_BKTx, jnp.clip(index_B1Sx, 0, T - 1), axis=2)
    return jnp.where(index_B1Sx >= 0, taken, old_BKSx)


def attend(
    q_BTNH: jax.Array,
    layer: LayerCache,
    before: LayerCache | None,
    new,
    kind: AttentionSpec,
    now: PrefillInputs,
    bias=None,
    prefix_BT: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Self-attention of the tokens that are read now, after the cache.

    Args:
      q_BTNH: queries.
      layer: the cache with these tokens: all that a single token (T = 1) needs.
      before: the cache without them: several tokens could have overwritten what the first of them sees.
      new: their keys and values [B, T, K, H].
      kind: mask, scale and cap.
      now: the tokens.
      bias: (positions of queries [B, T], of keys [B, S]) -> [B, N, T, S], added to the scores; None: nothing.
      prefix_BT: of several tokens: those with a 1 see each other both ways.
      sinks_N: float32, a logit of each query head in the softmax's denominator; None: none.

    Returns:
      [B, T, N, H] in the dtype of the queries.
    """
    there_B = None
    if q_BTNH.shape[1] == 1:
        positions_BS = places(now.lengths + now.counts, layer["key"].shape[2])
        there_B = jnp.minimum(now.lengths + now.counts, layer["key"].shape[2])
    else:
        stored = as_stored(before["key"].dtype, *new)
        layer = {n: jnp.concatenate([before[n], jnp.swapaxes(x, 1, 2)], axis=2) for n, x in stored.items()}
        old_BS = places(now.lengths, before["key"].shape[2])
        positions_BS = jnp.concatenate([old_BS, jnp.where(now.real, now.positions, -1)], axis=1)
    back_BTS = now.positions[:, :, None] - positions_BS[:, None, :]
    visible_BTS = back_BTS >= 0
    if prefix_BT is not None and q_BTNH.shape[1] > 1:
        seen_BS = jnp.pad(prefix_BT, ((0, 0), (positions_BS.shape[1] - prefix_BT.shape[1], 0)))
        visible_BTS |= (prefix_BT[:, :, None] > 0) & (seen_BS[:, None, :] > 0)
    visible_BTS &= positions_BS[:, None, :] >= 0
    if kind.window is not None:
        visible_BTS &= jnp.abs(back_BTS) < kind.window
    bias_BNTS = None if bias is None else bias(now.positions, positions_BS)
    scales = (layer["key_scale"], layer["value_scale"]) if "key_scale" in layer else None
    rows = cached_attention.Rows(layer["key"], layer["value"], scales)
    seen = cached_attention.Seen(visible_BTS, bias_BNTS, there_B, sinks_N)
    return cached_attention.attend_rows(q_BTNH, rows, seen, kind)


def put_rows(cache: Cache, rows: Cache, index: jax.Array) -> Cache:
    """The cache with `rows`, a cache of fewer rows and as many places, in place of those from `index` on."""
    return jax.tree.map(lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, index, axis=0), cache, rows)
