"""The part of Kubernetes's API that capibara.jobs.systems.gke uses: JobSets, Jobs, Services, pods and their logs, on loopback.

Jobs and Services are read by the models of Kubernetes's own client, JobSets by the schema of their CRD (jobset_crd.json) and
by the models of kubeflow_trainer_api; fields that these do not know are refused. Nothing runs: `start`, `complete`, `fail`,
`evict` and `restart` write what the controllers would. Answers have the form of the API server's.

  with FakeKubernetes() as cluster: ...
  python fake_kubernetes.py --port-file=F --journal=J --seed=N [--chaos=0.3] [--active-after=S] [--fail=P] [--done-after=S]
"""

from __future__ import annotations

import argparse
import base64
import collections
import contextlib
import copy
import dataclasses
import datetime
import functools
import http.server
import json
import os
import pathlib
import random
import re
import sys
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable

sys.path.append(str(pathlib.Path(__file__).resolve().parent))
from kubernetes_schemas import KINDS, Refused, check_new  # noqa: E402

VERBS = {"POST": "create", "GET": "get", "DELETE": "delete"}
# What one call can suffer. 429 and 503 come in storms, and have no effect. "slow": it takes effect after a while; "lost": it
# has no effect and no answer; "cut": it takes effect, and has no answer; "late": the same, the effect after that; "half": it
# takes effect, and its answer ends before its Content-Length; "torn": it takes effect, and its answer is half a JSON text;
# "garbage": it has no effect, and an answer that is none of the API's.
FAULTS = ("429", "503", "slow", "lost", "cut", "late", "half", "torn", "garbage")
GARBAGE = (
    b"",
    b"\x00\xff\xfe",
    b"<html>try again</html>",
    b"null",
    b"[]",
    b'"text"',
    b"[" * 20_000,
    b'{"kind": {}}',
    b"{}",
)
PATH = re.compile(
    r"/(?:api|apis)/(?P<version>.+)/namespaces/(?P<namespace>[^/]+)/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?(?P<log>/log)?"
)
INDEX = "batch.kubernetes.io/job-completion-index"


def stamp():
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(name, reason, message, status="True"):
    return {"type": name, "status": status, "reason": reason, "message": message, "lastTransitionTime": stamp()}


def selects(selector, values):
    """Whether a selector of labels or fields is true: "key", "!key", "key=value", "key!=value", by commas."""
    for term in filter(None, selector.split(",")):
        key, sign, value = re.fullmatch(r"(!?[^=!]+)(?:(==|=|!=)(.*))?", term).groups()
        if sign is None:
            is_true = (key.lstrip("!") in values) != key.startswith("!")
        else:
            is_true = (values.get(key) == value) != (sign == "!=")
        if not is_true:
            return False
    return True


def owner_of(pod):
    labels = pod["metadata"]["labels"]
    return labels.get("jobset.sigs.k8s.io/jobset-name") or labels.get("batch.kubernetes.io/job-name")


def fields_of(item):
    return {"metadata.name": item["metadata"]["name"], "status.phase": item.get("status", {}).get("phase")}


@dataclasses.dataclass(eq=False)
class Plan:
    """What a controller will do.

    Attributes:
      due_s: at the earliest.
      read: the kind of objects by which the state before it was read first; None: it was not read yet.
    """

    due_s: float
    action: Callable[[dict], None]
    item: dict
    read: str | None = None


class Controllers:
    """The objects of a cluster, and what its controllers would make of them; not safe for threads.

    A job has a new state at the earliest after the times below, and not before its state was read: by a whole round of whoever
    watches, that is when what was read first (JobSets, Jobs or their pods) is read again. So no watcher is too slow to see a state.

    Args:
      rng: of all that is random.
      active_after_s: a job gets its chips so long after it was made, and fails as long after that if it does;
        None: when a test says so.
      fail: the probability that it fails.
      done_after_s: it succeeds so long after it has its chips if it does not fail; None: when a test says so.
      gone_after_s: what is deleted is gone after so long, read or not: the least and the most.
    """

    def __init__(self, rng, active_after_s=None, fail=0.0, done_after_s=None, gone_after_s=(0.1, 0.5)):
        self.rng, self.objects, self.logs, self.version = rng, {}, {}, 0
        self._after_s, self._fail, self._done_s, self._plans = active_after_s, fail, done_after_s, []
        self._gone_s = gone_after_s

    def add(self, plural, namespace, document):
        self.version += 1
        item = copy.deepcopy(document)
        uid = str(uuid.UUID(int=self.rng.getrandbits(128), version=4))
        own = {"namespace": namespace, "uid": uid, "creationTimestamp": stamp(), "resourceVersion": str(self.version)}
        item["metadata"].update(own, generation=1)
        self.objects[plural, namespace, item["metadata"]["name"]] = item
        if plural in ("jobs", "jobsets"):
            self.set_pods(item, "Pending")
            if self._after_s is not None:
                self._plan(self._after_s, self._begin, item)
        return item

    def main(self, name):
        """The JobSet or Job of a name."""
        return next(
            item for (plural, _, own), item in self.objects.items() if own == name and plural in ("jobsets", "jobs")
        )

    def pods(self, name):
        """The pods of a JobSet or Job, by their names."""
        found = [item for key, item in self.objects.items() if key[0] == "pods" and owner_of(item) == name]
        return sorted(found, key=lambda pod: pod["metadata"]["name"])

    def set_pods(self, item, phase, **status):
        """Makes the pods of a JobSet or Job once more, all in one phase; counts them in its status."""
        name, namespace = item["metadata"]["name"], item["metadata"]["namespace"]
        for pod in self.pods(name):
            del self.objects["pods", namespace, pod["metadata"]["name"]]
        is_set, slices = item["kind"] == "JobSet", [("", 1, item["spec"])]
        if is_set:
            slices = [
                (one["name"], one.get("replicas", 1), one["template"]["spec"]) for one in item["spec"]["replicatedJobs"]
            ]
        counts = collections.Counter()
        for part, replicas, spec in slices if phase else ():
            for index in range(replicas):
                stem = f"{name}-{part}-{index}" if is_set else name
                labels = {"batch.kubernetes.io/job-name": stem}
                if is_set:
                    restarts = str(item.get("status", {}).get("restarts", 0))
                    own = {"jobset-name": name, "job-index": str(index), "restart-attempt": restarts}
                    labels |= {f"jobset.sigs.k8s.io/{key}": value for key, value in own.items()}
                for host in range(spec["parallelism"]):
                    self._add_pod(item, f"{stem}-{host}", spec["template"], {**labels, INDEX: str(host)}, phase, status)
                counts["active"] += 1 if is_set else spec["parallelism"]
        counts["ready"] = counts["active"] if phase == "Running" else 0
        return self._write_counts(item, counts)

    def _add_pod(self, item, stem, template, labels, phase, status):
        suffix = "".join(self.rng.choices("bcdfghjklmnpqrstvwxz2456789", k=5))
        name, namespace = f"{stem}-{suffix}", item["metadata"]["namespace"]
        labels = {**template.get("metadata", {}).get("labels", {}), **labels}
        metadata = {"name": name, "namespace": namespace, "labels": labels, "creationTimestamp": stamp()}
        pod = {"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": template["spec"]}
        self.objects["pods", namespace, name] = {**pod, "status": {"phase": phase, **status}}

    @staticmethod
    def _write_counts(item, counts):
        status = item.setdefault("status", {})
        if item["kind"] == "JobSet":
            empty = dict.fromkeys(("ready", "succeeded", "failed", "active", "suspended"), 0)
            status["replicatedJobsStatus"] = [{"name": item["spec"]["replicatedJobs"][0]["name"], **empty, **counts}]
            status.setdefault("restarts", 0)
        else:
            status |= {
                "active": counts["active"],
                "ready": counts["ready"],
                "succeeded": counts["succeeded"],
                "terminating": 0,
            }
        return status

    def add_condition(self, item, name, reason, message, status="True"):
        conditions = item.setdefault("status", {}).setdefault("conditions", [])
        conditions[:] = [one for one in conditions if one["type"] != name]
        conditions.append(condition(name, reason, message, status))

    def start(self, item):
        item["spec"].pop("suspend", None)
        self.set_pods(item, "Running")
        for name in ("Suspended", "RestartingJobSet"):
            if any(one["type"] == name for one in item["status"].get("conditions", ())):
                self.add_condition(item, name, "JobsReady", "all jobs are ready", status="False")

    def complete(self, item):
        is_set = item["kind"] == "JobSet"
        counts = {"active": 0, "ready": 0}
        wanted = item["spec"]["replicatedJobs"][0]["replicas"] if is_set else item["spec"]["completions"]
        for pod in self.pods(item["metadata"]["name"]):
            pod["status"]["phase"] = "Succeeded"
        self._write_counts(item, {**counts, "succeeded": wanted})
        if is_set:
            self.add_condition(item, "Completed", "AllJobsCompleted", "jobset completed successfully")
            item["status"]["terminalState"] = "Completed"
        else:
            for name in ("SuccessCriteriaMet", "Complete"):
                self.add_condition(item, name, "CompletionsReached", "Reached expected number of succeeded pods")

    def fail(self, item, reason="", message=""):
        name, is_set = item["metadata"]["name"], item["kind"] == "JobSet"
        if is_set:
            reason, most = reason or "ReachedMaxRestarts", "jobset failed due to reaching max number of restarts"
            message = message or f"{most} (first failed job: {name}-slice-0)"
            item["status"]["terminalState"] = "Failed"
        reason = reason or "BackoffLimitExceeded"
        message = message or "Job has reached the specified backoff limit"
        for pod in self.pods(name):
            pod["status"]["phase"] = "Failed"
        self._write_counts(item, collections.Counter())
        self.add_condition(item, "Failed", reason, message)

    def evict(self, item):
        """As Kueue does with a job of lower priority."""
        item["spec"]["suspend"] = True
        self.set_pods(item, None)
        names = {"JobSet": ("SuspendedJobs", "jobset is suspended"), "Job": ("JobSuspended", "Job suspended")}
        self.add_condition(item, "Suspended", *names[item["kind"]])

    def restart(self, item):
        """As JobSet does after a slice has failed."""
        item["status"]["restarts"] += 1
        message = (
            f"restarting jobset without exceeding max restarts (first failed job: {item['metadata']['name']}-slice-0)"
        )
        self.add_condition(item, "RestartingJobSet", "DefaultFailurePolicy", message)
        self.set_pods(item, "Pending")

    def delete(self, key, policy):
        """Deletes an object, with a policy of Foreground a moment later; returns whether it was not being deleted yet."""
        metadata = self.objects[key]["metadata"]
        if key[0] == "services" or policy != "Foreground":
            self.remove(self.objects[key])
            return True
        if "deletionTimestamp" in metadata:
            return False
        metadata |= {
            "deletionTimestamp": stamp(),
            "deletionGracePeriodSeconds": 0,
            "finalizers": ["foregroundDeletion"],
        }
        self._plan(self.rng.uniform(*self._gone_s), self.remove, self.objects[key])
        return True

    def remove(self, item):
        if item["kind"] in ("Job", "JobSet"):
            self.set_pods(item, None)
        self.objects = {key: one for key, one in self.objects.items() if one is not item}

    def _begin(self, item):
        self.start(item)
        if self.rng.random() < self._fail:
            self._plan(self._after_s, self.fail, item)
        elif self._done_s is not None:
            self._plan(self._done_s, self.complete, item)

    def _plan(self, after_s, action, item):
        self._plans.append(Plan(time.monotonic() + after_s, action, item))

    def tick(self, read=None):
        """Does what is due by now; `read`: the kind of the objects that are about to be read."""
        now = time.monotonic()
        due = [plan for plan in self._plans if plan.due_s <= now and (plan.action == self.remove or read == plan.read)]
        due = [plan for plan in due if plan.action == self.remove or read is not None]
        self._plans = [plan for plan in self._plans if plan not in due]
        for plan in due:
            is_there = any(one is plan.item for one in self.objects.values())
            if is_there and (plan.action == self.remove or "deletionTimestamp" not in plan.item["metadata"]):
                plan.action(plan.item)
        for plan in self._plans:
            plan.read = plan.read or read


class FakeKubernetes:
    """The server, with `calls` in their order, as "GET /apis/...".

    Args:
      journal: a file to which each creation and each deletion that takes effect is appended.
      seed: of all that is random.
      chaos: the probability that a call suffers a fault.
      slow_s: what a slow answer takes at most, and after what a late creation takes effect.
      namespaces: of the cluster.
      has_job_sets: whether it has JobSet's CRD.
      page: the most objects of a list.
      **more: of `Controllers`.
    """

    def __init__(
        self,
        *,
        journal=None,
        seed=0,
        chaos=0.0,
        slow_s=0.5,
        namespaces=("default", "ml"),
        has_job_sets=True,
        page=500,
        **more,
    ):
        self.calls, self.refusals, self.has_job_sets = [], {}, has_job_sets
        self._rng, self._chaos, self._slow_s, self._page, self._namespaces = (
            random.Random(seed),
            chaos,
            slow_s,
            page,
            namespaces,
        )
        self._cluster, self._lock, self._faults = (
            Controllers(random.Random(seed + 1), **more),
            threading.RLock(),
            collections.deque(),
        )
        self._journal = open(journal, "a", encoding="utf-8") if journal else None
        self._server = _Server(("127.0.0.1", 0), functools.partial(_Handler, self))
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            if self._journal:
                self._journal.close()
            self._journal = None

    def write_kubeconfig(self, path):
        """Writes a kubeconfig whose current context is this cluster."""
        context = {"cluster": "fake", "user": "fake", "namespace": "ignored"}
        parts = {"clusters": {"cluster": {"server": self.url}}, "users": {"user": {"token": "token-of-user"}}}
        parts["contexts"] = {"context": context}
        lists = {name: [{"name": "fake", **part}] for name, part in parts.items()}
        document = {"apiVersion": "v1", "kind": "Config", "current-context": "fake", **lists}
        pathlib.Path(path).write_text(json.dumps(document))

    def fault_next(self, *faults):
        """Each of the next calls suffers one of FAULTS; None: it is served."""
        assert {*faults} <= {None, *FAULTS}
        with self._lock:
            self._faults.extend(faults)

    def storm(self, calls):
        """The next calls are answered 429 or 503."""
        self.fault_next(*(("429", "503")[index % 2] for index in range(calls)))

    def refuse(self, verb, plural, code, reason, message):
        """From now on a verb on a resource is refused; message None: with a text that is no Status."""
        self.refusals[verb, plural] = (code, reason, message)

    def refuse_rights(self, verb, plural, namespace="default"):
        """The same, as to a user without the right."""
        _, version, resource = KINDS[plural]
        group = version.rpartition("/")[0]
        who = f'User "system:serviceaccount:ml:trainer" cannot {verb} resource "{plural}" in API group "{group}"'
        message = f'{resource} is forbidden: {who} in the namespace "{namespace}"'
        self.refuse(verb, plural, 403, "Forbidden", message)

    def put(self, plural, document, namespace="default"):
        """Adds an object that nobody has checked."""
        with self._lock:
            return self._cluster.add(plural, namespace, document)

    def objects(self, plural):
        """All objects of a kind, by their names."""
        with self._lock:
            self._cluster.tick()
            found = {key[2]: item for key, item in self._cluster.objects.items() if key[0] == plural}
            return copy.deepcopy(dict(sorted(found.items())))

    def pods(self, name):
        """The pods of a JobSet or Job, which a test may change."""
        return self._cluster.pods(name)

    def play(self, action, name, *arguments, **more):
        """An action of `Controllers` (start, complete, fail, evict, restart, remove, add_condition) on a JobSet or Job."""
        with self._lock:
            getattr(self._cluster, action)(self._cluster.main(name), *arguments, **more)

    start = functools.partialmethod(play, "start")
    complete = functools.partialmethod(play, "complete")
    fail = functools.partialmethod(play, "fail")
    evict = functools.partialmethod(play, "evict")
    restart = functools.partialmethod(play, "restart")

    def set_status(self, name, **status):
        """Sets fields of the status of a JobSet or Job."""
        with self._lock:
            self._cluster.main(name)["status"].update(copy.deepcopy(status))

    def say(self, pod, text):
        """Sets the log of a pod."""
        self._cluster.logs[pod] = text

    def next_fault(self):
        """What the call that has come suffers."""
        with self._lock:
            if self._faults:
                return self._faults.popleft()
            if self._rng.random() >= self._chaos:
                return None
            fault = self._rng.choice(FAULTS)
            if fault in ("429", "503"):
                self._faults.extend([fault] * self._rng.randrange(4))
            return fault

    def some(self, *values):
        with self._lock:
            return self._rng.choice(values)

    def wait(self):
        time.sleep(self._slow_s)

    def answer(self, method, path, query, body):
        """Serves a call: (code, headers, body)."""
        try:
            with self._lock:
                self._cluster.tick(self._read_by(method, path))
                found = self._serve(method, path, query, body)
                if isinstance(found, tuple):
                    return found
                return 201 if method == "POST" else 200, {}, json.dumps(found).encode()
        except Refused as error:
            return error.code, error.headers, json.dumps(error.body).encode()

    @staticmethod
    def _read_by(method, path):
        """The kind of the objects whose state a call reads; None: it reads none."""
        at = PATH.fullmatch(path)
        return at["plural"] if method == "GET" and at and at["plural"] in ("jobsets", "jobs", "pods") else None

    def _serve(self, method, path, query, body):
        at = PATH.fullmatch(path)
        plural, namespace, name = at and at["plural"], at and at["namespace"], at and at["name"]
        is_known = plural in KINDS and at["version"] == KINDS[plural][1]
        if not is_known or (plural == "jobsets" and not self.has_job_sets):
            return 404, {"Content-Type": "text/plain; charset=utf-8"}, b"404 page not found\n"
        verb = "list" if method == "GET" and name is None else VERBS[method]
        refusal = self.refusals.get((verb, "pods/log" if at["log"] else plural))
        if refusal and refusal[2] is None:
            return refusal[0], {"Content-Type": "text/html"}, b"<html>" + b"no " * 999
        if refusal:
            raise Refused(*refusal)
        if verb == "create":
            return self._create(plural, namespace, json.loads(body))
        if verb == "list":
            return self._list(plural, namespace, query)
        key = (plural, namespace, name)
        if key not in self._cluster.objects:
            resource = KINDS[plural][2]
            raise Refused(404, "NotFound", f'{resource} "{name}" not found', name=name, kind=plural)
        if at["log"]:
            return self._log(self._cluster.objects[key], query)
        return self._delete(key, query, json.loads(body or b"{}")) if verb == "delete" else self._cluster.objects[key]

    def _create(self, plural, namespace, document):
        check_new(document, plural, namespace)
        name, resource = document["metadata"]["name"], KINDS[plural][2]
        if namespace not in self._namespaces:
            raise Refused(404, "NotFound", f'namespaces "{namespace}" not found', name=namespace, kind="namespaces")
        there = self._cluster.objects.get((plural, namespace, name))
        if there:
            dying = "object is being deleted: " if "deletionTimestamp" in there["metadata"] else ""
            raise Refused(409, "AlreadyExists", f'{dying}{resource} "{name}" already exists', name=name, kind=plural)
        item = self._cluster.add(plural, namespace, document)
        self._note("create", item)
        return item

    def _list(self, plural, namespace, query):
        kind, version, _ = KINDS[plural]
        found = [item for key, item in sorted(self._cluster.objects.items()) if key[:2] == (plural, namespace)]
        found = [one for one in found if selects(query.get("labelSelector", ""), one["metadata"].get("labels", {}))]
        found = [one for one in found if selects(query.get("fieldSelector", ""), fields_of(one))]
        if "continue" in query:
            try:
                after = base64.b64decode(query["continue"], validate=True).decode()
            except ValueError:
                raise Refused(400, "BadRequest", "continue key is not valid") from None
            found = [one for one in found if one["metadata"]["name"] > after]
        most = min(int(query.get("limit", 0)) or self._page, self._page)
        metadata = {"resourceVersion": str(self._cluster.version)}
        if len(found) > most:
            token = base64.b64encode(found[most - 1]["metadata"]["name"].encode()).decode()
            metadata |= {"continue": token, "remainingItemCount": len(found) - most}
        items = found[:most]
        if plural != "jobsets":  # what a list has of a kind of its own has no kind
            items = [{key: part for key, part in one.items() if key not in ("kind", "apiVersion")} for one in items]
        return {"kind": f"{kind}List", "apiVersion": version, "metadata": metadata, "items": items}

    def _delete(self, key, query, options):
        item = self._cluster.objects[key]
        name, uid = item["metadata"]["name"], item["metadata"]["uid"]
        wanted = options.get("preconditions", {}).get("uid", uid)
        if wanted != uid:
            what = f"UID in precondition: {wanted}, UID in object meta: {uid}"
            raise Refused(409, "Conflict", f'Operation cannot be fulfilled on {KINDS[key[0]][2]} "{name}": {what}')
        policy = query.get("propagationPolicy") or options.get("propagationPolicy", "Background")
        if self._cluster.delete(key, policy):
            self._note("delete", item)
        if policy == "Foreground":
            return item
        details = {"name": name, "kind": key[0], "uid": uid}
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}

    def _log(self, pod, query):
        name = pod["metadata"]["name"]
        names = [container["name"] for container in pod["spec"]["containers"]]
        if query.get("container", names[0]) not in names:
            raise Refused(400, "BadRequest", f"container {query['container']} is not valid for pod {name}")
        if pod["status"]["phase"] == "Pending":
            message = f'container "{names[0]}" in pod "{name}" is waiting to start: ContainerCreating'
            raise Refused(400, "BadRequest", message)
        lines = self._cluster.logs.get(name, "").splitlines(keepends=True)
        text = "".join(lines[-int(query["tailLines"]) :] if "tailLines" in query else lines)
        return 200, {"Content-Type": "text/plain"}, text.encode()

    def _note(self, op, item):
        if self._journal:
            metadata = item["metadata"]
            line = {"op": op, "kind": item["kind"], "name": metadata["name"], "labels": metadata.get("labels", {})}
            print(json.dumps({**line, "time": time.time()}), file=self._journal, flush=True)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, *arguments):
        if not isinstance(sys.exception(), ConnectionError):  # of a client that waits no longer
            super().handle_error(*arguments)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, fake, *arguments):
        self._fake = fake
        super().__init__(*arguments)

    def _serve(self):
        path, _, query = self.path.partition("?")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        call = (self.command, urllib.parse.unquote(path), dict(urllib.parse.parse_qsl(query)), body)
        self._fake.calls.append(urllib.parse.unquote(f"{self.command} {self.path}"))
        fault = self._fake.next_fault()
        if fault in ("429", "503"):
            return self._storm(int(fault))
        if fault == "garbage":
            return self._reply(200, {}, self._fake.some(*GARBAGE))
        if fault in ("lost", "late"):
            self.close_connection = True
            if fault == "late":
                threading.Thread(target=lambda: (self._fake.wait(), self._fake.answer(*call)), daemon=True).start()
            return None
        if fault == "slow":
            self._fake.wait()
        code, headers, answer = self._fake.answer(*call)
        if fault == "cut":
            self.close_connection = True
            return None
        if fault == "torn":
            answer = answer[: len(answer) // 2]
        return self._reply(code, headers, answer, missing=1000 if fault == "half" else 0)

    do_GET = do_POST = do_DELETE = _serve

    def _storm(self, code):
        words = {429: ("TooManyRequests", "too many requests"), 503: ("ServiceUnavailable", "no endpoints")}
        headers = {"Retry-After": "1"} if code == 429 else {}
        self._reply(code, headers, json.dumps(Refused(code, *words[code]).body).encode())

    def _reply(self, code, headers, body, missing=0):
        own = {"Content-Type": "application/json", **headers, "Content-Length": str(len(body) + missing)}
        lines = [f"{name}: {value}" for name, value in own.items()]
        self.wfile.write("\r\n".join([f"HTTP/1.1 {code} {self.responses[code][0]}", *lines, "", ""]).encode() + body)
        self.close_connection = self.close_connection or missing > 0

    def log_message(self, *_):
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag in ("port-file", "journal"):
        parser.add_argument(f"--{flag}", type=pathlib.Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    for flag in ("chaos", "fail"):
        parser.add_argument(f"--{flag}", type=float, default=0.0, metavar="P")
    for flag in ("active-after", "done-after"):
        parser.add_argument(f"--{flag}", dest=f"{flag.replace('-', '_')}_s", type=float, metavar="S")
    options = vars(parser.parse_args())
    port_file = options.pop("port_file")
    with FakeKubernetes(**options) as fake, contextlib.suppress(KeyboardInterrupt):
        whole = port_file.with_suffix(".new")
        whole.write_text(str(fake.port))
        os.replace(whole, port_file)
        threading.Event().wait()


if __name__ == "__main__":
    main()
