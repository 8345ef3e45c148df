"""An emulator of S3 (moto's) in a thread of this process, whose reads fail on demand."""

from __future__ import annotations

import contextlib
import re
import threading
import urllib.request
from collections.abc import Iterator

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug import serving

_ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>as told</Message></Error>'
_STATUS = {"SlowDown": 503, "InternalError": 500, "AccessDenied": 403, "InvalidRequest": 400, "ExpiredToken": 400}
_OBJECT = re.compile(r"/[^/]+/.+")


class S3Server:
    """Listens at `url`. Its next reads of objects fail by `faults`: an S3 code, "cut" in the middle, or None: no
    failure.

    Where it `refuses`, a code, all requests do.
    """

    def __init__(self):
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = serving.make_server("127.0.0.1", 0, self, threaded=True, request_handler=_Quiet)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.faults: list[str | None] = []
        self.refuses: str | None = None
        self.requests = self.reads = 0
        self._lock, self._writing = threading.Lock(), threading.Lock()
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/bucket", method="PUT")).close()

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which a program takes s3:// for this server."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "anybody",
            "AWS_SECRET_ACCESS_KEY": "anything",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()

    def __call__(self, environ, start_response) -> Iterator[bytes]:
        is_read = environ["REQUEST_METHOD"] == "GET" and _OBJECT.fullmatch(environ["PATH_INFO"]) is not None
        with self._lock:
            self.requests += 1
            self.reads += is_read
            fault = self.faults.pop(0) if is_read and self.faults else None
        code = self.refuses or (fault if fault != "cut" else None)
        if code is not None:
            content = b"" if environ["REQUEST_METHOD"] == "HEAD" else _ERROR.format(code=code).encode()
            start_response(f"{_STATUS[code]} {code}", [("Content-Type", "application/xml")])
            return iter([content])
        conditional = "HTTP_IF_MATCH" in environ or "HTTP_IF_NONE_MATCH" in environ
        with (
            self._writing if conditional else contextlib.nullcontext()
        ):  # from the look to the write nobody else writes so
            content = b"".join(self._app(environ, start_response))
        return iter([content[: len(content) // 2] if fault == "cut" else content])


class _Quiet(serving.WSGIRequestHandler):
    def log(self, *arguments, **options) -> None:
        pass
