"""A point of the search space: what the search varies, the cost model predicts and a Plan sets in Gin."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from capibara.optim import StateDtype
from capibara.planner.model.workload import Workload
from capibara.sharding import MESH_AXES, Plan, Remat, RematPolicy

_FEW = 6  # most names of saved results to list

Kind = tuple[RematPolicy, tuple[str, ...]]  # the remat policy, and the mesh axes that shard layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A mesh, a batch and a remat policy.

    Attributes:
      sizes: of the mesh axes, in the order of sharding.MESH_AXES.
      rows: rows of one micro-batch on one device of the batch axes.
      accumulation: micro-batches per step.
      pipeline_microbatches: parts of a micro-batch in a pipeline; 1 without stages.
      remat: what the backward pass recomputes.
      state_dtype: dtype of the optimizer's state.
    """

    sizes: tuple[int, ...]
    rows: int
    accumulation: int = 1
    pipeline_microbatches: int = 1
    remat: RematPolicy = RematPolicy()
    state_dtype: StateDtype = StateDtype.FLOAT32

    @functools.cached_property  # each prediction uses it about twenty times
    def mesh(self) -> dict[str, int]:
        """Mesh axis -> size."""
        return dict(zip(MESH_AXES, self.sizes))

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)

    def batch_shards(self, work: Workload) -> int:
        """Number of devices that have rows of their own."""
        return math.prod(self.mesh[axis] for axis in work.rules.batch)

    def batch_size(self, work: Workload) -> int:
        """Rows per step."""
        return self.rows * self.accumulation * self.batch_shards(work)

    def tokens(self, work: Workload) -> int:
        """Counted tokens per step."""
        return self.batch_size(work) * work.length

    @property
    def ticks(self) -> int:
        """How often a stage runs its layers for one micro-batch, bubbles included; 1 without stages."""
        return self.pipeline_microbatches + self.mesh["stage"] - 1 if self.mesh["stage"] > 1 else 1

    @property
    def kind(self) -> Kind:
        """Plans of one kind save and recompute the same things, and share the memory model's error."""
        return self.remat, tuple(axis for axis in ("stage", "expert", "context", "tensor") if self.mesh[axis] > 1)

    def plan(self, work: Workload, slice_name: str | None = None, base: Plan | None = None) -> Plan:
        """The sharding.Plan of this choice; fields that a choice does not have are those of `base`."""
        return dataclasses.replace(
            base or Plan(batch_size=1),
            batch_size=self.batch_size(work),
            accumulation=self.accumulation,
            pipeline_microbatches=self.pipeline_microbatches if self.mesh["stage"] > 1 else None,
            pipeline_repeats=1,
            remat=self.remat.kind,
            remat_names=self.remat.names,
            rules=work.rules,
            slice=slice_name,
            **self.mesh,
        )

    def fields(self, work: Workload, slice_name: str) -> dict[str, Any]:
        """The fields of sharding.Plan that this choice sets; a run's plan keeps the others."""
        values = {"slice": slice_name, "batch_size": self.batch_size(work), **self.mesh}
        values |= {"accumulation": self.accumulation, "remat": self.remat.kind}
        if self.remat.kind in (Remat.SAVE, Remat.OFFLOAD):
            values["remat_names"] = self.remat.names
        if self.mesh["stage"] > 1:
            values |= {"pipeline_microbatches": self.pipeline_microbatches, "pipeline_repeats": 1}
        return values

    def bindings(self, work: Workload, slice_name: str) -> list[str]:
        """The plan as Gin statements."""
        values = self.fields(work, slice_name) | {"remat": str(self.remat.kind)}
        lines = [f"Plan.{name} = {value!r}" for name, value in values.items()]
        if self.state_dtype is StateDtype.FLOAT32 and work.optimizer != "Optimizer":
            return lines  # another optimizer may not have the field
        return [*lines, f"{work.optimizer}.state_dtype = {str(self.state_dtype)!r}"]

    def describe(self) -> str:
        """One line: "fsdp=64, 12 rows, remat full"."""
        mesh = " x ".join(f"{axis}={size}" for axis, size in self.mesh.items() if size > 1) or "one device"
        parts = [mesh, f"{self.rows} rows" + (f" x {self.accumulation}" if self.accumulation > 1 else "")]
        names = "all products" if len(self.remat.names) > _FEW else " ".join(self.remat.names)
        retained = f" {names}" if self.remat.kind in (Remat.SAVE, Remat.OFFLOAD) else ""
        parts.append(f"remat {self.remat.kind}{retained}")
        if self.state_dtype is not StateDtype.FLOAT32:
            parts.append(f"{self.state_dtype} optimizer state")
        return ", ".join(parts)


def of_plan(plan: Plan, work: Workload, devices: int, state_dtype: StateDtype = StateDtype.FLOAT32) -> Choice:
    """The choice that corresponds to a plan on `devices` devices.

    Raises:
      UserError: the mesh does not fit the devices.
    """
    mesh: Mapping[str, int] = plan.mesh_shape(devices)
    shards = math.prod(mesh[axis] for axis in work.rules.batch)
    stages = mesh["stage"]
    return Choice(
        sizes=tuple(mesh[axis] for axis in MESH_AXES),
        rows=max(1, plan.batch_size // (shards * plan.micro_batches)),
        accumulation=plan.micro_batches,
        pipeline_microbatches=(plan.pipeline_microbatches or 2 * stages) if stages > 1 else 1,
        remat=plan.remat_policy,
        state_dtype=state_dtype,
    )
