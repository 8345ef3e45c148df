"""Alerts: when they begin and end, and who is informed."""

from __future__ import annotations

import http.server
import json
import logging
import socket
import threading
import time

import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.monitoring.dashboard.alerts import rules, webhooks
from capibara.monitoring.dashboard.alerts.board import Alert, Board
from capibara.monitoring.dashboard.alerts.rules import Kind, Rules
from capibara.monitoring.dashboard.alerts.webhooks import Webhooks
from capibara.monitoring.dashboard.settings import DashboardConfig
from capibara.monitoring.dashboard.state import Dashboard
from capibara.monitoring.reading import parsing
from capibara.monitoring.reading.run import Run

NOW_S = 1.7e9


def line(step, loss=2.0, **more):
    return {"kind": "train", "step": step, "time": NOW_S + step, "loss": loss, "step_s": 1.0, **more}


@pytest.fixture
def run():
    found = Run("/nowhere/run", "run")
    found.is_new = False
    add(found, {"kind": "event", "step": 0, "time": NOW_S, "event": "start", "total_steps": 1000})
    return found


def add(run, *records):
    run.apply(parsing.parse_text("".join(json.dumps(record) + "\n" for record in records).encode(), 0))


def kinds(run, now_s=NOW_S, **options):
    return [(found.kind, found.step) for found in rules.check(run, Rules(**options), now_s)]


def noisy(step):
    return 2.0 + 0.01 * ((step * 7919) % 13 - 6)


def test_a_spike_is_one_alert(run):
    add(run, *(line(step, noisy(step)) for step in range(1, 200)))
    assert kinds(run, NOW_S + 200) == []
    add(run, line(200, 5.0), line(201, 4.9), *(line(step, noisy(step)) for step in range(202, 300)))
    assert kinds(run, NOW_S + 300) == [(Kind.SPIKE, 200)]


def test_spikes_are_those_of_a_plain_loop():
    noise = np.random.default_rng(0)
    loss = 2.0 + 0.1 * noise.standard_normal(2_000)
    loss[[300, 900, 1500]] += 3.0
    expected = [
        at for at in range(16, len(loss))
        if loss[at] - (before := loss[max(0, at - 128) : at]).mean() > 6 * max(before.std(), 1e-3 * before.mean())
    ]  # fmt: skip
    assert np.flatnonzero(rules._far_above(loss, 128, 6.0)).tolist() == expected == [300, 900, 1500]


def test_a_falling_or_constant_loss_has_no_spikes(run):
    add(
        run, *(line(step, 2.0) for step in range(1, 100)), *(line(step, 2.0 - step / 1_000) for step in range(100, 900))
    )
    assert kinds(run, NOW_S + 900) == []


def test_numbers_that_are_not_finite(run):
    add(
        run,
        *(line(step, noisy(step)) for step in range(1, 50)),
        line(50, None),
        line(51, None),
        line(52, 2.0, skipped=1.0),
        line(53),
    )
    assert kinds(run, NOW_S + 60) == [(Kind.NAN, 50)]


def test_a_stall_begins_and_ends(run):
    news = []
    board = Board(Rules(), lambda alert: news.append((alert.finding.kind, alert.ended_s is None)))
    add(run, *(line(step, noisy(step)) for step in range(1, 50)))
    board.check(run, NOW_S + 60, is_due=True)
    board.check(run, NOW_S + 400, is_due=True)
    board.check(run, NOW_S + 500, is_due=True)
    assert news == [(Kind.STALL, True)] and board.active(run.id) == 1
    add(run, {**line(50), "time": NOW_S + 510})
    board.check(run, NOW_S + 511, is_due=True)
    assert news == [(Kind.STALL, True), (Kind.STALL, False)] and board.active(run.id) == 0
    assert [alert.finding.kind for alert in board.all(run.id)] == [Kind.STALL]


def test_what_happened_long_ago_is_no_news(run):
    news = []
    board = Board(Rules(), news.append)
    add(
        run,
        *(line(step, noisy(step)) for step in range(1, 100)),
        line(100, 9.0),
        *(line(s, noisy(s)) for s in range(101, 200)),
    )
    add(run, {"kind": "event", "step": 199, "time": NOW_S + 200, "event": "end", "reason": "finished"})
    board.check(run, NOW_S + 100_000, is_due=True)
    assert not news and [alert.finding.kind for alert in board.all()] == [Kind.SPIKE]


def test_low_goodput_and_a_full_disk(run):
    add(run, *({**line(step, noisy(step)), "time": NOW_S + 20 * step} for step in range(1, 100)))
    add(run, {"kind": "system", "step": 99, "time": NOW_S + 1_980, "disk_free_bytes": 5e9})
    assert kinds(run, NOW_S + 1_990) == [(Kind.DISK, 99), (Kind.GOODPUT, 99)]
    assert kinds(run, NOW_S + 1_990, low_goodput=0.01, disk_free_gib=1.0) == []


@pytest.mark.parametrize(("drawn", "expected"), [([1, 1, 1], [(Kind.REJECTED, 3)]), ([1, 0, 1], []), ([0, 0, 0], [])])
def test_a_node_that_was_not_drawn_is_not_rejected(run, drawn, expected):
    about = [{"node_0/accepted": 1.0, "node_1/accepted": 0.0, "node_1/drawn": float(one)} for one in drawn]
    add(run, *(line(step, **one) for step, one in enumerate(about, 1)))
    assert kinds(run, NOW_S + 4) == expected


class Receiver:
    """An HTTP server that answers with the given statuses, one after the other, then with 200."""

    def __init__(self, *statuses, location=None):
        outer, self.bodies, self.statuses = self, [], list(statuses)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                outer.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(outer.statuses.pop(0) if outer.statuses else 200)
                if location:
                    self.send_header("Location", location)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook?key=a-secret"


@pytest.fixture
def receiver():
    made = []

    def of(*statuses, **options):
        made.append(Receiver(*statuses, **options))
        return made[-1]

    yield of
    for one in made:
        one.server.shutdown()
        one.server.server_close()


def delivered(hooks, count):
    limit_s = time.monotonic() + 10
    while hooks.sent + hooks.failed < count:
        assert time.monotonic() < limit_s
        time.sleep(0.01)


def test_alerts_are_sent_again_after_faults(receiver):
    good = receiver(503, 429)
    hooks = Webhooks([good.url], waits_s=(0.01, 0.01))
    hooks.start()
    hooks.send({"text": "loss spike"})
    delivered(hooks, 1)
    assert hooks.sent == 1 and good.bodies == [{"text": "loss spike"}] * 3
    hooks.stop()


def test_a_dead_receiver_holds_up_nobody_and_its_secret_is_not_logged(receiver, caplog):
    good, refusing = receiver(), receiver(404)
    dead = "http://127.0.0.1:9/hook/another-secret"
    hooks = Webhooks([dead, refusing.url, good.url], waits_s=(0.01,))
    hooks.start()
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            hooks.send({"number": number})
        delivered(hooks, 9)
    assert good.bodies == [{"number": number} for number in range(3)]
    assert "http://127.0.0.1/..." in caplog.text and "secret" not in caplog.text
    assert caplog.text.count("could not be sent") == 2  # once for each receiver
    hooks.stop()


def test_redirects_are_not_followed(receiver):
    inner = receiver()
    outer = receiver(302, 307, location=inner.url)
    hooks = Webhooks([outer.url], waits_s=())
    hooks.start()
    hooks.send({})
    hooks.send({})
    delivered(hooks, 2)
    assert hooks.failed == 2 and not inner.bodies
    hooks.stop()


def test_only_addresses_of_http_are_accepted(tmp_path, monkeypatch):
    for url in ("ftp://host/x", "file:///etc/passwd", "http://", "host", "http://host\r\nX: y/", "http://host:99999/"):
        with pytest.raises(UserError):
            webhooks.addresses([url], None)
    (tmp_path / "urls").write_text("https://one.example/a\n\nhttps://two.example/b\n")
    monkeypatch.setenv(webhooks.VARIABLE, "https://three.example/c")
    found = webhooks.addresses(["https://one.example/a"], str(tmp_path / "urls"))
    assert found == ("https://one.example/a", "https://three.example/c", "https://two.example/b")


def test_an_alert_of_lines_without_times_can_be_sent(run):
    sent = []
    board = Board(Rules(), lambda alert: sent.append(json.dumps(alert.as_json(), allow_nan=False)))
    lines = [line(step, None if step == 20 else noisy(step)) for step in range(1, 60)]
    add(run, *({name: value for name, value in one.items() if name != "time"} for one in lines))
    board.check(run, NOW_S, is_due=True)
    found = [alert.as_json() for alert in board.all(run.id)]
    assert found and all(json.dumps(one, allow_nan=False) for one in found)


def test_a_runs_name_calls_nobody_in_a_chat(receiver, tmp_path):
    good = receiver()
    hooks = Webhooks([good.url])
    hooks.start()
    dashboard = Dashboard([str(tmp_path)], DashboardConfig(), {}, hooks)
    found = rules.Found(kind=Kind.NAN, severity=rules.Severity.SERIOUS, key="", step=1, time_s=NOW_S, text="the loss")
    dashboard._news(Alert("id", "run", "<!channel> & \u202e\x1b", found))
    delivered(hooks, 1)
    assert good.bodies[0]["text"] == "&lt;!channel&gt; &amp; \\u202e\\x1b: the loss (serious)"
    hooks.stop()


@pytest.mark.parametrize(
    "url", ["https://a..b/x", "https://me:a-secret@host/x", "http://x:99999/", "https://" + "x" * 70]
)
def test_addresses_that_cannot_work_are_refused_without_being_shown(url):
    with pytest.raises(UserError) as caught:
        webhooks.addresses([url], None)
    assert "a-secret" not in str(caught.value) and url not in str(caught.value)


def test_an_answer_that_never_ends_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            connection, _ = listening.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
                ended.wait(20)

        ended = threading.Event()
        threading.Thread(target=answer, daemon=True).start()
        begun_s = time.monotonic()
        fault = webhooks._post(f"http://127.0.0.1:{listening.getsockname()[1]}/", b"{}")
        ended.set()
        assert fault == (None, False) and time.monotonic() - begun_s < 3
