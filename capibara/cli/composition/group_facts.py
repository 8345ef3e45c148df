"""What the dashboard shows of the group in which a run is a node: who had a part in the newest rounds, and why others had none."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from capibara.storage import stores

ROUNDS = 200  # the newest, of which the files are read
_MOST_NODES = 1024
_MOST_STEPS = 10**9  # of a round
_SILENT = "it sent nothing"  # as the coordinator says


def group(folder: str, roots: Sequence[str]) -> dict[str, Any]:
    """The nodes of a run's group, by the reports in its exchange.

    Args:
      folder: the run folder; it may be anyone's.
      roots: the folders that the server shows: an exchange elsewhere is not read.
    """
    from capibara.monitoring.dashboard.views.consensus import exchange_of
    from capibara.monitoring.reading.run import Run
    from capibara.strategies.group import reports
    from capibara.strategies.group.exchange import AGREED, Exchange

    named = exchange_of(Run(folder, ""))
    if named is None:
        return {"unavailable": "the run is no node of a group: see Trainer.group"}
    where = stores.of(named).absolute(named)
    if not any(_is_below(where, root) for root in roots):
        return {"unavailable": f"its group meets in {where}: name that folder to the dashboard, too"}
    store = stores.of(where)
    if store.has_local_paths:
        where = os.path.realpath(where)
    if store.is_link(epath.Path(where) / AGREED):
        return {"unavailable": f"{AGREED} in {where} is a link, which no coordinator makes"}
    agreed, newest = Exchange(where).agreed(), reports.newest(epath.Path(where), ROUNDS)
    if agreed is None or not newest:
        return {"unavailable": f"its group has ended no round yet: {where}"}
    every = agreed.every if 0 < agreed.every < _MOST_STEPS else 1
    return {**as_table(newest, every), "line": agreed.line, "unavailable": None}


def as_table(reports: Sequence[Mapping[str, Any]], every: int) -> dict[str, Any]:
    """The table of nodes, and how it came to be.

    Args:
      reports: of rounds, in order; at least one.
      every: steps of a round; 1 where they are unknown.
    """
    names = sorted({name for report in reports for name in (*_part(report, "accepted"), *_part(report, "without"))})
    names = names[:_MOST_NODES]
    last = reports[-1]
    approve = _part(last, "vote").get("approve")
    return {
        "score": last.get("score"),
        "step": last["round"] * every,
        "failed_rounds": sum(report.get("succeeded") is not True for report in reports),
        "spare_faults": last.get("spare_faults"),
        "votes": len(approve) if isinstance(approve, (dict, list)) else None,
        "nodes": [_node(name, reports, every) for name in names],
        "history": {
            "steps": [report["round"] * every for report in reports],
            "score": [report.get("score") for report in reports],
            "accepted": [[_accepted(report, name) for name in names] for report in reports],
        },
        "source": "reports",
    }


def _node(name: str, reports: Sequence[Mapping[str, Any]], every: int) -> dict[str, Any]:
    last, missed = reports[-1], [report["round"] for report in reports if _accepted(report, name) == 0.0]
    about, reason = _part(last, "accepted").get(name), _part(last, "without").get(name)
    values = about if isinstance(about, dict) else {}
    is_silent = isinstance(reason, str) and reason.startswith(_SILENT)
    return {
        "name": name,
        **{key: values.get(key) for key in ("loss", "quality", "distance")},
        "state": "accepted" if about is not None else "absent" if is_silent or reason is None else "rejected",
        "reason": reason if isinstance(reason, str) else "",
        "rejections": len(missed),
        "last_rejected": missed[-1] * every if missed else None,
    }


def _accepted(report: Mapping[str, object], name: str) -> float | None:
    """Whether a node had a part in a round; None: it was not of the group yet."""
    if name in _part(report, "accepted"):
        return 1.0
    return 0.0 if name in _part(report, "without") else None


def _part(report: Mapping[str, object], name: str) -> Mapping[str, Any]:
    """A dictionary of a report, which may be anyone's."""
    result = report.get(name)
    return result if isinstance(result, dict) else {}


def _is_below(path: str, root: str) -> bool:
    """Whether a folder is another one, or in it, where links lead to."""
    if stores.of(path).has_local_paths != stores.of(root).has_local_paths:
        return False
    if stores.of(path).has_local_paths:
        path, root = os.path.realpath(path), os.path.realpath(root)
    path, root = path.rstrip("/"), root.rstrip("/")
    return ".." not in path.split("/") and (path == root or path.startswith(f"{root}/"))
