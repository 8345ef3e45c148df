"""What viewers get: figures, lines, tables, events; and connections that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc

import numpy as np
import pytest
import uvicorn
from prometheus_client import parser

from capibara.monitoring.dashboard import app
from capibara.monitoring.dashboard.alerts.webhooks import Webhooks
from capibara.monitoring.dashboard.http import connections, hub
from capibara.monitoring.dashboard.http.access import Access
from capibara.monitoring.dashboard.http.connections import Connection, Room, Server
from capibara.monitoring.dashboard.settings import DashboardConfig
from capibara.monitoring.dashboard.state import Dashboard
from capibara.monitoring.dashboard.views import consensus, series
from capibara.monitoring.reading.parsing import Era, Rows
from capibara.monitoring.reading.reader import Change
from capibara.monitoring.reading.run import Run
from tests.strategies.group.test_coordinator import Play, coordinator, three


def test_the_table_of_runs(dashboard):
    rows = {run["name"]: run for run in dashboard.get("/api/runs")["runs"]}
    assert rows["baseline"]["status"] == "finished" and rows["baseline"]["step"] == 2000
    assert rows["group/resumed"]["status"] == "interrupted" and rows["group/resumed"]["starts"] == 2
    assert rows["experts"]["status"] == "stopped_early"
    assert rows["stalled"]["status"] == "stalled" and rows["stalled"]["alerts"] >= 1
    assert rows["baseline"]["tokens"] == 2000 * 524_288 and 0.9 < rows["baseline"]["goodput"] < 1
    assert len(rows["baseline"]["spark"]) == 60
    names = [run["name"] for run in dashboard.get("/api/runs", sort="name", limit=3, offset=1)["runs"]]
    assert names == sorted(rows)[1:4]


def test_lines_are_exact_when_zoomed(dashboard):
    run_id = dashboard.ids()["baseline"]
    whole = dashboard.get("/api/series", run=run_id, metric="train/loss", points=50)["series"][0]
    assert not whole["exact"] and whole["count"] == 200 and len(whole["x"]) <= 50
    assert max(whole["y"]) > 7.8  # the spike at step 1510
    part = dashboard.get("/api/series", run=run_id, metric="train/loss", points=50, **{"from": 1480, "to": 1550})
    (line,) = part["series"]
    assert line["exact"] and line["x"] == [1480, 1490, 1500, 1510, 1530, 1540, 1550] and line["nonfinite"] == [1520]


@pytest.mark.parametrize("axis", ["step", "time", "relative", "tokens"])
def test_lines_over_other_axes(dashboard, axis):
    run_id = dashboard.ids()["group/resumed"]
    found = dashboard.get(
        "/api/series", run=run_id, metric=["train/loss", "eval/loss", "train/none"], x=axis, smooth=0.6
    )
    assert [line["metric"] for line in found["series"]] == ["train/loss", "eval/loss"]
    line = found["series"][0]
    assert line["x"][0] == line["range"][0] and line["x"] == sorted(line["x"])
    assert len(line["smooth"]) == len(line["y"])
    assert {"step": 2000, "tokens": 2000 * 524_288}.get(axis, line["x"][-1]) == line["x"][-1]


def test_runs_side_by_side(dashboard):
    ids = dashboard.ids()
    found = dashboard.get("/api/compare", run=[ids["baseline"], ids["experts"], "0" * 16])
    assert [run["name"] for run in found["runs"]] == ["baseline", "experts"]
    rows = {row["name"]: row["values"] for row in found["config"]["rows"]}
    assert rows["Trainer.seed"] == ["0", "3"] and found["config"]["same"] >= 2
    loss = next(metric for metric in found["metrics"] if metric["name"] == "eval/loss")
    assert loss["best"] == "low" and loss["values"][0]["best"] <= loss["values"][0]["last"]
    entropy = next(metric for metric in found["metrics"] if metric["name"] == "train/router_entropy")
    assert entropy["values"][0] is None and entropy["values"][1] is not None


def test_samples_newest_first(dashboard):
    run_id = dashboard.ids()["baseline"]
    found = dashboard.get(f"/api/runs/{run_id}/samples", prompt="def ", limit=3)
    assert [sample["step"] for sample in found["samples"]] == [2000, 1800, 1600] and found["more"]
    assert found["samples"][0]["text"].startswith("fibonacci")
    older = dashboard.get(f"/api/runs/{run_id}/samples", prompt="def ", before=600)
    assert [sample["step"] for sample in older["samples"]] == [400, 200] and not older["more"]
    hostile = dashboard.get(f"/api/runs/{run_id}/samples", prompt="Once upon a time", limit=1)["samples"][0]["text"]
    assert "<script>alert('sample')</script>" in hostile and "\u202e" in hostile


def test_nodes_with_reasons(dashboard):
    run_id = dashboard.ids()["live"]
    found = dashboard.get(f"/api/runs/{run_id}/nodes")
    assert [node["name"] for node in found["nodes"]] == ["node_0", "node_1", "node_2"]
    node = found["nodes"][2]
    assert node["state"] == "accepted" and node["rejections"] == 600 and node["last_rejected"] == 1199
    assert len(found["history"]["accepted"][0]) == 3
    assert dashboard.get(f"/api/runs/{dashboard.ids()['baseline']}/nodes")["unavailable"]


def test_a_rejected_node_is_explained(tmp_path, demo, serve):
    run = demo.Demo(tmp_path / "run", nodes=3, began_s=time.time() - 900)
    run.start()
    run.run(0, 900)
    run.file.close()
    with serve(tmp_path) as client:
        run_id = client.ids()["run"]
        node = client.get(f"/api/runs/{run_id}/nodes")["nodes"][2]
        assert node["state"] == "rejected" and node["reason"] == "its quality 0.30 is below 0.5"
        kinds = [alert["kind"] for alert in client.get("/api/alerts", run=run_id)["alerts"]]
        assert "rejected" in kinds


def test_the_nodes_of_a_group_come_from_its_exchange(tmp_path, demo, serve):
    run, exchange = demo.Demo(tmp_path / "node-a", log_every=1), tmp_path / "group"
    with open(tmp_path / "node-a" / "config.gin", "a") as file:
        file.write(f"GroupNode.exchange = {str(exchange)!r}\n")
    run.start()
    run.run(0, 5)
    coordinator(exchange).run(check=Play(exchange, three()))
    with serve(tmp_path) as client:
        run_id = client.ids()["node-a"]
        assert client.get(f"/api/runs/{run_id}")["tabs"]["nodes"]
        found = client.get(f"/api/runs/{run_id}/nodes")
        assert [node["name"] for node in found["nodes"]] == ["a", "b", "c"] and found["score"] == 1.0


def test_experts_as_a_map(dashboard):
    run_id = dashboard.ids()["experts"]
    found = dashboard.get(f"/api/runs/{run_id}/experts", points=20)
    assert found["experts"] == 16 and len(found["load"]) == len(found["steps"]) == 20
    assert all(sum(row) / 16 == pytest.approx(1.0, abs=1e-3) for row in found["load"])
    assert found["entropy"][0] < found["entropy"][-1] <= 1


def test_checkpoints_lineage_and_plan_say_what_is_missing(dashboard):
    run_id = dashboard.ids()["baseline"]
    for part in ("checkpoints", "lineage", "plan"):
        assert dashboard.get(f"/api/runs/{run_id}/{part}")["unavailable"]
    rows = dashboard.get(f"/api/runs/{run_id}/plan")["rows"]
    assert rows[0]["measured"] > 0 and rows[0]["predicted"] is None


def test_alerts_of_spikes_and_numbers(dashboard):
    run_id = dashboard.ids()["baseline"]
    alerts = dashboard.get("/api/alerts", run=run_id)["alerts"]
    texts = {alert["kind"]: alert["text"] for alert in alerts}
    assert texts["spike"].startswith("loss 7.9 at step 1510") and "step 1520" in texts["nan"]
    assert not any(alert["active"] for alert in alerts)


def test_exports_hold_every_point(dashboard):
    run_id = dashboard.ids()["baseline"]
    text = dashboard.raw(f"/api/export.csv?run={run_id}&metric=train/loss&metric=eval/loss&from=1500&to=1530")[
        2
    ].decode()
    rows = [line.split(",") for line in text.splitlines()]
    assert rows[0] == ["run", "metric", "step", "time", "value"]
    assert [row[2] for row in rows[1:]] == ["1500", "1510", "1520", "1530"] and rows[3][4] == ""


def test_exports_lack_no_point_where_memory_is_short(tmp_path, serve):
    for name in "ab":
        (tmp_path / name).mkdir()
        line = {"kind": "train", "time": 1.7e9, "loss": 1.0, **{f"metric_{letter}": 1.0 for letter in "abcdefghij"}}
        lines = [json.dumps({**line, "step": step}) + "\n" for step in range(1, 9_501)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    with serve(tmp_path, "--gin.DashboardConfig.memory_mib=1") as client:
        answers = [client.raw(f"/api/export.csv?run={one}&metric=train/loss") for one in client.ids().values()]
        refused = [json.loads(body)["error"] for status, _, body in answers if status == 503]
        assert refused and "not all lines of " in refused[0]["message"]
        assert all(body.count(b"\n") == 9_501 for status, _, body in answers if status == 200)


def test_a_first_answer_waits_for_a_run_that_was_just_found(monkeypatch):
    async def scenario():
        found, silent = Run("/runs/found", "found"), Run("/runs/silent", "silent")
        answer = asyncio.ensure_future(app._shown([found]))
        await asyncio.sleep(0.1)
        assert not answer.done()
        found.is_new = False
        await asyncio.wait_for(answer, 0.5)
        monkeypatch.setattr(app, "MOMENT_S", 0.1)
        await asyncio.wait_for(app._shown([found, silent]), 0.5)  # its folder does not answer

    asyncio.run(scenario())


def test_prometheus_reads_the_figures(dashboard):
    families = {
        family.name: family for family in parser.text_string_to_metric_families(dashboard.raw("/metrics")[2].decode())
    }
    steps = {sample.labels["run"]: sample.value for sample in families["capibara_run_step"].samples}
    assert steps["baseline"] == 2000 and steps["<img src=x onerror=alert(1)>"] == 300


def test_answers_are_shared_and_packed(dashboard):
    path = f"/api/series?run={dashboard.ids()['live']}&metric=train/loss"
    status, headers, body = dashboard.raw(path, headers=[("Accept-Encoding", "gzip")])
    assert headers["content-encoding"] == "gzip" and json.loads(gzip.decompress(body))["series"]
    again = dashboard.raw(path, headers=[("If-None-Match", headers["etag"])])
    assert again[0] == 304 and not again[2]


def test_the_library_of_charts_comes_from_its_package(dashboard):
    status, headers, body = dashboard.raw("/static/plotly.min.js")
    assert status == 200 and headers["content-type"].startswith("text/javascript") and len(body) > 1_000_000


def events(client, until, query="", within_s=120.0):
    """The events up to the one for which `until` returns true: (name, data), and the time of it."""
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=within_s)
    found, text, limit_s = [], b"", time.monotonic() + within_s
    with contextlib.closing(connection):
        connection.request("GET", f"/api/events{query}")
        answer = connection.getresponse()
        while time.monotonic() < limit_s:
            text += answer.read1(65_536)
            *whole, text = text.split(b"\n\n")
            for one in whole:
                if match := re.fullmatch(rb"event: (\w+)\ndata: (.*)", one, re.DOTALL):
                    found.append((match[1].decode(), json.loads(match[2])))
                    if until(*found[-1]):
                        return found, time.monotonic()
    raise AssertionError(f"it did not come: {found}")


def test_a_new_line_is_an_event_within_two_seconds(tmp_path, demo, serve):
    run, written_s = demo.Demo(tmp_path / "run", log_every=1), []
    run.start()
    run.run(0, 20)

    def write():
        run.run(20, 21)
        written_s.append(time.monotonic())

    with serve(tmp_path) as client:
        run_id = client.ids()["run"]
        threading.Timer(0.7, write).start()
        is_new = lambda name, data: name == "update" and any(row["step"] == 21 for row in data["runs"])  # noqa: E731
        found, seen_s = events(client, is_new, f"?run={run_id}")
        assert found[0][0] == "hello"
        assert seen_s - written_s[0] < 2.0
        threading.Timer(0.2, lambda: demo.Demo(tmp_path / "new").start()).start()
        found, _ = events(client, lambda name, data: name == "runs", f"?run={run_id}")
        assert found[-1][1]["added"] == [client.ids()["new"]]


class Sink:
    """Stands for a viewer's connection: `unsent_bytes` is what it has not read."""

    def __init__(self, is_read=True):
        self.unsent_bytes, self.is_read, self.content = 0, is_read, b""

    def push(self, content):
        assert content  # an empty part would end the answer
        self.content += content
        self.unsent_bytes += 0 if self.is_read else len(content)

    def read(self):
        self.is_read, self.unsent_bytes = True, 0


def test_a_slow_viewer_loads_everything_again():
    sink = Sink(is_read=False)
    viewer, event = hub._Viewer(frozenset(), sink), b"event: update\ndata: %b\n\n" % (b"x" * 10_000)
    for second in range(100):
        viewer.put(event, second)
    assert sink.content.count(b"event: update") == hub._MOST_BYTES // len(event)
    sink.read()
    sink.content = b""
    viewer.put(b"", 100)
    assert sink.content.startswith(b"event: resync\n")
    viewer.put(event, 101)
    assert sink.content.endswith(event) and sink.content.count(b"event: resync") == 1


def test_an_event_that_is_too_large_becomes_a_resync():
    sink = Sink()
    hub._Viewer(frozenset(), sink).put(b"x" * (hub._MOST_BYTES + 1), 0)
    assert sink.content.startswith(b"event: resync\n") and len(sink.content) < 100


def test_a_viewer_that_reads_nothing_has_missed_nothing_while_there_is_no_news():
    sink = Sink(is_read=False)
    viewer = hub._Viewer(frozenset(), sink)
    sink.unsent_bytes = hub._MOST_BYTES + 1
    viewer.put(b"", 1)
    sink.read()
    viewer.put(b"event: alert\n\n", 2)
    assert sink.content == b"event: alert\n\n"


def test_a_ping_comes_where_nothing_was_written_for_long():
    sink = Sink()
    viewer = hub._Viewer(frozenset(), sink)
    begin_s = time.monotonic()
    viewer.put(b"", begin_s + hub._PING_S - 1)
    assert not sink.content
    viewer.put(b"event: alert\n\n", begin_s + 10)
    viewer.put(b"", begin_s + 10 + hub._PING_S - 1)
    assert b"ping" not in sink.content
    viewer.put(b"", begin_s + 10 + hub._PING_S)
    assert sink.content.endswith(b": ping\n\n")


def test_viewers_have_a_limit(tmp_path, monkeypatch):
    """One more is refused before its events begin; all else is answered."""
    monkeypatch.setattr(hub, "MOST_VIEWERS", 0)
    served = app.app(Dashboard([str(tmp_path)], DashboardConfig(), {}, Webhooks([])), Access())

    def answered(path):
        messages = []

        async def send(message):
            messages.append(message)

        async def receive():
            return {"type": "http.disconnect"}

        headers = [(b"host", b"localhost")]
        scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": headers}
        asyncio.run(served(scope, receive, send))
        return messages[0]["status"], b"".join(one.get("body", b"") for one in messages[1:])

    status, body = answered("/api/events")
    assert status == 503 and json.loads(body)["error"]["code"] == "too_many_viewers"
    assert answered("/api/info")[0] == 200


def test_many_changes_become_one_update(monkeypatch):
    monkeypatch.setattr(hub, "EVERY_S", 0.2)

    async def scenario():
        shared, all_runs, one = hub.Hub(lambda run_id: {"id": run_id}), Sink(), Sink()
        shared.begin()
        with shared.watching([], all_runs), shared.watching(["b"], one):
            shared.changed(Change(updated=["a"]))
            while not all_runs.content:
                await asyncio.sleep(0.01)
            first, all_runs.content = all_runs.content, b""
            for _ in range(100):
                shared.changed(Change(updated=["a"]))
            shared.changed(Change(updated=["b"], reloaded=["b"]))
            while not one.content:
                await asyncio.sleep(0.01)
        assert not shared.viewers
        shared.end()
        return first, all_runs.content, one.content

    first, everything, mine = asyncio.run(asyncio.wait_for(scenario(), 20))
    assert first.count(b"event: update") == 1 and b'"a"' in first
    assert everything.count(b"event: update") == 1 and b'"a"' in everything and b'"b"' in everything
    assert b'"a"' not in mine and mine.startswith(b'event: reload\ndata: {"id":"b"}')


def test_a_change_is_passed_on_at_once():
    async def scenario():
        shared, sink = hub.Hub(lambda run_id: {"id": run_id}), Sink()
        shared.begin()
        with shared.watching([], sink):
            shared.alert({"text": "NaN"})
            while not sink.content:
                await asyncio.sleep(0.01)
        shared.end()
        return sink.content

    assert asyncio.run(asyncio.wait_for(scenario(), 5)).startswith(b"event: alert")


def test_a_client_of_http_1_0_gets_events_without_the_framing_of_1_1(tmp_path, demo, serve):
    run = demo.Demo(tmp_path / "run", log_every=1)
    run.start()
    run.run(0, 5)
    with serve(tmp_path) as client, socket.create_connection(("127.0.0.1", client.port), timeout=20) as viewer:
        client.loaded()
        viewer.sendall(f"GET /api/events HTTP/1.0\r\nHost: 127.0.0.1:{client.port}\r\n\r\n".encode())
        content = b""
        while b"event: hello" not in content:
            content += viewer.recv(10_000)
        run.run(5, 6)
        while not re.search(rb"event: update\ndata: .*\n\n$", content):
            content += viewer.recv(10_000)
    head, _, body = content.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert all(re.fullmatch(rb"event: (\w+)\ndata: (.*)", one) for one in body.split(b"\n\n")[:-1])


@contextlib.contextmanager
def limited(monkeypatch, most=5):
    """A server with short deadlines in this process: its port."""
    monkeypatch.setattr(connections, "HEADER_S", 0.5)
    monkeypatch.setattr(connections, "UNREAD_S", 0.5)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(5_000 if scope["path"] == "/large" else 0):
            await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
        await send({"type": "http.response.body", "body": b"done"})

    room, ended = Room(most), threading.Event()
    settings = uvicorn.Config(
        app, http=functools.partial(Connection, room), lifespan="off", log_config=None, timeout_graceful_shutdown=1
    )
    listening = socket.create_server(("127.0.0.1", 0))
    server = Server(settings, room, functools.partial(ended.is_set))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        ended.set()
        thread.join(10)
        assert not thread.is_alive()


def test_connections_that_send_or_read_nothing_are_closed(monkeypatch):
    with limited(monkeypatch) as port:
        half = socket.create_connection(("127.0.0.1", port), timeout=10)
        half.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        unread = socket.create_connection(("127.0.0.1", port), timeout=10)
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        unread.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        with half, unread:
            assert half.recv(100) == b""
            time.sleep(2.5)
            with contextlib.suppress(ConnectionResetError):
                while unread.recv(1 << 20):
                    pass


def test_idle_connections_give_way_to_new_ones(monkeypatch):
    with limited(monkeypatch, most=5) as port, contextlib.ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(contextlib.closing(socket.create_connection(("127.0.0.1", port), timeout=10)))
        last = stack.enter_context(contextlib.closing(socket.create_connection(("127.0.0.1", port), timeout=10)))
        last.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"done" in last.makefile("rb").read()


def test_a_signal_ends_the_server_and_its_viewers(demo_runs, serve):
    with serve(demo_runs) as client:
        with socket.create_connection(("127.0.0.1", client.port), timeout=10) as viewer:
            viewer.sendall(f"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\n\r\n".encode())
            viewer.settimeout(10)
            content = b""
            while b"event: hello" not in content:
                content += viewer.recv(10_000)
            client.process.send_signal(signal.SIGTERM)
            while part := viewer.recv(10_000):
                content += part
            assert content.endswith(b"\r\n0\r\n\r\n")  # the answer is whole
            assert client.process.wait(10) in (0, -signal.SIGTERM, 143)


def test_the_server_ends_with_its_parent(tmp_path):
    code = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-m', 'capibara.dashboard', {str(tmp_path)!r}, '--port=0', f'--parent={{os.getpid()}}'],"
        " stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60)
    pid, limit_s = int(done.stdout), time.monotonic() + 15
    while time.monotonic() < limit_s:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == "Z":
                return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("it goes on without its parent")


def test_bad_command_lines_are_one_line(tmp_path):
    for arguments in (
        ["runs", "--port=99999"],
        ["runs", "--host=256.0.0.1"],
        ["runs", "--webhook=ftp://x"],
        ["runs", "--token_file=/none"],
        ["runs", "--allowed_host=https://x"],
        [__file__],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "capibara.dashboard", *arguments], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert math.isfinite(done.returncode)


ABSURD = [
    {"kind": "event", "event": "start", "step": 0, "time": -1e308, "total_steps": 1e308, "tokens_per_step": 1e308},
    *({"kind": "train", "step": step, "loss": 2.0, "step_s": 1e308, "data_wait_s": -1e308} for step in range(1, 30)),
    {"kind": "train", "step": 30, "loss": None},
    {
        "kind": "train",
        "step": 40,
        "time": 1e308,
        "loss": 1e308,
        "tokens_per_s": 1e308,
        "mfu": -1e308,
        "rollout_s": 1e308,
    },
    {"kind": "eval", "step": 40, "time": None, "loss": 1e308, "perplexity": 5e-324},
    {"kind": "train", "step": 41, "time": "x", "loss": 1e-300},
    {"kind": "system", "step": 41, "time": 1e308, "disk_free_bytes": -1e308},
]


def test_a_run_that_makes_no_sense_hides_no_other(tmp_path, serve):
    good = [
        {"kind": "event", "event": "start", "step": 0, "time": 1.0},
        {"kind": "train", "step": 1, "time": 2.0, "loss": 3.0},
    ]
    for name, lines in (("good", good), ("odd", ABSURD)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with serve(tmp_path) as client:
        ids = client.ids()
        for path in ("", "/goodput", "/samples", "/nodes"):
            client.get(f"/api/runs/{ids['odd']}{path}")
        client.get("/api/series", run=[*ids.values()], metric=["train/loss", "train/step_s"], x="time", smooth=0.9)
        client.get("/api/compare", run=[*ids.values()])
        client.get("/api/alerts")
        rows = {row["name"]: row for row in client.get("/api/runs")["runs"]}
        assert rows["good"]["loss"] == 3.0 and "odd" in rows
        text = client.raw("/metrics")[2].decode()
        assert 'run="good"' in text and list(parser.text_string_to_metric_families(text))


def test_runs_of_one_name_are_series_of_their_own(tmp_path, serve):
    for root in ("a", "b"):
        (tmp_path / root / "runs" / "one").mkdir(parents=True)
        line = {"kind": "train", "step": 1, "time": 1.0, "loss": 2.0}
        (tmp_path / root / "runs" / "one" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    with serve(tmp_path / "a" / "runs", tmp_path / "b" / "runs") as client:
        client.loaded()
        found = client.raw("/metrics")[2].decode().splitlines()
        losses = [line for line in found if line.startswith("capibara_run_loss{")]
        assert len({*losses}) == 2 and len({line.partition("}")[0] for line in losses}) == 2


@pytest.mark.parametrize(
    "text", ["=1+1", "+1", "-1", "@x", "\t=1", "\r=1", " =1", "\n=1", "\uff1d1", "\x00=1", "\ufeff=1"]
)
def test_a_name_is_no_formula_of_a_spreadsheet(text):
    cell = series._cell(text)
    assert cell.startswith("\"'") and "\n" not in cell and "\r" not in cell


def test_a_cell_holds_any_name():
    assert series._cell('a"b,\udc80\u202e') == '"a""b,? "' and series._cell("run") == '"run"'


def test_events_continue_after_a_run_that_cannot_be_described(monkeypatch, caplog):
    monkeypatch.setattr(hub, "EVERY_S", 0.01)

    def describe(run_id):
        if run_id == "odd":
            raise OverflowError("int too large")
        return {"id": run_id, "loss": float("inf")}

    async def scenario():
        shared, sink = hub.Hub(describe), Sink()
        shared.begin()
        with shared.watching([], sink):
            shared.changed(Change(updated=["odd"]))
            await asyncio.sleep(0.1)
            shared.changed(Change(updated=["good"]))
            while not sink.content:
                await asyncio.sleep(0.01)
        shared.end()
        return sink.content

    assert b'"id":"good","loss":null' in asyncio.run(asyncio.wait_for(scenario(), 20))
    assert "an update could not be passed on" in caplog.text


def test_a_folder_that_is_not_there_yet_is_named(tmp_path):
    lines = []
    command = [sys.executable, "-m", "capibara.dashboard", str(tmp_path / "later"), "--port=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        lines = [process.stdout.readline(), process.stdout.readline()]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        process.stdout.close()
    assert lines[0].startswith("dashboard: http://") and "later does not exist yet" in lines[1]


def test_a_map_of_experts_needs_little_memory():
    run = Run("/nowhere/run", "run")
    count, names = 100_000, [f"expert_load/{number}" for number in range(64)]
    columns = {name: np.full(count, float(number)) for number, name in enumerate([*names, "expert_load/" + "9" * 5000])}
    steps = np.arange(count)
    run.apply([Era(rows={"train": Rows(steps, steps.astype(float), columns)})])
    tracemalloc.start()
    found = consensus.experts(run, 200)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found["experts"] == 64 and found["load"][0] == [*map(float, range(64))] and len(found["load"]) <= 200
    assert peak_bytes < 16 << 20


def test_what_a_viewer_has_missed_is_not_forgotten_while_it_still_reads_nothing():
    sink = Sink(is_read=False)
    viewer = hub._Viewer(frozenset(), sink)
    sink.unsent_bytes = hub._MOST_BYTES + 1
    viewer.put(b"event: alert\n\n", 1)
    viewer.put(b"", 2)  # a look without news
    sink.read()
    viewer.put(b"", 3)
    assert sink.content.startswith(b"event: resync\n")


def test_viewers_are_looked_at_without_news(monkeypatch):
    monkeypatch.setattr(hub, "_LOOK_S", 0.01)
    monkeypatch.setattr(hub, "EVERY_S", 0.01)
    monkeypatch.setattr(hub, "_PING_S", 0.05)

    async def scenario():
        shared, sink = hub.Hub(lambda run_id: None), Sink()
        shared.begin()
        with shared.watching([], sink):
            while not sink.content:
                await asyncio.sleep(0.01)
        shared.end()
        return sink.content

    assert asyncio.run(asyncio.wait_for(scenario(), 5)) == b": ping\n\n"


def test_a_viewer_hears_of_no_other_run():
    """Neither of its lines nor that it is to be loaded again."""

    async def scenario():
        shared, mine, all_runs = hub.Hub(lambda run_id: {"id": run_id}), Sink(), Sink()
        with shared.watching(["b"], mine), shared.watching([], all_runs):
            shared._note(Change(updated=["a"], reloaded=["a"]))
            await shared._tell()
        return mine.content, all_runs.content

    mine, everything = asyncio.run(scenario())
    assert not mine and everything.startswith(b'event: reload\ndata: {"id":"a"}')


def test_events_come_no_more_often_than_each_second(monkeypatch):
    monkeypatch.setattr(hub, "EVERY_S", 0.3)

    async def scenario():
        shared, sink = hub.Hub(lambda run_id: {"id": run_id}), Sink()
        shared.begin()
        with shared.watching([], sink):
            begin_s = time.monotonic()
            for _ in range(20):
                shared.changed(Change(updated=["a"]))
                await asyncio.sleep(0.02)
            most = 2 + (time.monotonic() - begin_s) / hub.EVERY_S
        shared.end()
        return sink.content.count(b"event: update"), most

    count, most = asyncio.run(scenario())
    assert 1 <= count <= most


def test_a_viewer_that_leaves_is_no_longer_written_to():
    async def scenario():
        shared, gone = hub.Hub(lambda run_id: None), asyncio.Event()

        async def receive():
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            pass

        stream = hub.EventStream(shared, [], {})
        answer = asyncio.ensure_future(stream({"state": {"connection": Sink()}}, receive, send))
        while not shared.viewers:
            await asyncio.sleep(0)
        gone.set()
        await answer
        return shared.viewers

    assert asyncio.run(asyncio.wait_for(scenario(), 5)) == 0
