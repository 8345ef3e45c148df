"""TPU slices that are not there: their devices, as the TPU compiler (libtpu) describes them, on any machine."""

from __future__ import annotations

import os
from typing import Any

import jax

from capibara.core import devices, extras
from capibara.core.types import UserError
from capibara.planner.hardware import slices

# What libtpu would ask a metadata server that is not there, and complain of on the terminal.
WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


def topology_name(name: str) -> str:
    """The compiler's name of a slice: "v5e-64" -> "v5e:8x8"; a name like that is returned as it is.

    Raises:
      UserError: there is no such slice, or it is of no TPUs; names the nearest.
    """
    topology = slices.parse(name).topology
    if topology is None:
        raise UserError(f"slice {name!r} is of no TPUs, and the TPU compiler compiles for no other: try v5e-64")
    return topology


def check(name: str) -> None:
    """Raises UserError where `slice_devices` would for want of TPUs in the slice or of the TPU compiler; loads nothing."""
    topology_name(name)
    extras.require("libtpu", extra="tpu", why=f"compiling for {name}")


def slice_devices(name: str) -> list[jax.Device]:
    """The devices of a TPU slice, to make a mesh of and to lower and compile programs for; they hold no arrays.

    Set JAX_PLATFORMS=cpu (or devices.emulate) before, so that JAX itself looks for no TPU.

    Args:
      name: "v5e-64", or a topology such as "v5e:8x8"; "2xv5e-256" has the devices of both slices, told apart by their
        `slice_index`.

    Raises:
      UserError: no such slice, or libtpu is not installed.
    """
    check(name)
    topology, wanted = topology_name(name), slices.parse(name)
    for variable, value in ({} if devices.has_tpu() else WITHOUT_TPU).items():
        os.environ.setdefault(variable, value)
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # a killed process leaves a lock file that means nothing
    from jax.experimental import topologies

    options: dict[str, Any] = {}  # of its own, not JAX's
    if wanted.hosts == wanted.count:
        options["chips_per_host_bounds"] = (*wanted.shape, 1, 1)[:3]  # else a host has four
    if wanted.count > 1:
        options["num_slices"] = wanted.count
    if wanted.chip.name == "v4":
        options["chip_config_name"] = "megacore"  # both cores of a chip as one device, as JAX has them on a v4
    try:
        return list(topologies.get_topology_desc(topology_name=topology, platform="tpu", **options).devices)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        text = " ".join(str(error).split())
        raise UserError(f"slice {name!r}: the TPU compiler has no topology {topology}: {text[:200]}") from error
