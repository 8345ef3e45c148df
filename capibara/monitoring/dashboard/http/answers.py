"""Answers in JSON that many viewers share: each is made once, until its run changes."""

from __future__ import annotations

import collections
import gzip
import hashlib
import json
import threading
from collections.abc import Callable, Hashable
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response

from capibara.monitoring.dashboard.views.names import Json, all_finite

_MOST_BYTES, _MOST_ANSWERS = 48 << 20, 512
_LEAST_PACKED_BYTES = 2_048


class Answers:
    """Answers by their question, while they are new; the oldest go when they take too much memory."""

    def __init__(self) -> None:
        self._cached: collections.OrderedDict[Hashable, tuple[Hashable, bytes, bytes | None]] = (
            collections.OrderedDict()
        )
        self._bytes, self._lock = 0, threading.Lock()
        self._asked: dict[Hashable, threading.Lock] = {}

    def answer(self, key: Hashable, stamp: Hashable, make: Callable[[], Json], headers: Headers) -> Response:
        """The answer to a question.

        Args:
          key: the question.
          stamp: changes when the answer may.
          make: makes the answer.
          headers: of the request.
        """
        with self._lock:
            lock = self._asked.setdefault(key, threading.Lock())
        with lock:
            retained = self._cached.get(key)
            if retained is None or retained[0] != stamp:
                retained = self._keep(key, stamp, json_bytes(make()))
        _, body, packed = retained
        return _response(body, packed, headers)

    def _keep(self, key: Hashable, stamp: Hashable, body: bytes) -> tuple[Hashable, bytes, bytes | None]:
        packed = gzip.compress(body, 1, mtime=0) if len(body) >= _LEAST_PACKED_BYTES else None
        new = stamp, body, packed
        with self._lock:
            self._drop(key)
            self._cached[key] = new
            self._bytes += _size(new)
            while self._cached and (self._bytes > _MOST_BYTES or len(self._cached) > _MOST_ANSWERS):
                self._drop(next(iter(self._cached)))
        return new

    def _drop(self, key: Hashable) -> None:
        old = self._cached.pop(key, None)
        if old is not None:
            self._bytes -= _size(old)
        if len(self._asked) > 2 * _MOST_ANSWERS:
            self._asked = {item: lock for item, lock in self._asked.items() if item in self._cached or lock.locked()}


def json_bytes(value: Json) -> bytes:
    """JSON without spaces; lone surrogates of a run's texts become question marks, and what is not finite null."""
    options: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    try:
        text = json.dumps(value, **options)
    except ValueError:  # rare: of a run whose numbers are absurd
        text = json.dumps(all_finite(value), **options)
    return text.encode("utf-8", "replace")


def _size(entry: tuple[Hashable, bytes, bytes | None]) -> int:
    return len(entry[1]) + len(entry[2] or b"") + 1_000


def _response(body: bytes, packed: bytes | None, headers: Headers) -> Response:
    tag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
    caching = {"ETag": tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=caching)
    if packed is not None and "gzip" in headers.get("accept-encoding", ""):
        return Response(packed, headers={**caching, "Content-Encoding": "gzip"}, media_type="application/json")
    return Response(body, headers=caching, media_type="application/json")


def sized(content: bytes, kind: str, packed: bytes | None, headers: Headers) -> Response:
    """A file, packed if the client takes that; it may be kept, and is asked for again."""
    response = _response(content, packed, headers)
    if response.status_code == 200:
        response.headers["Content-Type"] = kind
    return response
