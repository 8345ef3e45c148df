"""The tracker of MLflow: `Monitoring.trackers = (@MlflowTracker(),)`."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from capibara.config import configurable
from capibara.core import extras
from capibara.core.types import UserError
from capibara.monitoring.metrics_file.redaction import redact
from capibara.monitoring.trackers.tracker import ADDRESS, Moment, Refused, TrackedRun, Tracker, check_address

_MOST_METRICS, _MOST_PARAMS = 1000, 100  # of one request
_LONGEST_LINE = 300
_LONGEST_VALUE = 500  # characters of a parameter that every server takes
_REFUSALS = (400, 413)  # of HTTP: to send the same again would not help; the client itself makes 500 of other ones
_MOST_REFUSED = 3  # of one metric: further ones are tried all at once
_MOST_UNTAKEN = 3  # requests in a row of which nothing is taken: then the run is gone
_UID = "capibara.uid"
_ENDS = {"interrupted": "KILLED", "crashed": "FAILED"}
_T = TypeVar("_T")


@dataclasses.dataclass
class _Refusals:
    """What the server has refused of a request.

    Attributes:
      counts: metrics, how often so far.
      new: metrics with the error.
      held: metrics that were refused too often to be tried one by one.
    """

    counts: collections.Counter[str]
    new: list[tuple[str, Refused]] = dataclasses.field(default_factory=list)
    held: list[Any] = dataclasses.field(default_factory=list)


@configurable
@dataclasses.dataclass(kw_only=True)
class MlflowTracker(Tracker):
    """Shows a run in MLflow. User name and password are in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.

    Metrics have the time at which they were logged: one that is sent twice is stored once.

    Attributes:
      uri: of the server, or of a local store (sqlite:///mlflow.db); None: MLFLOW_TRACKING_URI, or MLflow's default.
      experiment: its name; it is made if it does not exist.
      name: of the run; None: that of the run folder.
    """

    uri: str | None = dataclasses.field(default=None, metadata=ADDRESS)
    experiment: str = "capibara"
    name: str | None = None

    def __post_init__(self) -> None:
        check_address("MlflowTracker.uri", self.uri, "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")
        if not self.experiment.strip():
            raise UserError("MlflowTracker.experiment is empty: name one, e.g. 'capibara'")
        self._client: Any  # set by start, as is the next
        self._say: Callable[[str], None]
        self._id = ""
        self._metrics: list[Any] = []
        self._refused: collections.Counter[str] = collections.Counter()  # metrics, how often
        self._reported = set[str]()  # metrics, shared by all sessions

    @property
    def url(self) -> str | None:
        if not (self.uri or "").startswith(("http://", "https://")):
            return None
        return f"{str(self.uri).rstrip('/')}/#/experiments/{self._experiment}/runs/{self._id}"

    def start(self, run: TrackedRun) -> str | None:
        extras.require("mlflow", extra="mlflow", why="@MlflowTracker")
        tracking = extras.require("mlflow.tracking", extra="mlflow", why="@MlflowTracker")
        self._metrics, self._refused, self._say = [], collections.Counter(), run.say
        self._has_taken, self._untaken = False, 0
        self._client = client = tracking.MlflowClient(tracking_uri=self.uri)
        result = client.get_experiment_by_name(self.experiment)
        self._experiment = result.experiment_id if result is not None else client.create_experiment(self.experiment)
        self._id = self._existing(run) or str(
            client.create_run(self._experiment, tags={_UID: run.uid}, run_name=self.name or run.name).info.run_id
        )
        client.update_run(self._id, status="RUNNING")
        self._set_params(run.config)
        return self._id

    def _existing(self, run: TrackedRun) -> str | None:
        """The id of the run, if the server knows it: its creation may not have been noted here."""
        if run.run_id is not None:
            return run.run_id
        runs = self._client.search_runs([self._experiment], f"tags.`{_UID}` = '{run.uid}'", max_results=1)
        return str(runs[0].info.run_id) if runs else None

    def _set_params(self, config: Mapping[str, str]) -> None:
        """Logs the parameters that are not there; what has changed becomes a tag, since parameters cannot change."""
        entities = extras.require("mlflow.entities", extra="mlflow")
        known = self._client.get_run(self._id).data.params
        shortened = {_name(name): value[:_LONGEST_VALUE] for name, value in config.items()}
        new = [entities.Param(name, value) for name, value in shortened.items() if name not in known]
        for part in _parts(new, _MOST_PARAMS):
            self._client.log_batch(self._id, params=part)
        for name, value in shortened.items():
            if known.get(name, value) != value:
                self._client.set_tag(self._id, f"changed.{name}", value)

    def log(self, moment: Moment, metrics: Mapping[str, float]) -> None:
        entities = extras.require("mlflow.entities", extra="mlflow")
        time_ms = int(moment.time_s * 1000)
        self._metrics += [entities.Metric(_name(name), value, time_ms, moment.step) for name, value in metrics.items()]

    def text(self, moment: Moment, name: str, text: str) -> None:
        if name.startswith("sample/"):
            title = re.sub(r"\W+", "-", name.removeprefix("sample/")).strip("-")[:60] or "empty"
            name = f"samples/{moment.step:09d}-{title}.txt"
        elif "." not in name:
            name = f"{name}/{moment.step:09d}.txt"
        self._send(self._client.log_text, text, name)

    def facts(self, moment: Moment, facts: Mapping[str, Any]) -> None:
        for name, value in facts.items():
            text = value if isinstance(value, str) else json.dumps(value)
            self._send(self._client.set_tag, _name(name), text[:5000])
        commit = (facts.get("git") or {}).get("commit") if isinstance(facts.get("git"), dict) else None
        if isinstance(commit, str):
            self._client.set_tag(self._id, "mlflow.source.git.commit", commit)

    def picture(self, moment: Moment, name: str, path: str) -> None:
        self._send(self._client.log_artifact, path, "pictures")

    def roll_back(self, moment: Moment) -> None:
        self._client.set_tag(self._id, "rolled_back_to", str(moment.step))

    def flush(self) -> bool:
        for part in _parts(self._metrics, _MOST_METRICS):
            self._log_part(part)
        self._metrics = []
        return True

    def _log_part(self, metrics: list[Any]) -> None:
        """Logs metrics, but for those that the server refuses.

        Raises:
          Refused: it takes nothing at all: then it is not the metrics.
        """
        result = _Refusals(collections.Counter(self._refused))
        is_taken = self._log_batch(metrics, result)
        if result.held:  # they may be taken again: what is refused may be the value
            try:
                self._send(self._client.log_batch, metrics=result.held)
                is_taken = True
                self._refused -= collections.Counter({metric.key: _MOST_REFUSED for metric in result.held})
            except Refused:
                pass
        self._untaken = 0 if is_taken else self._untaken + bool(result.new)
        self._has_taken = self._has_taken or is_taken
        if result.new and (not self._has_taken or self._untaken >= _MOST_UNTAKEN):
            raise result.new[0][1]
        for name, error in result.new:
            if name not in self._reported:
                self._reported.add(name)
                self._say(redact(f"mlflow does not take the metric {name}; skipped: {error}")[:_LONGEST_LINE])
            self._refused[name] += 1

    def _log_batch(self, metrics: list[Any], refusals: _Refusals) -> bool:
        """Logs metrics; whether any was taken. The server refuses all for one: halves are tried until these are found."""
        refusals.held += [metric for metric in metrics if refusals.counts[metric.key] >= _MOST_REFUSED]
        metrics = [metric for metric in metrics if refusals.counts[metric.key] < _MOST_REFUSED]
        try:
            if metrics:
                self._send(self._client.log_batch, metrics=metrics)
            return bool(metrics)
        except Refused as error:
            half = len(metrics) // 2
            if not half:
                refusals.new.append((metrics[0].key, error))
                refusals.counts[metrics[0].key] += 1
                return False
            return any([self._log_batch(part, refusals) for part in (metrics[:half], metrics[half:])])

    def _send(self, call: Callable[..., object], *args: object, **options: object) -> None:
        """Calls the client; raises Refused for what the server will never take."""
        try:
            call(self._id, *args, **options)
        except Exception as error:
            if _status(error) in _REFUSALS:
                raise Refused(error) from error
            raise

    def finish(self, reason: str) -> None:
        self.flush()
        self._client.set_tag(self._id, "end", reason)
        self._client.set_terminated(self._id, status=_ENDS.get(reason, "FINISHED"))


def _name(name: str) -> str:
    """A name as MLflow allows it: a relative path of plain characters."""
    parts = re.sub(r"[^\w\-./ ]", "_", name)[:250].split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)


def _status(error: Exception) -> int | None:
    """The HTTP status of an error of MLflow, or of requests, with which it moves files."""
    of_mlflow = getattr(error, "get_http_status_code", None)
    return of_mlflow() if of_mlflow is not None else getattr(getattr(error, "response", None), "status_code", None)


def _parts(items: Sequence[_T], most: int) -> Iterator[list[_T]]:
    for first in range(0, len(items), most):
        yield list(items[first : first + most])
