"""The process of an HTTP server: it listens at once, loads its model, and ends when it is told to.

Needs FastAPI, uvicorn and prometheus_client: the extra `serve`.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import ipaddress
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NamedTuple

import uvicorn
from starlette.types import ASGIApp

from capibara.core import allocator
from capibara.core.multihost import peers
from capibara.core.multihost.channel import Leader
from capibara.core.types import UserError
from capibara.inference.server import http_protocol
from capibara.inference.server.http_errors import left_alone
from capibara.inference.server.openai_app import app_of
from capibara.inference.server.prometheus import ServingMetrics
from capibara.inference.server.service import Served, ServerConfig, Service, State
from capibara.inference.server.visitors import visitors_of

_KILLED = 130
_BACKLOG = 2048  # connections that wait to be accepted
_ACCEPTED_AT_ONCE = 64  # in one turn of the loop: others' tokens wait for it
_GIVEN_BACK_BYTES = 8 * 2**20  # of bodies: the allocator would keep what they took
_OTHER_FILES = 256  # that a process has open besides connections
_LAST_WRITES_S = 2  # for those who are still being written to when the grace is over
_CLOSE_S = 3.0
_FAILED_S = 5.0  # in which those who ask still hear that the engine has failed


class Server(uvicorn.Server):
    """uvicorn, which after the first signal lets the texts at hand end; a second one ends the process at once.

    It ends soon after its engine has failed, too.
    """

    def __init__(self, app: ASGIApp, service: Service):
        self._room = http_protocol.Room(service)
        config = uvicorn.Config(
            app,
            http=functools.partial(http_protocol.Protocol, self._room),  # type: ignore[arg-type]  # uvicorn only calls it
            backlog=_ACCEPTED_AT_ONCE,
            log_config=None,
            log_level="error",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=_LAST_WRITES_S,
        )
        super().__init__(config)
        self._service, self._signalled = service, False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for one in sockets or []:
            one.listen(_BACKLOG)  # asyncio has taken the number that it accepts at once for this one

    async def on_tick(self, counter: int) -> bool:
        self._room.check()
        if self._service.freed_bytes > _GIVEN_BACK_BYTES and not self._service.body_bytes:
            self._service.freed_bytes = 0
            threading.Thread(target=allocator.give_back, name="giving back", daemon=True).start()
        return await super().on_tick(counter) or self._service.drained() or self._service.failed_for(_FAILED_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._signalled:
            os._exit(_KILLED)
        self._signalled = True
        self._service.drain()


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections; they wait until the server runs.

    Raises:
      OSError: there is no such address, or another process has it.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)


class Door(NamedTuple):
    """Where clients come in: a socket that listens, the keys that let them in (empty: none is needed), and the URL."""

    listening: socket.socket
    keys: Sequence[str]
    url: str


def opened(host: str, port: int, key_file: str | None, variable: str) -> Door:
    """Listens, with the keys of a file or of an environment variable.

    Raises:
      UserError: it cannot be listened there, or all machines could ask without a key.
    """
    keys = keys_of(key_file, variable)
    try:
        listening = listen(host, port)
    except (OSError, UnicodeError) as error:  # the latter: a name that no host may have
        raise UserError(f"--host={host} --port={port} cannot be listened at ({error}): try others") from None
    address, port = listening.getsockname()[:2]
    if not keys and not ipaddress.ip_address(address).is_loopback:
        raise UserError(f"--host={host} lets other machines in: set {variable} or --api_key_file, or leave --host out")
    return Door(listening, keys, f"http://{f'[{address}]' if ':' in address else address}:{port}/v1")


def fitting(config: ServerConfig) -> ServerConfig:
    """Lets the process have as many files open as the connections need; with fewer connections where it may not."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Each may be open beside the one that makes room for it.
    needed = 2 * config.max_connections + _ACCEPTED_AT_ONCE + _OTHER_FILES
    if most != resource.RLIM_INFINITY and needed > most:
        connections = max((most - _ACCEPTED_AT_ONCE - _OTHER_FILES) // 2, 8)
        print(
            f"warning: ServerConfig.max_connections is {connections} instead of {config.max_connections}: a process may "
            f"open {most} files here",
            file=sys.stderr,
            flush=True,
        )
        config, needed = dataclasses.replace(config, max_connections=connections), most
    if now != resource.RLIM_INFINITY and needed > now:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))
    return config


def keys_of(path: str | None, variable: str) -> list[str]:
    """The keys of clients: the lines of a file, or what an environment variable holds; none of them may be empty.

    Raises:
      UserError: the file cannot be read, or has none.
    """
    if path is None:
        return list(filter(None, [os.environ.get(variable, "").strip()]))
    try:
        with open(path, encoding="utf-8") as file:
            keys = list(filter(None, map(str.strip, file)))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--api_key_file={path} cannot be read ({error}): name a text file with a key a line") from None
    if not keys:
        raise UserError(f"--api_key_file={path} has no key: write one a line")
    return keys


def run(
    listening: socket.socket,
    keys: Sequence[str],
    load: Callable[[], tuple[Served, ServerConfig]],
    tell: Callable[[Served], None],
    host: str = "localhost",
    leader: Leader | None = None,
) -> int:
    """Serves until a signal comes, or the engine fails: all who wait are told then. Returns the exit code.

    Args:
      listening: of `listen`.
      keys: of clients; empty: none is needed.
      load: loads the model, in a thread of its own: until then requests are told to wait. Its engine is started here.
      tell: called when it is ready.
      host: what the user has called the address that it listens at.
      leader: of the other processes that serve this model; a signal to one of them is one to this.

    Raises:
      Exception: what `load` raised.
    """
    metrics = ServingMetrics(lambda: service.load)
    service = Service(metrics)
    service.config = fitting(service.config)
    address = listening.getsockname()[0]
    visitors = visitors_of(host, address, ipaddress.ip_address(address).is_loopback)
    server = Server(app_of(service, metrics, keys, visitors), service)
    faults: list[BaseException] = []

    def make_ready() -> None:
        try:
            served, config = load()
            if leader is not None:
                served.engine.lead(leader.send)
            served.engine.start()
            service.ready(served, fitting(config))
            # What is loaded stays: looking through all of it for garbage stops every thread, here for up to 0.1 s.
            gc.collect()
            gc.freeze()
            tell(served)
        except BaseException as error:
            faults.append(error)
            server.should_exit = True

    if leader is not None:
        leader.on_gone, leader.on_signal = lambda _: _gone(service), lambda _: service.drain()
    loading = threading.Thread(target=make_ready, name="loading", daemon=True)
    loading.start()
    server.run(sockets=[listening])
    code = int(service.state is State.FAILED)
    if code and leader is not None and (fault := peers.told()) is not None:
        raise RuntimeError(fault.line)
    _end(loading, service, None if code or faults else leader, code)
    if faults:
        raise faults[0]
    return code


def _gone(service: Service) -> float:
    """Another process is gone: all who wait are told; gives the seconds in which this one ends."""
    if service.served is None:
        return 0.0
    service.served.engine.fail(left_alone())
    return _FAILED_S + _LAST_WRITES_S + 2 * _CLOSE_S


def _end(loading: threading.Thread, service: Service, leader: Leader | None, code: int) -> None:
    """Stops the threads. One that is inside XLA cannot be stopped, and would crash the interpreter's own end."""
    threads = [loading]
    if service.served is not None:
        threads.append(threading.Thread(target=service.served.engine.close, name="closing", daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(_CLOSE_S)
    if leader is not None:
        leader.close()
    if any(thread.is_alive() for thread in threads):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
