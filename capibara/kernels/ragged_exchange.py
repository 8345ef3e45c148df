"""A ragged all-to-all: each device sends rows to others, a different number to each."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara import sharding


def supported() -> bool:
    """Whether XLA has the collective: on TPU only; elsewhere callers gather all rows on all devices."""
    return sharding.platform() == "tpu"


def exchanged(
    rows_ND: jax.Array,
    received: int,
    starts_P: jax.Array,
    sizes_P: jax.Array,
    offsets_P: jax.Array,
    received_P: jax.Array,
    axis: tuple[str, ...],
) -> jax.Array:
    """The rows that the P devices of a manual mesh axis send to this one; unfilled rows are 0.

    Args:
      rows_ND: rows of this device, sorted by receiver.
      received: number of rows of the result.
      starts_P: int32, offset of the first row for each receiver.
      sizes_P: number of rows for each receiver.
      offsets_P: offset of these rows in each receiver's result.
      received_P: number of rows from each sender.
      axis: of the mesh.

    Returns:
      [received, D].
    """
    empty = jnp.zeros((received, rows_ND.shape[1]), rows_ND.dtype)
    return jax.lax.ragged_all_to_all(rows_ND, empty, starts_P, sizes_P, offsets_P, received_P, axis_name=axis)
