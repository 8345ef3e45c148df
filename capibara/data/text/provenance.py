"""The data sets that a split's files belong to, for the checkpoints of a run: fingerprints of what it saw.

A file belongs to the data set of the manifest.json in its folder, or in one above, that names it (capibara.builders writes
them). Other files stand for themselves.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from capibara.core import limits
from capibara.core.types import TryAgain, UserError
from capibara.storage import stores

MANIFEST = "manifest.json"
_LEVELS = 3  # folders above a file in which its manifest may be
HASH_BYTES = 256 << 20  # of files together that are hashed; larger ones are identified by their sizes
NAMED = 200  # files without a data set that are named one by one
_UNREADABLE = (OSError, UserError, TryAgain, limits.Refused, ValueError)

Value = dict[str, Any]  # a JSON object


def of_source(source: object) -> list[Value]:
    """The data sets of a source's training files; raises nothing: what cannot be read is omitted."""
    result: dict[str, int] = {}
    for pattern in _patterns(source):
        try:
            result |= {entry.url: entry.size for entry in stores.of(pattern).matching(pattern)}
        except _UNREADABLE:
            continue
    return of_files(result)


def of_paths(paths: Iterable[str]) -> list[Value]:
    """The data sets of files on this machine; missing ones are omitted."""
    return of_files({path: os.path.getsize(path) for path in paths if os.path.isfile(path)})


def of_files(sizes: Mapping[str, int], hashes: Mapping[str, str] | None = None) -> list[Value]:
    """The data sets that files belong to.

    Args:
      sizes: bytes by path or address.
      hashes: sha256 by path or address; None: computed here, unless there is too much.

    Returns:
      For each data set its folder (`path`), `kind`, `fingerprint` and how many of its `files` are read; for each other
      file its `path`, `bytes` and, unless there is too much, `sha256`. Many other files are one entry, with a
      `fingerprint` of their names and sizes.
    """
    is_hashed = sum(sizes.values()) <= HASH_BYTES
    known = {stores.of(path).absolute(path): digest for path, digest in (hashes or {}).items()}
    manifests: dict[str, Value | None] = {}
    sets: dict[str, Value] = {}
    others: list[Value] = []
    for path, size in sorted((stores.of(path).absolute(path), size) for path, size in sizes.items()):
        digest = known.get(path)
        if hashes is None and is_hashed and stores.of(path).has_local_paths:
            digest = _sha256(path)
        folder = next(_folders(path, size, digest, manifests), None)
        if folder is not None and (manifest := manifests[folder]) is not None:
            named = sets.setdefault(
                folder,
                {"path": folder, "kind": manifest["kind"], "fingerprint": manifest["fingerprint"], "files": 0},
            )
            named["files"] += 1
        else:
            others.append({"path": path, "bytes": size, **({"sha256": digest} if digest else {})})
    return [*sets.values(), *(others if len(others) <= NAMED else [_together(others)])]


def _patterns(source: object) -> Iterator[str]:
    """The paths and globs in the fields `files` of a source, and of the sources in it."""
    if not dataclasses.is_dataclass(source) or isinstance(source, type):
        return
    for field in dataclasses.fields(source):
        value = getattr(source, field.name)
        parts = value if isinstance(value, (tuple, list)) else (value,)
        for part in parts:
            if field.name == "files" and isinstance(part, str):
                yield part
            elif dataclasses.is_dataclass(part):
                yield from _patterns(part)


def _folders(path: str, size: int, digest: str | None, manifests: dict[str, Value | None]) -> Iterator[str]:
    """The folders at and above a file whose manifest names it with this content; adds manifests that were read."""
    folder = os.path.dirname(path)
    for _ in range(_LEVELS):
        if folder not in manifests:
            manifests[folder] = _manifest(folder)
        known = (manifests[folder] or {}).get("by_name", {}).get(path[len(folder) :].lstrip("/"))
        if known is not None and known.get("bytes") == size and digest in (None, known.get("sha256")):
            yield folder
        if os.path.dirname(folder) == folder:
            return
        folder = os.path.dirname(folder)


def _manifest(folder: str) -> Value | None:
    """The manifest of a data set in a folder; None: it has none."""
    path = f"{folder}/{MANIFEST}"
    try:
        store = stores.of(path)
        if store.has_local_paths and not os.path.isfile(path):
            return None
        result = limits.parse_json(store.read(path, limits.TEXT_BYTES))
        texts = isinstance(result["kind"], str) and isinstance(result["fingerprint"], str)
        return {**result, "by_name": {file["name"]: file for file in result["files"]}} if texts else None
    except (*_UNREADABLE, KeyError, TypeError):  # there is none, or it is of another program
        return None


def _sha256(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _together(files: list[Value]) -> Value:
    """One entry for many files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file['path']}\0{file['bytes']}\0{file.get('sha256', '')}\n".encode("utf-8", "surrogatepass"))
    folder = os.path.commonprefix([file["path"] for file in files]).rpartition("/")[0]
    size = sum(file["bytes"] for file in files)
    return {"path": folder, "files": len(files), "bytes": size, "fingerprint": digest.hexdigest()}
