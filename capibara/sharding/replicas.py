"""Checks that replicas of an array are bit for bit the same: a chip may compute wrong results without an error."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from capibara.core import tree
from capibara.core.types import PyTree


class SilentCorruption(RuntimeError):
    """Devices hold different bits of a replicated array; the message names the arrays and the devices."""


class ReplicaCheck:
    """Compares the replicas of arrays on a mesh by checksums.

    A checksum is the sum of an array's bits as integers modulo 2**32. It detects any single flipped bit, which changes the
    sum by a power of two below 2**32.

    Args:
      arrays: the arrays to check, or jax.ShapeDtypeStructs with their shardings.
      mesh: the mesh of their shardings.

    Attributes:
      sums: jitted (*arrays) -> uint32 [*mesh shape, arrays]: the checksum of each device's part of each array.
    """

    def __init__(self, arrays: PyTree, mesh: Mesh):
        self._mesh, self._names = mesh, tree.path_names(arrays)
        self._specs = [leaf.sharding.spec for leaf in jax.tree.leaves(arrays)]
        self.sums = _checksums(mesh, self._specs)

    @property
    def copies(self) -> int:
        """The largest number of devices that hold the same part of an array; 1: there is nothing to compare."""
        return max((self._mesh.size // _parts(self._mesh, spec) for spec in self._specs), default=1)

    def check(self, arrays: PyTree) -> None:
        """Raises SilentCorruption, on every process, if replicas differ. It waits for the devices."""
        from jax.experimental import multihost_utils

        sums = self.sums(*jax.tree.leaves(arrays))
        host = np.asarray(multihost_utils.process_allgather(sums, tiled=True) if jax.process_count() > 1 else sums)
        wrong = disagreements(host, self._specs, self._mesh)
        if wrong:
            first, devices = wrong[0]
            more = f" and {len(wrong) - 1} more arrays" if len(wrong) > 1 else ""
            raise SilentCorruption(
                f"silent data corruption: {self._names[first]}{more} differs on {', '.join(map(str, devices))} from the "
                "other replicas: this run's state is wrong; resume from the last checkpoint, without that device if it "
                "happens again"
            )


def disagreements(sums: np.ndarray, specs: Sequence[PartitionSpec], mesh: Mesh) -> list[tuple[int, list[jax.Device]]]:
    """Finds the replicas that differ: (index of an array, the devices whose checksum is not the most common one).

    Args:
      sums: checksums, uint32 [*mesh shape, arrays].
      specs: PartitionSpecs of the arrays.
      mesh: the mesh of the devices.
    """
    result = []
    for index, spec in enumerate(specs):
        split = {name for names in spec if names for name in ((names,) if isinstance(names, str) else names)}
        retained = [axis for axis, name in enumerate(mesh.axis_names) if name in split]
        groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for indices in itertools.product(*map(range, mesh.devices.shape)):
            groups.setdefault(tuple(indices[axis] for axis in retained), []).append(indices)
        devices = []
        for group in groups.values():
            values = [int(sums[(*indices, index)]) for indices in group]
            usual, _ = Counter(values).most_common(1)[0]
            devices += [mesh.devices[indices] for indices, value in zip(group, values) if value != usual]
        if devices:
            result.append((index, sorted(devices, key=lambda device: device.id)))
    return result


def _checksums(mesh: Mesh, specs: Sequence[PartitionSpec]) -> Callable[..., jax.Array]:
    """Makes a function (*arrays) -> uint32 [*mesh shape, arrays] of the checksums of each device's parts."""

    def local(*parts: jax.Array) -> jax.Array:
        return jnp.stack([_bit_sum(part) for part in parts]).reshape(*(1 for _ in mesh.axis_names), len(parts))

    everywhere = PartitionSpec(*mesh.axis_names, None)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=everywhere, check_vma=False))


def _bit_sum(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return jnp.sum(words.astype(jnp.uint32), dtype=jnp.uint32)


def _parts(mesh: Mesh, spec: PartitionSpec) -> int:
    names = [name for names in spec if names for name in ((names,) if isinstance(names, str) else names)]
    parts = 1
    for name in names:
        parts *= mesh.shape[name]
    return parts
