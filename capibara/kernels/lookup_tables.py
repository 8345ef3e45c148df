"""Tables from which programs look up rows, as a TPU reads rows of them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from capibara import sharding
from capibara.sharding import Rules

_LANES = 128  # of a TPU's tile


def for_lookups(table_VD: jax.Array) -> jax.Array:
    """The table, on TPU with zeros as further columns, so that each device has a multiple of 128.

    A TPU stores an argument so that it pads least. A table of 2,880 columns is stored by columns, and every program that looks
    up rows copies it first: for gpt-oss 20B on v5e-4 0.59 GB a step (benchmarks/tpu_decode.py).
    """
    mesh, rules = sharding.active() or (None, Rules())
    shards = math.prod(mesh.shape[axis] for axis in rules.embed) if mesh else 1
    missing = -table_VD.shape[1] % (_LANES * shards) if sharding.platform() == "tpu" else 0
    return jnp.pad(table_VD, ((0, 0), (0, missing))) if missing else table_VD


def columns(x: jax.Array, count: int) -> jax.Array:
    """The first columns: those of a model's table, or of its rows, without what `for_lookups` adds."""
    return x if x.shape[-1] == count else x[..., :count]
