"""The mesh for generation: which devices of one or all processes, and how they divide the work."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.sharding import SingleDeviceSharding

from capibara import sharding
from capibara.config import configurable
from capibara.core.types import PyTree, UserError
from capibara.models.api import Model
from capibara.sharding import Plan, Rules


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingMesh:
    """How generation is sharded: rows of slots along `data`, heads and hidden units along `tensor`.

    Attributes:
      tensor: devices that share each layer; None: as many as divide the model's heads. Emulated devices share one processor:
        of them, one per process is used unless more are requested.
      data: number of replicas of such groups, each with its share of the slots; None: as many as there are devices for.
    """

    tensor: int | None = None
    data: int | None = None

    def __post_init__(self) -> None:
        for name in ("tensor", "data"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"ServingMesh.{name} is {value}, must be at least 1, or None: chosen by the model")

    def shardings(self, model: Model, devices: Sequence[jax.Device]) -> PyTree:
        """Shardings of a model's parameters on these devices; an engine uses their mesh.

        Raises:
          UserError: there are too few devices, or they do not divide a dimension.
        """
        if self.tensor is not None:
            return self._on(model, devices, self.tensor)
        if devices[0].platform == "cpu":
            return self._on(model, devices, 1)
        most = len(devices) // (self.data or 1)
        for tensor in (n for n in range(most, 1, -1) if len(devices) % n == 0):
            with contextlib.suppress(UserError):
                return self._on(model, devices, tensor)
        return self._on(model, devices, 1)

    def _on(self, model: Model, devices: Sequence[jax.Device], tensor: int) -> PyTree:
        if self.data is not None:
            data = self.data
        else:
            least = max(_processes(devices) // tensor, 1)
            data = least if devices[0].platform == "cpu" else max(len(devices) // tensor, 1)
        if tensor * data > len(devices):
            raise UserError(
                f"ServingMesh.tensor ({tensor}) x ServingMesh.data ({data}) must be at most the {len(devices)} available "
                "devices: use fewer"
            )
        if tensor * data == _processes(devices) == 1:
            here = SingleDeviceSharding(devices[0])
            return jax.tree.map(lambda _: here, model.abstract_params)
        for count in model.config.cached_head_counts:
            if count % tensor:
                raise UserError(
                    f"ServingMesh.tensor ({tensor}) must divide the model's {count} heads of keys and values: "
                    f"try {math.gcd(count, tensor)}"
                )
        used = _of_each_process(devices, tensor * data)
        try:
            mesh = sharding.make_mesh(Plan(batch_size=data, data=data, fsdp=1, tensor=tensor), used)
        except AssertionError:  # JAX's, for chips that do not form a box in the slice
            raise UserError(
                f"ServingMesh.tensor ({tensor}) x ServingMesh.data ({data}) would use {len(used)} of {len(devices)} chips, "
                "which are not adjacent on the slice: use all of them"
            ) from None
        # A vocabulary that does not divide is replicated.
        rules = Rules(vocab=()) if model.config.vocab_size % tensor else Rules()
        return sharding.shardings(mesh, rules, model.axes, model.abstract_params)


def _processes(devices: Sequence[jax.Device]) -> int:
    return len({device.process_index for device in devices})


def _of_each_process(devices: Sequence[jax.Device], count: int) -> list[jax.Device]:
    """The first devices of each process, `count` together: every process takes part in every step."""
    processes = sorted({device.process_index for device in devices})
    if count % len(processes):
        raise UserError(
            f"ServingMesh.tensor x ServingMesh.data ({count}) must be a multiple of the {len(processes)} processes, which all "
            f"have a share: try {-(-count // len(processes)) * len(processes)}, or start one process"
        )
    share = count // len(processes)
    by_process = {process: [device for device in devices if device.process_index == process] for process in processes}
    if any(len(local_devices) < share for local_devices in by_process.values()):
        raise UserError(
            f"ServingMesh.tensor x ServingMesh.data ({count}) needs {share} devices of each of the {len(processes)} processes, "
            "of which one has fewer: ask for fewer"
        )
    return [device for process in processes for device in by_process[process][:share]]
