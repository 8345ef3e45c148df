"""Some slots of a cache: a decode step of few rows reads and writes theirs alone.

Pages are shared by all slots, and are found by the rows' part of the table. Keys and values that are stored as rows stay
where they are: the layer gets `slots` [R] int32, the slot of each row. Everything else is copied: lengths, the states of
recurrent layers, and what an encoder-decoder keeps of the encoder's output.
"""

from __future__ import annotations

import jax

from capibara.kernels.slots import put, take
from capibara.models.cache import paged
from capibara.models.cache.dense import KEYS_VALUES, SLOTS, Cache, LayerCache, has_keys, of_state


def select(cache: Cache, slots_R: jax.Array) -> Cache:
    """The cache of these slots, as a model reads it; they differ from each other."""

    def of_layer(layer: LayerCache) -> LayerCache:
        if paged.is_paged(layer):
            return {name: take(x, slots_R) if of_state(name) else x for name, x in layer.items()}
        copied = {name: x if name in KEYS_VALUES else take(x, slots_R) for name, x in layer.items()}
        return copied | ({SLOTS: slots_R} if has_keys(layer) else {})

    rest = {name: take(x, slots_R) for name, x in cache.items() if name != "layers"}
    return rest | {"layers": tuple(map(of_layer, cache["layers"]))}


def merge(cache: Cache, selected: Cache, slots_R: jax.Array) -> Cache:
    """The cache with the result of a model that has read tokens into `selected`."""

    def of_layer(old: LayerCache, new: LayerCache) -> LayerCache:
        if paged.is_paged(old):
            return {name: put(x, new[name], slots_R) if of_state(name) else new[name] for name, x in old.items()}
        return {name: new[name] if name in KEYS_VALUES else put(x, new[name], slots_R) for name, x in old.items()}

    rest = {name: put(x, selected[name], slots_R) for name, x in cache.items() if name != "layers"}
    return rest | {"layers": tuple(map(of_layer, cache["layers"], selected["layers"]))}
