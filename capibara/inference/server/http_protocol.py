"""HTTP/1.1 with deadlines: closes a connection whose request stays incomplete, or whose client does not read.

uvicorn has no deadline for an incomplete request, and answers malformed HTTP with plain text. Here a connection whose
header or body is incomplete counts as waiting for its client; if there are too many connections, the oldest waiting one
is closed, so that a new client can always connect.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import json
import time

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from capibara.inference.server.service.http_errors import Refusal
from capibara.inference.server.service.service import Service

# Most bytes of a header fed to h11 at once: it checks its limit only between calls.
_FED = 8192
# A chunk costs as much time as this many bytes of a large one.
_FREE_CHUNKS, _LEAST_CHUNK = 256, 512
_READ_AT_ONCE = 32 * 1024
_BYTES_PER_S, _AHEAD_S = 64 * 2**20, 0.01  # for all bodies together
_CLOSED_AT_ONCE = 32  # other requests' tokens wait meanwhile
_LINGER_S = 5.0  # for the client to read an error
# Refused connections that take in what their client still sends, and for how long: if one is closed with unread bytes, it is
# reset, and the client may lose the answer.
_DROPPING, _DROP_S = 64, 1.0
_MESSAGES = {
    400: ("the request is not HTTP/1.1", "invalid_request"),
    408: ("the request did not arrive in time", "timeout"),
    431: ("the header is too large", "header_too_large"),
    501: ("the Transfer-Encoding is not supported: send chunked, or Content-Length", "invalid_request"),
    503: ("there are too many connections: try again", "overloaded"),
}


class Waits(enum.Enum):
    """What a connection is waiting for."""

    HEADER = "the client's header"
    BODY = "the client's body"
    ANSWER = "the server"


class Connections:
    """The open connections, sorted by how long they have been waiting for a header.

    Args:
      service: has the limits.
    """

    def __init__(self, service: Service):
        self.service, self.dropping = service, 0
        self._open: dict[Protocol, None] = {}
        self._read_until_s = 0.0

    def delay_s(self, count: int) -> float:
        """Seconds to pause reading after `count` bytes of a body, which limits the rate of all bodies together."""
        now_s = time.monotonic()
        self._read_until_s = max(now_s, self._read_until_s) + count / _BYTES_PER_S
        return max(self._read_until_s - now_s - _AHEAD_S, 0.0)

    def add(self, connection: Protocol) -> None:
        """Adds a connection, or marks one as waiting; at the limit closes the oldest that waits for its client."""
        self._open.pop(connection, None)
        self._open[connection] = None
        if len(self._open) > self.service.config.max_connections:
            next(item for item in self._open if item.waits_on_client).refuse(503)  # the new one always qualifies

    def remove(self, connection: Protocol) -> None:
        """Removes a closed connection."""
        self._open.pop(connection, None)

    def check(self) -> None:
        """Closes overdue connections, a few at a time; called periodically."""
        now_s, closed = time.monotonic(), 0
        for connection in list(self._open):
            closed += connection.check(now_s)
            if closed == _CLOSED_AT_ONCE:
                return


class _Connection(h11.Connection):
    """h11's connection; keeps the status of its last error, and rejects bodies of many small chunks."""

    status = 400

    def __init__(self, most_bytes: int):
        super().__init__(h11.SERVER, most_bytes)
        self._chunks = self._bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
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


class _Flow(FlowControl):
    """uvicorn's flow control, with pauses that nothing can cut short."""

    _is_held = False

    def hold(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        if not self._is_held:
            self._is_held = True
            self.pause_reading()
            loop.call_later(seconds, self._release)

    def resume_reading(self) -> None:
        if not self._is_held:
            super().resume_reading()

    def _release(self) -> None:
        self._is_held = False
        self.resume_reading()


class Protocol(H11Protocol):
    """One connection.

    Args:
      room: the server's connections.
      config, server_state, app_state, _loop: from uvicorn.
    """

    def __init__(
        self,
        room: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ):
        super().__init__(config, server_state, app_state, _loop)
        self._room = room
        self._own_conn = self.conn = _Connection(room.service.config.max_header_kib * 1024)
        self.since_s = time.monotonic()  # when it began to wait for a header or a body
        self._has_begun = False  # whether a byte of it has arrived
        self._stuck_since_s: float | None = None
        self._unread_bytes = 0
        self._drops = False  # it was refused, and what still comes is dropped

    @property
    def waits(self) -> Waits:
        """What it is waiting for."""
        if self.cycle is None or self.cycle.response_complete:
            return Waits.HEADER
        return Waits.BODY if self.cycle.more_body and not self.cycle.response_started else Waits.ANSWER

    @property
    def waits_on_client(self) -> bool:
        """Whether closing it loses no answer."""
        return self.waits is not Waits.ANSWER and not self.transport.is_closing()

    # Called by uvicorn.

    def connection_made(  # type: ignore[override]  # as uvicorn's own: a server's transports are no others
        self, transport: asyncio.Transport
    ) -> None:
        super().connection_made(transport)
        self._own_flow = self.flow = _Flow(transport)
        if hasattr(transport, "max_size"):  # by default asyncio reads four times as much per turn of its loop
            transport.max_size = _READ_AT_ONCE
        self._room.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._room.remove(self)
        self._room.dropping -= self._drops
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._drops:
            return
        if delay_s := self._room.delay_s(len(data)):
            self._own_flow.hold(self.loop, delay_s)
        for at in range(0, len(data), _FED):
            if self.transport.is_closing() or self._drops:
                return
            self._has_begun = True
            before = self.waits
            if before is not Waits.HEADER:
                super().data_received(data[at:])
                return
            super().data_received(data[at : at + _FED])
            if self.waits is Waits.BODY:
                self.since_s = time.monotonic()

    def on_response_complete(self) -> None:
        self.since_s, self._has_begun = time.monotonic(), False
        if not self.transport.is_closing():
            self._room.add(self)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self.refuse(self._own_conn.status, is_sending=True)

    def shutdown(self) -> None:
        if self._drops:
            self.transport.close()
        elif not self.transport.is_closing():
            super().shutdown()

    # Called by the server.

    def refuse(self, status: int, *, is_sending: bool = False) -> None:
        """Sends an error, if nothing was sent yet, and closes the connection.

        Args:
          status: of the error.
          is_sending: whether the client may still be sending.
        """
        # Without a request, an error would be taken for the answer to the next request.
        is_request = self.waits is not Waits.HEADER or self._has_begun
        if is_request and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            self.transport.write(_response(status))
        if self.cycle is not None:  # the application waits for the rest of a body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.get_write_buffer_size():  # the client is not reading
            self.transport.abort()
        is_open = not (self._drops or self.transport.is_closing())
        if is_sending and is_open and self.transport.can_write_eof() and self._room.dropping < _DROPPING:
            self._drops, self._room.dropping = True, self._room.dropping + 1
            self.transport.write_eof()
            self.loop.call_later(_DROP_S, self.transport.close)
        elif not self._drops:
            self.transport.close()
        self._room.remove(self)

    def check(self, now_s: float) -> bool:
        """Closes the connection if a header or a body is overdue, or the client does not read its answer.

        Returns whether it did.
        """
        config = self._room.service.config
        if self.transport.is_closing():
            return self._is_stuck(now_s, _LINGER_S)
        most_s = {Waits.HEADER: config.header_timeout_s, Waits.BODY: config.body_timeout_s}.get(self.waits)
        if most_s is not None and now_s - self.since_s > most_s:
            self.refuse(408)
            return True
        if self.flow.write_paused:
            return self._is_stuck(now_s, config.body_timeout_s)
        self._stuck_since_s = None
        return False

    def _is_stuck(self, now_s: float, most_s: float) -> bool:
        """Aborts the connection if the client has read nothing for that long; until it reads, nothing is written."""
        unread_bytes = self.transport.get_write_buffer_size()
        if self._stuck_since_s is None or unread_bytes < self._unread_bytes:
            self._stuck_since_s = now_s
        self._unread_bytes = unread_bytes
        if now_s - self._stuck_since_s <= most_s:
            return False
        self.transport.abort()
        return True


@functools.cache
def _response(status: int) -> bytes:
    message, code = _MESSAGES[status]
    body = json.dumps(Refusal(status, message, code=code).body).encode()
    lines = [
        b"HTTP/1.1 %d %s" % (status, STATUS_PHRASES[status]),
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"connection: close",
    ]
    return b"\r\n".join([*lines, b"", body])
