"""The key-value cache: decoding one token computes only that token.

A cache is a dict, a pytree. `lengths` [B] int32 counts the tokens that each row has read; `layers` has one dict per
layer with `key` and `value` [B, K, S, H]. The token at position p is stored at index p % S: a layer with a sliding
window allocates no more than the window, and a row longer than its cache keeps the last S tokens. Each layer has its
own arrays rather than a part of one array for all layers, so that a donated cache is updated in place and read without
a copy.

An encoder-decoder's layers also have `cross_key` and `cross_value`, computed from the encoder's output, and the cache
has `encoder_segment_ids` [B, S] (0: padding).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from capibara.kernels import cache_writes
from capibara.kernels.attention.spec import AttentionSpec
from capibara.kernels.cached_attention import dispatch as cached_attention
from capibara.kernels.slots import put, take
from capibara.sharding import constrain

STATE = "state"
"""The names of a state's arrays begin with it (models/mixers); those of cached keys and values do not."""
RING = f"{STATE}_ring_"
"""Keys and values of streaming heads, whose size is fixed, have this before their names (models/cache/streaming)."""
KEYS_VALUES = ("key", "value", "key_scale", "value_scale")
"""The names of a layer's keys and values of tokens."""
SLOTS = "slots"
"""In a layer of some slots (cache.selection): [R] int32, the row of keys and values that each of R rows has."""

Cache = dict[str, Any]
LayerCache = dict[str, jax.Array]
PositionBias = Callable[[jax.Array, jax.Array], jax.Array]
"""(positions of queries [B, T], of keys [B, S]) -> [B, N, T, S]."""

_KEYS = ("batch", "act_kv_heads", None, None)
_AT_ONCE = 2048  # most tokens whose scores are materialised at once where there is an alternative


class Heads(Protocol):
    """The sizes of a model that a cache depends on."""

    @property
    def cached_heads(self) -> tuple[int, int]: ...


class Packed(NamedTuple):
    """What N rows of one token each are: the next tokens of some texts, and then those of prompts, one after the other.

    Attributes:
      documents: [N] int32, the number of each token's prompt, from 1; 0: the next token of a text, or padding.
      ends: [S] int32, the tokens after which logits are needed. At most the first S tokens are texts'.
      length: [1] int32, tokens of the first prompt that are in its pages already; the other prompts begin here.
      table: [1, M] int32, the pages of the first prompt.
    """

    documents: Any
    ends: Any
    length: Any
    table: Any


class PrefillInputs(NamedTuple):
    """The tokens to read now, right-padded to T: a prefill, a later chunk of one, or one token a row in a decode step.

    Attributes:
      lengths: [B] tokens that each row has read before.
      counts: [B] tokens to read now.
      positions: [B, T] positions of these tokens.
      is_prefill: whether the cache is empty for every row. A Python bool: it decides what is compiled.
      packed: what the rows are, where some are tokens of one prompt; None: each row is a text of its own.
    """

    lengths: jax.Array
    counts: jax.Array
    positions: jax.Array
    is_prefill: bool
    packed: Packed | None = None

    @property
    def real(self) -> jax.Array:
        """[B, T] bool: True for real tokens, False for padding."""
        return jnp.arange(self.positions.shape[1], dtype=jnp.int32) < self.counts[:, None]

    @property
    def segments(self) -> jax.Array:
        """[B, T] int32: 1 for real tokens, 0 for padding."""
        return self.real.astype(jnp.int32)


def prefill_inputs(
    tokens_BT: jax.Array, counts_B: jax.Array, cache: Cache, is_prefill: bool, packed: Packed | None = None
) -> PrefillInputs:
    """Describes the next `counts` tokens of each row of a cache; see PrefillInputs."""
    positions = cache["lengths"][:, None] + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
    return PrefillInputs(cache["lengths"], jnp.asarray(counts_B), positions, is_prefill, packed)


def empty_layer(
    config: Heads, batch: int, length: int, dtype: jax.typing.DTypeLike, window: int | None = None
) -> LayerCache:
    """An empty cache for one layer; `dtype` int8 adds scales."""
    capacity = length if window is None else min(length, window)
    count, size = config.cached_heads
    shape = (batch, count, capacity, size)
    layer = {"key": jnp.zeros(shape, dtype), "value": jnp.zeros(shape, dtype)}
    if jnp.dtype(dtype) == jnp.int8:
        layer |= {"key_scale": jnp.zeros(shape[:3], jnp.float32), "value_scale": jnp.zeros(shape[:3], jnp.float32)}
    return layer


def axes(cache: Cache) -> Any:
    """The logical axes of every array of a cache."""
    of_rows = lambda x: ("batch",) + (None,) * (x.ndim - 1)  # noqa: E731
    of_heads = lambda x: _KEYS[: x.ndim] if x.ndim > 2 else of_rows(x)  # noqa: E731
    by_rows = lambda name: of_state(name) and not name.startswith(RING)  # noqa: E731
    layers = tuple(
        {name: (of_rows if by_rows(name) else of_heads)(x) for name, x in layer.items()} for layer in cache["layers"]
    )
    return jax.tree.map(of_heads, {name: x for name, x in cache.items() if name != "layers"}) | {"layers": layers}


def has_keys(layer: LayerCache) -> bool:
    """Whether a layer keeps keys and values of tokens, and not only a state of fixed size (models/mixers) or nothing."""
    return not all(map(of_state, layer))


def of_state(name: str) -> bool:
    """Whether an array of a layer is of a state of fixed size (models/mixers)."""
    return name.startswith(STATE)


def cached_positions(lengths_B: jax.Array, count: int, sinks: int = 0) -> jax.Array:
    """[B, count]: the position of the token at each cache index of rows that have read `lengths`; negative: empty.

    A row longer than its cache keeps its first `sinks` tokens, and its last ones behind them.
    """
    last_B1, index = lengths_B[:, None] - 1, jnp.arange(count, dtype=jnp.int32)
    if not sinks:
        return last_B1 - (last_B1 - index) % count
    behind = last_B1 - sinks
    ring = behind - (behind - (index - sinks)) % (count - sinks)
    return jnp.where(index < sinks, jnp.where(index <= last_B1, index, -1), jnp.where(ring >= 0, ring + sinks, -1))


def cache_index(positions: jax.Array, count: int, sinks: int = 0) -> jax.Array:
    """The index at which the token at a position is stored: the inverse of `cached_positions`."""
    if not sinks:
        return positions % count
    return jnp.where(positions < sinks, positions, sinks + (positions - sinks) % (count - sinks))


def write(layer: LayerCache, k_BTKH: jax.Array, v_BTKH: jax.Array, now: PrefillInputs, sinks: int = 0) -> LayerCache:
    """The layer's cache, updated with the keys and values of the new tokens; `sinks` as in `cached_positions`."""
    slots = layer.get(SLOTS)
    if slots is not None and k_BTKH.shape[1] > 1:
        rows = write(rows_of(layer), k_BTKH, v_BTKH, now, sinks)
        return layer | {name: put(layer[name], x, slots) for name, x in rows.items()}
    new = as_stored(layer["key"].dtype, k_BTKH, v_BTKH)
    return layer | {
        name: constrain(_written(layer[name], x, now, slots, sinks), _KEYS[: x.ndim]) for name, x in new.items()
    }


def rows_of(layer: LayerCache) -> LayerCache:
    """The layer's keys and values of each row; copied, if the layer is of some slots."""
    if SLOTS not in layer:
        return layer
    return {name: take(layer[name], layer[SLOTS]) for name in KEYS_VALUES if name in layer}


def as_cached(layer: LayerCache, k_BTKH: jax.Array, v_BTKH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values as the layer's cache, of rows or pages, will return them, in their own dtypes.

    Tokens that are read together then see the same keys and values as later tokens do, so the generated text does not
    depend on how the prompt was split.
    """
    dtype = layer["key" if "key" in layer else "key_pages"].dtype
    if dtype == jnp.int8:
        new = as_stored(dtype, k_BTKH, v_BTKH)
        retained = [new[name].astype(jnp.float32) * new[f"{name}_scale"][..., None] for name in ("key", "value")]
        return retained[0].astype(k_BTKH.dtype), retained[1].astype(v_BTKH.dtype)
    if dtype == k_BTKH.dtype:
        return k_BTKH, v_BTKH
    # XLA may remove a cast and its inverse, since that only adds precision.
    bits = {"exponent_bits": jnp.finfo(dtype).nexp, "mantissa_bits": jnp.finfo(dtype).nmant}
    return jax.lax.reduce_precision(k_BTKH, **bits), jax.lax.reduce_precision(v_BTKH, **bits)


def attends_quantized_cache(layer: LayerCache, q_BTNH: jax.Array) -> bool:
    """Whether `attend` also handles a prefill into an empty cache.

    For an 8-bit cache, `as_cached` would round to 16 bits what `attend` multiplies exactly as 8-bit numbers and scales. A
    chunk longer than an engine reads at once does not qualify: its scores would take too much memory.
    """
    return "key_scale" in layer and q_BTNH.dtype.itemsize < 4 and q_BTNH.shape[1] <= _AT_ONCE


def as_stored(dtype: jnp.dtype, k_BTKH: jax.Array, v_BTKH: jax.Array) -> LayerCache:
    """Keys and values in the storage format of a cache of that dtype, but as [B, T, K, ...]."""
    if dtype != jnp.int8:
        return {"key": k_BTKH.astype(dtype), "value": v_BTKH.astype(dtype)}
    (key, key_scale), (value, value_scale) = _in_8_bits(k_BTKH), _in_8_bits(v_BTKH)
    return {"key": key, "value": value, "key_scale": key_scale, "value_scale": value_scale}


def _in_8_bits(x_BTKH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Symmetric int8 values, scaled to a maximum of 127 per token and head, and the scales [B, T, K]."""
    x_BTKH = x_BTKH.astype(jnp.float32)
    scale_BTK = jnp.max(jnp.abs(x_BTKH), axis=-1) / 127
    divisor_BTK = jnp.where(scale_BTK > 0, scale_BTK, 1.0)
    return jnp.round(x_BTKH / divisor_BTK[..., None]).astype(jnp.int8), scale_BTK


def _written(
    old_BKSx: jax.Array, new_BTKx: jax.Array, now: PrefillInputs, slots: jax.Array | None = None, sinks: int = 0
) -> jax.Array:
    T, S = new_BTKx.shape[1], old_BKSx.shape[2]
    if T == 1:
        return cache_writes.append(old_BKSx, new_BTKx[:, 0], cache_index(now.lengths, S, sinks), slots)
    new_BKTx = jnp.swapaxes(new_BTKx, 1, 2)
    if now.is_prefill and T <= S:  # padding is stored at indices that hold no position yet
        return jax.lax.dynamic_update_slice(old_BKSx, new_BKTx, (0,) * old_BKSx.ndim)
    index_BS = cached_positions(now.lengths + now.counts, S, sinks) - now.lengths[:, None]
    index_B1Sx = jnp.expand_dims(index_BS, (1, *range(3, old_BKSx.ndim)))
    taken = jnp.take_along_axis(new_BKTx, jnp.clip(index_B1Sx, 0, T - 1), axis=2)
    return jnp.where(index_B1Sx >= 0, taken, old_BKSx)


def attend(
    q_BTNH: jax.Array,
    layer: LayerCache,
    before: LayerCache | None,
    new: tuple[jax.Array, jax.Array],
    kind: AttentionSpec,
    now: PrefillInputs,
    bias: PositionBias | None = None,
    prefix_BT: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
    sinks: int = 0,
) -> jax.Array:
    """Self-attention of the new tokens over the cache.

    Args:
      q_BTNH: queries.
      layer: the cache with these tokens; sufficient for a single token (T = 1).
      before: the cache without them: several new tokens may overwrite entries that the first of them attends to.
      new: the keys and values [B, T, K, H] of the new tokens.
      kind: mask, scale and soft cap.
      now: the new tokens.
      bias: (positions of queries [B, T], of keys [B, S]) -> [B, N, T, S], added to the scores; None: no bias.
      prefix_BT: for several tokens: those marked 1 attend to each other in both directions.
      sinks_N: float32, a logit per query head in the softmax's denominator; None: no sinks.
      sinks: first tokens that the cache keeps, as in `cached_positions`.

    Returns:
      [B, T, N, H] in the queries' dtype.
    """
    count_B = None
    if q_BTNH.shape[1] == 1:
        positions_BS = cached_positions(now.lengths + now.counts, layer["key"].shape[2], sinks)
        if not kind.in_blocks:
            count_B = jnp.minimum(now.lengths + now.counts, layer["key"].shape[2])
    else:
        assert before is not None, "several tokens need the cache without them"
        before = rows_of(before)
        stored = as_stored(before["key"].dtype, *new)
        layer = {n: jnp.concatenate([before[n], jnp.swapaxes(x, 1, 2)], axis=2) for n, x in stored.items()}
        old_BS = cached_positions(now.lengths, before["key"].shape[2], sinks)
        positions_BS = jnp.concatenate([old_BS, jnp.where(now.real, now.positions, -1)], axis=1)
    back_BTS = now.positions[:, :, None] - positions_BS[:, None, :]
    visible_BTS = back_BTS >= 0
    if prefix_BT is not None and q_BTNH.shape[1] > 1:
        seen_BS = jnp.pad(prefix_BT, ((0, 0), (positions_BS.shape[1] - prefix_BT.shape[1], 0)))
        visible_BTS |= (prefix_BT[:, :, None] > 0) & (seen_BS[:, None, :] > 0)
    visible_BTS &= positions_BS[:, None, :] >= 0
    if kind.window is not None:
        visible_BTS &= kind.in_window(back_BTS, positions_BS[:, None, :])
    if kind.window is not None and kind.in_blocks:
        visible_BTS &= now.positions[:, :, None] // kind.window == positions_BS[:, None, :] // kind.window
    bias_BNTS = None if bias is None else bias(now.positions, positions_BS)
    scales = (layer["key_scale"], layer["value_scale"]) if "key_scale" in layer else None
    rows = cached_attention.Rows(layer["key"], layer["value"], scales, layer.get(SLOTS))
    seen = cached_attention.Visibility(visible_BTS, bias_BNTS, count_B, sinks_N)
    return cached_attention.attend_rows(q_BTNH, rows, seen, kind)


def put_rows(cache: Cache, rows: Cache, index: jax.Array) -> Cache:
    """Copies `rows`, a cache with fewer rows of the same capacity, into the cache from row `index` on."""
    return jax.tree.map(lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, index, axis=0), cache, rows)
