"""Records the events of a run: in a file beside its output, and at a server on request."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from capibara.builders.files.fingerprints import Input
from capibara.builders.lineage import events, history
from capibara.builders.lineage.events import Dataset, Run, Upstream
from capibara.core import limits
from capibara.core.types import UserError
from capibara.storage import stores

if TYPE_CHECKING:
    from openlineage.client import event_v2
    from openlineage.client.transport.http import HttpTransport

_TIMEOUT_S = 5.0
_URL, _KEY = "OPENLINEAGE_URL", "OPENLINEAGE_API_KEY"


class Recorder:
    """Emits the events of one run: `start` first, then one of `complete`, `fail` and `abort`.

    Args:
      folder: events are appended to its `lineage.jsonl`; may be in a bucket.
      job: name of the job, such as "prepare.playbooks".
      config: the settings, as JSON values.
      url: of a server that takes OpenLineage's events; None: OPENLINEAGE_URL, if it is set. OPENLINEAGE_API_KEY is its
        key.
      report: called once with a line if the server does not take the events: the run does not fail for that; None: the
        line goes to standard error.

    Raises:
      UserError: openlineage-python is not installed, or the address is none.
    """

    def __init__(
        self,
        folder: str,
        job: str,
        config: Mapping[str, Any],
        *,
        url: str | None = None,
        report: Callable[[str], None] | None = None,
    ):
        self._run = Run(id=events.new_id(), job=job, config=config)
        self._folder, self._path, self._report = folder, os.path.join(folder, history.FILE), report or _print
        self._server = _server(url or os.environ.get(_URL) or None)

    def start(self, inputs: Sequence[Dataset], upstream: Sequence[Upstream] = ()) -> None:
        """Emits START; before it ABORT for runs of this folder that were killed.

        Args:
          inputs: what is read.
          upstream: the runs that made it.
        """
        self._run = dataclasses.replace(self._run, inputs=inputs, upstream=upstream)
        if stores.of(self._path).has_local_paths:
            _mend(self._path)
        for killed in history.unfinished(self._folder):
            if (abort := events.abort_of(killed)) is not None:
                self._emit(abort)
        self._emit(events.event(self._run, "START"))

    def complete(self, outputs: Sequence[Dataset], inputs: Sequence[Dataset] | None = None) -> None:
        """Emits COMPLETE.

        Args:
          outputs: what was written.
          inputs: what was read, if `start` could not know it.
        """
        if inputs is not None:
            self._run = dataclasses.replace(self._run, inputs=inputs)
        self._emit(events.event(self._run, "COMPLETE", outputs))
        self._close()

    def fail(self, error: BaseException) -> None:
        """Emits FAIL with the error, or ABORT where the user has interrupted the run."""
        if isinstance(error, KeyboardInterrupt):
            self.abort()
            return
        message = f"{type(error).__name__}: {limits.cause(error, 1000)}"
        self._emit(events.event(self._run, "FAIL", error=message))
        self._close()

    def abort(self) -> None:
        """Emits ABORT."""
        self._emit(events.event(self._run, "ABORT"))
        self._close()

    def _emit(self, event: event_v2.RunEvent) -> None:
        from etils import epath
        from openlineage.client.serde import Serde

        try:
            stores.of(self._path).append(epath.Path(self._path), Serde.to_json(event))
        except OSError as error:
            cause = error.strerror or limits.cause(error)
            raise UserError(
                f"{self._path} cannot be written ({cause}): make room there, and make it writable"
            ) from None
        if self._server is None:
            return
        try:
            self._server.emit(event)
        except Exception as error:  # a server's answer, a name that does not resolve, a certificate
            host = urllib.parse.urlsplit(self._server.url).hostname
            self._report(f"note: {host} does not take the lineage events ({_answer(error)}): {self._path} has them")
            self._close()

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


def build(folder: str, kind: str, config: Mapping[str, object], inputs: Sequence[Input]) -> Recorder:
    """Begins to record a build in its output folder.

    Args:
      folder: the output folder.
      kind: the builder, such as "playbooks".
      config: the settings, as JSON values.
      inputs: the files that are read.

    Raises:
      UserError: see `Recorder`; or the folder cannot be written.
    """
    recorder = Recorder(folder, f"prepare.{kind}", config)
    sizes, hashes = {item.path: item.bytes for item in inputs}, {item.path: item.sha256 for item in inputs}
    absolute = [
        Dataset(path=stores.of(item.path).absolute(item.path), version=item.sha256, bytes=item.bytes) for item in inputs
    ]
    recorder.start(absolute, history.upstream_of_files(sizes, hashes))
    return recorder


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _server(url: str | None) -> HttpTransport | None:
    """The server at an address; None: none is named."""
    if url is None:
        return None
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"{_URL} or --lineage_url ({_shown(parts)}) must begin with http:// or https:// and a host")
    if parts.username or parts.password:
        raise UserError(f"{_URL} or --lineage_url has a password: put it in {_KEY}, which no other user sees")
    from openlineage.client.transport import http

    key = os.environ.get(_KEY)
    auth = http.ApiKeyTokenProvider({"api_key": key}) if key else http.TokenProvider({})
    retry = {"total": 1, "connect": 1, "read": 0, "backoff_factor": 0.3, "allowed_methods": ["POST"]}
    return http.HttpTransport(http.HttpConfig(url=url, timeout=_TIMEOUT_S, auth=auth, retry=retry))


def _shown(parts: urllib.parse.SplitResult) -> str:
    """An address without what may be secret."""
    return limits.shortened(f"{parts.scheme}://{parts.hostname or ''}" if parts.scheme else parts.path)


def _answer(error: Exception) -> str:
    """What a server answered, without the address, which may hold a secret."""
    response = getattr(error, "response", None)
    return type(error).__name__ if response is None else f"HTTP {response.status_code}"


def _mend(path: str) -> None:
    """Removes the beginning of an event that a killed process left at the end of a file."""
    with contextlib.suppress(FileNotFoundError), limits.opened(path) as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - limits.MIB)
            file.seek(begin)
            result = file.read(end - begin).rfind(b"\n")
            if result >= 0:
                end = begin + result + 1
                break
            end = begin
        if end != size:
            os.truncate(path, end)
