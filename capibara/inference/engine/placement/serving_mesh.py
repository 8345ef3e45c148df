"""The mesh that generates: which devices, of one process or of all, and what they share."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.sharding import SingleDeviceSharding

from capibara import config, sharding
from capibara.config import configurable
from capibara.core.types import PyTree, UserError
from capibara.models.api import Model
from capibara.sharding import Plan, Rules


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingMesh:
    """How generation lies on the devices: rows of slots on `data`, heads and hidden units on `tensor`.

    Attributes:
      tensor: devices that share each layer; None: as many as divide the model's heads. Emulated devices are one
        processor, and of them one of each process is used unless more are asked for.
      data: groups of them, each with its share of the slots and a copy of the parameters; None: those that are left.
    """

    tensor: int | None = None
    data: int | None = None

    def __post_init__(self) -> None:
        for name in ("tensor", "data"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"ServingMesh.{name} is {value}, must be at least 1, or None: what suits the model")

    def shardings(self, model: Model, devices: Sequence[jax.Device]) -> PyTree:
        """Where a model's parameters lie on these devices; an engine takes the mesh from them.

        Raises:
          UserError: the devices do not suffice, or a dimension cannot be shared so.
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
                f"ServingMesh.tensor ({tensor}) x ServingMesh.data ({data}) must be at most the {len(devices)} devices that "
                "there are: ask for fewer"
            )
        if tensor * data == _processes(devices) == 1:
            here = SingleDeviceSharding(devices[0])
            return jax.tree.map(lambda _: here, model.abstract_params)
        if heads := model.config.kv_heads % tensor:
            raise UserError(
                f"ServingMesh.tensor ({tensor}) must divide the model's {model.config.kv_heads} heads of keys and values: "
                f"try {math.gcd(heads, tensor)}"
            )
        used = _of_each_process(devices, tensor * data)
        try:
            mesh = sharding.make_mesh(Plan(batch_size=data, data=data, fsdp=1, tensor=tensor), used)
        except AssertionError:  # JAX's, of chips that are no box of the slice
            raise UserError(
                f"ServingMesh.tensor ({tensor}) x ServingMesh.data ({data}) would use {len(used)} of {len(devices)} chips, "
                "which are no neighbours on the slice: use all of them"
            ) from None
        # A vocabulary that cannot be shared is whole on every device.
        rules = Rules(vocab=()) if model.config.vocab_size % tensor else Rules()
        return sharding.shardings(mesh, rules, model.axes, model.abstract_params)


def placed(_: Plan, model: Model) -> PyTree:
    """Where the parameters lie, as `loading.load` asks for it, once the configuration is parsed: on all processes."""
    return config.build(ServingMesh).shardings(model, jax.devices())


def _processes(devices: Sequence[jax.Device]) -> int:
    return len({device.process_index for device in devices})


def _of_each_process(devices: Sequence[jax.Device], count: int) -> list[jax.Device]:
    """The first devices of each process, `count` together: every process has a part in every step."""
    processes = sorted({device.process_index for device in devices})
    if count % len(processes):
        raise UserError(
            f"ServingMesh.tensor x ServingMesh.data ({count}) must be a multiple of the {len(processes)} processes, which all "
            f"have a share: try {-(-count // len(processes)) * len(processes)}, or start one process"
        )
    share = count // len(processes)
    by_process = {one: [device for device in devices if device.process_index == one] for one in processes}
    if any(len(own) < share for own in by_process.values()):
        raise UserError(
            f"ServingMesh.tensor x ServingMesh.data ({count}) needs {share} devices of each of the {len(processes)} processes, "
            "of which one has fewer: ask for fewer"
        )
    return [device for one in processes for device in by_process[one][:share]]
