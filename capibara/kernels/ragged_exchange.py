"""Rows to the devices that work on them, of each device a number of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara import sharding


def supported() -> bool:
    """Whether `exchanged` runs: XLA has the collective on TPU; elsewhere all devices get all rows."""
    return sharding.platform() == "tpu"


def exchanged(
    rows_ND: jax.Array,
    received: int,
    starts_P: jax.Array,
    sizes_P: jax.Array,
    places_P: jax.Array,
    received_P: jax.Array,
    axis: tuple[str, ...],
) -> jax.Array:
    """What the P devices of a manual mesh axis send to this one; rows that nobody fills are 0.

    Args:
      rows_ND: those of this device, sorted by who gets them.
      received: how many rows the result has.
      starts_P: int32, the first row for each device.
      sizes_P: how many it gets.
      places_P: where in its result they begin.
      received_P: how many rows come from each device.
      axis: of the mesh.

    Returns:
      [received, D].
    """
    empty = jnp.zeros((received, rows_ND.shape[1]), rows_ND.dtype)
    return jax.lax.ragged_all_to_all(rows_ND, empty, starts_P, sizes_P, places_P, received_P, axis_name=axis)
