"""The files of the pages: read once, served by their names alone, so that no path leads to another file."""

from __future__ import annotations

import functools
import gzip
import importlib.util
import os
import pathlib
import re

from starlette.datastructures import Headers
from starlette.responses import Response

from capibara.monitoring.dashboard.http.access import Refusal
from capibara.monitoring.dashboard.http.answers import sized

_FOLDER = pathlib.Path(__file__).resolve().parent.parent / "static"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".json": "application/json",
    ".webmanifest": "application/manifest+json",
}
_PACKED = (".html", ".css", ".js", ".mjs", ".svg", ".json", ".webmanifest")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,100}", re.ASCII)
PLOTLY = "plotly.min.js"


def has_charts() -> bool:
    """Whether the library that draws charts is installed."""
    return _plotly() is not None


def file(name: str, headers: Headers) -> Response:
    """A file of the pages by its name.

    Raises:
      Refusal: there is none.
    """
    result = _read(name)
    if result is None:
        raise Refusal(404, "there is no such file", "not_found")
    return sized(*result, headers)


@functools.lru_cache(maxsize=64)
def _read(name: str) -> tuple[bytes, str, bytes | None] | None:
    """A file's content, its media type, and the content packed."""
    ending = os.path.splitext(name)[1]
    if not _NAME.fullmatch(name) or ending not in _KINDS:
        return None
    path = _plotly() if name == PLOTLY else _FOLDER / name
    # Compared with the folder's list: on some file systems several names lead to one file.
    if path is None or name != PLOTLY and name not in os.listdir(_FOLDER) or not path.is_file():
        return None
    content = path.read_bytes()
    packed = gzip.compress(content, 6, mtime=0) if ending in _PACKED else None
    return content, _KINDS[ending], packed


def _plotly() -> pathlib.Path | None:
    """plotly.js of the installed package, which is not imported: that would take a second."""
    result = importlib.util.find_spec("plotly")
    if result is None or result.origin is None:
        return None
    path = pathlib.Path(result.origin).parent / "package_data" / PLOTLY
    return path if path.is_file() else None
