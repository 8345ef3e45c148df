"""Memory of the local devices, and what fills it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping

import jax

Arrays = Mapping[str, tuple[tuple[int, ...], str]]  # name of an array of the train state -> its shape and dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory of each local device; None: the back end does not report it.

    Attributes:
      used_bytes, peak_bytes, limit_bytes: one for each device.
    """

    used_bytes: tuple[int | None, ...]
    peak_bytes: tuple[int | None, ...]
    limit_bytes: tuple[int | None, ...]


def memory() -> DeviceMemory:
    """Memory of the local devices now."""
    stats = [_stats(device) for device in jax.local_devices()]
    used, peak, limit = (
        tuple(item.get(name) for item in stats) for name in ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")
    )
    return DeviceMemory(used_bytes=used, peak_bytes=peak, limit_bytes=limit)


def _stats(device: jax.Device) -> Mapping[str, int]:
    try:
        return device.memory_stats() or {}
    except (RuntimeError, NotImplementedError):  # of back ends without them
        return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffers:
    """Live arrays of one shape and dtype.

    Attributes:
      shape, dtype: of each.
      count: how many there are.
      device_bytes: of all together, on the device with the largest share of them.
      names: of the arrays of the train state that have this shape and dtype.
    """

    shape: tuple[int, ...]
    dtype: str
    count: int
    device_bytes: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        names = f" {self.names[0]}" if self.names else ""
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return f"{self.count} x {self.dtype}[{shape}]{names}{more} ({self.device_bytes / 2**20:,.1f} MiB)"


def largest(most: int = 5, arrays: Arrays | None = None) -> list[Buffers]:
    """The shapes and dtypes of live arrays that take most memory of a device.

    Args:
      most: how many.
      arrays: the train state, for names.
    """
    sizes: dict[tuple[tuple[int, ...], str], list[int]] = collections.defaultdict(list)
    for array in jax.live_arrays():
        if not array.is_deleted():
            sizes[tuple(array.shape), str(array.dtype)].append(_on_a_device(array))
    largest_first = sorted(sizes.items(), key=lambda item: -sum(item[1]))[:most]
    return [
        Buffers(
            shape=shape,
            dtype=dtype,
            count=len(result),
            device_bytes=sum(result),
            names=tuple(name for name, about in (arrays or {}).items() if about == (shape, dtype)),
        )
        for (shape, dtype), result in largest_first
    ]


def _on_a_device(array: jax.Array) -> int:
    size = 1
    for length in array.sharding.shard_shape(array.shape):
        size *= length
    return size * array.dtype.itemsize


def listed(buffers: Iterable[Buffers]) -> str:
    """The buffers in one line; "none" if there are none."""
    return "; ".join(map(str, buffers)) or "none"
