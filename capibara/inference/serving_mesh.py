"""The mesh that generates: which of a process's devices, and what they share."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.sharding import SingleDeviceSharding

from capibara import config, sharding
from capibara.config import configurable
from capibara.models.api import Model
from capibara.sharding import Plan, Rules
from capibara.types import PyTree, UserError


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingMesh:
    """How generation lies on the devices: rows of slots on `data`, heads and hidden units on `tensor`.

    Attributes:
      tensor: devices that share each layer; None: as many as divide the model's heads. Emulated devices are one
        processor, and of them one is used unless more are asked for.
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
            data = 1 if devices[0].platform == "cpu" else max(len(devices) // tensor, 1)
        if tensor * data > len(devices):
            raise UserError(
                f"ServingMesh.tensor ({tensor}) x ServingMesh.data ({data}) must be at most the {len(devices)} devices that "
                "there are: ask for fewer"
            )
        if tensor * data == 1:
            here = SingleDeviceSharding(devices[0])
            return jax.tree.map(lambda _: here, model.abstract_params)
        if heads := model.config.kv_heads % tensor:
            raise UserError(
                f"ServingMesh.tensor ({tensor}) must divide the model's {model.config.kv_heads} heads of keys and values: "
                f"try {math.gcd(heads, tensor)}"
            )
        mesh = sharding.make_mesh(Plan(batch_size=data, data=data, fsdp=1, tensor=tensor), devices[: tensor * data])
        # A vocabulary that cannot be shared is whole on every device.
        rules = Rules(vocab=()) if model.config.vocab_size % tensor else Rules()
        return sharding.shardings(mesh, rules, model.axes, model.abstract_params)


def placed(_: object, model: Model) -> PyTree:
    """Where the parameters lie, as `loading.load` asks for it, once the configuration is parsed."""
    return config.build(ServingMesh).shardings(model, jax.local_devices())
