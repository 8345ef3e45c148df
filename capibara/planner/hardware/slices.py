"""Slices by name: shape, links, hosts, Google Cloud's names and list price.

A name is CHIP-N or CHIP:SHAPE; a prefix gives the number of such slices, connected by the data centre's network:

  v5e-64         64 chips: 8 x 8. N counts chips on v5e and v6e, and cores, two per chip, on v4, v5p and tpu7x.
  v5p-8          4 chips
  v5e:8x8        v5e-64 by its shape, as the TPU compiler writes it
  v5p:4x4x16     a shape that is not the default one of its size
  2xv5e-256      two slices of 256 chips ("2 x v5e-256" is accepted too)
  h100-8         8 GPUs of one NVLink network; two such machines are 2xh100-8
  cpu-8          8 emulated devices

Aliases of the chip are accepted too: v5litepod-64, trillium-8, ironwood-128.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

from capibara.core.fields import did_you_mean
from capibara.core.types import UserError
from capibara.planner.hardware import chips
from capibara.planner.hardware.chips import Chip, Machine

# Shapes of the two-dimensional chips. Source: docs.cloud.google.com/tpu/docs/v5e and v6e.
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_FULL_TORUS = 16  # chips of an axis that spans a whole v5e or v6e pod
_CUBE = 4  # edge of the cubes, in chips, that optical switches connect, on three-dimensional chips
_GPUS = (1, 2, 4, 8)
_MOST_SLICES = 1024  # more is taken for a slip: searches of so many devices would not end
# The sizes that slice_names and errors name of the three-dimensional chips, in cubes; all numbers of cubes are legal.
_USUAL_CUBES = (1, 2, 4, 8, 16, 32, 64, 96)

_NAME = re.compile(r"(?:(\d+)\s*x\s*)?([a-z].*)", re.IGNORECASE)
_SHAPE = re.compile(r"(.+):(\d+(?:x\d+)*)")


@dataclasses.dataclass(frozen=True)
class Slice:
    """Chips with direct links in a torus; or `count` such slices, connected by the data centre's network.

    Attributes:
      chip: its kind.
      shape: of one slice, in chips along each axis of the torus; (n,) for a flat network.
      count: slices.
      whole: the slice of which this is a part (see `part`); None: it is whole.
    """

    chip: Chip
    shape: tuple[int, ...]
    count: int = 1
    whole: Slice | None = None

    @property
    def title(self) -> str:
        """The name, for users; of a part "4 of the 8 devices of v5e-8"."""
        return self.name if self.whole is None else f"{self.devices} of the {self.whole.devices} devices of {self.name}"

    @property
    def name(self) -> str:
        """The shortest name that `parse` maps to this slice; of a part that of the whole, which is what can be rented."""
        if self.whole is not None:
            return self.whole.name
        chips_, kind = self.chips_per_slice, self.chip
        usual = _usual_shape(kind, chips_)
        item = f"{kind.name}-{chips_ * kind.name_units}" if self.shape == usual else f"{kind.name}:{self.gke_topology}"
        return item if self.count == 1 else f"{self.count}x{item}"

    @property
    def chips_per_slice(self) -> int:
        """Chips of one slice."""
        return math.prod(self.shape)

    @property
    def chips(self) -> int:
        """Chips of all slices."""
        return self.count * self.chips_per_slice

    @property
    def devices_per_slice(self) -> int:
        """JAX devices of one slice."""
        return self.chips_per_slice * self.chip.devices

    @property
    def devices(self) -> int:
        """JAX devices of all slices: the size of the mesh."""
        return self.count * self.devices_per_slice

    @property
    def machine(self) -> Machine | None:
        """The virtual machine with its chips; None for the CPU."""
        if self.whole is not None:
            return self.whole.machine
        machines = self.chip.machines
        # A slice of at most one full machine uses the machine of its size; larger ones use one kind of machine: [v5e],
        # [v6e].
        for machine in machines:
            if machine.chips == self.chips_per_slice:
                return machine
        return next((machine for machine in machines if machine.chips == self.chip.machine_chips), None)

    @property
    def machine_type(self) -> str | None:
        """Compute Engine's machine type, of GKE node pools too; None for the CPU."""
        return self.machine.name if self.machine else None

    @property
    def chips_per_host(self) -> int:
        """Chips of one machine that this slice uses."""
        return min(self.machine.chips if self.machine else self.chips_per_slice, self.chips_per_slice)

    @property
    def hosts(self) -> int:
        """Machines of all slices, which is also the number of processes."""
        return self.count * (self.chips_per_slice // self.chips_per_host)

    @property
    def host_memory_bytes(self) -> float | None:
        """Memory of one machine; None for the CPU."""
        return self.machine.memory_bytes if self.machine else None

    @property
    def device_host_bytes(self) -> float:
        """Memory of the machine for each of its JAX devices; infinite for the CPU, whose machine is not known."""
        return self.machine.memory_bytes / (self.machine.chips * self.chip.devices) if self.machine else math.inf

    @property
    def dcn_bytes_per_s(self) -> float:
        """Bytes per second that one host can send to other slices."""
        return self.chips_per_host * self.chip.dcn_bytes_per_s

    @functools.cached_property
    def wraps(self) -> tuple[bool, ...]:
        """For each axis, whether its last chip is linked to its first, so that collectives can use both directions.

        On v5e and v6e this holds for axes of 16 chips; on v4, v5p and tpu7x for all axes of slices made of whole cubes
        of
        4 x 4 x 4, none of smaller slices. Sources: docs.cloud.google.com/tpu/docs/v5p ("all 4x4x4 and larger slices
        have full 3D torus"); "How to Scale Your Model", chapter 2; MaxText's accelerator_to_spec_map.py.
        """
        if self.chip.ici_axes == 3:
            return (all(size % _CUBE == 0 for size in self.shape),) * 3
        if self.chip.ici_axes == 2:
            return tuple(size == _FULL_TORUS for size in self.shape)
        return (self.shape[0] > 1,)

    @property
    def topology(self) -> str | None:
        """The TPU compiler's name of one slice: "v5e:8x8"; None if it is no TPU."""
        return f"{self.chip.name}:{self.gke_topology}" if self.chip.is_tpu else None

    @property
    def gke_accelerator(self) -> str | None:
        """Value of GKE's label cloud.google.com/gke-tpu-accelerator (gke-accelerator for GPUs)."""
        return self.chip.gke_accelerator

    @property
    def gke_topology(self) -> str:
        """Value of GKE's label cloud.google.com/gke-tpu-topology: "8x8"."""
        return "x".join(map(str, self.shape))

    @property
    def accelerator_type(self) -> str | None:
        """The Cloud TPU API's type of one slice: "v5litepod-64"; None if that API does not have it.

        Types name sizes only: other shapes are requested by the API's topology.
        """
        if self.chip.api_name is None:
            return None
        return f"{self.chip.api_name}-{self.chips_per_slice * self.chip.name_units}"

    @property
    def vertex_machine_type(self) -> str | None:
        """Vertex AI's machineType; None if its documentation names no training on this chip."""
        return self.machine_type if self.chip.on_vertex else None

    @property
    def vertex_tpu_topology(self) -> str | None:
        """Vertex AI's tpuTopology, which equals GKE's; None for GPUs, and if Vertex AI does not train on this chip."""
        return self.gke_topology if self.chip.on_vertex and self.chip.is_tpu else None

    def price_per_hour(self, usd_per_chip_hour: float | None = None) -> float | None:
        """US dollars per hour for all slices.

        Args:
          usd_per_chip_hour: the actual price (commitments, spot, another region); None: the on-demand list price.

        Returns:
          None if the chip has no list price and none is passed.
        """
        if usd_per_chip_hour is None:
            if self.chip.price is None:
                return None
            usd_per_chip_hour = self.chip.price.usd
        return (self.whole or self).chips * usd_per_chip_hour


def part(slice_: Slice, first: int, devices: int) -> Slice | None:
    """The `devices` devices of a one-host slice from the `first` on, in JAX's order.

    JAX numbers the chips of a host along the first axis of the torus, then along the next ones. Of v5e-8 (2x4) the first six
    are 2x3, and the first three fill no box.

    Returns:
      The part, with the links of its box; None if its chips form no box, of which JAX makes no mesh.
    """
    assert slice_.hosts == 1, "JAX numbers chips host by host"
    each = slice_.chip.devices
    if first % each or devices % each:
        return None
    places = [_place(number, slice_.shape) for number in range(first // each, (first + devices) // each)]
    box = tuple(max(along) - min(along) + 1 for along in zip(*places))
    return dataclasses.replace(slice_, shape=box, whole=slice_) if math.prod(box) == len(places) else None


def _place(number: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The place of a chip in the torus."""
    place = []
    for side in shape:
        number, along = divmod(number, side)
        place.append(along)
    return tuple(place)


def parse(name: str) -> Slice:
    """The slice of a name; this module's docstring describes names.

    Raises:
      UserError: there is no such slice; suggests the nearest.
    """
    match = _NAME.fullmatch(name.strip())
    if not match:
        raise _unknown_slice(name)
    count, item = int(match[1] or 1), match[2]
    if not 1 <= count <= _MOST_SLICES:
        near = item if count < 1 else f"{_MOST_SLICES}x{item}"
        raise UserError(f"slice {name!r}: the number of slices ({count}) must be from 1 to {_MOST_SLICES}: try {near}")
    shaped = _SHAPE.fullmatch(item)
    if shaped:
        kind = chips.find(shaped[1])
        if kind is None or not kind.is_tpu:
            tpus = [chip_name for chip_name, known in chips.CHIPS.items() if known.is_tpu]
            raise UserError(f"slice {name!r}: no TPU {shaped[1]!r}{did_you_mean(shaped[1], tpus)}")
        return Slice(kind, _checked_shape(name, kind, shaped[2]), count)
    generation, _, size = item.rpartition("-")
    kind = chips.find(generation)
    if kind is None or not (size.isascii() and size.isdigit()):
        raise _unknown_slice(name)
    chips_per_slice, rest = divmod(int(size), kind.name_units)
    shape = None if rest else _usual_shape(kind, chips_per_slice)
    if shape is None:
        raise _no_size(name, kind, generation, int(size))
    return Slice(kind, shape, count)


def sizes(kind: Chip | str) -> list[Slice]:
    """All sizes of a chip that exist as one slice, by growing number of chips, each in its default shape.

    For three-dimensional chips these are all whole numbers of cubes; the shape is the one nearest to a cube.
    """
    kind = chips.chip(kind) if isinstance(kind, str) else kind
    return [Slice(kind, _shape_of(kind, size)) for size in _all_sizes(kind)]


def slice_names() -> list[str]:
    """Names of the default slices of every chip, by growing size; other numbers of cubes and CPUs are omitted."""
    return [Slice(kind, _shape_of(kind, size)).name for kind in chips.CHIPS.values() for size in _named_sizes(kind)]


def _all_sizes(kind: Chip) -> list[int]:
    if kind.ici_axes == 3:
        cube = _CUBE**3
        return [math.prod(shape) for shape in kind.sub_cubes] + list(range(cube, kind.most_chips + 1, cube))
    if kind.ici_axes == 2:
        return [math.prod(shape) for shape in _FLAT]
    return list(_GPUS) if kind.machines else list(range(1, kind.most_chips + 1))


def _named_sizes(kind: Chip) -> list[int]:
    every = _all_sizes(kind)
    if kind.ici_axes == 3:
        usual = {cubes * _CUBE**3 for cubes in _USUAL_CUBES}
        return [size for size in every if size < _CUBE**3 or size in usual]
    return every if kind.is_tpu or kind.machines else list(_GPUS)


@functools.cache
def _usual_shape(kind: Chip, size: int) -> tuple[int, ...] | None:
    """The default shape of a slice of `size` chips; None if there is no such slice."""
    if kind.ici_axes == 1:
        return (size,) if size in _all_sizes(kind) else None
    for shape in _FLAT if kind.ici_axes == 2 else kind.sub_cubes:
        if math.prod(shape) == size:
            return shape
    cubes, rest = divmod(size, _CUBE**3)
    if kind.ici_axes == 2 or rest or not 0 < size <= kind.most_chips:
        return None
    sides = [
        (a, b, cubes // (a * b))
        for a in range(1, cubes + 1)
        for b in range(a, cubes // a + 1)
        if cubes % (a * b) == 0 and cubes // (a * b) >= b
    ]
    nearest = min(sides, key=lambda abc: abc[0] * abc[1] + abc[1] * abc[2] + abc[0] * abc[2])  # the smallest surface
    return tuple(_CUBE * side for side in nearest)


def _checked_shape(name: str, kind: Chip, text: str) -> tuple[int, ...]:
    shape = tuple(map(int, text.split("x")))
    if _is_shape(kind, shape):
        return shape
    in_order = tuple(sorted(shape))
    if in_order != shape and _is_shape(kind, in_order):
        raise UserError(
            f"slice {name!r}: {kind.name} has no topology {kind.name}:{text}, the shorter axes come first: "
            f"try {kind.name}:{'x'.join(map(str, in_order))}"
        )
    nearest = Slice(kind, _nearest_size(kind, math.prod(shape))).topology
    raise UserError(f"slice {name!r}: {kind.name} has no topology {kind.name}:{text}: try {nearest}")


def _is_shape(kind: Chip, shape: tuple[int, ...]) -> bool:
    if kind.ici_axes == 2:
        return shape in _FLAT
    if len(shape) != 3:
        return False
    # Shapes are AxBxC with A <= B <= C, multiples of 4 from a cube on: docs.cloud.google.com/tpu/docs/types-topologies.
    whole_cubes = all(side > 0 and side % _CUBE == 0 for side in shape) and list(shape) == sorted(shape)
    return shape in kind.sub_cubes or (whole_cubes and math.prod(shape) <= kind.most_chips)


def _nearest_size(kind: Chip, size: int, units: int = 1) -> tuple[int, ...]:
    """The default shape of the size nearest to `size`, which counts units, of which a chip has `units`."""
    return _shape_of(kind, min(_all_sizes(kind), key=lambda known: (abs(known * units - size), known)))


def _shape_of(kind: Chip, size: int) -> tuple[int, ...]:
    """The default shape of a size that exists."""
    shape = _usual_shape(kind, size)
    assert shape is not None, f"no slice of {size} {kind.name}"
    return shape


def _unknown_slice(name: str) -> UserError:
    return UserError(
        f"slice {name!r} must be like v5e-64 (or v5e:8x8, or 2xv5e-256) with one of {', '.join(chips.CHIPS)}"
        f"{did_you_mean(name, slice_names())}"
    )


def _no_size(name: str, kind: Chip, generation: str, size: int) -> UserError:
    units = kind.name_units
    if kind.ici_axes == 1 and size > kind.most_chips and kind.machines:
        machines = -(-size // kind.most_chips)
        return UserError(
            f"slice {name!r}: one {kind.name} machine has at most {kind.most_chips} chips: "
            f"try {machines}x{generation}-{kind.most_chips}"
        )
    known = ", ".join(str(chip_count * units) for chip_count in _named_sizes(kind))
    if kind.ici_axes == 3:
        cube = _CUBE**3 * units
        known += f" and the other multiples of {cube} up to {kind.most_chips * units}"
    elif not kind.machines:
        known = f"1 to {kind.most_chips}"
    nearest = math.prod(_nearest_size(kind, size, units)) * units
    return UserError(f"slice {name!r}: {generation} has the sizes {known}: try {generation}-{nearest}")
