"""TPU VMs: queued resources of the Cloud TPU API, version 2, by its own client over gRPC.

A spot resource whose chips were taken becomes SUSPENDING, then SUSPENDED, and gets no chips again; its nodes say PREEMPTED
earlier. What has failed or is suspended uses up its quota until it is deleted.
Source: docs.cloud.google.com/tpu/docs/queued-resources, and the fields of the client.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from capibara.core import extras
from capibara.core.types import UserError
from capibara.jobs.backends.backend import Backend
from capibara.jobs.backends.gce import Gce
from capibara.jobs.spec import JobSpec
from capibara.jobs.systems.system import CALL_S, Busy, Denied, Exists, Phase, Resource, System

if TYPE_CHECKING:
    from google.api_core.exceptions import GoogleAPICallError
    from google.auth.exceptions import GoogleAuthError
    from google.cloud.tpu_v2 import Node, QueuedResource, TpuClient
    from google.protobuf.message import Message

_ENDPOINT = "CAPIBARA_TPU_ENDPOINT"  # of a server on loopback, for tests
_LOG = "/var/log/capibara.log"  # as in backends.startup
_LONGEST = 300  # characters of a message of the API
_LOGIN = "run gcloud auth application-default login"
_CHECK = "check --project, --zone, --slice, --runtime_version and --reservation"

# States of a queued resource; all others are WAITING.
_PHASES = {
    "ACTIVE": Phase.RUNNING,
    "SUSPENDED": Phase.PREEMPTED,
    "FAILED": Phase.FAILED,
    "SUSPENDING": Phase.DELETING,
    "DELETING": Phase.DELETING,
}
_TAKEN = ("PREEMPTED", "TERMINATED")  # states of a node that has no chips
_WELL = ("READY", "HEALTHY", "STATE_UNSPECIFIED", "HEALTH_UNSPECIFIED")

# Messages speak of a quota of chips, of one of calls in a time, of a right, or of a login that has expired. "Resource has
# been exhausted (e.g. check quota)." is what the API says of any limit.
_QUOTA = re.compile(r"(?<!check )\bquota|reservation for request queue", re.IGNORECASE)
_RATE = re.compile(r"per ?(second|minute|hour|day)|rate.?limit", re.IGNORECASE)
_RIGHT = re.compile(r"\bpermission|not authorized|access denied", re.IGNORECASE)
_NAMED_RIGHT = re.compile(r"permission '?([a-z]+\.\w+\.\w+)", re.IGNORECASE)
_EXPIRED = re.compile(r"metadata from plugin failed.*(reauthentication|invalid_grant)", re.IGNORECASE | re.DOTALL)
_ROLES = {"tpu": "roles/tpu.admin", "iam": "roles/iam.serviceAccountUser"}
_DENIED_CODES = (7, 16)  # PERMISSION_DENIED, UNAUTHENTICATED


def connect(backend: Backend) -> System:
    """The TPU VMs of a project and a zone.

    Raises:
      UserError: no project or zone is set, the client is not installed, or this machine has no credentials.
    """
    assert isinstance(backend, Gce)
    if backend.project is None or backend.zone is None:
        missing = "project" if backend.project is None else "zone"
        raise UserError(f"--{missing} is not set: launch gce needs the project and the zone of the TPU VMs")
    extras.require("google.cloud.tpu_v2", extra="launch", why="launch gce")
    return TpuVms(backend, _Place(project=backend.project, zone=backend.zone), _client())


class TpuVms(System):
    """The queued resources of a project and a zone.

    Args:
      backend: makes the requests.
      place: the project and the zone.
      client: of the API.
    """

    knows_result: ClassVar[bool] = False
    ended_costs: ClassVar[bool] = True  # chips while it is active, quota until it is deleted

    def __init__(self, backend: Gce, place: _Place, client: TpuClient):
        self._backend, self._place, self._client = backend, place, client

    def submit(self, spec: JobSpec) -> None:
        from google.api_core import exceptions
        from google.cloud import tpu_v2
        from google.protobuf import json_format

        request = tpu_v2.CreateQueuedResourceRequest.pb()()
        json_format.ParseDict(self._backend.render(spec).documents[0], request)
        with self._errors("create", spec.name):
            created = self._client.create_queued_resource(
                tpu_v2.CreateQueuedResourceRequest.wrap(request), retry=None, timeout=CALL_S
            )
            if created.operation.HasField("error"):
                raise exceptions.from_grpc_status(created.operation.error.code, created.operation.error.message)

    def resources(self) -> list[Resource]:
        """As in `System`.

        Raises:
          UserError: there is no such project or zone.
        """
        from google.cloud import tpu_v2

        with self._errors("list"):
            pager = self._client.list_queued_resources(parent=self._place.path, retry=None, timeout=CALL_S)
            listed = [tpu_v2.ListQueuedResourcesResponse.pb(page) for page in _pages(pager.pages)]
        ours = [
            queued_resource
            for page in listed
            for queued_resource in page.queued_resources
            if _labels(queued_resource).get("capibara-job")
        ]
        nodes = self._nodes() if any(_word(item.state, "state") == "ACTIVE" for item in ours) else {}
        return [_resource(item, nodes.get(_last(item.name), [])) for item in ours]

    def _nodes(self) -> dict[str, list[Node]]:
        """The nodes of each queued resource, by the last part of its name; none if they must not be listed."""
        from google.cloud import tpu_v2

        result: dict[str, list[Node]] = {}
        with contextlib.suppress(Denied), self._errors("list"):
            pager = self._client.list_nodes(parent=self._place.path, retry=None, timeout=CALL_S)
            for page in _pages(pager.pages):
                for node in tpu_v2.ListNodesResponse.pb(page).nodes:
                    # The whole name may have the project's number where the other has its ID.
                    result.setdefault(_last(node.queued_resource), []).append(node)
        return result

    def delete(self, resource: Resource) -> None:
        from google.api_core import exceptions
        from google.cloud import tpu_v2

        now: Resource | None = None
        with self._errors("get"), contextlib.suppress(exceptions.NotFound):
            result = self._client.get_queued_resource(name=resource.id, retry=None, timeout=CALL_S)
            now = _resource(tpu_v2.QueuedResource.pb(result), [])
        # What is being suspended must not be deleted by force, and the name may be a newer attempt's by now.
        if now is None or now.phase is Phase.DELETING or not _is_same(now, resource):
            return
        # Each call has an ID of its own, since what is stuck needs the request once more.
        request = tpu_v2.DeleteQueuedResourceRequest(name=resource.id, force=True, request_id=str(uuid.uuid4()))
        with self._errors("delete"), contextlib.suppress(exceptions.NotFound):
            self._client.delete_queued_resource(request, retry=None, timeout=CALL_S)

    def log(self, spec: JobSpec, resource: Resource) -> Iterator[str]:
        del resource
        count = spec.slice_.count
        for node in [spec.name] if count == 1 else [f"{spec.name}-{index}" for index in range(count)]:
            yield (
                f"the log of {node}: gcloud compute tpus tpu-vm ssh {node} --zone={self._place.zone} "
                f"--project={self._place.project} --worker=0 --command='tail -n 100 {_LOG}'"
            )

    def close(self) -> None:
        self._client.transport.close()

    @contextlib.contextmanager
    def _errors(self, action: str, name: str = "") -> Iterator[None]:
        """Raises the errors of `System` for those of the client."""
        import grpc
        from google.api_core.exceptions import GoogleAPICallError, GoogleAPIError
        from google.auth.exceptions import GoogleAuthError
        from google.protobuf.message import Error

        try:
            yield
        except GoogleAPICallError as error:
            raise _of_answer(error, self._place, action, name) from None
        except GoogleAuthError as error:
            raise _of_credentials(error) from None
        except (GoogleAPIError, grpc.RpcError, Error, TypeError, ValueError) as error:  # what cannot be decoded
            raise Busy(f"the Cloud TPU API answers what cannot be read: {type(error).__name__}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    project: str
    zone: str

    def __str__(self) -> str:
        return f"project {self.project}, zone {self.zone}"

    @property
    def path(self) -> str:
        return f"projects/{self.project}/locations/{self.zone}"


def _client() -> TpuClient:
    import grpc
    from google.auth.exceptions import GoogleAuthError
    from google.cloud import tpu_v2
    from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport

    endpoint = os.environ.get(_ENDPOINT)
    if not endpoint:
        try:
            return tpu_v2.TpuClient(transport="grpc")
        except GoogleAuthError as error:
            raise _of_credentials(error) from None
    host, _, port = endpoint.rpartition(":")
    try:
        is_local = ipaddress.ip_address(host.strip("[]")).is_loopback and 0 < int(port) < 1 << 16
    except ValueError:
        is_local = False
    if not is_local:
        raise UserError(f"{_ENDPOINT}={endpoint} must be an address on loopback, such as 127.0.0.1:8080: unset it")
    options = [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)]
    # A channel of one's own needs no credentials.
    return tpu_v2.TpuClient(transport=TpuGrpcTransport(channel=grpc.insecure_channel(endpoint, options=options)))


def _of_credentials(error: GoogleAuthError) -> Exception:
    from google.auth.exceptions import TransportError

    if isinstance(error, TransportError) or error.retryable:
        return Busy(f"Google Cloud does not answer with credentials: {_line(str(error))}")
    return UserError(f"this machine has no valid credentials of Google Cloud: {_LOGIN}: {_line(str(error))}")


def _of_answer(error: GoogleAPICallError, place: _Place, action: str, name: str) -> Exception:
    from google.api_core import exceptions as api

    whole = "; ".join([error.message or type(error).__name__, *_violations(error)])
    text, is_rate = _line(whole), error.reason == "RATE_LIMIT_EXCEEDED" or bool(_RATE.search(whole))
    if isinstance(error, api.AlreadyExists) and action == "create":
        return Exists(name)
    if isinstance(error, api.ClientError) and action == "create" and _QUOTA.search(whole) and not is_rate:
        return Denied(
            f"the quota of {place} has no room for {name}: {text}: get more of it at "
            f"https://console.cloud.google.com/iam-admin/quotas?project={place.project}&service=tpu.googleapis.com"
        )
    if isinstance(error, api.Unauthorized) or _EXPIRED.search(whole):
        return Denied(
            f"the Cloud TPU API does not accept the login for {place} (it needs {_right(error, action)}): {_LOGIN}"
        )
    if isinstance(error, api.Forbidden) and not is_rate:
        return _of_right(error, place, action, text)
    if isinstance(error, (api.BadRequest, api.NotFound)) and action in ("create", "list"):
        refused = f"the job {name}" if name else "to list jobs"
        return UserError(f"the Cloud TPU API refuses {refused} in {place}: {text}: {_CHECK}")
    return Busy(f"the Cloud TPU API answers {type(error).__name__} for {place}: {text}", _after_s(error))


def _of_right(error: GoogleAPICallError, place: _Place, action: str, text: str) -> Denied:
    if error.reason == "SERVICE_DISABLED":
        fix = f"gcloud services enable tpu.googleapis.com --project={place.project}"
        return Denied(f"the Cloud TPU API is not enabled in {place}: run {fix}")
    right = _right(error, action)
    role = _ROLES.get(right.partition(".")[0], f"a role that has {right}")
    return Denied(f"this login lacks {right} in {place}: have an administrator grant it {role}: {text}")


def _right(error: GoogleAPICallError, action: str) -> str:
    """The right that is missing: the one that the API names, or the one for nodes."""
    named = _NAMED_RIGHT.search(error.message or "")
    metadata = error.metadata or {}
    return str(metadata.get("permission") or (named and named[1]) or f"tpu.nodes.{action}")


def _violations(error: GoogleAPICallError) -> list[str]:
    """What it says of quotas beyond its message."""
    from google.rpc.error_details_pb2 import QuotaFailure

    failures = [detail for detail in error.details if isinstance(detail, QuotaFailure)]
    return [violation.description for failure in failures for violation in failure.violations if violation.description]


def _after_s(error: GoogleAPICallError) -> float | None:
    """The seconds that it says to wait."""
    from google.rpc.error_details_pb2 import RetryInfo

    delays = [detail.retry_delay for detail in error.details if isinstance(detail, RetryInfo)]
    return max(0.0, delays[0].seconds + delays[0].nanos / 1e9) if delays else None


class _Page(Protocol):
    """What the pages of all lists have."""

    @property
    def unreachable(self) -> Sequence[str]: ...

    @property
    def next_page_token(self) -> str: ...


_AnyPage = TypeVar("_AnyPage", bound=_Page)


def _pages(pages: Iterable[_AnyPage]) -> Iterator[_AnyPage]:
    """The pages of a list.

    Raises:
      Busy: it is not whole, so that what it lacks may exist.
    """
    tokens = set()
    for page in pages:
        if page.unreachable:
            raise Busy(f"the Cloud TPU API cannot reach {_line(', '.join(page.unreachable))}")
        if page.next_page_token in tokens:
            raise Busy("the Cloud TPU API answers the same page of a list twice")
        tokens.add(page.next_page_token)
        yield page


def _resource(resource: QueuedResource, nodes: Sequence[Node]) -> Resource:
    state, is_denied = _word(resource.state, "state"), False
    phase, reason = _PHASES.get(state, Phase.WAITING), state
    if state == "ACTIVE":
        states = [_word(node, "state") for node in nodes]
        phase = Phase.PREEMPTED if any(word in _TAKEN for word in states) else phase
        reason = _line("; ".join(trouble for node in nodes for trouble in _troubles(node)))
    elif state == "FAILED":
        error = resource.state.failed_data.error
        reason = _line(error.message) or state
        is_quota = bool(_QUOTA.search(error.message)) and not _RATE.search(error.message)
        is_denied = is_quota or error.code in _DENIED_CODES or bool(_RIGHT.search(error.message))
    return Resource(
        id=resource.name,
        labels=_labels(resource),
        phase=phase,
        reason=reason,
        created_s=resource.create_time.seconds + resource.create_time.nanos / 1e9,
        is_denied=is_denied,
    )


def _troubles(node: Node) -> Iterator[str]:
    for word in (_word(node, "state"), _word(node, "health")):
        if word not in _WELL:
            why = f": {node.health_description}" if word.startswith("UNHEALTHY") and node.health_description else ""
            yield f"{_last(node.name)} is {word}{why}"


def _labels(resource: QueuedResource) -> dict[str, str]:
    specs = resource.tpu.node_spec
    return dict(specs[0].node.labels) if specs else {}


def _is_same(first: Resource, other: Resource) -> bool:
    of_one, of_other = first.attempt, other.attempt
    return (first.job, of_one.launch, of_one.number) == (other.job, of_other.launch, of_other.number)


def _word(message: Message, field: str) -> str:
    """The name of an enum's value; versions of the API later than the client have others."""
    number = getattr(message, field)
    known = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number
    return known[number].name if number in known else f"{field} {number}"


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _line(text: str) -> str:
    return " ".join(text.split())[:_LONGEST].rstrip(". ")
