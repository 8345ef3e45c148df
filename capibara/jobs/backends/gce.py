"""TPU VMs by queued resources of the Cloud TPU API, version 2.

The request is that of google.cloud.tpu_v2.TpuClient.create_queued_resource, as JSON.
Source: docs.cloud.google.com/tpu/docs/queued-resources, and the fields of the client.
"""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from typing import ClassVar

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.jobs.backends import startup
from capibara.jobs.backends.backend import Backend, Form, Rendering, tpu_only
from capibara.jobs.spec import Capacity, JobSpec
from capibara.planner.hardware.slices import Slice

_PROJECT = re.compile(r"[a-z][a-z0-9-]{4,28}[a-z0-9]")
_ZONE = re.compile(r"[a-z]+(-[a-z]+)?-[a-z]+\d+-[a-z]")
# Images of TPU VMs: docs.cloud.google.com/tpu/docs/runtimes.
_RUNTIMES = {
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
# AcceleratorConfig.Type, for shapes that accelerator types cannot name.
_TYPES = {"v4": "V4", "v5e": "V5LITE_POD", "v5p": "V5P", "v6e": "V6E"}
_LONGEST_METADATA = 256 << 10  # bytes of a value: docs.cloud.google.com/compute/docs/metadata


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gce(Backend):
    """A project and a zone with TPU VMs.

    Attributes:
      project: of Google Cloud.
      zone: with such TPUs.
      runtime_version: the VMs' image; None: the usual one of the chip.
      service_account: the job's; None: Compute Engine's default.
      network: None: the default one.
      subnetwork: None: the network's own.
      external_ips: whether the VMs have addresses in the internet; without, the network needs Cloud NAT for packages.
      valid_hours: so long the request waits for chips; None: without a limit.
    """

    name: ClassVar[str] = "gce"
    has_limit: ClassVar[bool] = False

    project: str | None = None
    zone: str | None = None
    runtime_version: str | None = None
    service_account: str | None = None
    network: str | None = None
    subnetwork: str | None = None
    external_ips: bool = True
    valid_hours: float | None = None

    def __post_init__(self) -> None:
        for name, value, pattern, example in (
            ("project", self.project, _PROJECT, "my-project"),
            ("zone", self.zone, _ZONE, "us-west4-a"),
        ):
            if value is not None and not pattern.fullmatch(value):
                raise UserError(f"--{name}={value} must be like {example}")
        if self.valid_hours is not None and not 0 < self.valid_hours <= 24 * 365:
            raise UserError(f"--valid_hours is {self.valid_hours:g}, must be above 0 and at most a year")

    def check(self, spec: JobSpec) -> None:
        super().check(spec)
        tpu_only(self, spec)
        for name in ("project", "zone"):
            if getattr(self, name) is None:
                raise UserError(f"--{name} is not set: launch gce needs the project and the zone of the TPU VMs")
        if spec.slice_.accelerator_type is None or spec.slice_.chip.name not in _RUNTIMES:
            raise self.refuse(spec, f"the Cloud TPU API has no {spec.slice_.chip.name}", fix="use launch gke")
        if spec.image is None and not spec.bundle.url.startswith("gs://"):
            raise UserError(
                "--storage must be in gs://, from which the start-up script copies the wheel; with --image it may be in s3://"
            )
        if spec.priority is not None:
            raise UserError(f"--priority={spec.priority} has no effect with launch gce: leave it out")

    def render(self, spec: JobSpec) -> Rendering:
        self.check(spec)
        parent = f"projects/{self.project}/locations/{self.zone}"
        script = startup.script(spec)
        if len(script.encode()) > _LONGEST_METADATA:
            raise UserError(
                f"the start-up script has {len(script.encode())} bytes, must have at most {_LONGEST_METADATA}: put bindings "
                "into a Gin file"
            )
        node_spec: dict[str, object] = {"parent": parent}
        if spec.slice_.count == 1:
            node_spec["nodeId"] = spec.name
        else:
            node_spec["multisliceParams"] = {"nodeCount": spec.slice_.count, "nodeIdPrefix": spec.name}
        node_spec["node"] = self._node(spec, script)
        resource: dict[str, object] = {"tpu": {"nodeSpec": [node_spec]}}
        if spec.capacity is Capacity.SPOT:
            resource["spot"] = {}
        if spec.reservation is not None:
            resource["guaranteed"] = {}
            resource["reservationName"] = self._reservation(spec.reservation)
        if self.valid_hours is not None:
            resource["queueingPolicy"] = {"validUntilDuration": f"{round(3600 * self.valid_hours)}s"}
        request = {"parent": parent, "queuedResourceId": spec.name, "queuedResource": resource}
        # The same request twice makes one queued resource.
        request["requestId"] = str(uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(request, sort_keys=True)))
        return Rendering(form=Form.JSON, documents=[request])

    def _node(self, spec: JobSpec, script: str) -> dict[str, object]:
        network = {"network": self.network, "subnetwork": self.subnetwork}
        node: dict[str, object] = {
            **_accelerator(spec.slice_),
            "runtimeVersion": self.runtime_version or _RUNTIMES[spec.slice_.chip.name],
            "networkConfig": {
                **{name: value for name, value in network.items() if value is not None},
                "enableExternalIps": self.external_ips,
            },
        }
        if self.service_account is not None:
            scope = ["https://www.googleapis.com/auth/cloud-platform"]
            node["serviceAccount"] = {"email": self.service_account, "scope": scope}
        return {**node, "labels": dict(spec.all_labels), "metadata": {"startup-script": script}}

    def _reservation(self, name: str) -> str:
        return name if "/" in name else f"projects/{self.project}/locations/{self.zone}/reservations/{name}"


def _accelerator(slice_: Slice) -> dict[str, object]:
    """By its type, which names the usual shape of a size, or by its topology."""
    if ":" not in slice_.name:
        return {"acceleratorType": slice_.accelerator_type}
    return {"acceleratorConfig": {"type": _TYPES[slice_.chip.name], "topology": slice_.gke_topology}}
