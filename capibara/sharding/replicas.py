"""Whether all devices that should hold the same bits do: a chip that computes wrongly says nothing of it."""

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
    """Devices hold different bits where they must hold the same; names the arrays and the devices."""


class ReplicaCheck:
    """Compares the copies of arrays on a mesh by the sums of their bits.

    One bit that differs always shows: it changes the sum, which is taken modulo 2**32, by a power of two below that.

    Args:
      arrays: with the shardings of the arrays that will be checked; jax.ShapeDtypeStruct will do.
      mesh: the one they lie on.

    Attributes:
      sums: (the arrays, one by one) -> uint32 [*mesh shape, arrays]: the sum of the bits of each that a device holds; jitted.
    """

    def __init__(self, arrays: PyTree, mesh: Mesh):
        self._mesh, self._names = mesh, tree.path_names(arrays)
        self._specs = [leaf.sharding.spec for leaf in jax.tree.leaves(arrays)]
        self.sums = _checksums(mesh, self._specs)

    @property
    def copies(self) -> int:
        """The most devices that hold the same part of an array: with one there is nothing to compare."""
        return max((self._mesh.size // _parts(self._mesh, spec) for spec in self._specs), default=1)

    def check(self, arrays: PyTree) -> None:
        """Raises SilentCorruption where copies differ; the same on every process. It waits for the devices."""
        from jax.experimental import multihost_utils

        sums = self.sums(*jax.tree.leaves(arrays))
        host = np.asarray(multihost_utils.process_allgather(sums, tiled=True) if jax.process_count() > 1 else sums)
        wrong = disagreements(host, self._specs, self._mesh)
        if wrong:
            first, devices = wrong[0]
            more = f" and {len(wrong) - 1} more arrays" if len(wrong) > 1 else ""
            raise SilentCorruption(
                f"silent data corruption: {self._names[first]}{more} differs on {', '.join(map(str, devices))} from the "
                "other copies: this run's state is not worth keeping; start it again from its last checkpoint, without "
                "that device if it happens again"
            )


def disagreements(sums: np.ndarray, specs: Sequence[PartitionSpec], mesh: Mesh) -> list[tuple[int, list[jax.Device]]]:
    """(index of an array, the devices whose copy differs from that of most).

    Args:
      sums: uint32 [*mesh shape, arrays].
      specs: of the arrays.
      mesh: its devices are named.
    """
    found = []
    for index, spec in enumerate(specs):
        split = {name for names in spec if names for name in ((names,) if isinstance(names, str) else names)}
        kept = [axis for axis, name in enumerate(mesh.axis_names) if name in split]
        groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for place in itertools.product(*map(range, mesh.devices.shape)):
            groups.setdefault(tuple(place[axis] for axis in kept), []).append(place)
        devices = []
        for places in groups.values():
            values = [int(sums[(*place, index)]) for place in places]
            usual, _ = Counter(values).most_common(1)[0]
            devices += [mesh.devices[place] for place, value in zip(places, values) if value != usual]
        if devices:
            found.append((index, sorted(devices, key=lambda device: device.id)))
    return found


def _checksums(mesh: Mesh, specs: Sequence[PartitionSpec]) -> Callable[..., jax.Array]:
    """(arrays) -> uint32 [*mesh shape, arrays]: the sum of the bits that each device holds of each array."""

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
