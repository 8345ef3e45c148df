"""Data sets and their sources, compared with what was recorded of them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from capibara.builders.files import fingerprints
from capibara.builders.files import manifest as manifests
from capibara.builders.lineage import history
from capibara.builders.lineage.nodes import DIGITS, Check, Kind, Node, State
from capibara.core.types import TryAgain, UserError
from capibara.data.text import provenance
from capibara.storage import stores


class Sources:
    """Reads the chains of data sets; what several nodes come from is checked once.

    Args:
      check: how files are compared.
      progress: called with each file that is about to be read.
    """

    def __init__(self, check: Check, progress: Callable[[str], None]):
        self._check, self._progress = check, progress
        self._datasets: dict[str, Node] = {}
        self._hashed: dict[str, fingerprints.Input] = {}
        self._open: set[str] = set()  # folders whose parents are being read: a chain does not lead in a circle

    def expected(self, folder: str, fingerprint: str) -> Node:
        """A data set that something was made of when it had this fingerprint."""
        result = self.dataset(folder)
        if result.digest == fingerprint or result.state is State.MISSING:
            return dataclasses.replace(result, digest=fingerprint)
        note = f"it was used with the fingerprint {fingerprint[:DIGITS]}, and was built again since"
        return dataclasses.replace(result, state=State.CHANGED, notes=(note, *result.notes))

    def dataset(self, folder: str) -> Node:
        """The output folder of a builder, as it is now."""
        if folder not in self._datasets:
            self._datasets[folder] = self._read_dataset(folder)
        return self._datasets[folder]

    def _read_dataset(self, folder: str) -> Node:
        try:
            manifest = manifests.read_manifest(folder)
        except (UserError, OSError) as error:
            state = State.CHANGED if exists(folder) else State.MISSING
            note = str(error) if state is State.CHANGED else f"{folder} does not exist"
            return Node(kind=Kind.DATASET, path=folder, state=state, notes=(note,))
        checked = [
            (file, self._state(os.path.join(folder, file.name), file.bytes, file.sha256)) for file in manifest.files
        ]
        notes = [f"{file.name} {_is(state)}" for file, state in checked if state in (State.CHANGED, State.MISSING)]
        if fingerprints.of_files({file.name: file.sha256 for file in manifest.files}) != manifest.fingerprint:
            notes.append(f"{manifests.MANIFEST} has changed")
        state = State.CHANGED if notes else max((state for _, state in checked), key=_rank, default=State.WHOLE)
        created = history.maker(folder, manifest.fingerprint)
        records = sum(file.records for file in manifest.files)
        facts = {"built by": f"prepare {manifest.kind}", "records": records, **_making(manifest.version, created)}
        if folder in self._open:
            return Node(kind=Kind.DATASET, path=folder, digest=manifest.fingerprint, state=state, facts=facts)
        self._open.add(folder)
        try:
            parents = tuple(self._sources(folder, manifest, created))
        finally:
            self._open.discard(folder)
        return Node(
            kind=Kind.DATASET,
            path=folder,
            digest=manifest.fingerprint,
            state=state,
            notes=tuple(notes),
            facts=facts,
            parents=parents,
        )

    def _sources(
        self, folder: str, manifest: manifests.Manifest, making: Mapping[str, object] | None
    ) -> Iterator[Node]:
        """What a data set was built from: files, and the data sets that they belong to."""
        where = _working_directory(making)
        paths = {os.path.normpath(os.path.join(where, entry.path)): entry for entry in manifest.inputs}
        sets = provenance.of_files(
            {path: entry.bytes for path, entry in paths.items()}, {path: entry.sha256 for path, entry in paths.items()}
        )
        inside: set[str] = set()
        for item in sets:
            if "kind" in item and item["path"] != folder:
                hashes = {(file.name, file.sha256) for file in manifests.read_manifest(item["path"]).files}
                inside |= {
                    path for path in paths if (os.path.relpath(path, item["path"]), paths[path].sha256) in hashes
                }
                yield self.expected(item["path"], item["fingerprint"])
        for path, recorded in paths.items():
            if path not in inside:
                state = self._state(path, recorded.bytes, recorded.sha256)
                yield Node(kind=Kind.FILE, path=path, digest=recorded.sha256, state=state)

    def file(self, path: str, size: int | None, digest: str | None, facts: Mapping[str, str | int]) -> Node:
        """A file that something was made of when it had this size and hash, with the data set it belongs to."""
        state = self._state(path, size, digest)
        parents: tuple[Node, ...] = ()
        if size is not None and digest is not None:
            sets = provenance.of_files({path: size}, {path: digest})
            parents = tuple(
                self.dataset(item["path"]) for item in sets if "kind" in item and item["path"] not in self._open
            )
        return Node(kind=Kind.FILE, path=path, digest=digest, state=state, facts=facts, parents=parents)

    def _state(self, path: str, size: int | None, digest: str | None) -> State:
        """Whether a file is as recorded."""
        try:
            if size is not None and stores.of(path).size(path) != size:
                return State.CHANGED
            if not exists(path):
                return State.MISSING
            if digest is None or self._check is Check.SIZES or not stores.of(path).has_local_paths:
                return State.UNKNOWN
            return State.WHOLE if self._looked_at(path).sha256 == digest else State.CHANGED
        except (FileNotFoundError, NotADirectoryError):
            return State.MISSING
        except (UserError, TryAgain, OSError):
            return State.UNKNOWN

    def _looked_at(self, path: str) -> fingerprints.Input:
        if path not in self._hashed:
            self._progress(path)
            self._hashed[path] = fingerprints.hash_file(path)
        return self._hashed[path]


def exists(path: str) -> bool:
    """Whether a file or folder is there, also in a bucket."""
    from etils import epath

    return epath.Path(path).exists()


def _making(version: str, provenance: Mapping[str, object] | None) -> dict[str, str | int]:
    """Who built a data set, and when."""
    facts: dict[str, str | int] = {"by capibara": version}
    if provenance is not None:
        code = _facet(provenance, "capibara_code")
        if isinstance(code.get("commit"), str):
            facts["commit"] = code["commit"] + ("+" if code.get("isChanged") else "")
        facts |= {"at": str(provenance.get("eventTime")), "run": history.run_id(provenance)}
    return facts


def _working_directory(provenance: Mapping[str, object] | None) -> str:
    """Where relative paths of a build lead; without its events, where this program runs."""
    result = {} if provenance is None else _facet(provenance, "capibara_folder")
    return str(result.get("workingDirectory") or os.getcwd())


def _facet(event: Mapping[str, object], name: str) -> dict[str, Any]:
    run = event.get("run")
    facets = run.get("facets") if isinstance(run, dict) else None
    result = facets.get(name) if isinstance(facets, dict) else None
    return result if isinstance(result, dict) else {}


def _is(state: State) -> str:
    return "has changed" if state is State.CHANGED else "is missing"


def _rank(state: State) -> int:
    return [State.WHOLE, State.UNKNOWN, State.MISSING, State.CHANGED].index(state)
