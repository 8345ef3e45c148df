"""Columns of rows in an order that gives all context shards the same work."""

from __future__ import annotations

from typing import cast

import jax
import numpy as np

from capibara.core.types import Batch
from capibara.sharding.context import active


def balanced(batch: Batch) -> dict[str, jax.Array]:
    """Reorders the columns so that each context shard has an early and a late part of every row (traceable).

    Under a causal mask the last shard of a row in its own order would do twice the mean work. Attention and the capacity
    of experts depend on the order: for them the new entry `row_positions` [T] holds each column's index in the row
    before the move. Outside `activate`, without a context axis, or where a row does not divide, the batch stays as it
    is. Encoder entries keep their order.
    """
    current = active()
    shards = current[0].shape["context"] if current else 1
    length = batch["tokens"].shape[1]
    if shards == 1 or length % (2 * shards):
        return dict(batch)
    row_positions_T = zigzag(length, shards)
    moved = {k: v if k.startswith("encoder_") or v.ndim < 2 else v[:, row_positions_T] for k, v in batch.items()}
    # A constant of the program, which kernels read when they are traced.
    row_positions = cast(jax.Array, np.asarray(row_positions_T, np.int32))
    return moved | {"row_positions": row_positions}


def zigzag(length: int, shards: int) -> np.ndarray:
    """Column indices [length] in the order of the shards: shard i has parts i and 2 * shards - 1 - i of 2 * shards."""
    parts = np.arange(length).reshape(2 * shards, -1)
    return np.concatenate([parts[[i, 2 * shards - 1 - i]] for i in range(shards)]).reshape(-1)
