"""Custom jobs of Vertex AI, by Google's own client over HTTP, which passes proxies.

CreateCustomJob has no request id, so one whose answer was lost must not simply be repeated: `submit` looks for the labels of
its attempt first. What takes effect after that look is a second job of one attempt, which `resources` shows.

Sources: the fields and comments of google.cloud.aiplatform_v1 (ListCustomJobsRequest.filter, JobState, CustomJob.error); a
job that is preempted fails with STOCKOUT (docs.cloud.google.com/vertex-ai/docs/training/use-spot-vms); "The following quota
metrics exceed quota limits: ..." with 429 is a quota of chips (github.com/GoogleCloudPlatform/vertex-ai-samples/issues/3479).
"""

from __future__ import annotations

import contextlib
import dataclasses
import email.utils
import json
import os
import re
import time
import urllib.parse
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from capibara.core import extras
from capibara.core.types import UserError
from capibara.jobs.backends.backend import Backend
from capibara.jobs.backends.vertex import Vertex
from capibara.jobs.spec import JobSpec
from capibara.jobs.systems.system import CALL_S, Busy, Denied, Exists, Phase, Resource, System

if TYPE_CHECKING:
    import requests
    from google.api_core.exceptions import GoogleAPICallError
    from google.auth.exceptions import GoogleAuthError
    from google.cloud.aiplatform_v1.services.job_service import JobServiceClient
    from google.cloud.aiplatform_v1.types import CustomJob

_SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
_CONSOLE = "https://console.cloud.google.com"
_ENDPOINT = "CAPIBARA_VERTEX_ENDPOINT"  # of a fake server, for tests
_LOOPBACK = re.compile(r"http://(127(?:\.\d{1,3}){3}:\d{1,5})/?")
_PAGE = 100  # jobs
_LONGEST = 300  # characters of the service's words
# HTTP statuses that may pass, with 500 and above: a timeout, a conflict (ABORTED), a cancelled call, too many calls.
_PASSING = frozenset({408, 409, 425, 429, 499})
_PERMISSION_DENIED = 7  # google.rpc.Code, of a job's error
_CANCELLED = 1
SPOT = 4  # Scheduling.Strategy

# Of JobState; one that is not here, of a later version, counts as waiting: the hosts' reports say when they run.
_PHASES = {
    "JOB_STATE_QUEUED": Phase.WAITING,
    "JOB_STATE_PENDING": Phase.WAITING,
    "JOB_STATE_PAUSED": Phase.WAITING,
    "JOB_STATE_RUNNING": Phase.RUNNING,
    "JOB_STATE_UPDATING": Phase.RUNNING,
    "JOB_STATE_SUCCEEDED": Phase.SUCCEEDED,
    "JOB_STATE_FAILED": Phase.FAILED,
    "JOB_STATE_EXPIRED": Phase.FAILED,
    "JOB_STATE_PARTIALLY_SUCCEEDED": Phase.FAILED,
    "JOB_STATE_CANCELLED": Phase.CANCELLED,
    "JOB_STATE_CANCELLING": Phase.DELETING,
}
_QUOTA = re.compile(r"quota.*exceed|exceed.*quota", re.IGNORECASE)
_RATE = re.compile(
    r"per[ _-]?(second|minute|hour|day)|\b1/(s|min|h|d)\b|\brate[ _-]?limit|\brate (is|was|exceed)", re.IGNORECASE
)
_METRIC = re.compile(r"\b(?!type\.)[a-z]+\.googleapis\.com/[\w/-]+")
_STOCKOUT = re.compile(
    r"stockout|resources are insufficient|insufficient (resources|capacity)|pool_exhausted", re.IGNORECASE
)
_PREEMPTED = re.compile(r"preempted|preemption", re.IGNORECASE)


def connect(backend: Backend) -> System:
    """Vertex AI in the project and the region of a back end.

    Raises:
      UserError: the client is not installed, this machine has no credentials, or the back end names no place.
    """
    assert isinstance(backend, Vertex)
    if backend.project is None or backend.region is None:
        missing = "project" if backend.project is None else "region"
        raise UserError(f"--{missing} is not set: launch vertex needs a project and a region")
    extras.require("google.cloud.aiplatform_v1", extra="launch", why="launch vertex")
    return CustomJobs(backend, _client(backend.region))


def _client(region: str) -> JobServiceClient:
    # Each module of aiplatform_v1 loads the whole package, which takes 2 s.
    import google.auth.credentials
    import google.auth.exceptions
    from google.cloud.aiplatform_v1.services.job_service import JobServiceClient
    from google.cloud.aiplatform_v1.services.job_service.transports import JobServiceRestTransport

    url = os.environ.get(_ENDPOINT)
    if url:
        fake = _LOOPBACK.fullmatch(url)
        if fake is None:
            raise UserError(f"{_ENDPOINT}={url} must be on this machine, like http://127.0.0.1:8080: unset it")
        anyone = google.auth.credentials.AnonymousCredentials()
        return JobServiceClient(transport=JobServiceRestTransport(host=fake[1], credentials=anyone, url_scheme="http"))
    try:
        credentials, _ = google.auth.default(scopes=_SCOPES)
    except google.auth.exceptions.GoogleAuthError as error:
        raise UserError(
            f"launch vertex has no credentials of Google Cloud: {_line(str(error))}: gcloud auth application-default login"
        ) from None
    endpoint = f"{region}-aiplatform.googleapis.com"
    return JobServiceClient(credentials=credentials, transport="rest", client_options={"api_endpoint": endpoint})


class CustomJobs(System):
    """The custom jobs of a project in a region.

    Args:
      backend: which names both.
      client: of the service; it may have any credentials.
    """

    has_unique_names: ClassVar[bool] = False

    def __init__(self, backend: Vertex, client: JobServiceClient):
        assert backend.project is not None and backend.region is not None
        self._backend, self._client = backend, client
        self._place = _Place(project=backend.project, region=backend.region)
        session = getattr(client.transport, "_session", None)  # the client has no way in for hooks
        if session is not None:
            session.hooks["response"].append(_check_answer)

    def submit(self, spec: JobSpec) -> None:
        from google.cloud.aiplatform_v1.types import CreateCustomJobRequest
        from google.protobuf import json_format

        request = CreateCustomJobRequest()
        json_format.ParseDict(self._backend.render(spec).documents[0], CreateCustomJobRequest.pb(request))
        names = ("capibara-job", "capibara-launch", "capibara-attempt")
        wanted = {name: spec.all_labels[name] for name in names}
        with self._place.errors("list", "jobs"):
            result = self._jobs(" AND ".join(f"labels.{name}={value}" for name, value in wanted.items()))
        for job in result:
            if wanted.items() <= dict(job.labels).items():
                raise Exists(job.name)
        with self._place.errors("create", f"job {spec.name}"):
            self._client.create_custom_job(request=request, retry=None, timeout=CALL_S)

    def resources(self) -> list[Resource]:
        with self._place.errors("list", "jobs"):
            result = self._jobs("labels.capibara-job:*")
        return [_resource(job) for job in result if "capibara-job" in job.labels]

    def delete(self, resource: Resource) -> None:
        from google.api_core import exceptions

        if resource.phase.has_ended or resource.phase is Phase.DELETING:
            return
        # NotFound: it is gone; BadRequest, of which FailedPrecondition is one: it has ended meanwhile.
        is_deleted = contextlib.suppress(exceptions.NotFound, exceptions.BadRequest)
        with self._place.errors("cancel", f"job {resource.job}"), is_deleted:
            self._client.cancel_custom_job(name=resource.id, retry=None, timeout=CALL_S)

    def log(self, spec: JobSpec, resource: Resource) -> Iterator[str]:
        del spec
        project, region = self._place.project, self._place.region
        number = resource.id.rpartition("/")[2]
        query = f'resource.type="ml_job" AND resource.labels.job_id="{number}"'
        yield f"gcloud ai custom-jobs stream-logs {number} --region={region} --project={project}"
        yield f"{_CONSOLE}/agent-platform/locations/{region}/training/{number}?project={project}"
        yield f"{_CONSOLE}/logs/query;query={urllib.parse.quote(query, safe='')}?project={project}"

    def close(self) -> None:
        self._client.transport.close()

    def _jobs(self, wanted: str) -> list[CustomJob]:
        request = {"parent": self._place.parent, "filter": wanted, "page_size": _PAGE}
        jobs: list[CustomJob] = []
        tokens: set[str] = set()
        for page in self._client.list_custom_jobs(request=request, retry=None, timeout=CALL_S).pages:
            jobs += page.custom_jobs
            if page.next_page_token and page.next_page_token in tokens:
                raise Busy(f"Vertex AI in {self._place.region} answers the same page of a list twice")
            tokens.add(page.next_page_token)
        return jobs


def _resource(job: CustomJob) -> Resource:
    raw = type(job).pb(job)  # in which a state of a later version is a number
    state = raw.DESCRIPTOR.fields_by_name["state"].enum_type.values_by_number.get(raw.state)
    name = state.name if state else ""
    phase, message = _PHASES.get(name, Phase.WAITING), _line(raw.error.message)
    is_denied = False
    if name == "JOB_STATE_FAILED":
        is_denied = _is_quota(message) or raw.error.code == _PERMISSION_DENIED
        is_spot = raw.job_spec.scheduling.strategy == SPOT
        if not is_denied and (_PREEMPTED.search(message) or is_spot and _STOCKOUT.search(message)):
            phase = Phase.PREEMPTED
    elif phase in (Phase.FAILED, Phase.CANCELLED):
        word = name.removeprefix("JOB_STATE_").lower().replace("_", " ")
        # Whoever cancels a job knows why; a timeout of the service says so.
        message = f"{word}: {message}" if message and raw.error.code != _CANCELLED else word
    return Resource(
        id=raw.name,
        labels=dict(raw.labels),
        phase=phase,
        reason=message,
        created_s=raw.create_time.seconds + raw.create_time.nanos / 1e9,
        is_denied=is_denied,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """Where jobs run, and what the client's errors mean there."""

    project: str
    region: str

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.region}"

    @contextlib.contextmanager
    def errors(self, verb: str, action: str) -> Iterator[None]:
        """Within it, the client's errors become Busy, Denied and UserError.

        Args:
          verb: of the right: aiplatform.customJobs.VERB.
          action: of the verb, for the message.
        """
        import urllib3
        from google.api_core.exceptions import GoogleAPICallError
        from google.auth.exceptions import GoogleAuthError
        from google.protobuf.json_format import Error as JsonError

        try:
            yield
        except GoogleAPICallError as error:
            raise self._refusal(error, verb, action) from None
        except GoogleAuthError as error:
            raise self._no_token(error, verb) from None
        except (OSError, urllib3.exceptions.HTTPError) as error:  # requests' errors are OSErrors
            raise Busy(f"Vertex AI in {self.region} does not answer: {type(error).__name__}") from None
        except (JsonError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
            raise Busy(f"Vertex AI in {self.region} answers with something that cannot be read") from None

    def _refusal(self, error: GoogleAPICallError, verb: str, action: str) -> Exception:
        message = re.sub(r"^[A-Z]+ \S+: ", "", error.message)  # the client puts the call before it
        words, every = _line(message), f"{' '.join(message.split())} {json.dumps(error.details, default=str)}"
        code = int(error.code or 0)
        if code == 429 and _is_quota(every):
            metrics = ", ".join(dict.fromkeys(_METRIC.findall(every)))
            return Denied(
                f"the quota of project {self.project} in {self.region} does not allow job resources: {metrics or words}: "
                f"ask for more at {_CONSOLE}/iam-admin/quotas?project={self.project}, or take a smaller --slice"
            )
        if code in _PASSING or code >= 500 or error.reason == "RATE_LIMIT_EXCEEDED":
            return Busy(f"Vertex AI in {self.region} answers {code}: {words}", _after_s(error))
        if code == 401:
            return self._unknown(verb)
        if code == 403:
            mend = f"gcloud projects add-iam-policy-binding {self.project} --member=user:EMAIL --role=roles/aiplatform.user"
            if error.reason == "SERVICE_DISABLED":
                mend = f"gcloud services enable aiplatform.googleapis.com --project={self.project}"
            return Denied(f"{self._right(verb)} is denied: {words}: {mend}")
        mend = f": are --project={self.project} and --region={self.region} right?" if code == 404 else ""
        return UserError(f"Vertex AI refuses to {verb} {action}: {words}{mend}")

    def _no_token(self, error: GoogleAuthError, verb: str) -> Exception:
        from google.auth import exceptions

        passing = (exceptions.TransportError, exceptions.TimeoutError)
        if isinstance(error, passing) or isinstance(error.__cause__, passing) or error.retryable:
            return Busy(f"the service of Google's tokens does not answer: {type(error).__name__}")
        return self._unknown(verb)

    def _unknown(self, verb: str) -> Denied:
        return Denied(
            f"{self._right(verb)} is denied, since Google does not accept the credentials of this machine: gcloud auth "
            "application-default login, as an account that has roles/aiplatform.user"
        )

    def _right(self, verb: str) -> str:
        return f"aiplatform.customJobs.{verb} in project {self.project}, region {self.region},"


def _check_answer(answer: requests.Response, *_: object, **__: object) -> None:
    """A hook of requests: raises ValueError for an answer that the service does not send.

    The client reads a list, a text and an object of other fields as a message without fields, and follows redirects to
    wherever. An empty list of jobs that is none would have each of them submitted once more.
    """
    if answer.status_code >= 400:
        return
    body = json.loads(answer.content)
    method, is_cancel = answer.request.method, (answer.request.url or "").partition("?")[0].endswith(":cancel")
    known = {"customJobs", "nextPageToken"} if method == "GET" else {"name"}
    may_be_empty = method == "GET" or is_cancel
    fits = isinstance(body, dict) and (known & body.keys() or may_be_empty and not body)
    if answer.status_code >= 300 or not fits:
        raise ValueError("no answer of this service")


def _line(text: str) -> str:
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())[:_LONGEST]


def _is_quota(text: str) -> bool:
    """Whether a text speaks of a quota of chips or machines, not of calls."""
    return bool(_QUOTA.search(text)) and not _RATE.search(text)


def _after_s(error: GoogleAPICallError) -> float | None:
    """The seconds of RetryInfo or of the header Retry-After, which has seconds or a date."""
    for detail in error.details:
        delay = re.fullmatch(r"(\d{1,6}(\.\d+)?)s", str(detail.get("retryDelay", "")))
        if delay:
            return float(delay[1])
    text = str(getattr(error.response, "headers", {}).get("Retry-After", ""))
    if re.fullmatch(r"\d{1,6}", text):
        return float(text)
    with contextlib.suppress(ValueError, OverflowError):
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    return None
