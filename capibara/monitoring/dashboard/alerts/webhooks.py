"""Sends alerts to addresses that the user has named: JSON by POST, with time limits and retries.

Only these addresses are ever requested: nothing that a run folder or a viewer says becomes one, and redirects are not followed.
An address may contain a secret: it is never logged whole.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import queue
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Sequence

from capibara.core.types import UserError
from capibara.monitoring.dashboard.views.names import Json

_WAITS_S = (1.0, 5.0, 25.0)  # before each further attempt
_TIMEOUT_S = 5.0
_MOST_WAITING = 200
_MOST_URLS = 16
VARIABLE = "CAPIBARA_DASHBOARD_WEBHOOKS"


def addresses(named: Sequence[str], file: str | None) -> tuple[str, ...]:
    """The addresses from the command line or Gin, a file (one a line) and the environment.

    Raises:
      UserError: the file cannot be read, or an address cannot be used.
    """
    result = [*named, *os.environ.get(VARIABLE, "").split()]
    if file is not None:
        try:
            with open(file, encoding="utf-8") as lines:
                result += [line.strip() for line in lines if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"--webhook_file={file} cannot be read ({error}): name a file with one URL a line"
            ) from None
    for url in result:
        _check(url)
    if len(result) > _MOST_URLS:
        raise UserError(f"{len(result)} webhooks are named, must be at most {_MOST_URLS}")
    return tuple(dict.fromkeys(result))


def shown(url: str) -> str:
    """An address without what may be secret in it: its scheme and host."""
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}/..."


def _check(url: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        (parts.hostname or "").encode("idna")  # as the look-up of the name does, which fails for a..b
    except ValueError:
        is_whole = False
    if is_whole and "@" in parts.netloc:
        raise UserError("a webhook has a user name, which is not sent: name a URL with its secret in the path")
    if not is_whole or any(ord(sign) <= 32 or ord(sign) > 126 for sign in url):
        raise UserError("a webhook is no URL of http or https: try https://hooks.example.com/alerts")


class Webhooks:
    """Sends messages in a thread of its own; a slow or dead receiver holds up nobody else.

    Args:
      urls: the addresses.
      waits_s: seconds before each further attempt.
    """

    def __init__(self, urls: Sequence[str], waits_s: Sequence[float] = _WAITS_S):
        self.urls, self._waits_s = tuple(urls), tuple(waits_s)
        self._is_stopped = threading.Event()
        self._queues = [queue.Queue[bytes | None](_MOST_WAITING) for _ in self.urls]
        self._threads = [
            threading.Thread(target=self._work, args=pair, name="webhook", daemon=True)
            for pair in zip(self.urls, self._queues, strict=True)
        ]
        self.sent, self.failed = 0, 0

    def start(self) -> None:
        """Begins to send."""
        for thread in self._threads:
            thread.start()

    def send(self, message: dict[str, Json]) -> None:
        """Sends a message to all addresses; one whose queue is full loses it."""
        body = json.dumps(message, allow_nan=False).encode()
        for waiting in self._queues:
            try:
                waiting.put_nowait(body)
            except queue.Full:
                self.failed += 1

    def stop(self) -> None:
        """Ends the threads; messages that wait are lost."""
        self._is_stopped.set()
        for waiting in self._queues:
            with waiting.mutex:
                waiting.queue.clear()
            waiting.put(None)

    def _work(self, url: str, waiting: queue.Queue[bytes | None]) -> None:
        has_complained = False
        while (body := waiting.get()) is not None:
            fault = self._attempts(url, body)
            self.sent, self.failed = self.sent + (fault is None), self.failed + (fault is not None)
            if fault is not None and not has_complained:
                logging.getLogger(__name__).warning("an alert could not be sent to %s (%s)", shown(url), fault)
            has_complained = fault is not None

    def _attempts(self, url: str, body: bytes) -> str | None:
        """Sends a body, again after faults; returns why that failed."""
        fault, again = _post(url, body)
        for wait_s in self._waits_s:
            if fault is None or not again or self._is_stopped.wait(wait_s):
                break
            fault, again = _post(url, body)
        return fault


def _post(url: str, body: bytes) -> tuple[str | None, bool]:
    """Sends a body once; returns what went wrong, and whether another attempt may help."""
    parts = urllib.parse.urlsplit(url)
    make: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
    options: dict[str, ssl.SSLContext] = {}
    if parts.scheme == "https":
        make, options = http.client.HTTPSConnection, {"context": ssl.create_default_context()}
    connection = make(parts.hostname, parts.port, timeout=_TIMEOUT_S, **options)
    headers = {"Content-Type": "application/json", "User-Agent": "capibara-dashboard", "Connection": "close"}
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request("POST", target, body, headers)
        answer = connection.getresponse()  # its body may take for ever, and is not read
    except (OSError, http.client.HTTPException, ValueError) as error:
        return type(error).__name__, True  # the message may repeat the address
    finally:
        connection.close()
    if 200 <= answer.status < 300:
        return None, False
    return f"HTTP status {answer.status}", answer.status in (408, 429) or answer.status >= 500
