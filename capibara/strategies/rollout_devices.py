"""Checks of devices that draw answers while the others train."""

from __future__ import annotations

import math
from typing import Protocol

import jax

from capibara.core.types import UserError
from capibara.inference.engine.placement.own_chips import Where
from capibara.inference.engine.placement.serving_mesh import ServingMesh


class Apart(Protocol):
    """Options of drawing on devices apart: a `rewarded.RewardedLoss`."""

    @property
    def rollout_devices(self) -> int: ...
    @property
    def max_staleness(self) -> int | None: ...
    @property
    def staleness_bound(self) -> int: ...
    @property
    def steps_of_rollout(self) -> int: ...
    @property
    def where(self) -> Where: ...
    @property
    def mesh(self) -> ServingMesh: ...


class Weighted(Apart, Protocol):
    """The same of a loss with importance weights: a `grpo.Grpo` or `ppo.Ppo`."""

    @property
    def importance_cap(self) -> float | None: ...


def check(loss: Weighted) -> None:
    """Raises UserError if the options of drawing on devices apart do not go together."""
    name, count, staleness = type(loss).__name__, loss.rollout_devices, loss.max_staleness
    if count < 0:
        raise UserError(f"{name}.rollout_devices is {count}, must be at least 0 (0: the devices that train draw, too)")
    if staleness is not None and staleness < 0:
        raise UserError(f"{name}.max_staleness is {staleness}, must be at least 0, or None: the steps of a rollout")
    if not count:
        if staleness:
            raise UserError(
                f"{name}.max_staleness is {staleness}, and {name}.rollout_devices is 0, with which no answer is stale: set "
                f"{name}.rollout_devices, or leave it out"
            )
        return
    if (steps := loss.steps_of_rollout) and loss.staleness_bound % steps:
        raise UserError(
            f"{name}.max_staleness is {staleness}, must be a multiple of the {steps} steps of a rollout (updates x "
            f"mini_batches), between which weights are copied: try {-(-loss.staleness_bound // steps) * steps}"
        )
    if loss.where is Where.ALL:
        raise UserError(
            f"{name}.where is 'all', and {name}.rollout_devices is {count}, which draw alone: leave {name}.where out"
        )
    if loss.staleness_bound and loss.importance_cap is None:
        raise UserError(
            f"{name}.importance_cap is None, and answers of up to {loss.staleness_bound} steps ago ({name}.max_staleness) need "
            f"importance weights: try 2.0, or {name}.max_staleness = 0"
        )


def unplanned(loss: Apart) -> str | None:
    """Why a search for a mesh does not know such a run: it lays out all chips of a slice."""
    name, apart = type(loss).__name__, loss.rollout_devices
    if not apart:
        return None
    return (
        f"{name}.rollout_devices is {apart}, must be 0 for a search, which lays out all chips of a slice: set the axes of the "
        "mesh of the chips that train (Plan.fsdp, ...), and ask `capibara prove`"
    )


def training_devices(loss: Apart, count: int) -> int:
    """How many of `count` devices of a run train; raises UserError if there is not one left, or several processes."""
    name, apart = type(loss).__name__, loss.rollout_devices
    if not apart:
        return count
    if jax.process_count() > 1:
        raise UserError(
            f"{name}.rollout_devices is {apart}, and the run has {jax.process_count()} processes: drawing beside training is "
            f"for one process, set {name}.rollout_devices = 0"
        )
    if apart >= count:
        fix = f"try {count // 2}" if count > 1 else f"set {name}.rollout_devices = 0"
        raise UserError(f"{name}.rollout_devices is {apart}, must be below the {count} devices of the run: {fix}")
    used = (loss.mesh.tensor or 1) * (loss.mesh.data or 1)
    if apart % used:
        raise UserError(
            f"ServingMesh.tensor x ServingMesh.data ({used}) must divide {name}.rollout_devices ({apart}): try "
            f"{math.gcd(used, apart)}"
        )
    return count - apart
