"""HTTP/1.1 for clients of any kind: half a request, or an answer that nobody reads, is closed at a deadline.

uvicorn has no deadline before a request is whole, and answers what is no HTTP with plain text. A connection waits on its
client while a header or a body is on its way; when there are too many connections, the oldest of those makes room, so
that a new client is always heard.
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

from capibara.inference.server.http_errors import Refusal
from capibara.inference.server.service import Service

# What is fed to h11 at once while a header is on its way: it looks at its limit only in between.
_FED = 8192
# A chunk costs as much as the bytes of a large one.
_FREE_CHUNKS, _LEAST_CHUNK = 256, 512
_READ_AT_ONCE = 32 * 1024
_BYTES_PER_S, _AHEAD_S = 64 * 2**20, 0.01  # of all bodies together
_CLOSED_AT_ONCE = 32  # others' tokens wait for it
_LINGER_S = 5.0  # for an answer to be read
_MESSAGES = {
    400: ("the request is not HTTP/1.1", "invalid_request"),
    408: ("the request did not come in time", "timeout"),
    431: ("the header is too large", "header_too_large"),
    501: ("the Transfer-Encoding is not supported: send chunked, or Content-Length", "invalid_request"),
    503: ("there are too many connections: try again", "overloaded"),
}


class Waits(enum.Enum):
    """Whom a connection waits for."""

    HEADER = "the client's header"
    BODY = "the client's body"
    ANSWER = "the server"


class Room:
    """The connections that are open, the one that has waited longest for a header first.

    Args:
      service: with the limits.
    """

    def __init__(self, service: Service):
        self.service = service
        self._open: dict[Protocol, None] = {}
        self._read_until_s = 0.0

    def delay_s(self, count: int) -> float:
        """How long to read no more after so many bytes of a body: all together come at a pace that leaves time."""
        now_s = time.monotonic()
        self._read_until_s = max(now_s, self._read_until_s) + count / _BYTES_PER_S
        return max(self._read_until_s - now_s - _AHEAD_S, 0.0)

    def add(self, connection: Protocol) -> None:
        """Takes a new one, or one that begins to wait; the oldest that waits on its client makes room for it."""
        self._open.pop(connection, None)
        self._open[connection] = None
        if len(self._open) > self.service.config.max_connections:
            next(one for one in self._open if one.waits_on_client).refuse(503)  # at least the new one does

    def remove(self, connection: Protocol) -> None:
        """Forgets one that is closed."""
        self._open.pop(connection, None)

    def check(self) -> None:
        """Closes those that are late, a few at a time; to be called every now and then."""
        now_s, closed = time.monotonic(), 0
        for connection in list(self._open):
            closed += connection.check(now_s)
            if closed == _CLOSED_AT_ONCE:
                return


class _Connection(h11.Connection):
    """h11's, which keeps the status of its last error, and refuses bodies of many small chunks."""

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
    """uvicorn's, which reads no more for a while, whoever asks for it."""

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
      room: of the server.
      config, server_state, app_state, _loop: as uvicorn gives them.
    """

    def __init__(
        self,
        room: Room,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ):
        super().__init__(config, server_state, app_state, _loop)
        self._room = room
        self._own_conn = self.conn = _Connection(room.service.config.max_header_kib * 1024)
        self.since_s = time.monotonic()  # when it began to wait for a header, or for a body
        self._has_begun = False  # whether a byte of that has come
        self._stuck_since_s: float | None = None
        self._unread_bytes = 0

    @property
    def waits(self) -> Waits:
        """Whom it waits for."""
        if self.cycle is None or self.cycle.response_complete:
            return Waits.HEADER
        return Waits.BODY if self.cycle.more_body and not self.cycle.response_started else Waits.ANSWER

    @property
    def waits_on_client(self) -> bool:
        """Whether it can be closed without that an answer is lost."""
        return self.waits is not Waits.ANSWER and not self.transport.is_closing()

    # What uvicorn calls.

    def connection_made(  # type: ignore[override]  # as uvicorn's own: a server's transports are no others
        self, transport: asyncio.Transport
    ) -> None:
        super().connection_made(transport)
        self._own_flow = self.flow = _Flow(transport)
        if hasattr(transport, "max_size"):  # asyncio's own reads four times as much in one turn of the loop
            transport.max_size = _READ_AT_ONCE
        self._room.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._room.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if delay_s := self._room.delay_s(len(data)):
            self._own_flow.hold(self.loop, delay_s)
        for at in range(0, len(data), _FED):
            if self.transport.is_closing():
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
        self.refuse(self._own_conn.status)

    def shutdown(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    # What the server calls.

    def refuse(self, status: int) -> None:
        """Says why, where nothing was said yet, and closes the connection."""
        # Where nothing was asked, what is said would be taken for the answer to the next request.
        asked = self.waits is not Waits.HEADER or self._has_begun
        if asked and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            self.transport.write(_response(status))
        if self.cycle is not None:  # whoever waits for the rest of a body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.get_write_buffer_size():  # the client does not read
            self.transport.abort()
        self.transport.close()
        self._room.remove(self)

    def check(self, now_s: float) -> bool:
        """Closes the connection where a header or a body is late, or the client does not read what it has asked for.

        Returns whether it has.
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
        """Aborts the connection where nothing was read for so long: nothing is written any more before that."""
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
