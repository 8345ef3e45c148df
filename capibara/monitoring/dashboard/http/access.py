"""Who may ask: Host and Origin, the token, limits on requests; and the headers of every answer.

A page in a browser can send requests to this machine and, by DNS rebinding (its own name resolved to 127.0.0.1), also
read the answers; the name in Host or the Origin gives it away. On a loopback address only loopback names are accepted. An
address that other machines can reach needs a token, which is exchanged for a cookie.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import hmac
import ipaddress
import json
import math
import re
import time
import urllib.parse
from collections.abc import Mapping, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from capibara.core.types import UserError

_COOKIE = "capibara_dashboard"
_COOKIE_S = 30 * 24 * 3600
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(?::[0-9]{1,5})?", re.ASCII)
_MOST_HEADERS, _MOST_HEADER_BYTES = 100, 16_384
_MOST_PATH_BYTES, _MOST_QUERY_BYTES = 1_024, 8_192
_MOST_ADDRESSES = 4_096  # whose rates are remembered
_FAILURES = 20  # wrong tokens in a row of one address, then one in _FAILURE_S
_FAILURE_S = 3.0
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "font-src 'self'; connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}


class Refusal(Exception):
    """An error for the client.

    Attributes:
      status: the HTTP status.
      code: for programs.
    """

    def __init__(self, status: int, message: str, code: str = "refused"):
        super().__init__(message)
        self.status, self.code = status, code

    def response(self) -> Response:
        """The error as JSON."""
        body = json.dumps({"error": {"message": str(self), "code": self.code}})
        headers = {"Retry-After": "1"} if self.status in (429, 503) else {}
        return Response(body, self.status, headers, media_type="application/json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Access:
    """Who may ask.

    Attributes:
      token: the secret; None: none is needed.
      hosts: names in Host that are accepted; None: every name, which needs a token.
      per_second: most requests of one address in a second, on average.
      port: of the server: a browser keeps one cookie of a name for all ports of a host.
    """

    token: str | None = None
    hosts: frozenset[str] | None = LOOPBACK
    per_second: float = 300.0
    port: int = 0

    @property
    def cookie(self) -> str:
        """The cookie's name."""
        return f"{_COOKIE}_{self.port}"

    @property
    def session(self) -> str:
        """The cookie's value: it proves that the token is known, and does not reveal it."""
        return hmac.new((self.token or "").encode(), b"capibara dashboard session", hashlib.sha256).hexdigest()

    def is_known(self, headers: Headers) -> bool:
        """Whether a request carries the token or the cookie."""
        if self.token is None:
            return True
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.is_token(token.strip()):
            return True
        # Not http.cookies, which reads nothing after an odd cookie of another program on this host.
        return _same(cookie_parser(headers.get("cookie", "")).get(self.cookie, ""), self.session)

    def is_token(self, token: str) -> bool:
        """Whether this is the token; takes the same time for every wrong one."""
        return self.token is not None and _same(token, self.token)


def check_hosts(names: Sequence[str]) -> None:
    """Raises UserError if a name cannot be the one in Host."""
    for name in names:
        if not (result := _AUTHORITY.fullmatch(name.lower())) or result[1] != name.lower():
            raise UserError(
                f"--allowed_host={name[:100]!r} must be a name without http:// and port: try dashboard.example.com"
            )


def access(
    address: tuple[str, int], host: str, allowed_hosts: tuple[str, ...], token: str | None, per_second: float
) -> Access:
    """The rules for a server that listens at an address.

    Args:
      address: and port of the socket.
      host: the address as the user wrote it.
      allowed_hosts: further names, such as a proxy's.
      token: the secret; None: none.
      per_second: most requests of one address in a second.
    """
    number, port = address
    own_names = {
        _bracketed(host.lower()),
        _bracketed(number.lower()),
        *(allowed_host.lower() for allowed_host in allowed_hosts),
    }
    is_named = ipaddress.ip_address(number).is_loopback or allowed_hosts
    return Access(token=token, hosts=LOOPBACK | own_names if is_named else None, per_second=per_second, port=port)


class Guarded:
    """Passes allowed requests on to an application, and adds the headers of HEADERS to every answer."""

    def __init__(self, app: ASGIApp, rules: Access):
        self._app, self._rules = app, rules
        self._rates = _Rates(rules.per_second, 4 * rules.per_second)
        self._failures = _Rates(1 / _FAILURE_S, _FAILURES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        send = _with_headers(send)
        try:
            answer = self._check(scope)
        except Refusal as refusal:
            answer = refusal.response()
        await (self._app if answer is None else answer)(scope, receive, send)

    def _check(self, scope: Scope) -> Response | None:
        """An answer that is given at once; None: the application answers.

        Raises:
          Refusal: the request is not allowed.
        """
        headers = Headers(scope=scope)
        _check_size(scope, headers)
        client = (scope.get("client") or ("", 0))[0]
        if not self._rates.take(client):
            raise Refusal(429, "too many requests: wait a moment", "too_many_requests")
        self._check_names(scope, headers)
        if scope["method"] not in ("GET", "HEAD"):
            raise Refusal(405, f"{scope['method'][:20]} is not supported: use GET", "method_not_allowed")
        if scope["path"] == "/" and (token := _token_of(scope)) is not None:
            return self._sign_in(token, client, headers, scope)
        if scope["path"] == "/health" or self._rules.is_known(headers):
            return None
        if headers.get("authorization") is not None and not self._failures.take(client):
            raise Refusal(429, "too many wrong tokens: wait a moment", "too_many_requests")
        if scope["path"] == "/":
            is_link = headers.get("sec-fetch-site") in ("cross-site", "same-site")  # which brings no cookie
            return Response(_SIGNED_IN if is_link else _SIGN_IN, 401, media_type="text/html")
        raise Refusal(401, "a token is needed: open the address that the server printed", "token_needed")

    def _sign_in(self, token: str, client: str, headers: Headers, scope: Scope) -> Response:
        """Exchanges a token in the address for a cookie, and removes it from the address."""
        if self._rules.token is not None:
            if not self._failures.has_room(client) or not self._rules.is_token(token):
                if not self._failures.take(client):
                    raise Refusal(429, "too many wrong tokens: wait a moment", "too_many_requests")
                raise Refusal(401, "the token is wrong: open the address that the server printed", "wrong_token")
        # No redirect: after a link on another site a browser would follow it without the cookie.
        response = Response(_SIGNED_IN, media_type="text/html", headers={"Cache-Control": "no-store"})
        if self._rules.token is not None:
            is_secure = scope.get("scheme") == "https" or headers.get("x-forwarded-proto") == "https"
            response.set_cookie(
                self._rules.cookie,
                self._rules.session,
                _COOKIE_S,
                path="/",
                secure=is_secure,
                httponly=True,
                samesite="strict",
            )
        return response

    def _check_names(self, scope: Scope, headers: Headers) -> None:
        """Raises Refusal for a foreign Host or Origin."""
        host = headers.get("host", "")
        name = _name(host)
        if len(headers.getlist("host")) != 1 or name is None:
            raise Refusal(400, "Host must be one valid name", "invalid_request")
        if self._rules.hosts is not None and name not in self._rules.hosts:
            raise Refusal(
                403, f"Host is {host[:100]!r}, which is no name of this server: use localhost, or --allowed_host",
                "host_not_allowed",
            )  # fmt: skip
        for origin in headers.getlist("origin"):
            scheme, _, authority = origin.lower().partition("://")
            if scheme not in ("http", "https") or authority != host.lower():
                raise Refusal(
                    403, f"Origin is {origin[:100]!r}: pages of others are not answered", "origin_not_allowed"
                )
        is_page = headers.get("sec-fetch-mode") == "navigate" and scope["path"] == "/"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not is_page:
            raise Refusal(403, "pages of others are not answered", "origin_not_allowed")


class _Rates:
    """Counts of each address, which fall with time: a bucket that fills by `per_second`, up to `most`."""

    def __init__(self, per_second: float, most: float):
        self._per_second, self._most = per_second, max(1.0, most)
        self._left: collections.OrderedDict[str, tuple[float, float]] = collections.OrderedDict()

    def take(self, address: str) -> bool:
        """Counts one; returns whether there was room."""
        now_s = time.monotonic()
        left = self._room(address, now_s)
        self._left[address] = (left - 1 if left >= 1 else left, now_s)
        self._left.move_to_end(address)
        while len(self._left) > _MOST_ADDRESSES:
            self._left.popitem(last=False)
        return left >= 1

    def has_room(self, address: str) -> bool:
        """Whether `take` would return True."""
        return self._room(address, time.monotonic()) >= 1

    def _room(self, address: str, now_s: float) -> float:
        left, since_s = self._left.get(address, (self._most, -math.inf))
        return min(self._most, left + (now_s - since_s) * self._per_second)


def _check_size(scope: Scope, headers: Headers) -> None:
    """Raises Refusal for a request that is larger than any that the pages send."""
    fields = scope["headers"]
    if len(fields) > _MOST_HEADERS or sum(len(name) + len(value) for name, value in fields) > _MOST_HEADER_BYTES:
        raise Refusal(431, "the header is too large", "header_too_large")
    path, query = scope.get("raw_path") or b"", scope.get("query_string") or b""
    if len(path) > _MOST_PATH_BYTES or len(query) > _MOST_QUERY_BYTES:
        raise Refusal(414, "the address is too long", "address_too_long")
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise Refusal(413, "requests have no body here", "body_not_allowed")


def _token_of(scope: Scope) -> str | None:
    values = urllib.parse.parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token")
    return values[0] if values else None


def _same(first: str, other: str) -> bool:
    """Whether two secrets are equal, without a hint in the time that it takes."""
    digests = [hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest() for text in (first, other)]
    return hmac.compare_digest(*digests)


def _name(authority: str) -> str | None:
    """The name in a Host, without its port; None: invalid."""
    result = _AUTHORITY.fullmatch(authority.lower())
    return result and result[1]


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _with_headers(send: Send, extra: Mapping[str, str] = HEADERS) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in extra.items():
                headers[name] = value
            headers.setdefault("Cache-Control", "no-store")
        await send(message)

    return send_with_headers


_SIGNED_IN = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>capibara dashboard</title>
<meta http-equiv="refresh" content="0;url=/"></head><body><p><a href="/">capibara dashboard</a></p></body></html>"""
_SIGN_IN = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>capibara dashboard</title>
<meta name="viewport" content="width=device-width"></head><body><main><h1>capibara dashboard</h1>
<p>A token is needed: open the address that the server printed when it started.</p></main></body></html>"""
