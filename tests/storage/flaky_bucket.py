"""A bucket with Google Cloud Storage's version rules that fails on demand: a proxy before the emulator.

The emulator numbers versions and then ignores what a request expects of them (ifGenerationMatch, generation).
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import parse_qs, quote, unquote, urlsplit

# (method, path with its query) -> a status to answer with, "cut": half of the answer, or None: the emulator's answer.
_NAME = re.compile(rb'"name": *("[^"]*")')
Fault = Callable[[str, str], int | str | None]


class FlakyBucket(http.server.ThreadingHTTPServer):
    """Listens at `url`; calls `faults` for every request, and uses the first result that is not None."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, emulator: str):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.emulator = emulator
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.faults: list[Fault] = []
        self.asked: list[tuple[str, str, int]] = []  # method, path, status
        self.writing = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which a program takes gs:// for this server."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,  # gcsfs
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GCE_METADATA_HOST": "127.0.0.1:1",  # nobody to ask for credentials
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # nor for the kind of the bucket
        }

    @contextlib.contextmanager
    def failing(self, *faults: Fault) -> Iterator[None]:
        """Context in which these faults happen."""
        self.faults[:0] = faults
        try:
            yield
        finally:
            del self.faults[: len(faults)]

    def handle_error(self, request, client_address) -> None:
        """Does not log clients that have disconnected."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def times(count: int, status: int | str, method: str, part: str) -> Fault:
    """The first `count` requests with this method and part of a path fail."""
    left = [count]

    def fault(asked: str, path: str) -> int | str | None:
        if asked == method and part in unquote(path) and left[0] > 0:
            left[0] -= 1
            return status
        return None

    return fault


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm, wbufsize = True, -1  # else an answer in two parts takes 40 ms more

    def _any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(iter(self._chunk, b""))
        fault = next(filter(None, (fault(self.command, self.path) for fault in self.server.faults)), None)
        if isinstance(fault, int):
            return self._answer(fault, {}, json.dumps({"error": {"code": fault, "message": "made to fail"}}).encode())
        expected = parse_qs(urlsplit(self.path).query).get("ifGenerationMatch")
        if expected is None:
            status, headers, content = self._version_asked() or self._passed(body)
        else:
            with self.server.writing:  # from the look to the write nobody else writes so
                if self._generation(body) != expected[0]:
                    status, headers, content = 412, {}, b'{"error": {"code": 412, "message": "conditionNotMet"}}'
                else:
                    status, headers, content = self._passed(body)
        if fault == "lost":  # it was done, and nobody hears of it
            self.server.asked.append((self.command, self.path, 0))
            self.close_connection = True
            return None
        return self._answer(status, headers, content, cut=fault == "cut")

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = _any

    def _chunk(self) -> bytes:
        size = int(self.rfile.readline(), 16)
        data = self.rfile.read(size)
        self.rfile.readline()
        return data

    def _version_asked(self):
        """A deleted version is not found."""
        asked = parse_qs(urlsplit(self.path).query).get("generation")
        if self.command == "GET" and asked and asked[0] != self._generation():
            return 404, {}, b'{"error": {"code": 404, "message": "no such version"}}'
        return None

    def _generation(self, body: bytes = b"") -> str:
        url = urlsplit(self.path)
        path = f"/storage/v1{url.path.partition('/storage/v1')[2]}"
        if url.path.startswith("/upload/"):
            name = parse_qs(url.query).get("name") or [json.loads(_NAME.search(body)[1])]  # of several parts
            path = f"{path}/{quote(name[0], safe='')}"
        status, _, content = self._forward("GET", path, {}, b"")
        return json.loads(content)["generation"] if status == 200 else "0"

    def _passed(self, body: bytes):
        skipped = ("connection", "transfer-encoding", "content-length", "accept-encoding")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in skipped}
        return self._forward(self.command, self.path, headers, body)

    def _forward(self, method: str, path: str, headers: dict[str, str], body: bytes):
        for attempt in range(5):
            one = http.client.HTTPConnection(self.server.emulator, timeout=30)
            try:
                one.request(method, path, body or None, headers)
                answer = one.getresponse()
                return answer.status, dict(answer.getheaders()), answer.read()
            except ConnectionError:  # it answers one after the other, and its queue is short
                if attempt == 4:
                    raise
                time.sleep(0.05)
            finally:
                one.close()

    def _answer(self, status: int, headers: dict[str, str], content: bytes, cut: bool = False) -> None:
        self.server.asked.append((self.command, self.path, status))
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "content-length", "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        self.wfile.flush()
        if cut:
            self.close_connection = True

    def log_message(self, *args) -> None:
        pass
