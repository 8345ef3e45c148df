"""The plan: how a run is spread over devices."""

from __future__ import annotations

import dataclasses

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from capibara.config import configurable
from capibara.core.fields import chosen, did_you_mean, unset
from capibara.core.types import AUTO, Auto, UserError
from capibara.sharding.axes import MESH_AXES, NODE_AXIS, nearest_divisor
from capibara.sharding.remat import REMAT_NAMES, Remat, RematPolicy
from capibara.sharding.rows import batch_axes, host_shards
from capibara.sharding.rules import Rules


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A pipeline: its stages of consecutive layers, its microbatches, and how often each passes the stages."""

    stages: int
    microbatches: int
    repeats: int = 1


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a run is laid out on its devices.

    Attributes:
      batch_size: rows of the global batch, all accumulation steps together.
      data, fsdp, expert, context, tensor, stage: sizes of the mesh axes; one of them may be -1 and takes the devices
        that are left. data: rows, with replicated parameters; fsdp: rows, with sharded parameters (ZeRO-3); expert:
        rows, and experts; context: the tokens of a row; tensor: heads and hidden units; stage: layers, as a pipeline.
      node: replicas that train apart, each on its part of every batch; Trainer.strategy brings them together.
      accumulation: micro-batches per step; gradients are averaged over all their real tokens.
      pipeline_microbatches: parts of a micro-batch that pass through the pipeline; None: two for each stage.
      pipeline_repeats: how often a row passes each stage (circular schedule); more repeats shorten the bubble.
      remat: what the backward pass recomputes.
      remat_names: what `save` and `offload` keep.
      rules: logical axes -> mesh axes.
      slice: the TPU slice of the plan ("v5e-64"); None: the devices of this run.

    Fields that are AUTO are not set: fsdp takes the devices that are left, the other axes and `accumulation` are 1, and
    `remat` is none; but with a slice and no mesh axis set, `train` uses the planner's choice of all of them.
    """

    batch_size: int
    data: int | Auto = unset(1)
    fsdp: int | Auto = unset(-1)
    expert: int | Auto = unset(1)
    context: int | Auto = unset(1)
    tensor: int | Auto = unset(1)
    stage: int | Auto = unset(1)
    node: int = 1
    accumulation: int | Auto = unset(1)
    pipeline_microbatches: int | None = None
    pipeline_repeats: int = 1
    remat: Remat | Auto = unset(Remat.NONE)
    remat_names: tuple[str, ...] = RematPolicy.names
    rules: Rules = Rules()
    slice: str | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulation", "pipeline_repeats", "node"):
            if getattr(self, name) is not AUTO and getattr(self, name) < 1:
                raise UserError(f"Plan.{name} is {getattr(self, name)}, must be at least 1")
        if self.pipeline_microbatches is not None and self.pipeline_microbatches < 1:
            raise UserError(
                f"Plan.pipeline_microbatches is {self.pipeline_microbatches}, must be at least 1, or None: two a stage"
            )
        for name, size in self.axes.items():
            if size < 1 and size != -1:
                raise UserError(f"Plan.{name} is {size}, must be at least 1, or -1 for the devices left")
        if sum(size == -1 for size in self.axes.values()) > 1:
            raise UserError("Plan has more than one mesh axis of -1: only one can take the devices that are left")
        if NODE_AXIS in self.rules.batch:
            raise UserError("Rules.batch names the mesh axis 'node', which has the rows first by itself: leave it out")
        for name in self.remat_names:
            if name not in REMAT_NAMES:
                raise UserError(f"Plan.remat_names has {name!r}, which no layer has{did_you_mean(name, REMAT_NAMES)}")

    @property
    def has_mesh(self) -> bool:
        """Whether a mesh axis is set."""
        return any(getattr(self, name) is not AUTO for name in MESH_AXES)

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh axes without `node`; one may be -1, such as fsdp if it is not set."""
        return {name: chosen(self, name) for name in MESH_AXES}

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step."""
        return int(chosen(self, "accumulation"))

    @property
    def remat_policy(self) -> RematPolicy:
        return RematPolicy(chosen(self, "remat"), self.remat_names)

    def pipeline(self, mesh: Mesh | AbstractMesh) -> Pipeline | None:
        """The pipeline over the mesh's stage axis; None: the axis has size 1.

        Raises:
          UserError: a repeat needs at least as many microbatches as stages.
        """
        stages = mesh.shape["stage"]
        if stages == 1:
            return None
        microbatches = self.pipeline_microbatches or 2 * stages
        if microbatches < stages:
            raise UserError(
                f"Plan.pipeline_microbatches ({microbatches}) must be at least the stages ({stages}): try {2 * stages}"
            )
        return Pipeline(stages=stages, microbatches=microbatches, repeats=self.pipeline_repeats)

    def mesh_shape(self, device_count: int, of: str | None = None) -> dict[str, int]:
        """Sizes of the mesh axes on `device_count` devices, -1 resolved.

        Args:
          device_count: devices of the whole mesh.
          of: name of the slice, for errors; None: the devices of this run.

        Raises:
          UserError: the sizes do not multiply to the number of devices.
        """
        nodes = {NODE_AXIS: self.node} if self.node > 1 else {}
        sizes = nodes | self.axes
        fixed = int(np.prod([s for s in sizes.values() if s != -1]))
        shown = " x ".join(f"{name}={size}" for name, size in sizes.items())
        if -1 in sizes.values():
            if device_count % fixed:
                raise UserError(
                    f"Plan ({shown}): the fixed axes multiply to {fixed}, which must divide the {device_count} devices: "
                    f"try {nearest_divisor(fixed, device_count)}"
                )
            return {name: device_count // fixed if size == -1 else size for name, size in sizes.items()}
        if fixed != device_count:
            there, fix = (
                (f"{of} has {device_count}", "")
                if of
                else (f"{device_count} are here", f", or run with --emulate={fixed}")
            )
            raise UserError(f"Plan ({shown}) needs {fixed} devices, {there}: set one axis to -1{fix}")
        return sizes

    def check_batch(self, mesh: Mesh) -> None:
        """Raises UserError, with the nearest batch that works, unless the batch divides over the mesh."""
        rows = batch_axes(mesh.shape, self.rules)
        shards = int(np.prod([mesh.shape[a] for a in rows]))
        pipeline = self.pipeline(mesh)
        host_shards(mesh, self.rules)
        unit = shards * self.micro_batches * (pipeline.microbatches if pipeline else 1)
        if self.batch_size % unit:
            nearest = max(unit, round(self.batch_size / unit) * unit)
            parts = [f"{a}={mesh.shape[a]}" for a in rows if mesh.shape[a] > 1] or ["1 device"]
            parts += [f"{self.micro_batches} accumulation steps"] if self.micro_batches > 1 else []
            parts += [f"{pipeline.microbatches} pipeline microbatches"] if pipeline else []
            raise UserError(
                f"Plan.batch_size ({self.batch_size}) must be a multiple of {unit} ({' x '.join(parts)}): try {nearest}"
            )
