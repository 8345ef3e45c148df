"""Places mesh axes on a slice's torus, and predicts the times of collectives over them, for one device.

Times follow from bandwidth alone, by "How to Scale Your Model" (Austin et al. 2025), chapter 3: on a closed ring each
direction carries half of the data; on a line every byte has one way. Devices of the mesh's innermost axes are
neighbours, as in sharding.make_mesh: `layout` states its rule, and a test compares it with the result.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping

from capibara.core.types import UserError
from capibara.planner.hardware.slices import Slice
from capibara.sharding import MESH_AXES

# Share of the data centre network's bandwidth that collectives reach; calibrated with the efficiencies of cost.py.
DCN_REACHED = 0.68


@dataclasses.dataclass(frozen=True)
class Span:
    """A mesh axis's part of one torus axis.

    Attributes:
      size: devices along it.
      stride: distance between them, in chips.
      closed: whether its ends are linked.
    """

    size: int
    stride: int
    closed: bool


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh on a slice.

    Attributes:
      slice_: the slice.
      mesh: mesh axis -> size.
      spans: mesh axis -> its part of each torus axis, in the torus's order. Devices of one chip are the last axis.
      slices: mesh axis -> number of slices that it spans, over the data centre's network.
    """

    slice_: Slice
    mesh: Mapping[str, int]
    spans: Mapping[str, tuple[Span, ...]]
    slices: Mapping[str, int]

    def gather_s(self, size: float, axes: Iterable[str]) -> float:
        """Seconds of an all-gather to `size` bytes on each device; a reduce-scatter of them takes as long."""
        axes = tuple(axes)
        if axes not in self._known_gathers:
            inside = math.prod(self.mesh[axis] // self.slices[axis] for axis in axes)
            # If several slices share the array, each slice first gathers its own part.
            seconds = (inside - 1) / inside / self.bandwidth(axes) if inside > 1 else 0.0
            self._known_gathers[axes] = seconds + self._dcn_s(1 / inside, axes)
        return size * self._known_gathers[axes]

    def reduce_s(self, size: float, axes: Iterable[str]) -> float:
        """Seconds of an all-reduce of `size` bytes on each device."""
        return 2 * self.gather_s(size, axes)

    def exchange_s(self, size: float, axes: Iterable[str]) -> float:
        """Seconds of an all-to-all of `size` bytes on each device."""
        axes = tuple(axes)
        seconds = 0.0
        link = self.slice_.chip.link_bytes_per_s
        for span in self._extents(axes):
            if span.size > 1:  # half of the data of each half must cross the middle of a line
                seconds = max(seconds, size * span.size * span.stride / (8 if span.closed else 4) / link)
        return seconds + self._dcn_s(size, axes)

    def pass_on_s(self, size: float, axis: str) -> float:
        """Seconds to send `size` bytes from each device to the next one along an axis."""
        if self.mesh[axis] == 1:
            return 0.0
        if self.slices[axis] > 1:
            return size / self.slice_.chip.dcn_bytes_per_s / DCN_REACHED
        stride = min(span.stride for span in self.spans[axis] if span.size > 1)
        return size * stride / self.slice_.chip.link_bytes_per_s

    def bandwidth(self, axes: Iterable[str]) -> float:
        """Bytes per second that reach each device in an all-gather over these axes within a slice; 0 for one device."""
        link = self.slice_.chip.link_bytes_per_s
        return sum(link * (2 if s.closed else 1) / s.stride for s in self._extents(tuple(axes)) if s.size > 1)

    def describe(self, axis: str) -> str:
        """Where an axis lies: "fsdp=64: x 8, y 8"."""
        names = "xyzc"
        parts = [f"{names[i]} {s.size}" + (f" (stride {s.stride})" if s.stride > 1 else "") + (", ring" * s.closed)
                 for i, s in enumerate(self.spans[axis]) if s.size > 1]  # fmt: skip
        if self.slices[axis] > 1:
            parts.append(f"{self.slices[axis]} slices")
        return f"{axis}={self.mesh[axis]}: {' x '.join(parts) or 'one device'}"

    def _dcn_s(self, size: float, axes: tuple[str, ...]) -> float:
        count = math.prod(self.slices[axis] for axis in axes)
        return 0.0 if count == 1 else size * (count - 1) / count / self.slice_.chip.dcn_bytes_per_s / DCN_REACHED

    def _extents(self, axes: tuple[str, ...]) -> list[Span]:
        """The combined spans of several mesh axes, for each torus axis."""
        if axes in self._known_extents:
            return self._known_extents[axes]
        extents: list[Span] = []
        for spans in zip(*(self.spans[axis] for axis in axes)):
            used = [span for span in spans if span.size > 1]
            size, stride = math.prod(s.size for s in used), min((s.stride for s in used), default=1)
            extents.append(Span(size, stride, any(s.closed for s in used) or self._closes(len(extents), size)))
        self._known_extents[axes] = extents
        return extents

    @functools.cached_property  # seconds of a byte by mesh axes; a search evaluates many plans on each layout
    def _known_gathers(self) -> dict[tuple[str, ...], float]:
        return {}

    @functools.cached_property  # by mesh axes
    def _known_extents(self) -> dict[tuple[str, ...], list[Span]]:
        return {}

    def _closes(self, index: int, size: int) -> bool:
        shape = self.slice_.shape
        return index < len(shape) and self.slice_.wraps[index] and size == shape[index]


def layout(slice_: Slice, mesh: Mapping[str, int]) -> Layout:
    """Lays a mesh on a slice as sharding.make_mesh does.

    Mesh axes are placed from the innermost to the outermost. Among the ways to compose an axis from parts of torus
    axes, the order of preference is: most chips in whole torus axes; most whole torus axes; continues torus axes in
    use; largest part of the first torus axis. Several slices form the outermost part of the first mesh axis that they
    divide: data, then stage, then fsdp.

    Args:
      slice_: the slice.
      mesh: mesh axis -> size, all of sharding.MESH_AXES.

    Raises:
      UserError: the mesh has another number of devices, or no axis that the slices divide.
    """
    return _layout(slice_, tuple(mesh[axis] for axis in MESH_AXES))


@functools.lru_cache(maxsize=4096)
def _layout(slice_: Slice, sizes: tuple[int, ...]) -> Layout:
    mesh = dict(zip(MESH_AXES, sizes))
    if math.prod(sizes) != slice_.devices:
        shown = " x ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1)
        raise UserError(f"mesh ({shown}) has {math.prod(sizes)} devices, {slice_.name} has {slice_.devices}")
    slices = dict.fromkeys(MESH_AXES, 1)
    if slice_.count > 1:
        outer = next((axis for axis in MESH_AXES[:3] if mesh[axis] % slice_.count == 0), None)
        if outer is None:
            raise UserError(
                f"mesh of {slice_.name}: data, stage or fsdp must be a multiple of the {slice_.count} slices, "
                f"is {mesh['data']}, {mesh['stage']} and {mesh['fsdp']}"
            )
        slices[outer] = slice_.count
    torus = (*slice_.shape, slice_.chip.devices) if slice_.chip.devices > 1 else slice_.shape
    left, used = list(torus), [1] * len(torus)
    spans = {}
    for axis in reversed(MESH_AXES):
        size = mesh[axis] // slices[axis]
        best = max(_ways(size, tuple(left)), key=lambda way: _preference(way, torus, used))
        spans[axis] = tuple(
            Span(part, used[i], part == torus[i] and i < len(slice_.shape) and slice_.wraps[i])
            for i, part in enumerate(best)
        )
        left = [a // b for a, b in zip(left, best)]
        used = [a * b for a, b in zip(used, best)]
    return Layout(slice_, mesh, spans, slices)


def _ways(size: int, left: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All ways to write `size` as a product of divisors of the unused parts of the torus axes."""
    divisors = [[d for d in range(1, n + 1) if n % d == 0 and size % d == 0] for n in left]
    return [way for way in itertools.product(*divisors) if math.prod(way) == size]


def _preference(way: tuple[int, ...], torus: tuple[int, ...], used: list[int]) -> tuple:
    whole = [part for part, size in zip(way, torus) if part == size]
    going_on = math.prod(part for part, taken in zip(way, used) if taken > 1)
    return math.prod(whole), sum(part > 1 for part in whole), going_on, way
