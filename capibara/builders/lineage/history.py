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
    path = outputs.own(folder, FILE)
    if stores.of(path).has_local_paths:
        return [one.value for one in reading.records(path, Problems())]
    found = []
    for line in (outputs.read(path, limits.TEXT_BYTES) or "").splitlines():
        with contextlib.suppress(ValueError):
            value = limits.parse_json(line)
            found += [value] if isinstance(value, dict) else []
    return found


def unfinished(folder: str) -> list[dict[str, Any]]:
    """The START events whose run has no end."""
    begun: dict[str, dict[str, Any]] = {}
    for event in read(folder):
        run = event.get("run")
        name = str(run.get("runId")) if isinstance(run, dict) else ""
        if event.get("eventType") == "START":
            begun[name] = event
        elif event.get("eventType") in _ENDS:
            begun.pop(name, None)
    return list(begun.values())


def run_id(event: Mapping[str, Any]) -> str:
    """The id of an event's run."""
    run = event.get("run")
    return str(run.get("runId")) if isinstance(run, dict) else "unknown"


def maker(folder: str, version: str) -> dict[str, Any] | None:
    """The COMPLETE event of the run that made a folder's files with this fingerprint; None: none is recorded."""
    made = None
    for event in read(folder):
        if event.get("eventType") == "COMPLETE" and version in _versions(event.get("outputs")):
            made = event
    return made


def upstream_of(folder: str, version: str) -> Upstream | None:
    """The run that made a folder's files with this fingerprint; None: none is recorded."""
    made = maker(folder, version)
    if made is None:
        return None
    try:
        job = made["job"]
        return Upstream(namespace=str(job["namespace"]), job=str(job["name"]), run=str(made["run"]["runId"]))
    except (KeyError, TypeError):
        return None


def upstream_of_files(sizes: Mapping[str, int], hashes: Mapping[str, str]) -> list[Upstream]:
    """The runs that made files, as far as their folders record it.

    Args:
      sizes: bytes by path.
      hashes: sha256 by path.
    """
    sets = [one for one in provenance.of_files(sizes, hashes) if "kind" in one]
    found = [upstream_of(one["path"], one["fingerprint"]) for one in sets]
    return [one for one in found if one is not None]


def _versions(datasets: object) -> set[str]:
    """The versions of an event's data sets."""
    found = set()
    for one in datasets if isinstance(datasets, list) else []:
        try:
            found.add(str(one["facets"]["version"]["datasetVersion"]))
        except (KeyError, TypeError):
            continue
    return found
