"""Reads the events that builds and runs have recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from capibara.builders.files import reading
from capibara.builders.files.problems import Problems
from capibara.builders.lineage.events import Upstream
from capibara.core import limits
from capibara.data.text import provenance
from capibara.storage import outputs, stores

FILE = "lineage.jsonl"
_ENDS = ("COMPLETE", "FAIL", "ABORT")


def read(folder: str) -> list[dict[str, Any]]:
    """The events in a folder's `lineage.jsonl`, oldest first; empty if there is none. Malformed lines are skipped."""
    path = outputs.path_in(folder, FILE)
    if stores.of(path).has_local_paths:
        return [item.value for item in reading.records(path, Problems())]
    result = []
    for line in (outputs.read(path, limits.TEXT_BYTES) or "").splitlines():
        with contextlib.suppress(ValueError):
            value = limits.parse_json(line)
            result += [value] if isinstance(value, dict) else []
    return result


def unfinished(folder: str) -> list[dict[str, Any]]:
    """The START events whose run has no end."""
    started: dict[str, dict[str, Any]] = {}
    for event in read(folder):
        run = event.get("run")
        name = str(run.get("runId")) if isinstance(run, dict) else ""
        if event.get("eventType") == "START":
            started[name] = event
        elif event.get("eventType") in _ENDS:
            started.pop(name, None)
    return list(started.values())


def run_id(event: Mapping[str, object]) -> str:
    """The id of an event's run."""
    run = event.get("run")
    return str(run.get("runId")) if isinstance(run, dict) else "unknown"


def maker(folder: str, version: str) -> dict[str, Any] | None:
    """The COMPLETE event of the run that made a folder's files with this fingerprint; None: none is recorded."""
    created = None
    for event in read(folder):
        if event.get("eventType") == "COMPLETE" and version in _versions(event.get("outputs")):
            created = event
    return created


def upstream_of(folder: str, version: str) -> Upstream | None:
    """The run that made a folder's files with this fingerprint; None: none is recorded."""
    created = maker(folder, version)
    if created is None:
        return None
    try:
        job = created["job"]
        return Upstream(namespace=str(job["namespace"]), job=str(job["name"]), run=str(created["run"]["runId"]))
    except (KeyError, TypeError):
        return None


def upstream_of_files(sizes: Mapping[str, int], hashes: Mapping[str, str]) -> list[Upstream]:
    """The runs that made files, as far as their folders record it.

    Args:
      sizes: bytes by path.
      hashes: sha256 by path.
    """
    sets = [item for item in provenance.of_files(sizes, hashes) if "kind" in item]
    result = [upstream_of(item["path"], item["fingerprint"]) for item in sets]
    return [item for item in result if item is not None]


def _versions(datasets: object) -> set[str]:
    """The versions of an event's data sets."""
    result = set()
    for item in datasets if isinstance(datasets, list) else []:
        try:
            result.add(str(item["facets"]["version"]["datasetVersion"]))
        except (KeyError, TypeError):
            continue
    return result
