"""Vertex AI: a custom job of one worker pool.

The request is that of google.cloud.aiplatform_v1.JobServiceClient.create_custom_job, as JSON. Source:
docs.cloud.google.com/vertex-ai/docs/training/configure-compute, and the fields of the client.
"""

from __future__ import annotations

import dataclasses
import re
from typing import ClassVar

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.jobs.backends.backend import Backend, Form, Rendering, command, literal
from capibara.jobs.spec import Capacity, JobSpec

_PROJECT = re.compile(r"[a-z][a-z0-9-]{4,28}[a-z0-9]")
_REGION = re.compile(r"[a-z]+(-[a-z]+)?-[a-z]+\d+")
_GPUS = {"h100": "NVIDIA_H100_80GB"}  # MachineSpec.acceleratorType
_MOST_VARIABLES = 100  # of a container: EnvVar
_RESERVATION = "compute.googleapis.com/reservation-name"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Vertex(Backend):
    """A project and a region of Vertex AI.

    Attributes:
      project: of Google Cloud.
      region: with such chips.
      service_account: the job's; None: Vertex AI's own.
      network: for a VPC peered with Vertex AI; None: none.
      max_days: the job ends after so many days.
    """

    name: ClassVar[str] = "vertex"
    needs_image: ClassVar[bool] = True

    project: str | None = None
    region: str | None = None
    service_account: str | None = None
    network: str | None = None
    max_days: float = 7.0

    def __post_init__(self) -> None:
        for name, value, pattern, example in (
            ("project", self.project, _PROJECT, "my-project"),
            ("region", self.region, _REGION, "us-west1"),
        ):
            if value is not None and not pattern.fullmatch(value):
                raise UserError(f"--{name}={value} must be like {example}")
        if not 0 < self.max_days <= 365:
            raise UserError(f"--max_days is {self.max_days:g}, must be above 0 and at most 365")

    def check(self, spec: JobSpec) -> None:
        super().check(spec)
        for name in ("project", "region"):
            if getattr(self, name) is None:
                raise UserError(f"--{name} is not set: launch vertex needs a project and a region")
        slice_ = spec.slice_
        if slice_.machine is not None and slice_.vertex_machine_type is None:
            raise self.refuse(spec, f"Vertex AI has no {slice_.chip.name}", fix="use launch gce or gke")
        if slice_.machine is None:
            raise self.refuse(spec, "launch vertex runs accelerators", fix="use launch gke for CPUs")
        if slice_.count > 1:
            raise self.refuse(spec, "a custom job has one slice or machine", fix="use launch gke for several")
        if spec.capacity is Capacity.SPOT and slice_.hosts > 1:
            raise self.refuse(
                spec,
                "Vertex AI has no Spot slices of several hosts",
                fix="use launch gce or gke, or --capacity=on_demand",
            )
        if spec.priority is not None:
            raise UserError(f"--priority={spec.priority} has no effect with launch vertex: leave it out")
        if len(spec.environment) > _MOST_VARIABLES:
            raise UserError(f"there are {len(spec.environment)} variables in --env, must be at most {_MOST_VARIABLES}")

    def render(self, spec: JobSpec) -> Rendering:
        self.check(spec)
        seconds = min(86_400 * self.max_days, spec.left_s or float("inf"))
        strategy = "SPOT" if spec.capacity is Capacity.SPOT else "STANDARD"
        job_spec: dict[str, object] = {
            "workerPoolSpecs": [self._pool(spec)],
            "scheduling": {
                "timeout": f"{round(seconds)}s",
                "strategy": strategy,
                **({"restartJobOnWorkerRestart": True} if spec.restarts > 0 else {"disableRetries": True}),
            },
        }
        if self.service_account is not None:
            job_spec["serviceAccount"] = self.service_account
        if self.network is not None:
            job_spec["network"] = self.network
        job = {"displayName": spec.name, "jobSpec": job_spec, "labels": dict(spec.all_labels)}
        parent = f"projects/{self.project}/locations/{self.region}"
        return Rendering(form=Form.JSON, documents=[{"parent": parent, "customJob": job}])

    def _pool(self, spec: JobSpec) -> dict[str, object]:
        slice_ = spec.slice_
        machine: dict[str, object] = {"machineType": slice_.vertex_machine_type}
        if slice_.chip.is_tpu:
            machine["tpuTopology"] = slice_.vertex_tpu_topology
        else:
            machine["acceleratorType"] = _GPUS[slice_.chip.name]
            machine["acceleratorCount"] = slice_.chips
        if spec.reservation is not None:
            machine["reservationAffinity"] = {
                "reservationAffinityType": "SPECIFIC_RESERVATION",
                "key": _RESERVATION,
                "values": [spec.reservation],
            }
        container: dict[str, object] = {"imageUri": spec.image, "command": [literal(word) for word in command(spec)]}
        if spec.environment:
            container["env"] = [{"name": name, "value": literal(value)} for name, value in spec.environment.items()]
        # One replica, for slices of several hosts, too: the topology says how many there are. (64 bits are text in JSON.)
        return {"machineSpec": machine, "replicaCount": "1", "containerSpec": container}
