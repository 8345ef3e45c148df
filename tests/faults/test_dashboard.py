"""Slow, many and dead readers of a dashboard, and its death: training goes on as before."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time

import pytest

STEP_S = 0.01
RUN = """
import json, sys, time
with open(sys.argv[1], "a") as file:
    file.write(json.dumps({"kind": "event", "step": 0, "time": time.time(), "event": "start"}) + "\\n")
    for step in range(1, 100_000):
        begin_s = time.perf_counter()
        end_s = begin_s + STEP_S
        while time.perf_counter() < end_s:
            pass
        line = {"kind": "train", "step": step, "time": time.time(), "loss": 2.0, "step_s": time.perf_counter() - begin_s}
        file.write(json.dumps(line) + "\\n")
        file.flush()
""".replace("STEP_S", str(STEP_S))


@contextlib.contextmanager
def child(*command, **options):
    process = subprocess.Popen([sys.executable, *command], **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def serving(folder):
    """A dashboard's port and process."""
    with child("-m", "capibara.dashboard", str(folder), "--port=0", stdout=subprocess.PIPE) as process:
        with process.stdout as lines:
            yield int(re.search(rb":(\d+)/", lines.readline())[1]), process


def steps_between(path, begin_s, end_s):
    """The seconds of the steps within a time."""
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:-1]]
    return [line["step_s"] for line in lines if begin_s < line["time"] < end_s]


def viewer(port, number, stack):
    """A connection to the events: dead, half a request, or one that reads hardly anything."""
    connection = stack.enter_context(contextlib.closing(socket.create_connection(("127.0.0.1", port), timeout=10)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    request = f"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
    connection.sendall(request[:30] if number % 3 == 0 else request)
    if number % 3 == 1:
        connection.recv(10)
    return connection


def health(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", "/health")
        return connection.getresponse().status


@pytest.mark.fault(51)
def test_slow_and_dead_readers_cost_a_run_nothing(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    with child("-c", RUN, str(path)), serving(tmp_path) as (port, dashboard), contextlib.ExitStack() as stack:
        time.sleep(1.5)
        alone = time.time() - 1.0, time.time()
        for number in range(100):
            viewer(port, number, stack)
        begin_s = time.time()
        time.sleep(2.0)
        beside = begin_s, time.time()
        assert health(port) == 200
        dashboard.send_signal(signal.SIGKILL)
        dashboard.wait()
        size = path.stat().st_size
        time.sleep(0.3)
        assert path.stat().st_size > size  # the run has not noticed
        before, after = (statistics.median(steps_between(path, *span)) for span in (alone, beside))
    assert after < before * 1.25  # other tests share the cores; benchmarks/dashboard.py measures 2%


@pytest.mark.fault(51)
def test_readers_that_vanish_leave_nothing_behind(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    path.write_text('{"kind": "event", "step": 0, "time": 1.0, "event": "start"}\n')
    with serving(tmp_path) as (port, dashboard):
        health(port)
        files = len(os.listdir(f"/proc/{dashboard.pid}/fd"))
        for _ in range(3):
            with contextlib.ExitStack() as stack:
                threads = [threading.Thread(target=viewer, args=(port, number, stack)) for number in range(60)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        limit_s = time.monotonic() + 20
        while len(os.listdir(f"/proc/{dashboard.pid}/fd")) > files + 2:
            assert time.monotonic() < limit_s, "connections are left open"
            time.sleep(0.1)
        assert health(port) == 200
