"""HTTP/1.1 for clients of any kind: half a request, or an answer that nobody reads, is closed at a deadline.

uvicorn has no deadline before a request is whole, and answers what is no HTTP with plain text. A connection waits on its
client while a header or a body is on its way; when there are too many connections, the oldest of those makes room, so
that a new client is always heard.
"""

from __future__ import annotations

import asyncio
import enum
import json
import time
from collections.abc import Iterable

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from capibara.inference.refusal import Refusal
from capibara.inference.service import Service

# What is fed to h11 at once while a header is on its way: it looks at its limit only in between.
_FED = 8192
# A chunk costs as much as the bytes of a large one.
_FREE_CHUNKS, _LEAST_CHUNK = 256, 512
_READ_AT_ONCE = 64 * 1024
_LINGER_S = 5.0  # for an answer to be read
_MESSAGES = {
    400: ("the request is not HTTP/1.1", "invalid_request"),
    408: ("the header did not come in time", "timeout"),
    431: ("the header is too large", "header_too_large"),
    501: ("the Transfer-Encoding is not supported: send chunked, or Content-Length", "invalid_request"),
    503: ("there are too many connections: try again", "overloaded"),
}


class Waits(enum.Enum):
    """Whom a connection waits for."""

    HEADER = "the client's header"
    BODY = "the client's body"
    ANSWER = "the server"


class _Connection(h11.Connection):
    """h11's, which keeps the status of its last error, and refuses bodies of many small chunks."""

    status = 400

    def __init__(self, most_bytes: int):
        super().__init__(h11.SERVER, most_bytes)
        self._chunks = self._bytes = 0

    def next_event(self):
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.status = error.error_status_hint if error.error_status_hint in _MESSAGES else 400
            raise
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks, self._bytes = self._chunks + bool(event.chunk_start), self._bytes + len(event.data)
            if self._chunks > _FREE_CHUNKS and self._bytes < _LEAST_CHUNK * self._chunks:
                raise h11.RemoteProtocolError("the chunks of the body are too small")
        return event


class Protocol(H11Protocol):
    """One connection.

    Args:
      service: with the limits.
      config, server_state, app_state, _loop: as uvicorn gives them.
    """

    def __init__(
        self,
        service: Service,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ):
        super().__init__(config, server_state, app_state, _loop)
        self._service = service
        self.conn = _Connection(service.config.max_header_kib * 1024)
        self.since_s = time.monotonic()  # when it began to wait for a header
        self._has_begun = False  # whether a byte of that has come
        self._stuck_since_s: float | None = None
        self._unread_bytes = 0

    @property
    def waits(self) -> Waits:
        """Whom it waits for."""
        if self.cycle is None or self.cycle.response_complete:
            return Waits.HEADER
        return Waits.BODY if self.cycle.more_body and not self.cycle.response_started else Waits.ANSWER

    # What uvicorn calls.

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # asyncio's own reads four times as much in one turn of the loop
            transport.max_size = _READ_AT_ONCE
        make_room(self.connections, self._service.config.max_connections)

    def data_received(self, data: bytes) -> None:
        for at in range(0, len(data), _FED):
            if self.transport.is_closing():
                return
            self._has_begun = True
            if self.waits is not Waits.HEADER:
                super().data_received(data[at:])
                return
            super().data_received(data[at : at + _FED])

    def on_response_complete(self) -> None:
        self.since_s, self._has_begun = time.monotonic(), False
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self.refuse(self.conn.status)

    def shutdown(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    # What the server calls.

    def refuse(self, status: int) -> None:
        """Says why, where nothing was said yet, and closes the connection."""
        # Where nothing was asked, what is said would be taken for the answer to the next request.
        asked = self.waits is not Waits.HEADER or self._has_begun
        if asked and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            message, code = _MESSAGES[status]
            body = json.dumps(Refusal(status, message, code=code).body).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            response = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:  # whoever waits for the rest of a body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def check(self, now_s: float) -> None:
        """Closes the connection where a header is late, or the client does not read what it has asked for."""
        config = self._service.config
        if self.transport.is_closing():
            self._check_reader(now_s, _LINGER_S)
        elif self.waits is Waits.HEADER and now_s - self.since_s > config.header_timeout_s:
            self.refuse(408)
        elif self.flow.write_paused:
            self._check_reader(now_s, config.body_timeout_s)
        else:
            self._stuck_since_s = None

    def _check_reader(self, now_s: float, most_s: float) -> None:
        """Aborts the connection where nothing was read for so long: nothing is written any more before that."""
        unread_bytes = self.transport.get_write_buffer_size()
        if self._stuck_since_s is None or unread_bytes < self._unread_bytes:
            self._stuck_since_s = now_s
        self._unread_bytes = unread_bytes
        if now_s - self._stuck_since_s > most_s:
            self.transport.abort()


def make_room(connections: Iterable[Protocol], most: int) -> None:
    """Closes the oldest connection that waits on its client, if there are more than `most`."""
    connections = [one for one in connections if not one.transport.is_closing()]
    if len(connections) <= most:
        return
    waiting = [one for one in connections if one.waits is not Waits.ANSWER]
    oldest = min(waiting, key=lambda one: one.since_s)  # at least the new one
    oldest.refuse(503)
    if oldest.transport.get_write_buffer_size():
        oldest.transport.abort()


def check_all(connections: Iterable[Protocol]) -> None:
    """Closes what is late; to be called every now and then."""
    now_s = time.monotonic()
    for connection in list(connections):
        connection.check(now_s)
