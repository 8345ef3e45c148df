"""TPU slices that are not there: their devices, as the TPU compiler (libtpu) describes them, on any machine."""

from __future__ import annotations

import os
import re

import jax

from capibara import extras
from capibara.fields import did_you_mean
from capibara.types import UserError

# Chips of a slice -> its shape, for the two-dimensional chips. Source: the Cloud TPU pages of v5e and v6e.
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
# The same for those with three dimensions; larger slices have more than one shape and are named by it.
_DEEP = {
    4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8",
    1024: "8x8x16", 2048: "8x16x16", 4096: "16x16x16",
}  # fmt: skip
# The name of a slice's generation -> the compiler's name, the shapes, and what the number in the slice's name counts
# per chip: v4-8 and v5p-8 have 8 cores, so 4 chips.
_GENERATIONS = {
    "v4": ("v4", {n: s for n, s in _DEEP.items() if n <= 2048}, 2),
    "v5e": ("v5e", _FLAT, 1),
    "v5litepod": ("v5e", _FLAT, 1),
    "v5p": ("v5p", _DEEP, 2),
    "v6e": ("v6e", _FLAT, 1),
    "tpu7x": ("tpu7x", _DEEP, 2),
}
_SHAPE = re.compile(r"(\w+):(\d+(?:x\d+){1,2})")


def slice_names() -> list[str]:
    """The names that `slice_devices` knows, shapes aside."""
    return [f"{g}-{chips * per_chip}" for g, (_, shapes, per_chip) in _GENERATIONS.items() for chips in shapes]


def topology_name(name: str) -> str:
    """The compiler's name of a slice: "v5e-64" -> "v5e:8x8"; a name like that is returned as it is.

    Raises:
      UserError: there is no such slice; names the nearest.
    """
    if match := _SHAPE.fullmatch(name):
        if match[1] in _GENERATIONS:
            return f"{_GENERATIONS[match[1]][0]}:{match[2]}"
        raise UserError(f"slice {name!r}: no TPU {match[1]!r}{did_you_mean(match[1], _GENERATIONS)}")
    generation, _, size = name.rpartition("-")
    if generation not in _GENERATIONS or not size.isdigit():
        raise UserError(
            f"slice {name!r} must be like v5e-64 (or v5e:8x8) with one of {', '.join(_GENERATIONS)}"
            f"{did_you_mean(name, slice_names())}"
        )
    compiler, shapes, per_chip = _GENERATIONS[generation]
    chips = int(size) / per_chip
    if chips not in shapes:
        nearest = min(shapes, key=lambda n: (abs(n - chips), n))
        sizes = ", ".join(str(n * per_chip) for n in shapes)
        raise UserError(
            f"slice {name!r}: {generation} has the sizes {sizes}: try {generation}-{nearest * per_chip}"
        )
    return f"{compiler}:{shapes[chips]}"


def slice_devices(name: str) -> list[jax.Device]:
    """The devices of a TPU slice, to make a mesh of and to lower and compile programs for; they hold no arrays.

    Set JAX_PLATFORMS=cpu (or sharding.emulate) before, so that JAX itself looks for no TPU.

    Args:
      name: "v5e-64", or a topology such as "v5e:8x8".

    Raises:
      UserError: no such slice, or libtpu is not installed.
    """
    topology = topology_name(name)
    extras.require("libtpu", extra="tpu", why=f"compiling for {name}")
    # Neither is there a metadata server to ask, nor is the lock file of a process that was killed of any meaning.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    options = {}
    if topology.endswith(":1x1"):
        options["chips_per_host_bounds"] = (1, 1, 1)  # else a host has four
    if topology.startswith("v4:"):
        options["chip_config_name"] = "megacore"  # both cores of a chip as one device, as JAX has them on a v4
    try:
        return list(topologies.get_topology_desc(topology_name=topology, platform="tpu", **options).devices)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        text = " ".join(str(error).split())
        raise UserError(f"slice {name!r}: the TPU compiler has no topology {topology}: {text[:200]}") from error
