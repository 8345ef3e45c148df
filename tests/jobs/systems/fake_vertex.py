"""A fake of Vertex AI's custom jobs: an HTTP server on loopback that checks each request with the service's own messages.

In a test: `with FakeVertex() as fake: ...`. As a process, until SIGTERM:

  python fake_vertex.py --port-file=F --journal=J --seed=N [--chaos=0.3] [--active-after=S] [--done-after=S] [--cancel-after=S]
                        [--delay-landing=S]

Each creation and each cancel that takes effect is a line of J: {"op", "name", "labels", "time"}.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import http.server
import json
import os
import pathlib
import random
import re
import signal
import socket
import sys
import threading
import time
import urllib.parse

from google.cloud.aiplatform_v1.types import (
    CancelCustomJobRequest,
    CustomJob,
    JobState,
    ListCustomJobsRequest,
    ListCustomJobsResponse,
)
from google.protobuf import json_format

NUMBER = "123456789012"  # of the project, by which the service names it in its answers
ENDED = ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED")
# What one call can suffer. 429 and 503 come in storms. "lost": it has no effect and no answer; "cut": it takes effect, and
# has no answer; "half": it takes effect, and its answer ends before its Content-Length; "torn": it takes effect, and its
# answer is half a JSON text; "garbage": it takes effect, and its answer is no JSON; "late": a creation takes effect long
# after the connection is cut; "slow": its answer takes a while.
FAULTS = ("429", "503", "slow", "lost", "cut", "half", "torn", "late", "garbage")
GARBAGE = (
    b"",
    b"\x00\xff\xfe",
    b"<html>502 Bad Gateway</html>",
    b"null",
    b"[]",
    b'"text"',
    b"[" * 20_000,
    b'{"name": {}}',
)
WORDS = {400: "INVALID_ARGUMENT", 404: "NOT_FOUND", 429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE"}
_PATH = re.compile(r"/v1/projects/([^/:]+)/locations/([^/:]+)/customJobs(?:/(\d+))?(?::(cancel))?")
_LABEL = re.compile(r"[a-z][a-z0-9_-]{0,62}=[a-z0-9_-]{0,63}")
_TERM = re.compile(r'labels\.([a-z][a-z0-9_-]*)(?:(:\*)|="?([a-z0-9_-]*)"?)')


class Refusal(Exception):
    """An answer that is an error: status, message, and the service's word for the status if it is not the usual one."""

    def __init__(self, status, message, word=None):
        super().__init__(message)
        self.status, self.message, self.word = status, message, word or WORDS[status]


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer to whatever is called, which has no effect."""

    status: int
    body: bytes
    headers: dict = dataclasses.field(default_factory=dict)


def refusal(status, message, *, details=(), headers=(), word=None):
    """The Answer that is an error as the service writes it."""
    error = {"code": status, "message": message, "status": word or WORDS.get(status, "UNKNOWN"), "details": [*details]}
    return Answer(status, json.dumps({"error": error}).encode(), dict(headers))


@dataclasses.dataclass(frozen=True)
class Call:
    method: str
    path: str
    query: dict
    body: bytes

    @property
    def op(self):
        """What is called: create, list, get or cancel."""
        at = _PATH.fullmatch(self.path)
        if at is None:
            return "unknown"
        which = (self.method, at[3] is not None, at[4])
        known = {
            ("POST", False, None): "create",
            ("GET", False, None): "list",
            ("GET", True, None): "get",
            ("POST", True, "cancel"): "cancel",
        }
        return known.get(which, "unknown")


class FakeVertex:
    """The server, with `calls` in their order and `jobs` by their names.

    Args:
      journal: a file to which each creation and each cancel is appended.
      seed: of the faults.
      chaos: the probability that a call suffers a fault.
      active_after: seconds after which a job runs; None: it waits until `set_state`.
      done_after: seconds after which a job that runs has succeeded; None: it runs until `set_state`.
      cancel_after: seconds that a job takes to be cancelled.
      delay_landing: seconds after which a creation that is "late" takes effect.
      slow: seconds that an answer that is "slow" takes at most.
      page: the most jobs of a page.
    """

    def __init__(
        self,
        *,
        journal=None,
        seed=0,
        chaos=0.0,
        active_after=None,
        done_after=None,
        cancel_after=0.0,
        delay_landing=1.0,
        slow=0.5,
        page=100,
    ):
        self.calls, self.jobs = [], {}
        self.active_after, self.done_after, self.cancel_after = active_after, done_after, cancel_after
        self.delay_landing = delay_landing
        self.slow, self.page = slow, page
        self._random, self._chaos = random.Random(seed), chaos
        self._journal = open(journal, "a", encoding="utf-8") if journal else None
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._next, self._storm, self._timers = collections.deque(), (0, ""), []
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.005,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._ended.set()
        for timer in self._timers:
            timer.cancel()
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            if self._journal:
                self._journal.close()
                self._journal = None

    def fault_next(self, *faults):
        """Each of the next calls suffers one of FAULTS, or has that Answer; None: it is served."""
        assert all(fault is None or isinstance(fault, Answer) or fault in FAULTS for fault in faults)
        self._next.extend(faults)

    def set_state(self, name, state, *, code=0, message=""):
        """Sets a job's state, a name of JobState without its prefix, or a number; and its error."""
        with self._lock:
            job = self.jobs[name]
            job.state = state if isinstance(state, int) else JobState[f"JOB_STATE_{state}"].value
            job.error.code, job.error.message = code, message
            job.update_time.GetCurrentTime()

    def serve(self, call):
        """The Answer to a call, which takes effect."""
        try:
            with self._lock:
                answer = getattr(self, f"_{call.op}")(call)
        except Refusal as error:
            return refusal(error.status, error.message, word=error.word)
        as_numbers = "enum-encoding=int" in call.query.get("$alt", "")
        text = json_format.MessageToJson(answer, use_integers_for_enums=as_numbers) if answer is not None else "{}"
        return Answer(200, text.encode())

    def fault(self):
        """What the next call suffers."""
        with self._lock:
            if self._next:
                return self._next.popleft()
            left, kind = self._storm
            if left:
                self._storm = (left - 1, kind)
                return kind
            if self._random.random() >= self._chaos:
                return None
            kind = self._random.choice(FAULTS)
            if kind in ("429", "503"):
                self._storm = (self._random.randrange(4), kind)
            return kind

    def pick(self, *values):
        """One of some values, by the seed."""
        with self._lock:
            return self._random.choice(values)

    def wait(self):
        """As long as an answer takes that is slow."""
        self._ended.wait(self.slow * self.pick(0.25, 0.5, 1.0))

    def land_later(self, call):
        """A call takes effect after the delay."""
        timer = threading.Timer(self.delay_landing, self.serve, [call])
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def _unknown(self, call):
        raise Refusal(404, f"The URL {call.path} was not found on this server.")

    def _create(self, call):
        job = _parsed(CustomJob, json.loads(call.body or b"{}"))
        _check(job)
        job.name = f"projects/{NUMBER}/locations/{_PATH.fullmatch(call.path)[2]}/customJobs/{10**18 + len(self.jobs)}"
        job.state = JobState.JOB_STATE_PENDING.value
        job.create_time.GetCurrentTime()
        self.jobs[job.name] = job
        self._note("create", job)
        return job

    def _list(self, call):
        at = _PATH.fullmatch(call.path)
        fields = {name: value for name, value in call.query.items() if name != "$alt"}
        if "pageSize" in fields:
            fields["pageSize"] = int(fields["pageSize"])
        request = _parsed(ListCustomJobsRequest, {**fields, "parent": f"projects/{at[1]}/locations/{at[2]}"})
        terms = _terms(request.filter)
        if not re.fullmatch(r"\d*", request.page_token):
            raise Refusal(400, "The page token is not valid.")
        # The newest first; a token says from where on, so that what is made between two pages moves none.
        jobs = [*enumerate(self.jobs.values())]
        before = jobs[: int(request.page_token)] if request.page_token else jobs
        fits = [(number, self._now(job)) for number, job in reversed(before) if f"/locations/{at[2]}/" in job.name]
        fits = [(number, job) for number, job in fits if all(_has(job, *term) for term in terms)]
        page = fits[: min(request.page_size or self.page, self.page)]
        answer = ListCustomJobsResponse.pb(ListCustomJobsResponse())
        answer.custom_jobs.extend(job for _, job in page)
        answer.next_page_token = str(page[-1][0]) if len(fits) > len(page) else ""
        return answer

    def _get(self, call):
        at = _PATH.fullmatch(call.path)
        name = f"projects/{NUMBER}/locations/{at[2]}/customJobs/{at[3]}"
        if name not in self.jobs:
            raise Refusal(404, f"The CustomJob does not exist: {name}")
        return self._now(self.jobs[name])

    def _cancel(self, call):
        fields = json.loads(call.body or b"{}")
        _parsed(CancelCustomJobRequest, {**fields, "name": call.path.removeprefix("/v1/").removesuffix(":cancel")})
        job = self._get(call)
        state = JobState(job.state).name.removeprefix("JOB_STATE_")
        if state in ENDED:
            raise Refusal(400, f"The CustomJob is in state {state} and cannot be cancelled.", "FAILED_PRECONDITION")
        if state != "CANCELLING":
            self.set_state(job.name, "CANCELLING")
            self._note("cancel", job)

    def _now(self, job):
        """A job in the state to which time has brought it."""
        if job.state == JobState.JOB_STATE_CANCELLING and _age_s(job.update_time) >= self.cancel_after:
            self.set_state(job.name, "CANCELLED", code=1, message="The job has been cancelled.")
            job.end_time.GetCurrentTime()
        waits = job.state == JobState.JOB_STATE_PENDING and self.active_after is not None
        if waits and _age_s(job.create_time) >= self.active_after:
            self.set_state(job.name, "RUNNING")
            job.start_time.GetCurrentTime()
        runs = job.state == JobState.JOB_STATE_RUNNING and self.done_after is not None
        if runs and _age_s(job.start_time) >= self.done_after:
            self.set_state(job.name, "SUCCEEDED")
        return job

    def _note(self, op, job):
        if self._journal:
            line = {"op": op, "name": job.name, "labels": dict(job.labels), "time": time.time()}
            self._journal.write(f"{json.dumps(line)}\n")
            self._journal.flush()


def _age_s(moment):
    return time.time() - moment.ToNanoseconds() / 1e9


def _parsed(message, fields):
    """A raw message of the service; a field that it does not know, or a wrong type, is refused."""
    try:
        return json_format.ParseDict(fields, message.pb(message()))
    except (json_format.ParseError, TypeError, AttributeError) as error:
        raise Refusal(400, f"Invalid JSON payload received. {error}") from None


def _check(job):
    pools = job.job_spec.worker_pool_specs
    wrong = {
        "display_name: Required, and at most 128 characters": not 0 < len(job.display_name) <= 128,
        "job_spec.worker_pool_specs: Required": not pools,
        "labels: at most 64": len(job.labels) > 64,
        "labels: not valid": not all(_LABEL.fullmatch(f"{name}={value}") for name, value in job.labels.items()),
        "container_spec.image_uri: Required": not all(pool.container_spec.image_uri for pool in pools),
        "container_spec.env: at most 100": any(len(pool.container_spec.env) > 100 for pool in pools),
        "machine_spec.machine_type: Required": not all(pool.machine_spec.machine_type for pool in pools),
        "replica_count: must be 1 with a tpu_topology": any(
            pool.machine_spec.tpu_topology and pool.replica_count != 1 for pool in pools
        ),
        "state, name and create_time are output only": job.state or job.name or job.HasField("create_time"),
    }
    found = [what for what, is_wrong in wrong.items() if is_wrong]
    if found:
        raise Refusal(400, f"CustomJob is not valid: {'; '.join(found)}")


def _terms(text):
    """(name, whether its existence will do, value) of each label of a filter."""
    terms = [_TERM.fullmatch(term) for term in re.split(r"\s+AND\s+", text)] if text else []
    if not all(terms):
        raise Refusal(400, f"Invalid filter: {text}")
    return [(term[1], bool(term[2]), term[3]) for term in terms]


def _has(job, name, exists, value):
    return name in job.labels and (exists or job.labels[name] == value)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):  # a client that waits no longer
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    fake: FakeVertex

    def do_GET(self):
        parts = urllib.parse.urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        call = Call(self.command, urllib.parse.unquote(parts.path), query, body)
        self.fake.calls.append(call)
        fault = self.fake.fault()
        if isinstance(fault, Answer):
            return self._send(fault)
        if fault in ("429", "503"):
            return self._send(self._storm(int(fault)))
        if fault in ("lost", "late"):
            if fault == "late" and call.op == "create":
                self.fake.land_later(call)
            return self._cut()
        answer = self.fake.serve(call)
        if fault == "slow":
            self.fake.wait()
        if fault == "cut":
            return self._cut()
        if fault == "garbage":
            answer = Answer(200, self.fake.pick(*GARBAGE))
        if fault == "torn":
            answer = dataclasses.replace(answer, body=answer.body[: len(answer.body) // 2])
        self._send(answer, missing=1000 if fault == "half" else 0)

    do_POST = do_GET

    def _storm(self, status):
        words = {
            429: "Quota exceeded for quota metric 'Requests' and limit 'Requests per minute'.",
            503: "Unavailable.",
        }
        info = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "0.050s"}
        return self.fake.pick(
            refusal(status, words[status]),
            refusal(status, words[status], headers={"Retry-After": "0"}),
            refusal(status, words[status], details=[info]),
            Answer(status, b"<html>try again</html>"),
        )

    def _send(self, answer, *, missing=0):
        self.send_response(answer.status)
        for name, value in {"Content-Type": "application/json", **answer.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body) + missing))
        self.end_headers()
        self.wfile.write(answer.body)
        if missing:
            self._cut()

    def _cut(self):
        self.wfile.flush()
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_):
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port-file", type=pathlib.Path, required=True)
    parser.add_argument("--journal", type=pathlib.Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chaos", type=float, default=0.0)
    parser.add_argument("--active-after", type=float)
    parser.add_argument("--done-after", type=float)
    parser.add_argument("--cancel-after", type=float, default=0.0)
    parser.add_argument("--delay-landing", type=float, default=2.0)
    flags = vars(parser.parse_args())
    port_file = flags.pop("port_file")
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with FakeVertex(**flags) as fake:
        part = port_file.with_name(f"{port_file.name}.part")
        part.write_text(fake.url.rpartition(":")[2])
        os.replace(part, port_file)
        while not ended.wait(0.2):
            pass


if __name__ == "__main__":
    main()
