"""A loss on rollouts: how many steps they last, which devices draw them, and the memory that this takes."""

from __future__ import annotations

import dataclasses
import math
from typing import Self

import jax

from capibara.core.types import UserError
from capibara.data.dataset import Dataset
from capibara.inference.engine.cache.batching import PREFILL_TOKENS
from capibara.inference.engine.engine import EngineConfig
from capibara.inference.engine.placement import footprint
from capibara.inference.engine.placement.own_chips import MEMORY_SHARE, Where
from capibara.inference.engine.placement.serving_mesh import ServingMesh
from capibara.models.api import Model
from capibara.objectives.loss import Loss, ResidentArrays, Rollout
from capibara.strategies.generating import COPIES_APART


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutLoss(Loss):
    """Trains on answers that an engine draws.

    Attributes:
      mini_batches: a rollout has the answers of so many steps.
      updates: number of passes over the answers of a rollout.
      engine: options of the engine.
      where: whether each process answers its part of the prompts on its own chips, or all processes work together.
      mesh: the mesh of an engine on a process's own chips, or on `rollout_devices`.
      rollout_devices: how many devices draw answers while the others train: the last ones of the run; 0: all do both in turn;
        -1: the planner's choice for a slice.
      max_staleness: most steps between the weights that draw a rollout and those before its first step, a multiple of the
        steps of a rollout; None: the steps of one; 0: drawing and training wait for each other.
    """

    mini_batches: int = 1
    updates: int = 1
    engine: EngineConfig = EngineConfig(slots=16)
    where: Where = Where.AUTO
    mesh: ServingMesh = ServingMesh()
    rollout_devices: int = 0
    max_staleness: int | None = None

    @property
    def steps_of_rollout(self) -> int:
        """The number of steps on the answers of one rollout."""
        return self.updates * self.mini_batches

    def drawing(self, dataset: Dataset) -> Dataset:
        """The data as an engine draws with it: a row has room for one prompt with its answer."""
        return dataset

    @property
    def staleness_bound(self) -> int:
        """The value of `max_staleness`."""
        return self.steps_of_rollout if self.max_staleness is None else self.max_staleness

    def with_rollouts(self, devices: int, tensor: int | None, data: int | None) -> Self:
        mesh = dataclasses.replace(self.mesh, tensor=tensor, data=data)
        return dataclasses.replace(self, rollout_devices=devices, mesh=mesh)

    def check_apart(self, importance_cap: float | None) -> None:
        """Raises UserError if the options of drawing beside training do not go together.

        `importance_cap`: the loss's bound of importance weights; None: it has none.
        """
        name, devices, staleness = type(self).__name__, self.rollout_devices, self.max_staleness
        if devices < -1:
            raise UserError(
                f"{name}.rollout_devices is {devices}, must be at least 0 (0: the devices that train draw, too), or -1: the "
                "planner's choice"
            )
        if staleness is not None and staleness < 0:
            raise UserError(f"{name}.max_staleness is {staleness}, must be at least 0, or None: the steps of a rollout")
        if not devices:
            return
        if self.staleness_bound % self.steps_of_rollout:
            fix = -(-self.staleness_bound // self.steps_of_rollout) * self.steps_of_rollout
            raise UserError(
                f"{name}.max_staleness is {staleness}, must be a multiple of the {self.steps_of_rollout} steps of a rollout "
                f"(updates x mini_batches), between which weights are copied: try {fix}"
            )
        if self.where is Where.ALL:
            raise UserError(
                f"{name}.where is 'all', and {name}.rollout_devices is {devices}, which draw alone: leave {name}.where out"
            )
        if self.staleness_bound and importance_cap is None:
            raise UserError(
                f"{name}.importance_cap is None, and answers of up to {self.staleness_bound} steps ago ({name}.max_staleness) "
                f"need importance weights: try 2.0, or {name}.max_staleness = 0"
            )

    def training_devices(self, count: int) -> int:
        name, devices = type(self).__name__, self.rollout_devices
        if not devices:
            return count
        if jax.process_count() > 1:
            raise UserError(
                f"{name}.rollout_devices is {devices}, and the run has {jax.process_count()} processes: drawing beside training "
                f"is for one process, set {name}.rollout_devices = 0"
            )
        if devices == -1:
            raise UserError(
                f"{name}.rollout_devices is -1, which the planner replaces where it chooses the mesh: set Plan.slice, and leave "
                f"the axes of the mesh out, or try {name}.rollout_devices = {max(1, count // 2)}"
            )
        if devices >= count:
            fix = f"try {count // 2}" if count > 1 else f"set {name}.rollout_devices = 0"
            raise UserError(f"{name}.rollout_devices is {devices}, must be below the {count} devices of the run: {fix}")
        used = (self.mesh.tensor or 1) * (self.mesh.data or 1)
        if devices % used:
            raise UserError(
                f"ServingMesh.tensor x ServingMesh.data ({used}) must divide {name}.rollout_devices ({devices}): try "
                f"{math.gcd(used, devices)}"
            )
        return count - devices

    def drawn(self, answers: int, prompt_tokens: int, answer_tokens: int) -> Rollout:
        """A rollout of so many answers on `rollout_devices`, with the most tokens of a prompt and of an answer."""
        return Rollout(
            answers=answers,
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            steps=self.steps_of_rollout,
            in_turn=self.staleness_bound == 0,
            slots=self.engine.slots,
            cache_dtype=str(self.engine.cache_dtype),
            prefill_tokens=self.engine.prefill_tokens or PREFILL_TOKENS,
            memory_share=MEMORY_SHARE,
            tensor=self.mesh.tensor,
            data=self.mesh.data,
        )

    def resident_arrays(self, model: Model, dataset: Dataset) -> tuple[ResidentArrays, ...]:
        """The engine with its copy of the parameters, on devices that train."""
        if self.rollout_devices:
            return ()
        whole, length = model.plain, self.drawing(dataset).length
        size, spread_as = footprint.parameters_bytes(model), (whole.abstract_params, whole.axes)
        # If they do not fit a process's own chips, they are sharded like the trained parameters.
        own_chips = ResidentArrays("engine's parameters", size // (self.mesh.tensor or 1))
        return (
            own_chips if self.where is Where.OWN else ResidentArrays("engine's parameters", size, spread_as),
            ResidentArrays("engine's keys and values", footprint.state_bytes(model, self.engine, length)),
        )

    def rollout_arrays(self, model: Model, dataset: Dataset) -> tuple[ResidentArrays, ...]:
        """The engine with its copy of the parameters, and those that come while it draws."""
        if not self.rollout_devices:
            return ()
        size = footprint.parameters_bytes(model) // (self.mesh.tensor or 1)
        state = footprint.state_bytes(model, self.engine, self.drawing(dataset).length)
        return (
            ResidentArrays("engine's parameters", size),
            ResidentArrays("next parameters", (COPIES_APART - 1) * size),
            ResidentArrays("engine's keys and values", state // (self.mesh.tensor or 1)),
        )
