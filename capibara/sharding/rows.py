"""Which devices and hosts have which rows of a batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from capibara.core.types import HostBatch, UserError
from capibara.sharding.axes import NODE_AXIS
from capibara.sharding.rules import Rules


def batch_sharding(mesh: Mesh, rules: Rules) -> NamedSharding:
    """Sharding of a [B, T] array of a batch by rows, as hosts read them; each node has consecutive rows."""
    return NamedSharding(mesh, of_all_nodes(mesh, rules).spec(("batch",)))


def batch_axes(sizes: Mapping[str, int], rules: Rules) -> tuple[str, ...]:
    """The axes over which the rows of a global batch are sharded on a mesh with such axes: the nodes' first."""
    return (NODE_AXIS, *rules.batch) if NODE_AXIS in sizes else rules.batch


def manual_axes(mesh: Mesh, independent: Sequence[str] = (NODE_AXIS,)) -> set[str]:
    """The axes that are manual where each position of the axes `independent` runs a program of its own: these, or all.

    They are all if such a program has a single device: kernels cannot be partitioned, not even over automatic axes of one.
    """
    return set(independent) if mesh.size > math.prod(mesh.shape[axis] for axis in independent) else set(mesh.axis_names)


def of_all_nodes(mesh: Mesh, rules: Rules) -> Rules:
    """The rules of a program in which all nodes share one batch and one model, such as an evaluation."""
    return dataclasses.replace(rules, batch=batch_axes(mesh.shape, rules)) if NODE_AXIS in mesh.shape else rules


def host_shards(mesh: Mesh, rules: Rules) -> list[int]:
    """For each process, the index of the part of a global batch that its devices hold; parts have equal sizes.

    Processes whose devices hold the same rows (a tensor, context or stage axis that spans hosts) have the same index.

    Raises:
      UserError: the rows of two processes overlap but differ.
    """
    held = _held_shards(mesh, rules)
    parts = sorted(set(held.values()))
    return [parts.index(held[process]) for process in sorted(held)]


def row_places(mesh: Mesh, rules: Rules, rows: int) -> tuple[int, ...] | None:
    """Where on the mesh each row of a global batch comes to lie, as hosts read them; None: each in its own place.

    A host reads consecutive rows for all its devices, whose places need not be consecutive.

    Args:
      mesh, rules: of the run.
      rows: of a global batch.
    """
    each = rows // math.prod(mesh.shape[axis] for axis in batch_axes(mesh.shape, rules))
    parts = sorted(set(_held_shards(mesh, rules).values()))
    places = tuple(shard * each + row for part in parts for shard in part for row in range(each))
    return None if places == tuple(range(rows)) else places


def _held_shards(mesh: Mesh, rules: Rules) -> dict[int, tuple[int, ...]]:
    """Process -> the indices of the batch shards that its devices hold; see `host_shards`."""
    rows = int(np.prod([mesh.shape[axis] for axis in batch_axes(mesh.shape, rules)]))
    held: dict[int, set[int]] = {}
    parts_of: Mapping[jax.Device, tuple[slice, ...]] = batch_sharding(mesh, rules).devices_indices_map((rows,))
    for device, index in parts_of.items():
        held.setdefault(device.process_index, set()).update(range(*index[0].indices(rows)))
    parts = sorted({tuple(sorted(part)) for part in held.values()})
    if sorted(sum(parts, ())) != list(range(rows)) or len({len(part) for part in parts}) > 1:
        sizes = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
        raise UserError(
            f"Plan ({sizes}) splits the batch so that the rows of the {len(held)} hosts overlap or differ in number: each "
            "host must hold whole batch shards, choose axis sizes that divide the devices of a host or are multiples"
        )
    return {process: tuple(sorted(shards)) for process, shards in held.items()}


def global_batch(sharding: NamedSharding, host_batch: HostBatch) -> dict[str, jax.Array]:
    """Turns this host's rows (numpy, [B / hosts, T]) into global arrays [B, T]."""
    return {k: jax.make_array_from_process_local_data(sharding, v) for k, v in host_batch.items()}
