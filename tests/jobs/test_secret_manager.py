"""Secret Manager's answers, by its own client's library on loopback."""

import base64
import http.server
import json
import threading

import google.auth
import google.auth.credentials
import pytest

from capibara.core.types import TryAgain, UserError
from capibara.jobs import secret_manager

NAME = "projects/p/secrets/s/versions/latest"


@pytest.fixture
def service(monkeypatch):
    """A server that answers each request with (status, body); its requests are in `asked`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            server.asked.append((self.path, self.headers["authorization"]))
            status, body = server.answer
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.answer = [], (200, b"")
    threading.Thread(target=server.serve_forever, daemon=True).start()

    class Account(google.auth.credentials.AnonymousCredentials):
        def before_request(self, request, method, url, headers):
            headers["authorization"] = "Bearer token-of-the-account"

    monkeypatch.setattr(google.auth, "default", lambda scopes: (Account(), "p"))
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield server
    server.shutdown()
    server.server_close()


def test_the_value_of_a_version(service):
    data = base64.b64encode("hf_äöü\n".encode()).decode()
    service.answer = (200, json.dumps({"name": NAME, "payload": {"data": data}}).encode())
    assert secret_manager.read(NAME, service.url) == "hf_äöü"
    assert service.asked == [(f"/v1/{NAME}:access", "Bearer token-of-the-account")]


@pytest.mark.parametrize(
    ("status", "body", "error", "message"),
    [
        (403, b"{}", UserError, "grant it roles/secretmanager.secretAccessor"),
        (404, b"{}", UserError, "does not exist"),
        (503, b"", TryAgain, "answers 503"),
        (200, b"<html>", UserError, "is not text in UTF-8"),
        (200, json.dumps({"payload": {"data": base64.b64encode(b"\xff").decode()}}).encode(), UserError, "is not text"),
    ],
)
def test_other_answers(service, status, body, error, message):
    service.answer = (status, body)
    with pytest.raises(error, match=message):
        secret_manager.read(NAME, service.url)


def test_no_answer(service):
    service.shutdown()
    service.server_close()
    with pytest.raises(TryAgain, match="Secret Manager does not answer"):
        secret_manager.read(NAME, service.url)
