"""Reads the reports of an exchange: who had a part in a round, and why others had none."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from typing import Any

from etils import epath

from capibara.core import limits
from capibara.storage import stores

_FILE = re.compile(r"\d{6,9}/report\.json", re.ASCII)
_FOREIGN_BYTES, _FOREIGN_VALUES = 1 << 20, 50_000  # of one report: enough for a thousand nodes
_KEPT = {"round", "succeeded", "score", "spare_faults", "accepted", "without", "vote"}
_MOST_ROUNDS = 10**9


def every(exchange: epath.Path) -> list[dict[str, Any]]:
    """The reports of all rounds, in order, without those that cannot be read."""
    return _read(exchange, _files(exchange), limits.SMALL_BYTES, limits.VALUES)


def newest(exchange: epath.Path, count: int) -> list[dict[str, Any]]:
    """The reports of the newest rounds, in order, of an exchange that may be anyone's.

    No link is followed, large ones are skipped, and of each only what all reports have is kept.
    """
    store = stores.of(exchange)
    names = [name for name in _files(exchange)[-count:] if not store.is_link(exchange / name)]
    result = _read(exchange, names, _FOREIGN_BYTES, _FOREIGN_VALUES)
    return [{name: value for name, value in report.items() if name in _KEPT} for report in result]


def _files(exchange: epath.Path) -> list[str]:
    """The files of all reports, in the order of their rounds."""
    try:
        listed = stores.of(exchange).list(exchange / "rounds")
    except FileNotFoundError:
        return []
    result = sorted(filter(_FILE.fullmatch, listed), key=lambda name: int(name.split("/")[0]))
    return [f"rounds/{name}" for name in result]


def _read(exchange: epath.Path, names: Iterable[str], most: int, values: int) -> list[dict[str, Any]]:
    result = []
    for name in names:
        with contextlib.suppress(OSError, ValueError, limits.Refused):
            report = limits.parse_json(stores.of(exchange).read(exchange / name, most), values=values)
            if isinstance(report, dict) and {"round", "accepted", "without"} <= report.keys():
                if type(report["round"]) is int and 0 <= report["round"] < _MOST_ROUNDS:
                    result.append(report)
    return result
