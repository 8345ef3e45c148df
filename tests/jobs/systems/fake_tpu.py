"""The queued resources of the Cloud TPU API in memory, as a gRPC server on loopback that also fails as that API does.

In a test: `with FakeTpu() as tpu`, then its `address`. As a process, for tests that kill and restart what speaks to it:

  python fake_tpu.py --port-file=F --journal=J --seed=N [--chaos=0.3] [--active-after=S] [--preempt=P]

It writes its port to F, and to J a line of JSON for each creation and each deletion that takes effect.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
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
import uuid
from collections.abc import Callable

import grpc
from google.cloud import tpu_v2
from google.longrunning import operations_pb2
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

SERVICE = "/google.cloud.tpu.v2.Tpu/"
NUMBER = "projects/123456789"  # the API may name a project by its number
GARBAGE = b"\xff\xff\xff\xff"
KEPT_S = 3600.0  # so long a request ID is known
STATES, NODE_STATES, HEALTH = tpu_v2.QueuedResourceState.State, tpu_v2.Node.State, tpu_v2.Node.Health
REQUESTS = {
    "CreateQueuedResource": tpu_v2.CreateQueuedResourceRequest,
    "DeleteQueuedResource": tpu_v2.DeleteQueuedResourceRequest,
    "GetQueuedResource": tpu_v2.GetQueuedResourceRequest,
    "ListQueuedResources": tpu_v2.ListQueuedResourcesRequest,
    "ListNodes": tpu_v2.ListNodesRequest,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """What becomes of a call.

    Attributes:
      before: the error that is answered instead of doing it.
      slow_s: seconds until it is done.
      after: what is answered once it is done: an error, "cut" (the connection ends), "garbage" (undecodable bytes) or
        "details" (an error with undecodable details).
      method: the only one that it affects; empty: all.
    """

    before: status_pb2.Status | None = None
    slow_s: float = 0.0
    after: status_pb2.Status | str | None = None
    method: str = ""


class Refusal(Exception):
    """The API's error for a call."""

    def __init__(self, code: str, message: str):
        self.status = status(code, message)


def status(code: str, message: str, *, retry_s: float | None = None, reason: str = "", quota: str = "", **metadata):
    """An error as Google's services answer it, with the details that they add."""
    details = []
    if retry_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(1000 * retry_s))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if reason:
        details.append(error_details_pb2.ErrorInfo(reason=reason, domain="googleapis.com", metadata=metadata))
    if quota:
        violation = error_details_pb2.QuotaFailure.Violation(subject="project:123456789", description=quota)
        details.append(error_details_pb2.QuotaFailure(violations=[violation]))
    packed = [any_pb2.Any() for _ in details]
    for one, detail in zip(packed, details):
        one.Pack(detail)
    return status_pb2.Status(code=code_pb2.Code.Value(code), message=message, details=packed)


def too_many(retry_s: float | None = None):
    limit = "Quota exceeded for quota metric 'Mutate requests' and limit 'Mutate requests per minute' of service 'tpu'"
    return status("RESOURCE_EXHAUSTED", limit, retry_s=retry_s, reason="RATE_LIMIT_EXCEEDED")


def unavailable(retry_s: float | None = None):
    return status("UNAVAILABLE", "The service is currently unavailable.", retry_s=retry_s)


TOO_LATE = status("DEADLINE_EXCEEDED", "Deadline exceeded.")


@dataclasses.dataclass
class Record:
    """A queued resource, and when it changes by itself."""

    resource: object
    changes: list[tuple[float, str]] = dataclasses.field(default_factory=list)
    nodes: dict[str, tuple[str, str, str]] = dataclasses.field(default_factory=dict)  # state, health, description
    sticks: bool = False

    @property
    def state(self) -> str:
        return STATES(self.resource.state.state).name

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.resource.tpu.node_spec[0].node.labels) if self.resource.tpu.node_spec else {}

    def set(self, state: str) -> None:
        self.resource.state.state = STATES[state].value
        if state == "ACTIVE":
            self.nodes = {name: ("READY", "HEALTHY", "") for name in self.node_ids()}
        elif state in ("SUSPENDED", "FAILED"):
            self.nodes = {}

    def node_ids(self) -> list[str]:
        (spec,) = self.resource.tpu.node_spec
        many = spec.multislice_params
        return (
            [f"{many.node_id_prefix}-{index}" for index in range(many.node_count)]
            if many.node_count
            else [spec.node_id]
        )


class Api:
    """The methods of the API. The caller has its lock."""

    def __init__(self, *, active_after_s: float, preempt: float, chance: random.Random, journal: str | None):
        self.records: dict[str, Record] = {}
        self.made: list[object] = []  # requests that have made a queued resource
        self.unreachable: list[str] = []
        self.page_size = 100
        self._active_after_s, self._preempt, self._chance, self._journal = active_after_s, preempt, chance, journal
        self._operations: dict[str, tuple[float, str, operations_pb2.Operation]] = {}

    def advance(self) -> None:
        """Does what was due by now."""
        now = time.monotonic()
        for name, record in [*self.records.items()]:
            while record.changes and record.changes[0][0] <= now:
                _, change = record.changes.pop(0)
                if change == "gone":
                    del self.records[name]
                elif change == "node preempted":
                    record.nodes = {node: ("PREEMPTED", "HEALTHY", "") for node in record.nodes}
                else:
                    record.set(change)

    def create_queued_resource(self, request):
        if known := self._known(request.request_id):
            return known
        name = f"{request.parent}/queuedResources/{request.queued_resource_id}"
        if name in self.records:
            raise Refusal("ALREADY_EXISTS", f"Resource '{name}' already exists")
        resource = type(request.queued_resource)()
        resource.CopyFrom(request.queued_resource)
        resource.name = name
        resource.create_time.FromNanoseconds(time.time_ns())
        record = self.records[name] = Record(resource)
        record.set("WAITING_FOR_RESOURCES")
        due_s = time.monotonic() + self._active_after_s
        record.changes = [(due_s, "ACTIVE")]
        if self._chance.random() < self._preempt:
            times = (due_s + pause for pause in sorted(self._chance.uniform(0.5, 4.0) for _ in range(3)))
            record.changes += zip(times, ("node preempted", "SUSPENDING", "SUSPENDED"))
        self.made.append(request)
        self._write("create", record)
        return self._done(request.request_id, name)

    def delete_queued_resource(self, request):
        if known := self._known(request.request_id):
            return known
        record = self._find(request.name)
        if record.state == "SUSPENDING" or (record.state == "ACTIVE" and not request.force):
            raise Refusal("FAILED_PRECONDITION", f"{request.name} is {record.state}, so it cannot be deleted")
        if record.sticks:
            record.sticks = False
        elif record.state != "DELETING":
            record.set("DELETING")
            record.changes = [(time.monotonic() + self._chance.uniform(0.1, 0.5), "gone")]
            self._write("delete", record)
        return self._done(request.request_id, request.name)

    def get_queued_resource(self, request):
        return self._find(request.name).resource

    def list_queued_resources(self, request):
        found = [record.resource for record in self._in(request.parent)]
        return self._page(tpu_v2.ListQueuedResourcesResponse, "queued_resources", found, request)

    def list_nodes(self, request):
        found = []
        for record in self._in(request.parent):
            for node_id, (state, health, description) in record.nodes.items():
                node = tpu_v2.Node.pb()(name=f"{request.parent}/nodes/{node_id}", health_description=description)
                node.state, node.health = NODE_STATES[state].value, HEALTH[health].value
                node.queued_resource = f"{NUMBER}/{record.resource.name.split('/', 2)[2]}"
                node.labels.update(record.labels)
                found.append(node)
        return self._page(tpu_v2.ListNodesResponse, "nodes", found, request)

    def _in(self, parent: str) -> list[Record]:
        return [record for name, record in sorted(self.records.items()) if name.startswith(f"{parent}/")]

    def _page(self, response, field, found, request):
        first = int(request.page_token or 0)
        end = first + min(self.page_size, request.page_size or self.page_size)
        more = str(end) if end < len(found) else ""
        fields = {field: found[first:end], "next_page_token": more, "unreachable": self.unreachable}
        return response.pb()(**fields)

    def _find(self, name: str) -> Record:
        if name not in self.records:
            raise Refusal("NOT_FOUND", f"Resource '{name}' was not found")
        return self.records[name]

    def _known(self, request_id: str):
        """The operation of an earlier request of that ID."""
        if request_id not in self._operations:
            return None
        since_s, name, operation = self._operations[request_id]
        return operation if name in self.records or time.monotonic() - since_s < KEPT_S else None

    def _done(self, request_id: str, name: str):
        operation = operations_pb2.Operation(name=f"operations/{uuid.uuid4()}")
        if request_id:
            self._operations[request_id] = (time.monotonic(), name, operation)
        return operation

    def _write(self, op: str, record: Record) -> None:
        if self._journal is not None:
            line = {
                "op": op,
                "name": record.resource.name.rpartition("/")[2],
                "labels": record.labels,
                "time": time.time(),
            }
            with open(self._journal, "a", encoding="utf-8") as file:
                file.write(f"{json.dumps(line)}\n")
                file.flush()


class Wire:
    """A port whose connections end at another one, and can be cut."""

    def __init__(self, port: int):
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    def cut(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                with self._lock:
                    self._pairs.add((near, far))
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)


class FakeTpu(grpc.GenericRpcHandler):
    """The server.

    Attributes:
      address: for CAPIBARA_TPU_ENDPOINT.
      api: its state.
      log: the name and the request of each call.

    Args:
      active_after_s: seconds until a queued resource gets its chips.
      chaos: the probability of a random fault of a call.
      preempt: the probability that a queued resource loses its chips within seconds.
      seed: of the random numbers.
      journal: a file for a line of each creation and deletion.
    """

    def __init__(self, *, active_after_s=1e9, chaos=0.0, preempt=0.0, seed=0, journal=None):
        self.log: list[tuple[str, object]] = []
        self._faults: list[Fault] = []
        self._chaos, self._chance = chaos, random.Random(seed)
        self.api = Api(active_after_s=active_after_s, preempt=preempt, chance=self._chance, journal=journal)
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(16), handlers=[self])
        self._wire = Wire(self._server.add_insecure_port("127.0.0.1:0"))
        self._server.start()
        self.address = f"127.0.0.1:{self._wire.port}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self) -> None:
        self._stopped.set()
        self._wire.close()
        self._server.stop(0).wait()

    def service(self, details):
        method = details.method.removeprefix(SERVICE)
        if method not in REQUESTS:
            return None
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: self._answer(method, request, context),
            request_deserializer=REQUESTS[method].pb().FromString,
            response_serializer=lambda answer: answer if isinstance(answer, bytes) else answer.SerializeToString(),
        )

    def _answer(self, method: str, request, context):
        with self._lock:
            self.log.append((method, request))
            fault = self._next(method)
        if self._stopped.wait(fault.slow_s) or fault.before is not None:
            context.abort_with_status(rpc_status.to_status(fault.before or unavailable()))
        try:
            answer = self._do(method, request)
        except Refusal as refusal:
            context.abort_with_status(rpc_status.to_status(refusal.status))
        if fault.after == "cut":
            self._wire.cut()
        elif fault.after == "details":
            context.set_trailing_metadata([("grpc-status-details-bin", GARBAGE)])
            context.abort(grpc.StatusCode.UNAVAILABLE, "")
        elif isinstance(fault.after, status_pb2.Status):
            context.abort_with_status(rpc_status.to_status(fault.after))
        return GARBAGE if fault.after == "garbage" else answer

    def _do(self, method: str, request):
        done: Callable = getattr(self.api, re.sub(r"(?<!^)(?=[A-Z])", "_", method).lower())
        with self._lock:
            self.api.advance()
            answer = done(request)
            copy = type(answer)()  # what is answered does not change while it is sent
            copy.CopyFrom(answer)
            return copy

    def _next(self, method: str) -> Fault:
        """The fault of the next call."""
        for fault in self._faults:
            if fault.method in ("", method):
                self._faults.remove(fault)
                return fault
        if self._chance.random() >= self._chaos:
            return Fault()
        kind = self._chance.choice(["storm", "slow", "half", "cut", "garbage", "details"])
        if kind == "storm":
            storm = Fault(before=self._chance.choice([too_many, unavailable])(self._chance.choice([None, 0.1, 0.5])))
            self._faults += [storm] * self._chance.randrange(4)
            return storm
        if kind == "slow":
            return Fault(slow_s=self._chance.uniform(0.1, 1.0))
        return Fault(after=self._chance.choice([unavailable(), TOO_LATE]) if kind == "half" else kind)

    def fault(self, fault: Fault, count: int = 1) -> None:
        """What becomes of the next calls that it affects."""
        with self._lock:
            self._faults += [fault] * count

    def count(self, method: str) -> int:
        """How many calls of a method there were."""
        with self._lock:
            return sum(name == method for name, _ in self.log)

    @contextlib.contextmanager
    def _record(self, name: str):
        with self._lock:
            self.api.advance()
            yield next(record for whole, record in self.api.records.items() if whole.rpartition("/")[2] == name)

    def set_state(self, name: str, state: str) -> None:
        """Puts a queued resource into a state, in which it stays."""
        with self._record(name) as record:
            record.changes = []
            record.set(state)

    def activate(self, name: str) -> None:
        self.set_state(name, "ACTIVE")

    def suspend(self, name: str) -> None:
        self.set_state(name, "SUSPENDED")

    def fail(self, name: str, message: str, code: str = "INTERNAL") -> None:
        self.set_state(name, "FAILED")
        with self._record(name) as record:
            record.resource.state.failed_data.error.CopyFrom(status(code, message))

    def preempt(self, name: str, index: int = 0) -> None:
        """Takes a node of a queued resource that stays ACTIVE for now."""
        self.set_node(name, "PREEMPTED", index=index)

    def set_node(self, name: str, state: str, health: str = "HEALTHY", why: str = "", index: int = 0) -> None:
        """Puts a node of a queued resource into a state."""
        with self._record(name) as record:
            record.nodes[record.node_ids()[index]] = (state, health, why)

    def stick(self, name: str) -> None:
        """The next deletion of a queued resource has no effect."""
        with self._record(name) as record:
            record.sticks = True


def main(argv: list[str]) -> None:
    """Serves until SIGTERM."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--port-file", type=pathlib.Path, required=True)
    flags.add_argument("--journal", required=True)
    flags.add_argument("--seed", type=int, required=True)
    flags.add_argument("--chaos", type=float, default=0.0)
    flags.add_argument("--active-after", type=float, default=1.0)
    flags.add_argument("--preempt", type=float, default=0.0)
    read = flags.parse_args(argv)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    fields = {"chaos": read.chaos, "preempt": read.preempt, "seed": read.seed, "journal": read.journal}
    with FakeTpu(active_after_s=read.active_after, **fields) as tpu:
        partial = read.port_file.with_suffix(".partial")
        partial.write_text(tpu.address.rpartition(":")[2])
        os.replace(partial, read.port_file)
        stopped.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
