"""The cache of streaming heads: a row's first tokens, and a ring of its last ones.

A layer with streaming heads has `key` and `value` (or pages) of its other heads alone, and beside them `state_ring_key` and
`state_ring_value` [B, K, sinks + ring, H], whose size does not depend on the length of rows. In 8 bits both have scales.
"""

from __future__ import annotations

import dataclasses

import jax

from capibara.models.cache import dense
from capibara.models.cache.dense import RING, LayerCache, of_state


@dataclasses.dataclass(frozen=True)
class _Heads:
    """Number and size of some of a layer's heads, as a cache asks for them."""

    cached_heads: tuple[int, int]


def empty_layer(
    cached_heads: tuple[int, int],
    streaming: int,
    batch: int,
    length: int,
    capacity: int,
    dtype: jax.typing.DTypeLike,
) -> LayerCache:
    """An empty cache for a layer.

    Args:
      cached_heads: number and size of its key/value heads.
      streaming: how many of them stream.
      batch, length, dtype: as in dense.empty_layer.
      capacity: tokens of a row that streaming heads keep.
    """
    count, size = cached_heads
    whole: LayerCache = {}
    if streaming < count:
        whole = dense.empty_layer(_Heads((count - streaming, size)), batch, length, dtype)
    # As long as that in short rows too: rows of any length are copied into slots and back.
    return whole | as_ring(dense.empty_layer(_Heads((streaming, size)), batch, capacity, dtype))


def as_ring(layer: LayerCache) -> LayerCache:
    """Keys and values of streaming heads under their names in a layer."""
    return {f"{RING}{name}": x for name, x in layer.items()}


def ring_of(layer: LayerCache) -> LayerCache:
    """Keys and values of a layer's streaming heads, as a cache of these heads alone."""
    return {name.removeprefix(RING): x for name, x in layer.items() if name.startswith(RING)}


def whole_of(layer: LayerCache) -> LayerCache:
    """Keys and values of a layer's other heads, as a cache of these heads alone."""
    return {name: x for name, x in layer.items() if not of_state(name)}
