"""Maintenance that a metadata server announces is SIGTERM for the run."""

import contextlib
import functools
import http.server
import os
import signal
import threading
import time

import pytest

from capibara.cli.launching import staged
from capibara.jobs import maintenance
from capibara.jobs.maintenance import Maintenance


class Metadata(http.server.BaseHTTPRequestHandler):
    values: dict = {}
    answers: dict = {}  # by path, how many there were

    def do_GET(self):
        name = self.path.removeprefix("/computeMetadata/v1/instance/")
        found = self.values.get(name) if self.headers["Metadata-Flavor"] == "Google" else None
        self.send_response(200 if found is not None else 404)
        self.end_headers()
        self.wfile.write((found or "").encode())
        self.answers[name] = self.answers.get(name, 0) + 1

    def log_message(self, *_):
        pass


@pytest.fixture
def values(monkeypatch):
    Metadata.values = {"maintenance-event": "NONE", "preempted": "FALSE"}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which is not used
    yield Metadata.values
    server.shutdown()
    server.server_close()


@contextlib.contextmanager
def terms():
    came = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append(1))
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)


def until(condition):
    end_s = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def until_read(count=3):
    """Waits until whoever watches has read what is announced now: its next reading may have begun before."""
    before = Metadata.answers.get("maintenance-event", 0)
    until(lambda: Metadata.answers.get("maintenance-event", 0) >= before + count)


def test_each_announcement_is_one_signal(values):
    with terms() as came, Maintenance(every_s=0.01, say=lambda line: None) as watched:
        until_read()
        assert not came and not watched.was_announced()
        values["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
        until(lambda: came)
        until_read()
        assert len(came) == 1 and watched.was_announced() and not watched.was_announced()
        values["maintenance-event"] = "NONE"
        until_read()
        values["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
        until(lambda: len(came) == 2)
        assert watched.was_announced()


def test_a_metadata_server_that_does_not_answer_announces_nothing(values):
    with terms() as came, Maintenance(every_s=0.01, say=lambda line: None):
        del values["maintenance-event"]
        until_read()
        assert not came
    assert not Maintenance.is_preempted()
    values["preempted"] = "TRUE"
    assert Maintenance.is_preempted()


def test_no_metadata_server(monkeypatch):
    monkeypatch.setenv("GCE_METADATA_IP", "127.0.0.1:9")
    assert maintenance._read("preempted") is None


def test_a_run_starts_again_after_each_announcement_until_its_host_is_taken(values, monkeypatch):
    """As `launch staged` runs it; a SIGTERM of somebody else ends it."""
    monkeypatch.setattr(maintenance, "Maintenance", functools.partial(Maintenance, every_s=0.01))
    monkeypatch.setattr(staged, "REST_S", 0.01)
    announced = {"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}
    events = [announced, {"maintenance-event": "NONE"}, announced]
    starts = 0

    def run():
        nonlocal starts
        starts += 1
        with terms() as came:
            values.update(events.pop(0))
            if values["maintenance-event"] == "NONE":
                until_read()
            else:
                until(lambda: came)
        return 128 + signal.SIGTERM

    assert staged._through_maintenance(run) == 128 + signal.SIGTERM
    assert starts == 2  # the second was ended by somebody else
    values["preempted"] = "TRUE"
    assert staged._through_maintenance(run) == 128 + signal.SIGTERM
    assert starts == 3


def test_a_second_announcement_while_the_run_rests_does_not_end_its_launcher(values, monkeypatch):
    """Then a SIGTERM of somebody else, which does."""
    monkeypatch.setattr(maintenance, "Maintenance", functools.partial(Maintenance, every_s=0.01))
    monkeypatch.setattr(staged, "REST_S", 1.0)
    starts = []

    def run():
        starts.append(time.monotonic())
        with terms() as came:
            values["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE" if len(starts) == 1 else "NONE"
            if len(starts) == 1:
                until(lambda: came)
        later = {"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"} if len(starts) == 1 else {}
        threading.Timer(0.2, values.update, [later]).start()
        return 128 + signal.SIGTERM if len(starts) == 1 else 0

    assert staged._through_maintenance(run) == 0
    assert len(starts) == 2 and starts[1] - starts[0] > 1.1  # it has rested again
    starts.clear()
    values["maintenance-event"] = "NONE"
    monkeypatch.setattr(staged, "REST_S", 30.0)  # the signal ends it

    def run_and_be_ended():
        ended = run()
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        return ended

    assert staged._through_maintenance(run_and_be_ended) == 128 + signal.SIGTERM
    assert len(starts) == 1
