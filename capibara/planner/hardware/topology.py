"""The devices of TPU slices as the TPU compiler (libtpu) describes them, on any machine, without a TPU."""

from __future__ import annotations

import os
from typing import Any

import jax

from capibara.core import devices, extras
from capibara.core.types import UserError
from capibara.planner.hardware import slices

# What libtpu would request from a metadata server, and log errors about on the terminal.
WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


def topology_name(name: str) -> str:
    """The compiler's name of a slice: "v5e-64" -> "v5e:8x8"; a name of that form is returned unchanged.

    Raises:
      UserError: there is no such slice, or its chips are no TPUs; suggests the nearest.
    """
    topology = slices.parse(name).topology
    if topology is None:
        raise UserError(f"slice {name!r} has no TPUs, and the TPU compiler compiles for nothing else: try v5e-64")
    return topology


def check(name: str) -> None:
    """Raises UserError if the slice has no TPUs or the TPU compiler is not installed; loads nothing."""
    topology_name(name)
    extras.require("libtpu", extra="tpu", why=f"compiling for {name}")


def slice_devices(name: str) -> list[jax.Device]:
    """The devices of a TPU slice, for making a mesh and for lowering and compiling programs; they hold no arrays.

    Set JAX_PLATFORMS=cpu (or use devices.emulate) before, so that JAX itself does not look for TPUs.

    Args:
      name: "v5e-64", or a topology such as "v5e:8x8"; "2xv5e-256" yields the devices of both slices, which differ in
        their `slice_index`.

    Raises:
      UserError: there is no such slice, or libtpu is not installed.
    """
    check(name)
    topology, slice_ = topology_name(name), slices.parse(name)
    for variable, value in ({} if devices.has_tpu() else WITHOUT_TPU).items():
        os.environ.setdefault(variable, value)
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # killed processes leave stale lock files
    from jax.experimental import topologies

    options: dict[str, Any] = {}  # of libtpu, not JAX
    if slice_.hosts == slice_.count:
        options["chips_per_host_bounds"] = (*slice_.shape, 1, 1)[:3]  # the default is four chips per host
    if slice_.count > 1:
        options["num_slices"] = slice_.count
    if slice_.chip.name == "v4":
        options["chip_config_name"] = "megacore"  # both cores of a chip as one device, as in JAX on a v4
    try:
        return list(topologies.get_topology_desc(topology_name=topology, platform="tpu", **options).devices)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        text = " ".join(str(error).split())
        raise UserError(f"slice {name!r}: the TPU compiler has no topology {topology}: {text[:200]}") from error
