"""Checks Host and Origin of requests, so that other sites' web pages cannot use the server.

A page in a browser can send requests to this machine and, by DNS rebinding (its own name resolved to 127.0.0.1), also
read the answers; the name in Host or the Origin gives it away. A server on a loopback address therefore accepts only
loopback names. One that other machines can reach requires a key, which such a page does not have; its names are not
known here, so it accepts any Host unless `ServerConfig.allowed_hosts` is set. Both refuse a foreign Origin.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from capibara.inference.server.service.http_errors import Refusal
from capibara.inference.server.service.service import ServerConfig, Service

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:/?#@\\\s]+)(?::([0-9]{0,5}))?", re.ASCII)
_ORIGIN = re.compile(r"(https?)://([^/?#@\\\s]+)", re.ASCII)
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_MOST_HEADERS = 100
_PREFLIGHT_S = 600


@dataclasses.dataclass(frozen=True)
class Visitors:
    """Which hosts and origins may send requests.

    Attributes:
      addresses: names of this server besides the loopback ones; the address that a connection was made to always counts.
      any_host: whether any Host is accepted if `ServerConfig.allowed_hosts` is empty.
    """

    addresses: frozenset[str] = frozenset()
    any_host: bool = False

    def check(self, headers: Headers, reached: str, config: ServerConfig) -> None:
        """Raises Refusal if a request is not allowed.

        Args:
          headers: of the request.
          reached: the address that the connection was made to.
          config: the user's settings.
        """
        host, origin = headers.get("host"), ", ".join(headers.getlist("origin")) or headers.get("origin")
        if host is not None and not self._knows_host(_name(host), reached, config):
            raise Refusal(
                403,
                f"Host is {host[:100]!r}, which is no name of this server: use localhost, or add it to "
                "ServerConfig.allowed_hosts",
                code="host_not_allowed",
            )
        if origin is not None and not self._knows_origin(origin, host, reached, config):
            raise Refusal(
                403,
                f"Origin is {origin[:100]!r}: web pages of others are not answered; add it to ServerConfig.allowed_origins",
                code="origin_not_allowed",
            )

    def _knows_host(self, name: str | None, reached: str, config: ServerConfig) -> bool:
        if name is None:
            return False
        if self.any_host and not config.allowed_hosts:
            return True
        allowed = {allowed_host.lower() for allowed_host in config.allowed_hosts}
        return name in _LOOPBACK or name in self.addresses or name in allowed or name == bracketed(reached)

    def _knows_origin(self, origin: str, host: str | None, reached: str, config: ServerConfig) -> bool:
        if origin.lower() in {allowed_origin.lower() for allowed_origin in config.allowed_origins}:
            return True
        result = _ORIGIN.fullmatch(origin.lower())
        if result is None:  # "null", as of a file or a sandboxed frame
            return False
        scheme, authority = result.groups()
        if _name(authority) is None:
            return False
        port = _DEFAULT_PORTS[scheme]
        if host is not None and _with_port(authority, port) == _with_port(host.lower(), port):
            return True
        return not self.any_host and _name(authority) in _LOOPBACK


def bracketed(address: str) -> str:
    """An address in the form that Host uses."""
    return f"[{address}]" if ":" in address else address


def _name(authority: str) -> str | None:
    """The name in a Host, without its port; None: invalid."""
    result = _AUTHORITY.fullmatch(authority.lower())
    return result and result[1]


def _with_port(authority: str, default: str) -> tuple[str, str] | None:
    result = _AUTHORITY.fullmatch(authority)
    return result and (result[1], result[2] or default)


def visitors_of(host: str, address: str, is_loopback: bool) -> Visitors:
    """The rules for a server that listens at `address`; `host` is the address as the user wrote it."""
    return Visitors(frozenset({bracketed(host.lower()), bracketed(address.lower())}), any_host=not is_loopback)


class Guarded:
    """Passes allowed requests on to an application; answers browsers' preflight requests (CORS)."""

    def __init__(self, app: ASGIApp, service: Service, visitors: Visitors):
        self._app, self._service, self._visitors = app, service, visitors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, config = Headers(scope=scope), self._service.config
        try:
            _check_size(scope["headers"], config)
            self._visitors.check(headers, (scope.get("server") or ("", 0))[0], config)
        except Refusal as refusal:
            await JSONResponse(refusal.body, refusal.status, refusal.headers)(scope, receive, send)
            return
        origin = headers.get("origin")
        if origin is None:
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(headers, origin)(scope, receive, send)
        else:
            await self._app(scope, receive, _with_allowed_origin(send, origin))


def _check_size(headers: Iterable[tuple[bytes, bytes]], config: ServerConfig) -> None:
    headers = list(headers)
    names = {name for name, _ in headers}
    size, most = sum(len(name) + len(value) for name, value in headers), config.max_header_kib * 1024
    if size > most or len(headers) > _MOST_HEADERS:
        raise Refusal(
            431,
            f"the request has {len(headers)} header fields of {size} bytes, must have at most {_MOST_HEADERS} of {most}",
            code="header_too_large",
        )
    if {b"content-length", b"transfer-encoding"} <= names:  # ambiguous: a proxy may see another end of the body
        raise Refusal(
            400, "the request has Content-Length and Transfer-Encoding: leave one out", code="invalid_request"
        )


_HEADERS = "authorization, content-type"
_MOST_ECHOED = 200


def _preflight(headers: Headers, origin: str) -> Response:
    requested = headers.get("access-control-request-headers", _HEADERS)
    allowed = {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": "GET, POST",
        "Access-Control-Allow-Headers": requested if len(requested) <= _MOST_ECHOED else _HEADERS,
        "Access-Control-Max-Age": str(_PREFLIGHT_S),
        "Vary": "Origin",
    }
    if headers.get("access-control-request-private-network") == "true":
        allowed["Access-Control-Allow-Private-Network"] = "true"
    return Response(status_code=204, headers=allowed)


def _with_allowed_origin(send: Send, origin: str) -> Send:
    async def send_with_header(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers.add_vary_header("Origin")
        await send(message)

    return send_with_header
