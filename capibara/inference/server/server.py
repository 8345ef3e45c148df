"""The server process: listens at once, loads the model, and shuts down on a signal.

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
from capibara.core.types import UserError
from capibara.inference.engine.requests.stream import ProcessLost
from capibara.inference.server import http_protocol
from capibara.inference.server.app import app_of
from capibara.inference.server.prometheus import ServingMetrics
from capibara.inference.server.service.service import Served, ServerConfig, Service, State
from capibara.inference.server.visitors import visitors_of
from capibara.multihost import peers
from capibara.multihost.channel import Leader

_KILLED = 130
_BACKLOG = 2048  # connections that wait to be accepted
_ACCEPTED_AT_ONCE = 64  # per turn of the event loop: other requests' tokens wait meanwhile
_GIVEN_BACK_BYTES = 8 * 2**20  # of bodies read, after which freed memory is returned to the system
_OTHER_FILES = 256  # files that the process has open besides connections
_LAST_WRITES_S = 2  # to finish writing when the grace period is over
_CLOSE_S = 3.0
FAILED_S = 5.0  # during which requests still get an error after the engine failed


class Server(uvicorn.Server):
    """uvicorn's server; the first signal lets running texts finish, a second one ends the process at once.

    It also ends soon after its engine has failed.
    """

    def __init__(self, app: ASGIApp, service: Service):
        self._room = http_protocol.Connections(service)
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
        for item in sockets or []:
            item.listen(_BACKLOG)  # asyncio has set the backlog to the number that it accepts at once

    async def on_tick(self, counter: int) -> bool:
        self._room.check()
        if self._service.freed_bytes > _GIVEN_BACK_BYTES and not self._service.body_bytes:
            self._service.freed_bytes = 0
            threading.Thread(target=allocator.give_back, name="giving back", daemon=True).start()
        return await super().on_tick(counter) or self._service.drained() or self._service.failed_for(FAILED_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._signalled:
            os._exit(_KILLED)
        self._signalled = True
        self._service.drain()


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections; they wait until the server runs.

    Raises:
      OSError: the address does not exist or is in use.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)


class Endpoint(NamedTuple):
    """The server's entrance: a listening socket, its API keys (empty: none is required), and the URL."""

    listening: socket.socket
    keys: Sequence[str]
    url: str


def open_endpoint(host: str, port: int, key_file: str | None, variable: str) -> Endpoint:
    """Listens, with API keys from a file or an environment variable.

    Raises:
      UserError: the address cannot be used, or other machines could send requests without a key.
    """
    keys = read_api_keys(key_file, variable)
    try:
        listening = listen(host, port)
    except (OSError, UnicodeError) as error:  # the latter: an invalid host name
        raise UserError(f"--host={host} --port={port} cannot be listened on ({error}): try others") from None
    address, port = listening.getsockname()[:2]
    if not keys and not ipaddress.ip_address(address).is_loopback:
        raise UserError(f"--host={host} is open to other machines: set {variable} or --api_key_file, or omit --host")
    return Endpoint(listening, keys, f"http://{f'[{address}]' if ':' in address else address}:{port}/v1")


def with_file_limit(config: ServerConfig) -> ServerConfig:
    """Raises the process's limit of open files for the connections; lowers the number of connections if that fails."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Each connection may be open beside the one that it replaces.
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


def read_api_keys(path: str | None, variable: str) -> list[str]:
    """The API keys: the lines of a file, or the value of an environment variable; none may be empty.

    Raises:
      UserError: the file cannot be read, or has no key.
    """
    if path is None:
        return list(filter(None, [os.environ.get(variable, "").strip()]))
    try:
        with open(path, encoding="utf-8") as file:
            keys = list(filter(None, map(str.strip, file)))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--api_key_file={path} cannot be read ({error}): name a file with one key per line") from None
    if not keys:
        raise UserError(f"--api_key_file={path} has no key: write one per line")
    return keys


def run(
    listening: socket.socket,
    keys: Sequence[str],
    load: Callable[[], tuple[Served, ServerConfig]],
    tell: Callable[[Served], None],
    host: str = "localhost",
    leader: Leader | None = None,
) -> int:
    """Serves until a signal arrives or the engine fails; open requests then get an error. Returns the exit code.

    Args:
      listening: from `listen`.
      keys: API keys; empty: none is required.
      load: loads the model, in its own thread; until then requests get an error. Its engine is started here.
      tell: called when the model is ready.
      host: the address to listen on, as the user wrote it.
      leader: leads the other processes that serve this model; a signal to one of them is treated as one to this
        process.

    Raises:
      Exception: what `load` raised.
    """
    metrics = ServingMetrics(lambda: service.load)
    service = Service(metrics)
    service.config = with_file_limit(service.config)
    address = listening.getsockname()[0]
    visitors = visitors_of(host, address, ipaddress.ip_address(address).is_loopback)
    server = Server(app_of(service, metrics, keys, visitors), service)
    faults: list[BaseException] = []

    def make_ready() -> None:
        try:
            served, config = load()
            if leader is not None:
                served.engine.lead(leader.send)
            if served.generator is not None:
                served.generator.start()
            service.ready(served, with_file_limit(config))
            # Freezes what is loaded: a garbage collection over it would stop every thread for up to 0.1 s.
            gc.collect()
            gc.freeze()
            tell(served)
        except BaseException as error:
            faults.append(error)
            server.should_exit = True

    if leader is not None:
        leader.on_gone, leader.on_signal = lambda _: _fail_requests(service), lambda _: service.drain()
    loading = threading.Thread(target=make_ready, name="loading", daemon=True)
    loading.start()
    server.run(sockets=[listening])
    code = int(service.state is State.FAILED)
    if code and leader is not None and (fault := peers.peer_fault()) is not None:
        raise RuntimeError(fault.line)
    _end(loading, service, None if code or faults else leader, code)
    if faults:
        raise faults[0]
    return code


def _fail_requests(service: Service) -> float:
    """Fails open requests after another process was lost; returns the seconds until this process ends."""
    if service.served is None:
        return 0.0
    service.served.engine.fail(ProcessLost("another process is gone"))
    return FAILED_S + _LAST_WRITES_S + 2 * _CLOSE_S


def _end(loading: threading.Thread, service: Service, leader: Leader | None, code: int) -> None:
    """Stops the threads. A thread inside XLA cannot be stopped, and would crash the interpreter at exit."""
    threads = [loading]
    if service.served is not None and (engine := service.served.generator) is not None:
        threads.append(threading.Thread(target=engine.close, name="closing", daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(_CLOSE_S)
    if leader is not None:
        leader.close()
    if any(thread.is_alive() for thread in threads):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
