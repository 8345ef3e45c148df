"""Connections with limits: requests must arrive in time, answers must be read, and there is room for new ones."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable

import uvicorn
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

_MOST_CONNECTIONS = 1_200
HEADER_S = 10.0  # for a request to arrive, after the connection or the answer before
UNREAD_S = 30.0  # for a client that does not read its answer
_KEPT_MS = 45_000  # for what was sent to be acknowledged: a viewer that vanished is found by a ping
_SEND_BYTES = 256 << 10  # of the system's buffer for one connection
_TICK_S = 0.5  # uvicorn looks for signals ten times a second: each look takes a core from the training


class Room:
    """The open connections, sorted by how long they have been waiting for a request."""

    def __init__(self, most: int = _MOST_CONNECTIONS):
        self.most = most
        self._open: dict[Connection, None] = {}

    def add(self, connection: Connection) -> None:
        """Adds a connection, or marks one as waiting; if there are too many, closes the one that waits for longest."""
        self._open.pop(connection, None)
        self._open[connection] = None
        if len(self._open) > self.most:
            next((item for item in self._open if item.is_idle), connection).close()

    def remove(self, connection: Connection) -> None:
        """Removes a closed connection."""
        self._open.pop(connection, None)

    def check(self) -> None:
        """Closes connections that are overdue."""
        now_s = time.monotonic()
        for connection in list(self._open):
            connection.check(now_s)


class Connection(H11Protocol):
    """One connection; the state of its requests has it as `connection`.

    Args:
      room: the server's connections.
      config, server_state, app_state, _loop: from uvicorn.
    """

    def __init__(
        self,
        room: Room,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ):
        super().__init__(config, server_state, {**app_state, "connection": self}, _loop)
        self._room, self._since_s = room, time.monotonic()
        self._unread: tuple[int, float] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a request."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def unsent_bytes(self) -> int:
        """What was written and the system has not taken yet."""
        return self.transport.get_write_buffer_size()

    def push(self, content: bytes) -> None:
        """Writes a part of an answer whose header was sent, without waiting.

        Args:
          content: at least one byte.
        """
        if self.transport.is_closing():
            return
        is_chunked = self.conn.their_http_version != b"1.0"
        self.transport.write(b"%x\r\n%b\r\n" % (len(content), content) if is_chunked else content)

    # Called by uvicorn.

    def connection_made(  # type: ignore[override]  # as uvicorn's own: a server's transports are no others
        self, transport: asyncio.Transport
    ) -> None:
        super().connection_made(transport)
        connected = transport.get_extra_info("socket")
        if connected is not None:
            with contextlib.suppress(OSError, AttributeError):  # another system than Linux
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _KEPT_MS)
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        self._room.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._room.remove(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._since_s = time.monotonic()
        if not self.transport.is_closing():
            self._room.add(self)
        super().on_response_complete()

    # Called by the room.

    def close(self) -> None:
        """Closes the connection; what was not sent is lost."""
        self._room.remove(self)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.abort()

    def check(self, now_s: float) -> None:
        """Closes the connection if a request is overdue, or nothing of an answer is read for too long."""
        if self.is_idle:
            if now_s - self._since_s > HEADER_S:
                self.close()
            return
        waiting = self.unsent_bytes
        if not waiting:
            self._unread = None
        elif self._unread is None or waiting < self._unread[0]:
            self._unread = waiting, now_s
        elif now_s - self._unread[1] > UNREAD_S:
            self.close()
        else:
            self._unread = waiting, self._unread[1]


class Server(uvicorn.Server):
    """uvicorn's server with limits on its connections.

    Args:
      config: of uvicorn.
      room: the connections.
      ticks: called about once a second; True ends the server.
      closing: called before open connections are waited for, to end those that have no end.
    """

    def __init__(
        self, config: uvicorn.Config, room: Room, ticks: Callable[[], bool], closing: Callable[[], None] = lambda: None
    ):
        super().__init__(config)
        self._room, self._ticks, self._closing, self._checked_s = room, ticks, closing, 0.0

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._closing()
        await super().shutdown(sockets)

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(_TICK_S)

    async def on_tick(self, counter: int) -> bool:
        now_s = time.monotonic()
        if now_s - self._checked_s > 1.0:
            self._checked_s = now_s
            self._room.check()
            if self._ticks():
                return True
        return await super().on_tick(counter)
