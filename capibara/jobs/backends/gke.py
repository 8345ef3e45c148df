"""Kubernetes: a JobSet of TPU slices on Google Kubernetes Engine, and a plain Job on GPUs and CPUs of any cluster.

JobSet v1alpha2: jobset.sigs.k8s.io. Labels of nodes and the resource google.com/tpu: Google's documentation of TPUs in GKE,
docs.cloud.google.com/kubernetes-engine/docs/how-to/tpus.
"""

from __future__ import annotations

import dataclasses
import re
from typing import ClassVar

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.jobs.backends.backend import Backend, Document, Form, Rendering, command, literal
from capibara.jobs.secrets import Source
from capibara.jobs.spec import Capacity, JobSpec
from capibara.multihost import exits

_DNS = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_COORDINATOR_PORT = 8476  # of jax.distributed, where flags name process 0
_TPU_PORTS = (8471, 8080)  # of libtpu between hosts, and between slices
_SPOT_GRACE_S = 25  # docs.cloud.google.com/kubernetes-engine/docs/concepts/spot-vms
_POOL = "cloud.google.com/gke-nodepool"
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gke(Backend):
    """A Kubernetes cluster.

    Attributes:
      namespace: of the job.
      queue: Kueue's local queue, which admits the job when there is capacity; None: it is scheduled at once.
      service_account: Kubernetes's, whose rights the job has in buckets (Workload Identity); None: those of the nodes.
      arch: of the machines without accelerators: "amd64" or "arm64" (Axion); None: any.
      memory_gib: of a machine without accelerators that the job asks for; None: 32.
      cpus: the same; None: 8.
    """

    name: ClassVar[str] = "gke"
    needs_image: ClassVar[bool] = True
    secret_sources: ClassVar[frozenset[Source]] = frozenset({Source.SECRET_MANAGER, Source.KUBERNETES})

    namespace: str = "default"
    queue: str | None = None
    service_account: str | None = None
    arch: str | None = None
    memory_gib: int | None = None
    cpus: int | None = None

    def __post_init__(self) -> None:
        for name in ("namespace", "queue", "service_account"):
            value = getattr(self, name)
            if value is not None and not _DNS.fullmatch(value):
                raise UserError(f"--{name}={value} must have lower-case letters, digits, - and . only")
        if self.arch not in (None, "amd64", "arm64"):
            raise UserError(f"--arch={self.arch} must be amd64 or arm64")
        for name, count in (("memory_gib", self.memory_gib), ("cpus", self.cpus)):
            if count is not None and count < 1:
                raise UserError(f"--{name} is {count}, must be at least 1")

    def check(self, spec: JobSpec) -> None:
        super().check(spec)
        for name in ("arch", "memory_gib", "cpus"):
            if spec.slice_.machine is not None and getattr(self, name) is not None:
                raise UserError(
                    f"--{name} has no effect on {spec.slice_.name}, whose machine type is fixed: leave it out"
                )
        if spec.slice_.count > 1 and not spec.slice_.chip.is_tpu and spec.slice_.machine is None:
            raise self.refuse(spec, "emulated devices are of one machine", fix=f"try cpu-{spec.slice_.chips_per_slice}")

    def render(self, spec: JobSpec) -> Rendering:
        self.check(spec)
        documents = [self._job_set(spec)] if spec.slice_.chip.is_tpu else self._job(spec)
        return Rendering(form=Form.YAML, documents=documents)

    def _metadata(self, spec: JobSpec) -> dict[str, object]:
        labels = {**spec.all_labels, "xpk.google.com/workload": spec.name}
        if self.queue is not None:
            labels["kueue.x-k8s.io/queue-name"] = self.queue  # `xpk workload list` shows what Kueue has admitted
        return {"name": spec.name, "namespace": self.namespace, "labels": labels}

    def _job_set(self, spec: JobSpec) -> Document:
        slices = {
            "name": "slice",
            "replicas": spec.slice_.count,
            "template": {"spec": self._job_spec(spec, spec.slice_.hosts // spec.slice_.count)},
        }
        # Without the rule a run that the user must mend, or whose budget is spent, would be restarted as often as one on
        # a node that was taken.
        reasons = ["PodFailurePolicy", "DeadlineExceeded"]
        rule = {"name": "invalid_input_or_budget", "action": "FailJobSet", "onJobFailureReasons": reasons}
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {
                **self._metadata(spec),
                # Each slice has a node pool of its own: no two slices share one.
                "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": _POOL},
            },
            "spec": {
                "failurePolicy": {"maxRestarts": spec.restarts, "rules": [rule]},
                "replicatedJobs": [slices],
            },
        }

    def _job(self, spec: JobSpec) -> list[Document]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": self._metadata(spec)}
        job["spec"] = self._job_spec(spec, spec.slice_.hosts, backoff=spec.restarts * spec.slice_.hosts)
        if spec.slice_.hosts == 1:
            return [job]
        # By this service's name the pods find process 0: NAME-0.NAME.
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self._metadata(spec),
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {"batch.kubernetes.io/job-name": spec.name},
                "ports": [{"name": "jax", "port": _COORDINATOR_PORT, "protocol": "TCP"}],
            },
        }
        return [service, job]

    def _job_spec(self, spec: JobSpec, hosts: int, backoff: int = 0) -> dict[str, object]:
        invalid = {"containerName": "capibara", "operator": "In", "values": [exits.EXIT_USER_ERROR]}
        return {
            "parallelism": hosts,
            "completions": hosts,
            "completionMode": "Indexed",
            "backoffLimit": backoff,
            **({"activeDeadlineSeconds": round(spec.left_s)} if spec.left_s is not None else {}),
            "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": invalid}]},
            "template": {"metadata": {"labels": dict(spec.all_labels)}, "spec": self._pod(spec)},
        }

    def _pod(self, spec: JobSpec) -> dict[str, object]:
        is_tpu, slice_ = spec.slice_.chip.is_tpu, spec.slice_
        is_apart = not is_tpu and slice_.hosts > 1
        is_on_host = is_tpu and self.service_account is None  # on the host's network pods have the node's rights
        return {
            "restartPolicy": "Never",
            **({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if is_on_host else {}),
            **({"subdomain": spec.name} if is_apart else {}),
            # The launcher has to end after the run; a node on Spot is gone after half a minute.
            "terminationGracePeriodSeconds": _SPOT_GRACE_S if spec.capacity is Capacity.SPOT else spec.grace_s + 30,
            **({"serviceAccountName": self.service_account} if self.service_account else {}),
            **({"priorityClassName": spec.priority} if spec.priority else {}),
            **({"nodeSelector": nodes} if (nodes := self._nodes(spec)) else {}),
            **({"tolerations": tolerations} if (tolerations := _tolerations(spec)) else {}),
            "containers": [self._container(spec, is_apart=is_apart)],
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],  # of processes that read data
        }

    def _nodes(self, spec: JobSpec) -> dict[str, str]:
        slice_ = spec.slice_
        nodes = {"kubernetes.io/arch": self.arch} if self.arch is not None and slice_.machine is None else {}
        if slice_.chip.is_tpu and slice_.gke_accelerator is not None:
            nodes["cloud.google.com/gke-tpu-accelerator"] = slice_.gke_accelerator
            nodes["cloud.google.com/gke-tpu-topology"] = slice_.gke_topology
        elif slice_.gke_accelerator is not None:
            nodes["cloud.google.com/gke-accelerator"] = slice_.gke_accelerator
        if spec.capacity is Capacity.SPOT:
            nodes["cloud.google.com/gke-spot"] = "true"
        if spec.reservation is not None:
            nodes["cloud.google.com/reservation-name"] = spec.reservation
        return nodes

    def _container(self, spec: JobSpec, *, is_apart: bool) -> dict[str, object]:
        slice_ = spec.slice_
        variables: list[dict[str, object]] = [
            {"name": name, "value": literal(value)} for name, value in spec.environment.items()
        ]
        for secret in spec.secrets:
            if secret.source is Source.KUBERNETES:
                name, _, key = secret.name.partition("/")
                reference = {"secretKeyRef": {"name": name, "key": key}}
                variables.append({"name": secret.variable, "valueFrom": reference})
        if is_apart:
            address = f"{spec.name}-0.{spec.name}.{self.namespace}.svc.cluster.local:{_COORDINATOR_PORT}"
            variables += [
                {"name": "JAX_COORDINATOR_ADDRESS", "value": address},
                {"name": "JAX_NUM_PROCESSES", "value": str(slice_.hosts)},
                {"name": "JAX_PROCESS_ID", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
            ]
        if slice_.machine is None:
            resources: dict[str, object] = {
                "requests": {"cpu": str(self.cpus or 8), "memory": f"{self.memory_gib or 32}Gi"}
            }
        else:
            kind = "google.com/tpu" if slice_.chip.is_tpu else "nvidia.com/gpu"
            resources = {"limits": {kind: str(slice_.chips_per_host)}}
        ports = _TPU_PORTS if slice_.chip.is_tpu else (_COORDINATOR_PORT,) if is_apart else ()
        return {
            "name": "capibara",
            "image": spec.image,
            "command": [literal(word) for word in command(spec)],
            **({"env": variables} if variables else {}),
            **({"ports": [{"containerPort": port, "protocol": "TCP"} for port in ports]} if ports else {}),
            "resources": resources,
            "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        }


def _tolerations(spec: JobSpec) -> list[Document]:
    """Nodes with accelerators, and those on Spot, may keep off pods that do not ask for them."""
    kind = (
        "google.com/tpu" if spec.slice_.chip.is_tpu else "nvidia.com/gpu" if spec.slice_.machine is not None else None
    )
    result = [{"key": kind, "operator": "Exists", "effect": "NoSchedule"}] if kind else []
    if spec.capacity is Capacity.SPOT:
        spot = "cloud.google.com/gke-spot"
        result.append({"key": spot, "operator": "Equal", "value": "true", "effect": "NoSchedule"})
    return list(result)
