"""The chain from a checkpoint, a run folder, a data set or a file back to its sources, checked as it is read."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from capibara.builders.files import fingerprints
from capibara.builders.files import manifest as manifests
from capibara.builders.lineage import history
from capibara.builders.lineage.nodes import Check, Kind, Node, State
from capibara.builders.lineage.sources import Sources, exists
from capibara.core import limits
from capibara.core.types import UserError
from capibara.storage import outputs, stores

_CHECKPOINTS = "checkpoints"
_STEP_BYTES, _STEP_VALUES = 128 << 20, 8_000_000  # limits of a step's manifest, as in capibara.checkpoints
_INIT_FROM = re.compile(r"^Trainer\.init_from\s*=\s*\\?\s*((['\"]).*\2)\s*$", re.MULTILINE)
_SHOWN = 20  # files of a checkpoint that are said to be wrong
_STEP_FACTS = {"saved": "date", "by capibara": "capibara", "commit": "commit", "data state": "data"}


class Chain:
    """Reads chains.

    Args:
      check: how files are compared.
      progress: called with each file that is about to be read.
    """

    def __init__(self, check: Check = Check.HASHES, progress: Callable[[str], None] = lambda path: None):
        self._sources = Sources(check, progress)
        self._open: set[str] = set()  # runs whose initial weights are being followed

    def of(self, path: str) -> Node:
        """The chain from a checkpoint step's folder, a run folder, a data set's folder, or a file.

        Raises:
          UserError: it is none of these.
        """
        path = stores.of(path).absolute(path)
        outputs.path_in(
            path, manifests.MANIFEST
        )  # a link is no manifest of the folder's: said before it counts as none
        above, inner = os.path.split(os.path.dirname(path))
        if inner == _CHECKPOINTS:
            outputs.path_in(above, os.path.join(inner, os.path.basename(path)))
        result = _document(path)
        if result is not None and "step" in result:
            return self._step(path, result)
        if result is not None and "fingerprint" in result:
            return self._sources.dataset(path)
        if result is not None and "steps" in result or exists(os.path.join(path, _CHECKPOINTS)):
            return self._run(path, result or {})
        if stores.of(path).has_local_paths and os.path.isfile(path):
            about = fingerprints.hash_file(path)
            return self._sources.file(path, about.bytes, about.sha256, {"bytes": about.bytes})
        raise UserError(
            f"{path} has no lineage: name a run folder, a step in its checkpoints, a folder that capibara prepare wrote, or "
            "a file"
        )

    def _run(self, path: str, record: Mapping[str, object]) -> Node:
        """A run folder, by its newest checkpoint."""
        steps, facts = _steps(record), dict[str, str | int]()
        for name in ("", *map(str, steps)):
            outputs.path_in(path, os.path.join(_CHECKPOINTS, name))
        facts["steps"] = len(steps)
        for event in history.read(path):
            facts["run"] = history.run_id(event)
        if (newest := newest_step(path)) is None:
            raise UserError(f"{path} has no checkpoint yet: name a run that has saved one")
        folder, manifest = newest
        notes = tuple(f"step {step} is missing" for step in steps if step > int(os.path.basename(folder)))
        state = State.MISSING if notes else State.WHOLE
        parents = (self._step(folder, manifest),)
        return Node(kind=Kind.RUN, path=path, state=state, notes=notes, facts=facts, parents=parents)

    def _step(self, path: str, record: Mapping[str, Any]) -> Node:
        """A checkpoint step."""
        about = record["about"] if isinstance(record.get("about"), dict) else {}
        facts = {name: about[key] for name, key in _STEP_FACTS.items() if isinstance(about.get(key), (str, int))}
        notes = _files_wrong(path, record.get("files"))
        state = State.CHANGED if notes else State.WHOLE
        if not isinstance(about.get("datasets"), list):
            notes = (*notes, "its version of capibara recorded no data sets")
        parents = [node for item in datasets_of(record) for node in self._seen(item)]
        if (pretrained := self._pretrained(path, about.get("config"))) is not None:
            parents.append(pretrained)
        return Node(
            kind=Kind.CHECKPOINT, path=path, state=state, notes=notes, facts=facts, parents=tuple(_unique(parents))
        )

    def _seen(self, recorded: Mapping[str, Any]) -> Iterator[Node]:
        """What a checkpoint recorded of its data."""
        path, fingerprint = recorded.get("path"), recorded.get("fingerprint")
        if not isinstance(path, str):  # an encrypted run names no paths
            digest = fingerprint if isinstance(fingerprint, str) else None
            yield Node(kind=Kind.DATASET, path="(the run is encrypted)", digest=digest, state=State.UNKNOWN)
        elif "kind" in recorded:
            yield self._sources.expected(path, str(fingerprint))
        elif "files" in recorded:  # many files as one
            facts = {name: recorded[name] for name in ("files", "bytes") if isinstance(recorded.get(name), int)}
            state = State.UNKNOWN if exists(path) else State.MISSING
            yield Node(kind=Kind.DATASET, path=path, digest=str(fingerprint), state=state, facts=facts)
        else:
            size, digest = recorded.get("bytes"), recorded.get("sha256")
            yield self._sources.file(
                path, size if isinstance(size, int) else None, digest if isinstance(digest, str) else None, {}
            )

    def _pretrained(self, path: str, config: object) -> Node | None:
        """What a checkpoint's initial weights were read from, by its configuration."""
        match = _INIT_FROM.search(config) if isinstance(config, str) else None
        if match is None:
            return None
        try:
            named = str(ast.literal_eval(match[1]))
        except (ValueError, SyntaxError):
            return None
        folder = stores.of(named).absolute(named)
        facts = {"role": "initial weights"}
        if not exists(folder):
            return Node(kind=Kind.RUN, path=folder, state=State.MISSING, facts=facts)
        if folder in self._open or path.startswith(f"{folder}/"):
            return None
        self._open.add(folder)
        try:
            if not _is_folder(folder):  # the size and hash of a file that a manifest of anyone names are not shown
                return Node(kind=Kind.FILE, path=folder, state=State.UNKNOWN, facts=facts)
            return dataclasses.replace(self.of(folder), facts=facts)
        except UserError:  # a model of another program
            return Node(kind=Kind.FILE, path=folder, state=State.UNKNOWN, facts=facts)
        finally:
            self._open.discard(folder)


def newest_step(run: str) -> tuple[str, dict[str, Any]] | None:
    """The folder and the manifest of a run's newest checkpoint step; None: it has none.

    Args:
      run: the run folder; may be in a bucket.
    """
    for step in reversed(_steps(_document(run) or {})):
        inner = os.path.join(_CHECKPOINTS, str(step))
        if (manifest := _document(run, os.path.join(inner, manifests.MANIFEST))) is not None:
            return os.path.join(run, inner), manifest
    return None


def datasets_of(step: Mapping[str, object]) -> list[dict[str, Any]]:
    """What a checkpoint step's manifest says of the data that its run saw (see data.sources.provenance)."""
    about = step.get("about")
    result = about.get("datasets") if isinstance(about, dict) else None
    return [item for item in result if isinstance(item, dict)] if isinstance(result, list) else []


def _steps(run: Mapping[str, object]) -> list[int]:
    """The steps that a run folder's manifest records, oldest first."""
    result = run.get("steps")
    return sorted(step for step in result if type(step) is int) if isinstance(result, list) else []


def _document(folder: str, name: str = manifests.MANIFEST) -> dict[str, Any] | None:
    """The JSON object in a folder's own file; None: there is none, or it is something else, or a link elsewhere."""
    try:
        text = outputs.read_own(folder, name, _STEP_BYTES)
        result = None if text is None else limits.parse_json(text, values=_STEP_VALUES, finite=False)
    except (UserError, ValueError, limits.Refused):
        return None
    return result if isinstance(result, dict) else None


def _is_folder(path: str) -> bool:
    return not stores.of(path).has_local_paths or os.path.isdir(path)


def _files_wrong(folder: str, files: object) -> tuple[str, ...]:
    """What is wrong with the sizes of a step's files; `capibara convert verify` compares their hashes."""
    result = []
    for file in files if isinstance(files, list) else []:
        try:
            step = file.get("step")
            path = os.path.join(
                folder if step is None else os.path.join(os.path.dirname(folder), str(step)), file["path"]
            )
            if stores.of(path).size(path) != file["size"]:
                result.append(f"{file['path']} has another size")
        except (FileNotFoundError, NotADirectoryError):
            result.append(f"{file['path']} is missing")
        except (KeyError, TypeError, AttributeError, ValueError):
            result.append(f"{manifests.MANIFEST} has changed")
    return tuple(result[:_SHOWN])


def _unique(nodes: list[Node]) -> Iterator[Node]:
    """The nodes without repetitions: a data set is named once."""
    seen = set()
    for node in nodes:
        if (key := (node.kind, node.path, node.digest)) not in seen:
            seen.add(key)
            yield node
