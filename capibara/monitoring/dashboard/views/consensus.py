"""The nodes of a consensus run and the experts of a mixture, from their metrics."""

from __future__ import annotations

import ast
import re

import numpy as np

from capibara.monitoring.dashboard.views.files import bindings, config_text
from capibara.monitoring.dashboard.views.names import Json, finite
from capibara.monitoring.reading.run import Run
from capibara.monitoring.reading.tables import View
from capibara.monitoring.reading.thinning import averaged

_NODE = re.compile(r"(node_\d{1,9})/(\w+)")
_EXPERT = re.compile(r"expert_load/(\d{1,9})")
_NO_UPDATE = "it made no update: its loss or gradients were never finite"
_TOO_FAR = "its parameters are not finite, or too far from all others"
_HISTORY = 200  # logged rounds
_MOST_NODES, _MOST_EXPERTS = 1024, 1024


def nodes(run: Run) -> dict[str, Json]:
    """The table of nodes of the last logged step, why nodes have no part, and how often that was so."""
    view = run.views().get("train")
    columns: dict[str, dict[str, np.ndarray]] = {}
    for name, column in ({} if view is None else view.columns).items():
        if (match := _NODE.fullmatch(name)) and len(columns) < _MOST_NODES:
            columns.setdefault(match[1], {})[match[2]] = column
    if view is None or not columns:
        return {"nodes": [], "unavailable": "the run has no nodes: see Trainer.strategy"}
    threshold = _threshold(run)
    rows: list[Json] = [_node(name, columns[name], view, threshold) for name in sorted(columns, key=_order)]
    shown = np.unique(np.linspace(0, len(view) - 1, _HISTORY).astype(int)) if len(view) else np.empty(0, int)
    accepted = [columns[name].get("accepted") for name in sorted(columns, key=_order)]
    score = view.columns.get("consensus_score")
    history: dict[str, Json] = {
        "steps": view.steps[shown].tolist(),
        "score": [] if score is None else [finite(value) for value in score[shown].tolist()],
        "accepted": [[None if item is None else finite(float(item[row])) for item in accepted] for row in shown],
    }
    last = {
        name: view.last(name) for name in ("consensus_score", "failed_rounds", "spare_faults", "votes", "bytes_sent")
    }
    return {
        "score": last.pop("consensus_score"),
        "step": int(view.steps[-1]) if len(view) else None,
        **last,
        "nodes": rows,
        "history": history,
        "source": "metrics",
        "unavailable": None,
    }


def exchange_of(run: Run) -> str | None:
    """The folder in which a run meets the others of its group; None: it is no node of a group."""
    text = bindings(config_text(run) or "").get("GroupNode.exchange")
    try:
        result = ast.literal_eval(text) if text else None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return result if isinstance(result, str) and result.strip() else None


def _order(name: str) -> int:
    return int(name.rpartition("_")[2])


def _threshold(run: Run) -> float | None:
    """The quality below which a node has no part, by the run's configuration."""
    result = bindings(config_text(run) or "").get("ConsensusConfig.quality_threshold")
    try:
        return None if result is None else float(result)
    except ValueError:  # None
        return None


def _node(name: str, columns: dict[str, np.ndarray], view: View, threshold: float | None) -> dict[str, Json]:
    values = {key: finite(float(column[-1])) if len(column) else None for key, column in columns.items()}
    accepted, drawn = columns.get("accepted"), columns.get("drawn")
    rejected = np.zeros(len(view), bool) if accepted is None else accepted == 0
    if drawn is not None:
        rejected &= drawn != 0
    is_drawn = drawn is None or not len(drawn) or drawn[-1] != 0
    is_rejected = bool(len(rejected) and rejected[-1])
    state = "not_drawn" if not is_drawn else "rejected" if is_rejected else "accepted"
    at = np.flatnonzero(rejected)
    return {
        "name": name,
        **{key: values.get(key) for key in ("loss", "quality", "distance", "weight", "vote")},
        "drawn": is_drawn,
        "accepted": not is_rejected and is_drawn,
        "state": state,
        "reason": _reason(values.get("quality"), threshold) if is_rejected else "",
        "rejections": len(at),
        "last_rejected": int(view.steps[at[-1]]) if len(at) else None,
        "until": None,
    }


def _reason(quality: float | None, threshold: float | None) -> str:
    """Why a node has no part in a round; the run itself says so in the same words."""
    if quality is not None and quality < 0:
        return _NO_UPDATE
    if quality is not None and threshold is not None and quality < threshold:
        return f"its quality {quality:.2f} is below {threshold:g}"
    return _TOO_FAR


def experts(run: Run, points: int) -> dict[str, Json]:
    """How the experts are used over time: a map of their load, and the router's entropy."""
    view = run.views().get("train")
    result = sorted(
        (int(match[1]), name) for name in ({} if view is None else view.columns) if (match := _EXPERT.fullmatch(name))
    )[:_MOST_EXPERTS]
    if view is None or not result:
        return {
            "experts": 0,
            "steps": [],
            "load": [],
            "unavailable": "the run has no experts: see TransformerConfig.moe",
        }
    names = [name for _, name in result]
    others = [
        name for name in ("router_entropy", "expert_load_max", "expert_load_min", "dropped") if name in view.columns
    ]
    columns = [view.columns[name] for name in (*names, *others)]
    rows = np.zeros(len(view), bool)
    for column in columns:
        rows |= np.isfinite(column)
    each = [averaged(column[rows, None], points) for column in columns]  # all at once would take much memory
    ends, means = each[0][0], np.concatenate([output for _, output in each], axis=1)
    rounded = [[None if np.isnan(value) else float(f"{value:.5g}") for value in row] for row in means.tolist()]
    extra = {name: [row[len(names) + index] for row in rounded] for index, name in enumerate(others)}
    return {
        "experts": len(names),
        "steps": view.steps[rows][ends].tolist(),
        "load": [list(row[: len(names)]) for row in rounded],
        "entropy": extra.get("router_entropy"),
        "max": extra.get("expert_load_max"),
        "min": extra.get("expert_load_min"),
        "dropped": extra.get("dropped"),
        "unavailable": None,
    }
