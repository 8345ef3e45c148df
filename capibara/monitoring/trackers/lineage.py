"""What a run folder says of the data that its run saw, and of its plan, for trackers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

from capibara.builders.lineage import chain
from capibara.core.types import UserError
from capibara.storage import outputs

NAME = "lineage.json"
_EVENTS = "lineage.jsonl"  # of a run with LineageFile
_PLANS = ("plan.json", "plan.gin")


def of_run(model_dir: str) -> str:
    """JSON text with the data sets of the newest checkpoint, their fingerprints, and the last OpenLineage event; or ""."""
    result: dict[str, object] = {}
    if (newest := chain.newest_step(model_dir)) is not None:
        folder, manifest = newest
        datasets = chain.datasets_of(manifest)
        if datasets:
            result["checkpoint"] = {"step": os.path.basename(folder), "xxh128": manifest.get("xxh128")}
            result["datasets"] = datasets
    events = (_read(model_dir, _EVENTS) or "").split("\n")
    if len(events) > 1 and (event := _parsed(events[-2])) is not None:
        result["event"] = event
    return json.dumps(result, indent=1) if result else ""


def plans(model_dir: str) -> Iterator[tuple[str, str]]:
    """Names and texts of the plan in a run folder, if `capibara plan` has written one there."""
    for name in _PLANS:
        if (text := _read(model_dir, name)) is not None:
            yield name, text


def _read(model_dir: str, name: str) -> str | None:
    try:
        return outputs.read_own(model_dir, name)
    except UserError:
        return None


def _parsed(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
