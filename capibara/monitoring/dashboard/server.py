"""The dashboard's process: listens, gives way to training, and ends with the run that started it.

Needs Starlette, uvicorn, pyarrow and regex: the extra `dashboard`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import ipaddress
import os
import resource
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence

import uvicorn

from capibara.core.types import UserError
from capibara.monitoring.dashboard.alerts import webhooks
from capibara.monitoring.dashboard.app import app
from capibara.monitoring.dashboard.facts import Question
from capibara.monitoring.dashboard.http.access import LOOPBACK, access, check_hosts
from capibara.monitoring.dashboard.http.connections import Connection, Room, Server
from capibara.monitoring.dashboard.settings import DashboardConfig
from capibara.monitoring.dashboard.state import Dashboard
from capibara.monitoring.reading import large
from capibara.storage import stores

TOKEN = "CAPIBARA_DASHBOARD_TOKEN"
_LEAST_TOKEN = 16  # characters
_NICER = 19  # training goes first
_BACKLOG = 512
_OTHER_FILES = 256
_LAST_WRITES_S = 2
_TRIED_PORTS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says.

    Attributes:
      roots: run folders, or folders of them.
      host: the address to listen on.
      port: 0: any free one.
      next_ports: whether the following ports are tried if this one is in use.
      token_file: a file with the token; None: the environment, or a new one where it is needed.
      webhook_file: a file with URLs; None: there is none.
      webhooks: URLs that alerts are sent to.
      allowed_hosts: names in Host that are accepted.
      parent: the process with which the server ends; None: none.
    """

    roots: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8080
    next_ports: bool = False
    token_file: str | None = None
    webhook_file: str | None = None
    webhooks: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    parent: int | None = None


def run(
    options: Options,
    config: DashboardConfig,
    questions: Mapping[str, Question],
    say: Callable[[str], None] = functools.partial(print, flush=True),
) -> int:
    """Serves until a signal arrives, or the parent ends; returns the exit code.

    Args:
      options: of the command line.
      config: the options of Gin.
      questions: what other rooms know of a run folder; see facts.Facts.
      say: prints the address, once.

    Raises:
      UserError: the address cannot be used, or a file cannot be read.
    """
    roots = [os.fspath(stores.folder_of(root)) for root in options.roots]
    urls = webhooks.addresses((*options.webhooks, *config.webhooks), options.webhook_file)
    _check_folders(roots)
    hosts = (*options.allowed_hosts, *config.allowed_hosts)
    check_hosts(hosts)
    listening = _listen(options)
    address, port = listening.getsockname()[:2]
    # A proxy that is named passes on what others ask, also to a loopback address.
    is_open = not (ipaddress.ip_address(address).is_loopback and LOOPBACK.issuperset(name.lower() for name in hosts))
    token, is_new = _token(options, is_open=is_open)
    rules = access((address, port), options.host, hosts, token, config.requests_per_s)
    with contextlib.suppress(OSError):
        os.nice(_NICER)
    large.prepare()
    dashboard = Dashboard(roots, config, questions, webhooks.Webhooks(urls))
    room = Room()
    _raise_file_limit(2 * room.most + _OTHER_FILES)
    shown = f"[{address}]" if ":" in address else address
    say(f"dashboard: http://{shown}:{port}/" + (f"?token={token}" if is_new else ""))
    for root in roots:
        if stores.of(root).has_local_paths and not os.path.exists(root):
            say(f"note: {root} does not exist yet; its runs appear when they do")
    settings = uvicorn.Config(
        app(dashboard, rules),
        http=functools.partial(Connection, room),  # type: ignore[arg-type]  # uvicorn only calls it
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        h11_max_incomplete_event_size=16_384,
        timeout_graceful_shutdown=_LAST_WRITES_S,
    )
    ticks = functools.partial(_tick, dashboard, options.parent)
    Server(settings, room, ticks, dashboard.hub.end).run(sockets=[listening])
    return 0


def _check_folders(roots: Sequence[str]) -> None:
    """Raises UserError if a root is a file."""
    for root in roots:
        if stores.of(root).has_local_paths and os.path.isfile(root):
            raise UserError(
                f"{root} is a file, must be a run folder, or a folder of them: name the folder that it is in"
            )


def _tick(dashboard: Dashboard, parent: int | None) -> bool:
    """Checks silent runs; returns whether the process that started this one is gone."""
    dashboard.check_quiet()
    return parent is not None and os.getppid() != parent


def _listen(options: Options) -> socket.socket:
    ports = range(options.port, min(65_536, options.port + _TRIED_PORTS)) if options.next_ports else [options.port]
    fault: Exception | None = None
    for port in ports:
        try:
            family, *_, address = socket.getaddrinfo(
                options.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        except (OSError, UnicodeError, OverflowError) as error:
            fault = fault or error
    raise UserError(f"--host={options.host} --port={options.port} cannot be listened on ({fault}): try others")


def _token(options: Options, *, is_open: bool) -> tuple[str | None, bool]:
    """The token, and whether it was made now: only then it is printed.

    Raises:
      UserError: its file cannot be read, or it is too short.
    """
    token, source = os.environ.get(TOKEN, "").strip(), TOKEN
    if options.token_file is not None:
        source = f"--token_file={options.token_file}"
        try:
            with open(options.token_file, encoding="utf-8") as file:
                token = file.read(4_096).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{source} cannot be read ({error}): name a file that holds a token") from None
        if not token:
            raise UserError(f"{source} is empty: write a token of at least {_LEAST_TOKEN} characters")
    if token:
        if len(token) < _LEAST_TOKEN or not token.isascii() or not token.isprintable():
            raise UserError(
                f"{source} must have at least {_LEAST_TOKEN} printable ASCII characters: try openssl rand -hex 32"
            )
        return token, False
    return (secrets.token_urlsafe(32), True) if is_open else (None, False)


def _raise_file_limit(needed: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and needed > soft:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
