"""Who may ask: foreign pages, wrong tokens, paths that lead elsewhere, requests that are too large."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import time
import types

import pytest

from capibara.core.types import UserError
from capibara.monitoring.dashboard import search, server
from capibara.monitoring.dashboard.http import access
from capibara.monitoring.dashboard.views import files
from capibara.monitoring.reading.run import Run

TOKEN = "a-token-of-a-test-0123456789"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)


@pytest.fixture(scope="module")
def closed(demo_runs, serve):
    """A server that needs a token."""
    with serve(demo_runs, env={server.TOKEN: TOKEN}) as client:
        yield client


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:{port}", 200),
        ("127.0.0.1", 200),
        ("[::1]:{port}", 200),
        ("evil.example", 403),
        ("evil.example:{port}", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost@evil.example", 400),
        ("a b", 400),
        ("", 400),
    ],
)
def test_only_this_machines_names_are_accepted(dashboard, host, status):
    answer = dashboard.raw("/api/runs", host=host.format(port=dashboard.port) or " ")
    assert answer[0] == status


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("Origin", "http://127.0.0.1:{port}", 200),
        ("Origin", "http://evil.example", 403),
        ("Origin", "null", 403),
        ("Origin", "http://127.0.0.1:1", 403),
        ("Sec-Fetch-Site", "same-origin", 200),
        ("Sec-Fetch-Site", "cross-site", 403),
        ("Content-Length", "5", 413),
        ("Transfer-Encoding", "chunked", 413),
        ("X-Long", "x" * 17_000, 431),
    ],
)
def test_headers_of_foreign_or_large_requests(dashboard, name, value, status):
    try:
        answer = dashboard.raw("/api/runs", headers=[(name, value.format(port=dashboard.port))])[0]
    except (ConnectionError, http.client.HTTPException):
        answer = 431  # closed before an answer
    assert answer == status or status == 431 and answer == 400


@pytest.mark.parametrize("path", ["/api/events", "/api/export.csv", "/api/runs", "/"])
def test_a_head_has_no_body(dashboard, path):
    status, _, body = dashboard.raw(path, method="HEAD")
    assert status == 200 and not body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"])
def test_nothing_can_be_changed(dashboard, method):
    assert dashboard.raw("/api/runs", method=method)[0] == 405


@pytest.mark.parametrize(
    "path",
    [
        "/static/../state.py",
        "/static/..%2fstate.py",
        "/static/%2e%2e/state.py",
        "/static/%2e%2e%2f%2e%2e%2fserver.py",
        "/static/..\\state.py",
        "/static//etc/passwd",
        "/static/index.html%00.js",
        "/static/.hidden.js",
        "/static/" + "a" * 2_000 + ".js",
        "/api/runs/..%2f..%2fetc/config",
        "/api/runs/%00/config",
        "/api/runs/{id}/image/..%2fconfig.gin",
        "/api/runs/{id}/image/%2e%2e%2f%2e%2e%2fsecret.png",
        "/api/runs/{id}/image/config.gin",
        "/api/runs/{id}/image/link.png",
        "/api/runs/{id}/image/fake.png",
        "/api/runs/{id}/image/real.png%00",
        "/api/runs/{id}/nothing",
    ],
)
def test_no_path_leads_elsewhere(dashboard, demo_runs, path):
    folder = demo_runs / "baseline"
    (demo_runs / "secret.png").write_bytes(PNG)
    (folder / "real.png").write_bytes(PNG)
    (folder / "fake.png").write_text("<script>alert(1)</script>")
    if not (folder / "link.png").is_symlink():
        os.symlink(demo_runs / "secret.png", folder / "link.png")
    run_id = dashboard.ids()["baseline"]
    status, headers, body = dashboard.raw(path.format(id=run_id))
    assert status in (400, 404, 414)
    assert b"root:" not in body and PNG not in body
    good = dashboard.raw(f"/api/runs/{run_id}/image/real.png")
    assert good[0] == 200 and good[1]["content-type"] == "image/png"


def test_a_pipe_is_no_picture(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    assert files.picture(Run(str(tmp_path), "run"), "pipe.png") is None
    assert files.pictures(Run(str(tmp_path), "run")) == []


def test_every_answer_has_the_headers_of_security(dashboard):
    for path in ("/", "/api/runs", "/api/nothing", "/static/none.js", "/metrics", "/health"):
        headers = {name.lower(): value for name, value in dashboard.raw(path)[1].items()}
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
        assert "server" not in headers


def test_what_a_run_wrote_is_never_sent_as_html(dashboard):
    name = "<img src=x onerror=alert(1)>"
    run_id = dashboard.ids()[name]
    for path in ("", "/samples", "/config", "/goodput", "/nodes", "/experts"):
        status, headers, body = dashboard.raw(f"/api/runs/{run_id}{path}")
        assert status == 200 and headers["content-type"] == "application/json"
        json.loads(body)
    csv = dashboard.raw(f"/api/export.csv?run={run_id}&metric=train/loss")
    assert csv[1]["content-type"].startswith("text/csv") and csv[1]["content-disposition"].startswith("attachment")
    details = dashboard.get(f"/api/runs/{run_id}")
    assert "train/<script>alert(2)</script>" in [metric["name"] for metric in details["metrics"]["train"]]


def test_without_the_token_nothing_is_told(closed):
    for path in ("/api/runs", "/api/info", "/metrics", "/static/index.html", "/api/events"):
        status, _, body = closed.raw(path)
        assert status == 401 and b"baseline" not in body
    assert closed.raw("/")[0] == 401
    assert closed.raw("/health")[0] == 200
    link = closed.raw("/", headers=[("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "navigate")])
    assert link[0] == 401 and b'content="0;url=/"' in link[2]  # once more, with the cookie


def test_the_token_becomes_a_cookie(closed):
    status, headers, _ = closed.raw(f"/?token={TOKEN}")
    assert status == 200 and "location" not in headers  # the page itself leads on, so that the cookie is sent
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and TOKEN not in cookie
    pair = cookie.partition(";")[0]
    assert closed.raw("/api/runs", headers=[("Cookie", pair)])[0] == 200
    assert closed.raw("/api/runs", headers=[("Cookie", pair[:-1] + "x")])[0] == 401
    assert closed.raw("/api/runs", headers=[("Authorization", f"Bearer {TOKEN}")])[0] == 200


def test_wrong_tokens_are_refused_and_slowed_down(closed):
    for given in ("", "wrong", TOKEN[:-1], TOKEN + "x"):
        assert closed.raw(f"/?token={given}")[0] == 401
    statuses = {closed.raw("/api/runs", headers=[("Authorization", f"Bearer wrong-{n}")])[0] for n in range(40)}
    assert statuses == {401, 429}
    assert closed.raw("/api/runs", headers=[("Authorization", f"Bearer {TOKEN}")])[0] == 200


def test_after_too_many_guesses_an_address_waits_even_with_the_token(monkeypatch):
    """Else each guess would still count; another address, or the same one later, can sign in."""
    now_s = [1_000.0]
    monkeypatch.setattr(access, "time", types.SimpleNamespace(monotonic=lambda: now_s[0]))
    guarded = access.Guarded(None, access.Access(token=TOKEN))

    def status(given, client="10.0.0.1"):
        messages = []

        async def send(message):
            messages.append(message)

        scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", b"localhost")]}
        scope |= {"query_string": f"token={given}".encode(), "client": (client, 1)}
        asyncio.run(guarded(scope, None, send))
        return messages[0]["status"]

    assert [status("wrong") for _ in range(21)] == [401] * 20 + [429]
    assert status(TOKEN) == 429 and status(TOKEN, client="10.0.0.2") == 200
    now_s[0] += 10
    assert status(TOKEN) == 200


def test_other_machines_need_a_token(demo_runs, serve):
    with serve(demo_runs, "--host=0.0.0.0") as client:
        assert client.token and len(client.token) >= 32
        assert client.raw("/api/runs")[0] == 401
        assert client.raw("/api/runs", headers=[("Authorization", f"Bearer {client.token}")])[0] == 200


def test_tokens_are_checked_before_the_server_starts(tmp_path, monkeypatch):
    monkeypatch.setenv(server.TOKEN, "short")
    with pytest.raises(UserError, match="at least 16"):
        server._token(server.Options(roots=("x",)), is_open=False)
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert server._token(server.Options(roots=("x",), token_file=str(tmp_path / "token")), is_open=True) == (
        TOKEN,
        False,
    )
    with pytest.raises(UserError, match="cannot be read"):
        server._token(server.Options(roots=("x",), token_file=str(tmp_path / "none")), is_open=True)


@pytest.mark.parametrize(
    "expression", [r"(a+)+$", r"(?:a?){900}a{900}c", r"(\w+\s?)*$$x", r"(a|aa)+$", r"(.*)(.*)(.*)(.*)x"]
)
def test_no_search_takes_long(expression):
    begin_s = time.monotonic()
    found = search.Search(expression)
    for _ in range(100):
        try:
            assert not found.matches("a" * 5_000 + "!")
        except UserError as error:
            assert "takes too long" in str(error)
    assert time.monotonic() - begin_s < 2.0


@pytest.mark.parametrize("expression", ["[", "(", "a{5000}", "(a{1,3000})", "x" * 201, "(?P<"])
def test_searches_that_are_refused(expression):
    with pytest.raises(UserError, match="the search"):
        search.Search(expression)


def test_a_bad_search_is_explained(dashboard):
    status, _, body = dashboard.raw("/api/runs?search=%5B")
    assert status == 400 and json.loads(body)["error"]["code"] == "bad_search"
    assert [run["name"] for run in dashboard.get("/api/runs", search="^group/.*nodes$")["runs"]] == ["group/four nodes"]
    assert dashboard.get("/api/runs", search="Trainer.seed = 3", within="config")["matched"] == 1


@pytest.mark.parametrize(
    "query",
    ["points=1", "points=nan", "points=1e9", "smooth=1", "x=evil", "from=x", "smooth=" + "9" * 500]
    + ["run=" + "&run=".join(map(str, range(30)))],
)
def test_parameters_have_limits(dashboard, query):
    run_id = dashboard.ids()["baseline"]
    status, _, body = dashboard.raw(f"/api/series?run={run_id}&metric=train/loss&{query}")
    assert status == 400 and json.loads(body)["error"]["code"] == "bad_parameter"


def test_many_parameters_are_no_fault(dashboard):
    run_id = dashboard.ids()["baseline"]
    for path in ("/api/events", "/api/series", "/"):
        query = "&".join(f"run={run_id}&metric=train/{number}" for number in range(80))
        status, headers, _ = dashboard.raw(f"{path}?{query}", method="HEAD")
        assert status in (200, 400) and "content-security-policy" in {name.lower() for name in headers}


def test_a_cookie_is_found_behind_odd_ones_of_other_programs(closed):
    rules = access.Access(token=TOKEN, port=closed.port)
    pair = f"{rules.cookie}={rules.session}"
    for cookies in (f'other={{"a": 1}}; {pair}', f"a b=c d; {pair}; x", f"{pair}; (=)", f'q="unended; {pair}'):
        assert closed.raw("/api/runs", headers=[("Cookie", cookies)])[0] == 200, cookies
    for cookies in ("", ";;;", rules.cookie, f"{rules.cookie}=", f"x{pair}", 'other={"a": 1}'):
        assert closed.raw("/api/runs", headers=[("Cookie", cookies)])[0] == 401


def test_a_proxy_needs_a_token_on_a_loopback_address_too(demo_runs, serve):
    with serve(demo_runs, "--allowed_host=Dash.example.com") as client:
        assert client.token and client.raw("/api/runs", host="dash.example.com")[0] == 401
        bearer = [("Authorization", f"Bearer {client.token}")]
        assert client.raw("/api/runs", host="dash.example.com", headers=bearer)[0] == 200
        assert client.raw("/api/runs", host="evil.example", headers=bearer)[0] == 403


@pytest.mark.parametrize("name", ["https://dash.example.com", "dash.example.com:8443", "a b", "", "x" * 300])
def test_what_cannot_be_a_hosts_name_is_refused(name):
    with pytest.raises(UserError, match="--allowed_host=.* must be a name"):
        access.check_hosts([name])


def test_a_link_is_no_configuration(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("Trainer.steps = 7\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.gin").symlink_to(secret)
    assert files.config_text(Run(str(tmp_path / "run"), "run")) is None
    assert files.config_text(Run(str(tmp_path / "none"), "run")) is None


def test_dashboards_on_two_ports_have_two_cookies():
    """A browser sends the cookies of a host to all its ports: signing in to one must not sign out of the other."""
    assert access.Access(token=TOKEN, port=1).cookie != access.Access(token=TOKEN, port=2).cookie
