"""A Hub on this machine with one repository, me/small: what its clients ask of a model or of a data set, and send of a model."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def running(kind: str, files: dict[str, bytes]) -> Iterator[str]:
    """The address of a server with these files; `kind` is "models" or "datasets"."""
    handler = type("Hub", (_Handler,), {"kind": kind, "files": files})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers for the list of files, for what the repository is, and for each file."""

    protocol_version = "HTTP/1.1"
    kind: str
    files: dict[str, bytes]

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def do_POST(self):
        """A repository that is made, and a commit whose files are in `files` afterwards."""
        path, body = self.path.partition("?")[0], self._body()
        if path == "/api/repos/create":
            self._send(json.dumps({"url": f"http://{self.headers['Host']}/me/small"}).encode(), True)
        elif path == "/api/models/me/small/preupload/main":
            rows = [
                {"path": row["path"], "uploadMode": "regular", "shouldIgnore": False}
                for row in json.loads(body)["files"]
            ]
            self._send(json.dumps({"files": rows}).encode(), True)
        elif path == "/api/models/me/small/commit/main":
            lines = [json.loads(line) for line in body.splitlines()]
            sent = [line["value"] for line in lines if line["key"] == "file"]
            self.files.update({value["path"]: base64.b64decode(value["content"]) for value in sent})
            commit = {
                "success": True,
                "commitOid": COMMIT,
                "commitUrl": f"http://{self.headers['Host']}/me/small/commit/{COMMIT}",
            }
            self._send(json.dumps(commit).encode(), True)
        else:
            self._send(json.dumps({"errors": [], "warnings": []}).encode(), True)  # of a model card

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        prefix = "" if self.kind == "models" else f"/{self.kind}"
        revision, _, name = path.removeprefix(f"{prefix}/me/small/resolve/").partition("/")
        if path.startswith(f"/api/{self.kind}/me/small/tree/"):
            rows = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.files.items()
            ]
            self._send(json.dumps(rows).encode(), with_body)
        elif path.startswith(f"/api/{self.kind}/me/small"):
            siblings = [{"rfilename": name} for name in self.files]
            self._send(json.dumps({"id": "me/small", "sha": COMMIT, "siblings": siblings}).encode(), with_body)
        elif revision in (COMMIT, "main") and name in self.files:
            self._send(self.files[name], with_body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if "/me/small" in path else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send(self, content: bytes, with_body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def log_message(self, *args: object) -> None: ...
