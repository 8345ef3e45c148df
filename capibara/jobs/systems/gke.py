"""Kubernetes: JobSets, and Jobs with their Services, in one namespace of a cluster, by its own client for Python.

JobSet counts a slice as ready when as many of its pods run or have succeeded as it has hosts; slices of an earlier restart
count as nothing. Kueue suspends what it does not admit. No condition says that nodes were taken: that is a failure.
Sources: github.com/kubernetes-sigs/jobset, pkg/controllers/jobset_controller.go; kubernetes.io/docs/reference/using-api.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from capibara.core import extras
from capibara.core.types import UserError
from capibara.jobs.backends.backend import Backend, Document
from capibara.jobs.backends.gke import Gke
from capibara.jobs.spec import JobSpec
from capibara.jobs.systems.system import CALL_S, Busy, Denied, Exists, Phase, Resource, System

if TYPE_CHECKING:
    from kubernetes.client import ApiClient, ApiException, Configuration

_JOB_SETS, _JOBS, _SERVICES, _PODS, _LOGS = "jobsets.jobset.x-k8s.io", "jobs.batch", "services", "pods", "pods/log"
_RESOURCES = {"JobSet": _JOB_SETS, "Job": _JOBS, "Service": _SERVICES}
PAGE = 250  # items of a list in one answer
_REASONS_S = 5.0  # for the call that says why a resource waits
_LOG_LINES = 1000
_LONGEST = 500  # characters of a message of the API
_PASSING = (408, 425, 429)  # with these the same request may succeed later, as with 500 and more
_GONE = {"list": (404,), "get": (400, 404), "delete": (404, 409)}  # verb -> answers when the object is not there
_LOGIN = "run gcloud container clusters get-credentials CLUSTER --location=LOCATION"
_CONTROLLER = "https://github.com/kubernetes-sigs/jobset/releases/download/v0.12.0/manifests.yaml"
_OWN = ("capibara-job", "capibara-launch", "capibara-attempt")  # the labels that a resource's pods have too
_RESTART, _SLICE = "jobset.sigs.k8s.io/restart-attempt", "jobset.sigs.k8s.io/job-index"
_INDEX = "batch.kubernetes.io/job-completion-index"


def connect(backend: Backend) -> System:
    """The cluster of the kubeconfig's current context; in a pod that has no kubeconfig, the pod's own cluster.

    Raises:
      UserError: the client is not installed, or this machine has no credentials.
    """
    assert isinstance(backend, Gke)
    client = extras.require("kubernetes.client", extra="launch", why="launch gke")
    configuration = client.Configuration()
    _load_credentials(configuration)
    configuration.retries = False  # the manager calls again; None would be three retries
    return Cluster(backend, _Api(client.ApiClient(configuration), backend.namespace))


def _load_credentials(configuration: Configuration) -> None:
    from kubernetes import config

    paths = os.environ.get("KUBECONFIG") or "~/.kube/config"
    has_file = any(os.path.exists(os.path.expanduser(path)) for path in paths.split(os.pathsep) if path)
    try:
        if not has_file and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=configuration)
            return
        if has_file:
            config.load_kube_config(paths, client_configuration=configuration, persist_config=False)
            return
    except Exception as error:  # of YAML and of the file's structure; their messages may quote a token of the file
        where = f"KUBECONFIG={paths}" if has_file else "the service account of this pod"
        raise UserError(
            f"{where} has no valid cluster, user and current context ({type(error).__name__}): {_LOGIN}"
        ) from None
    raise UserError(f"KUBECONFIG={paths} does not exist, and launch gke needs credentials for the cluster: {_LOGIN}")


def _of_job_sets(function: Callable[..., object]) -> Callable[..., object]:
    return functools.partial(function, group="jobset.x-k8s.io", version="v1alpha2", plural="jobsets")


class _Gone(Exception):
    """The object is not there; the argument is the API's message."""


class _Api:
    """The calls of the API in one namespace, each made once.

    Args:
      client: of the API.
      namespace: where they are made.
    """

    def __init__(self, client: ApiClient, namespace: str):
        from kubernetes import client as kubernetes

        self.namespace, self._client = namespace, client
        custom, core = kubernetes.CustomObjectsApi(client), kubernetes.CoreV1Api(client)
        batch = kubernetes.BatchV1Api(client)
        self._functions: dict[tuple[str, str], Callable[..., object]] = {
            ("create", _JOB_SETS): _of_job_sets(custom.create_namespaced_custom_object),
            ("list", _JOB_SETS): _of_job_sets(custom.list_namespaced_custom_object),
            ("delete", _JOB_SETS): _of_job_sets(custom.delete_namespaced_custom_object),
            ("create", _JOBS): batch.create_namespaced_job,
            ("get", _JOBS): batch.read_namespaced_job,
            ("list", _JOBS): batch.list_namespaced_job,
            ("delete", _JOBS): batch.delete_namespaced_job,
            ("create", _SERVICES): core.create_namespaced_service,
            ("get", _SERVICES): core.read_namespaced_service,
            ("delete", _SERVICES): core.delete_namespaced_service,
            ("list", _PODS): core.list_namespaced_pod,
            ("get", _LOGS): core.read_namespaced_pod_log,
        }
        self._has_job_sets = False  # whether a call for them has ever succeeded

    def close(self) -> None:
        self._client.close()

    def items(self, resource: str, **arguments: object) -> list[Document]:
        """All objects of a kind, whatever the number of answers they take."""
        objects: list[Document] = []
        token = ""
        while True:
            more = {"_continue": token} if token else {}
            try:
                page = self.answer("list", resource, limit=PAGE, **more, **arguments)
            except _Gone as error:
                if resource == _JOB_SETS and not self._has_job_sets:
                    return []  # the cluster has no controller for them
                raise Busy(f"{self._where} has no {resource} now: {error}") from None
            items = _items(page)
            if items is None:
                raise self._unreadable("list", resource)
            objects += items
            token = _text(_at(page, "metadata", "continue"))
            if not token:
                return objects

    def answer(self, verb: str, resource: str, **arguments: object) -> Document:
        """The object that answers a call."""
        data = self.call(verb, resource, **arguments)
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or not isinstance(answer.get("kind"), str):
            raise self._unreadable(verb, resource)
        self._has_job_sets = self._has_job_sets or resource == _JOB_SETS
        return answer

    def call(self, verb: str, resource: str, **arguments: object) -> bytes:
        """What answers a call, undecoded: the client's models refuse what a newer cluster may send.

        Args:
          verb: as rights name it.
          resource: the same.
          arguments: of the client's function.
        """
        from kubernetes.client import ApiException
        from kubernetes.config import ConfigException
        from urllib3 import HTTPResponse
        from urllib3.exceptions import HTTPError

        limits = (CALL_S, CALL_S)  # to connect, and to read; version 33 of the client ignores a float
        options = {"namespace": self.namespace, "_preload_content": False, "_request_timeout": limits, **arguments}
        try:
            response = self._functions[verb, resource](**options)
            assert isinstance(response, HTTPResponse)
            return response.data
        except ApiException as error:
            name = _text(_at(arguments.get("body"), "metadata", "name"))
            raise self._error(error, verb, resource, name) from None
        except ConfigException:
            raise Denied(f"the credentials for {self._where} cannot be renewed: {_LOGIN}") from None
        except (HTTPError, OSError) as error:
            raise Busy(f"{self._where} does not answer: {type(error).__name__}: {_line(str(error))}") from None

    @property
    def _where(self) -> str:
        return f"the Kubernetes API at {self._client.configuration.host}"

    def _unreadable(self, verb: str, resource: str) -> Busy:
        return Busy(f"{self._where} answers what cannot be read to {verb} {resource}")

    def _error(self, error: ApiException, verb: str, resource: str, name: str) -> Exception:
        """What the methods raise for an answer that is an error."""
        status, (reason, kind, message) = error.status or 0, _status(error)
        place = f"namespace {self.namespace}"
        if status == 401 or (status == 403 and "system:anonymous" in message):
            return Denied(
                f"{self._where} does not accept the credentials ({message}): run gcloud auth login, then {_LOGIN}"
            )
        if status == 403 and "denied the request" not in message:  # what an admission webhook says is of the job
            if "exceeded quota" in message:
                return Denied(f"{place}: {message}: delete jobs that are not needed, or have the ResourceQuota raised")
            return Denied(f"{place}: no right to {verb} {resource} ({message}): {_role(self.namespace)}")
        if status in _GONE.get(verb, ()):
            return _Gone(message)
        if verb == "create" and status == 409 and reason == "AlreadyExists":
            return Exists(name)
        if verb == "create" and status == 404 and kind == "namespaces":
            return UserError(f"--namespace={self.namespace} does not exist: kubectl create namespace {self.namespace}")
        if verb == "create" and status == 404 and resource == _JOB_SETS:
            fix = f"kubectl apply --server-side -f {_CONTROLLER}"
            return UserError(f"the cluster has no JobSet controller, which TPU jobs need: {fix}")
        if verb == "create" and 400 <= status < 500 and status not in (409, *_PASSING):
            return UserError(f"{self._where} refuses {name} in {place}: {message}")
        return Busy(f"{self._where} answers {status} to {verb} {resource}: {message}", _retry_after(error))


class Cluster(System):
    """A namespace of a cluster.

    Args:
      backend: makes the manifests.
      api: of the namespace.
    """

    def __init__(self, backend: Gke, api: _Api):
        self._backend, self._api = backend, api

    def submit(self, spec: JobSpec) -> None:
        *services, main = self._backend.render(spec).documents
        created = [self._create_service(spec, service) for service in services]
        try:
            self._create(main)
        except UserError:
            if any(created):  # nobody would delete it
                with contextlib.suppress(Busy, UserError):
                    self._delete_service(spec.name, spec.name)
            raise

    def _create(self, document: Document) -> None:
        kind = _text(document["kind"])
        # Without strict validation an older JobSet would drop a rule of the failure policy in silence.
        self._api.answer("create", _RESOURCES[kind], body=dict(document), field_validation="Strict")

    def _create_service(self, spec: JobSpec, document: Document) -> bool:
        """Makes a Job's Service; one that an interrupted call or an earlier attempt has left will do.

        Returns:
          Whether it was made.
        """
        try:
            self._create(document)
            return True
        except Exists:
            try:
                service = self._api.answer("get", _SERVICES, name=spec.name)
            except _Gone:
                service = {}
            if not service or _at(service, "metadata", "deletionTimestamp"):
                raise Busy(f"Service {spec.name} in namespace {self._api.namespace} is being deleted") from None
            if _labels(service).get("capibara-job") != spec.name:
                raise UserError(
                    f"--name={spec.name}: namespace {self._api.namespace} has a Service of that name which is not the job's: "
                    "choose another --name"
                ) from None
            return False

    def resources(self) -> list[Resource]:
        selector = {"label_selector": "capibara-job"}
        resources = [_resource("JobSet", item) for item in self._api.items(_JOB_SETS, **selector)]
        for item in self._api.items(_JOBS, **selector):
            if "jobset.sigs.k8s.io/jobset-name" not in _labels(item):
                resources.append(_resource("Job", item))
        reasons = self._reasons() if any(_is_unclear(resource) for resource in resources) else {}
        return [
            dataclasses.replace(resource, reason=reasons.get(_key(resource.labels), ""))
            if _is_unclear(resource)
            else resource
            for resource in resources
        ]

    def _reasons(self) -> dict[tuple[str, ...], str]:
        """Why pods do not start, by their job and attempt; nothing if that cannot be listed."""
        pending = {"label_selector": "capibara-job", "field_selector": "status.phase=Pending", "limit": PAGE}
        with contextlib.suppress(Busy, UserError, _Gone):
            pods = _items(self._api.answer("list", _PODS, _request_timeout=(_REASONS_S, _REASONS_S), **pending))
            newest = sorted((*_obstacle(pod), _key(_labels(pod))) for pod in pods or [])
            return {key: reason for _, reason, key in newest if reason}
        return {}

    def delete(self, resource: Resource) -> None:
        kind, name, uid = resource.id.split("/")
        with contextlib.suppress(_Gone):
            if kind == "Job":
                # The name may have a newer attempt by now, which needs the Service.
                if _at(self._api.answer("get", _JOBS, name=name), "metadata", "uid") != uid:
                    return
                self._delete_service(name, resource.job)
            self._delete(_RESOURCES[kind], name, uid, "Foreground")

    def _delete_service(self, name: str, job: str) -> None:
        with contextlib.suppress(_Gone):
            service = self._api.answer("get", _SERVICES, name=name)
            if _labels(service).get("capibara-job") == job:
                self._delete(_SERVICES, name, _text(_at(service, "metadata", "uid")), "Background")

    def _delete(self, resource: str, name: str, uid: str, policy: str) -> None:
        options = {"propagationPolicy": policy, "preconditions": {"uid": uid}}
        self._api.answer("delete", resource, name=name, body={"apiVersion": "v1", "kind": "DeleteOptions", **options})

    def log(self, spec: JobSpec, resource: Resource) -> Iterator[str]:
        labels = {"capibara-job": spec.name, **resource.labels}
        selector = ",".join(f"{label}={labels[label]}" for label in _OWN if label in labels)
        pods = self._api.items(_PODS, label_selector=selector)
        if not pods:
            return iter([f"job {spec.name} has no pods yet"])
        name = _text(_at(max(pods, key=_precedence), "metadata", "name"))
        try:
            data = self._api.call("get", _LOGS, name=name, container="capibara", tail_lines=_LOG_LINES)
        except _Gone as error:
            return iter([f"pod {name} has no log yet: {error}"])
        text = data.decode("utf-8", "replace").removesuffix("\n")
        return iter(text.split("\n") if text else [])

    def close(self) -> None:
        self._api.close()


def _role(namespace: str) -> str:
    verbs, resources = "create,get,list,delete", ",".join((_JOB_SETS, _JOBS, _SERVICES, _PODS, _LOGS))
    return (
        "have a Role with it bound to you, as of kubectl create role capibara "
        f"--namespace={namespace} --verb={verbs} --resource={resources}"
    )


def _status(error: ApiException) -> tuple[str, str, str]:
    """The reason of an error, the kind of the object that it is about, and a line of text; each may be empty."""
    body = error.body.decode("utf-8", "replace") if isinstance(error.body, bytes) else error.body or ""
    try:
        status = json.loads(body)
    except (ValueError, RecursionError):
        status = None
    message = _text(_at(status, "message")) or _text(error.reason)
    return _text(_at(status, "reason")), _text(_at(status, "details", "kind")), _line(message)


def _retry_after(error: ApiException) -> float | None:
    text = str((error.headers or {}).get("Retry-After", ""))
    return float(text) if text.isascii() and text.isdigit() else None


def _resource(kind: str, item: Document) -> Resource:
    phase, reason = _phase(kind, item)
    name, uid, created = (_text(_at(item, "metadata", key)) for key in ("name", "uid", "creationTimestamp"))
    return Resource(
        id=f"{kind}/{name}/{uid}",
        labels=_labels(item),
        phase=phase,
        reason=reason,
        created_s=_seconds(created),
        is_denied=phase is Phase.FAILED and "exceeded quota" in reason,
    )


def _phase(kind: str, item: Document) -> tuple[Phase, str]:
    conditions = _conditions(item)
    # What has ended stays so while it is being deleted: its outcome must not be lost.
    for name, phase in (("Completed", Phase.SUCCEEDED), ("Complete", Phase.SUCCEEDED), ("Failed", Phase.FAILED)):
        if name in conditions:
            return phase, conditions[name]
    if _at(item, "metadata", "deletionTimestamp"):
        return Phase.DELETING, ""
    if "FailureTarget" in conditions:  # a Job that fails once its pods are gone
        return Phase.DELETING, conditions["FailureTarget"]
    if "Suspended" in conditions or _at(item, "spec", "suspend") is True:
        return Phase.WAITING, conditions.get("Suspended", "")
    if _job_set_runs(item) if kind == "JobSet" else _job_runs(item):
        return Phase.RUNNING, ""
    return Phase.WAITING, conditions.get("RestartingJobSet", "")


def _conditions(item: Document) -> dict[str, str]:
    """The conditions that are true, each with its reason and message."""
    messages = {}
    for condition in _maps(_at(item, "status", "conditions")):
        if condition.get("status") == "True":
            reason = ": ".join(
                part for part in (_text(condition.get("reason")), _text(condition.get("message"))) if part
            )
            messages[_text(condition.get("type"))] = _line(reason)
    return messages


def _job_set_runs(item: Document) -> bool:
    wanted = sum(_count(replicas.get("replicas", 1)) for replicas in _maps(_at(item, "spec", "replicatedJobs")))
    slices = _maps(_at(item, "status", "replicatedJobsStatus"))
    return 0 < wanted <= sum(_count(status.get("ready")) + _count(status.get("succeeded")) for status in slices)


def _job_runs(item: Document) -> bool:
    wanted, status = _count(_at(item, "spec", "parallelism")) or 1, _at(item, "status")
    return wanted <= _count(_at(status, "ready")) + _count(_at(status, "succeeded"))


def _is_unclear(resource: Resource) -> bool:
    return resource.phase is Phase.WAITING and not resource.reason


def _key(labels: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(labels.get(name, "") for name in _OWN)


def _obstacle(pod: Document) -> tuple[str, str]:
    """Since when a pod does not start, and why: no node has room for it, or its image cannot be pulled; may be empty."""
    for condition in _maps(_at(pod, "status", "conditions")):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return _text(condition.get("lastTransitionTime")), _line(_text(condition.get("message")))
    for container in _maps(_at(pod, "status", "containerStatuses")):
        waiting = _at(container, "state", "waiting")
        if _text(_at(waiting, "message")):  # there is none while all is well
            reason = f"{_text(_at(waiting, 'reason'))}: {_text(_at(waiting, 'message'))}"
            return _text(_at(pod, "metadata", "creationTimestamp")), _line(reason)
    return "", ""


def _precedence(pod: Document) -> tuple[int, bool, str, str]:
    """Highest for process 0 of the newest restart, and of these for the newest."""
    labels, (name, created) = _labels(pod), (_text(_at(pod, "metadata", key)) for key in ("name", "creationTimestamp"))
    restart, slice_ = labels.get(_RESTART, "0"), labels.get(_SLICE, "0")
    index = labels.get(_INDEX) or _text(_at(pod, "metadata", "annotations", _INDEX)) or "0"
    return int(restart) if restart.isdigit() else 0, slice_ == index == "0", created, name


def _at(value: object, *path: str) -> object:
    """What lies at a path of a JSON value; None: nothing."""
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _items(page: Document) -> list[Document] | None:
    """The items of a list; None: it is none."""
    items = page.get("items") or []
    if not _text(page["kind"]).endswith("List") or not isinstance(items, list):
        return None
    return items if all(isinstance(item, Mapping) for item in items) else None


def _maps(value: object) -> list[Document]:
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []


def _labels(item: Document) -> dict[str, str]:
    labels = _at(item, "metadata", "labels")
    return {str(key): str(value) for key, value in labels.items()} if isinstance(labels, Mapping) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _line(text: str) -> str:
    return " ".join(text.split())[:_LONGEST]


def _seconds(text: str) -> float:
    """Since 1970; 0.0: it is no time."""
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0
