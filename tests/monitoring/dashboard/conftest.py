"""A dashboard's server in a process of its own, on demo runs."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import urllib.parse

import pytest


def _load(name):
    file = pathlib.Path(__file__).parent / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"dashboard_{name}", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


demo_module = _load("demo")


@dataclasses.dataclass
class Client:
    """Asks a server."""

    port: int
    token: str | None
    process: subprocess.Popen

    def raw(self, target, *, method="GET", headers=(), host=None):
        """The status, headers and body of an answer to a request as it is written."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            connection.putheader("Host", host or f"127.0.0.1:{self.port}")
            for name, value in headers:
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def get(self, path, **parameters):
        """The JSON of an address."""
        pairs = [
            (key, one) for key, value in parameters.items() for one in (value if isinstance(value, list) else [value])
        ]
        status, _, body = self.raw(f"{path}?{urllib.parse.urlencode(pairs)}" if pairs else path)
        found = json.loads(body)
        assert status == 200, found
        return found

    def ids(self):
        """Name -> id of all runs, once all have been read."""
        return {run["name"]: run["id"] for run in self.loaded()}

    def loaded(self, within_s=120.0):
        limit_s = time.monotonic() + within_s
        while time.monotonic() < limit_s:
            rows = self.get("/api/runs")["runs"]
            if rows and not any(row["loading"] for row in rows):
                return rows
            time.sleep(0.1)
        raise AssertionError("the runs were not read in time")


@contextlib.contextmanager
def serving(*arguments, env=()):
    """A server on a free port."""
    command = [sys.executable, "-m", "capibara.dashboard", *map(str, arguments), "--port=0"]
    environment = {**os.environ, **dict(env)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        line = process.stdout.readline()
        found = re.search(r"http://\S+?:(\d+)/(?:\?token=(\S+))?", line)
        assert found, line + process.stdout.read()
        yield Client(int(found[1]), found[2], process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@pytest.fixture(scope="session")
def demo():
    """The module that makes demo runs."""
    return demo_module


@pytest.fixture(scope="session")
def demo_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "runs"
    demo_module.make(folder).file.close()
    return folder


@pytest.fixture(scope="session")
def dashboard(demo_runs):
    """A server on the demo runs."""
    with serving(demo_runs) as client:
        client.loaded()
        yield client


@pytest.fixture(scope="session")
def serve():
    """Starts further servers."""
    return serving
