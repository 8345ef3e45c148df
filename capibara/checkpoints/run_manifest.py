"""The manifest of a run folder: its files outside `checkpoints` with hashes, and the committed steps.

  manifest.json     beside config.gin: these facts config.gin, tokenizer/, paths.json, origin/    files needed to read
  the run, which must be unmodified metrics.jsonl, bad_batches.jsonl, tensorboard/    logs, which grow: the bytes up to
  the last seal must be unmodified loss_curve.png    outputs, sealed when a run ends

A file of the first kind is replaced only by `replace`, so that it always agrees with the manifest. The steps
distinguish a run that has lost its checkpoints from one that has not saved yet. The hashes detect random corruption.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from etils import epath

from capibara.checkpoints import manifest
from capibara.checkpoints.manifest import Corrupted
from capibara.core import bucket_faults, limits
from capibara.core.types import UserError
from capibara.data.tokenizers import files as tokenizer_files
from capibara.storage import hashing, outputs, stores
from capibara.storage.store import PARTIAL

NAME = "manifest.json"
CONFIG = "config.gin"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
TRACKERS = "trackers"  # how far each tracker is with the run: changes after the run, and is not in the manifest
# What is read or written where a run folder is used: none of it may be a link out of the folder.
_OWN = (NAME, CONFIG, METRICS, CHECKPOINTS, TRACKERS, "tensorboard", tokenizer_files.OWN, tokenizer_files.ORIGIN)
_FORMAT = 1
_MOST_BYTES, _MOST_VALUES = 16 << 20, 100_000  # limits of a manifest
_LOCK = threading.RLock()  # the saving thread adds steps while the run writes files


class Role(enum.StrEnum):
    """Purpose of a file: config files are needed to read the run, logs grow, outputs are neither."""

    CONFIG = "config"
    LOG = "log"
    OUTPUT = "output"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A file of a run folder.

    Attributes:
      path: relative to the folder.
      size: bytes; for a log the sealed ones.
      xxh128: hash of these bytes.
      role: purpose of the file.
      before: hash of the previous contents while the file is being replaced; "" if it did not exist.
    """

    path: str
    size: int
    xxh128: str
    role: Role
    before: str | None = None


@dataclasses.dataclass(frozen=True)
class RunManifest:
    """The manifest of a run folder.

    Attributes:
      entries: the files, by path.
      steps: committed steps that were not removed.
      data: for each split of the data what the last start has read, held out, skipped and left out.
    """

    entries: Mapping[str, Entry] = dataclasses.field(default_factory=dict)
    steps: frozenset[int] = frozenset()
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def read(folder: epath.Path) -> RunManifest | None:
    """The manifest of a run folder; None: there is none.

    Raises:
      Corrupted: it was modified.
      UserError: the bucket refuses to read it.
    """
    path = folder / NAME
    check_own(folder, NAME)
    if not path.exists():
        return None
    try:
        values = limits.parse_json(stores.of(path).read(path, _MOST_BYTES), values=_MOST_VALUES, finite=False)
        digest = values.pop("xxh128")
        if digest != _digest(values):
            raise Corrupted(f"{path} has changed since it was written")
        if values["format"] != _FORMAT:
            raise Corrupted(f"{path} is of format {values['format']}, this version of capibara reads {_FORMAT}")
        entries = [_entry(value) for value in values["files"]]
        if not all(type(step) is int for step in values["steps"]):
            raise ValueError("its steps are no numbers")
        if not isinstance(data := values.get("data", {}), dict):
            raise ValueError("its data is no object")
        return RunManifest({entry.path: entry for entry in entries}, frozenset(values["steps"]), data)
    except limits.Refused as error:
        raise Corrupted(f"{path} has {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError) as error:
        if (cause := bucket_faults.explained([error])) is not None:  # nothing is wrong with the file
            raise cause from error
        raise Corrupted(f"{path} cannot be read ({manifest.one_line(error)})") from error


def _entry(values: Mapping[str, Any]) -> Entry:
    """Parses a manifest's entry of a file, which is untrusted."""
    entry = Entry(**{**values, "role": Role(values["role"])})
    if not all(isinstance(text, str) for text in (entry.path, entry.xxh128, entry.before or "")):
        raise ValueError(f"it has the file {limits.shortened(values)}")
    if type(entry.size) is not int or entry.size < 0:
        raise ValueError(f"{entry.path} is said to have {limits.shortened(entry.size)} bytes")
    limits.inside("", entry.path, NAME)
    return entry


def replace(folder: epath.Path, files: Mapping[str, bytes]) -> None:
    """Replaces files needed to read a run; after a crash either the old or the new ones are there.

    Args:
      folder: of the run.
      files: contents by path.

    Raises:
      OSError: the folder cannot be written.
    """
    with _LOCK:
        new = {path: Entry(path, len(data), hashing.hash_of(data), Role.CONFIG) for path, data in files.items()}
        old = {path: _hash_or_nothing(folder / path) for path in files}
        _change(folder, lambda m: {**m.entries, **{p: dataclasses.replace(e, before=old[p]) for p, e in new.items()}})
        for path, data in files.items():
            stores.of(folder).make_folder((folder / path).parent)
            stores.of(folder).write_atomic(folder / path, data)
        _change(folder, lambda m: {**m.entries, **new})


def begin(folder: epath.Path, data: Mapping[str, object]) -> None:
    """Records that a run starts writing, and the counts of its data: previous outputs are no longer valid."""
    with _LOCK:
        recorded = _read_or_empty(folder)
        entries = {path: entry for path, entry in recorded.entries.items() if entry.role is not Role.OUTPUT}
        _write(folder, dataclasses.replace(recorded, entries=entries, data=data))


def seal_logs(folder: epath.Path) -> None:
    """Seals the logs as they are now."""
    entries = _entries_of(folder, [path for path in _present(folder) if _role(path) is Role.LOG])
    _change(folder, lambda m: {**m.entries, **entries})


def seal(folder: epath.Path) -> list[str]:
    """Seals every file of the folder and the list of its steps as they are now; returns the paths."""
    entries = _entries_of(folder, _present(folder))
    steps = _committed(folder)
    with _LOCK:
        _write(folder, RunManifest(entries, frozenset(steps), _data(folder)))
    return list(entries)


def _data(folder: epath.Path) -> Mapping[str, Any]:
    """The counts of the data that are recorded; of a manifest that was modified none."""
    try:
        recorded = read(folder)
    except Corrupted:
        recorded = None
    return {} if recorded is None else recorded.data


def seal_outputs(folder: epath.Path) -> None:
    """Seals logs and outputs as they are now, at the end of a run."""
    entries = _entries_of(folder, [path for path in _present(folder) if _role(path) is not Role.CONFIG])
    _change(folder, lambda m: {**m.entries, **entries})


def add_step(folder: epath.Path, step: int) -> None:
    """Records a committed step."""
    with _LOCK:
        recorded = _read_or_empty(folder)
        _write(folder, dataclasses.replace(recorded, steps=recorded.steps | {step}))


def forget_step(folder: epath.Path, step: int) -> None:
    """Records that a step is about to be removed or renamed, so that it does not count as lost."""
    with _LOCK:
        recorded = _read_or_empty(folder)
        if step in recorded.steps:
            _write(folder, dataclasses.replace(recorded, steps=recorded.steps - {step}))


def hashes(folder: epath.Path) -> dict[str, str]:
    """The hashes of the files needed to read the run, for its steps' manifests."""
    with _LOCK:
        entries = _read_or_empty(folder).entries.values()
    return {entry.path: entry.xxh128 for entry in entries if entry.role is Role.CONFIG}


def check(folder: epath.Path) -> None:
    """Raises UserError if files needed to read a run were modified; accepts a run without a manifest."""
    known = (CONFIG, tokenizer_files.PATHS)
    check_own(folder, *_OWN)
    check_own_steps(folder)
    try:
        recorded = read(folder)
    except Corrupted as fault:
        raise UserError(f"{fault}: {_mend(folder)}") from None
    if recorded is None:
        for name in known:
            if (folder / name).exists():
                raise UserError(f"{folder / NAME} is gone, which has the hash of {name}: {_mend(folder)}")
        return
    if wrong := faults(folder, recorded, Role.CONFIG):
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UserError(f"{folder}: {wrong[0]}{more}: {_mend(folder)}")


def check_own(folder: epath.Path, *names: str) -> None:
    """Raises UserError if a file or folder of these names is a link out of the run folder."""
    for name in names:
        outputs.path_in(folder, name)


def config_text(folder: epath.Path) -> str | None:
    """The recorded configuration of a run folder that may come from anyone, to be shown; None: it has none.

    Without a manifest there is no hash to compare: such a text may be shown, and no run is built of it.

    Raises:
      UserError: it is a link out of the folder, no regular file, too large, no text, or has changed since it was written.
    """
    text = outputs.read_own(folder, CONFIG, limits.MIB)
    try:
        entry = None if (manifest := read(folder)) is None else manifest.entries.get(CONFIG)
    except Corrupted as fault:
        raise UserError(f"{fault}: {_mend(folder)}") from None
    if text is None or entry is None:
        return text
    if hashing.file_hash(folder / CONFIG) not in (entry.xxh128, entry.before):
        raise UserError(f"{folder}: {CONFIG} has changed since it was written: {_mend(folder)}")
    return text


def check_own_steps(folder: epath.Path) -> None:
    """Raises UserError if the folder of the checkpoints, a step's or what describes it is a link out of the run folder."""
    inner = folder / CHECKPOINTS
    check_own(folder, CHECKPOINTS)
    if not stores.of(folder).has_local_paths or not os.path.isdir(inner):
        return
    for name in os.listdir(inner):
        check_own(folder, *(f"{CHECKPOINTS}/{name}/{inner}" for inner in ("", manifest.NAME, manifest.RUN)))


def faults(folder: epath.Path, recorded: RunManifest, *roles: Role) -> list[str]:
    """Faults of a run's files, one per line.

    Args:
      folder: of the run.
      recorded: its manifest.
      roles: of the files to check; none: all.
    """
    entries = [entry for entry in recorded.entries.values() if not roles or entry.role in roles]
    lines = [_fault(folder, entry) for entry in entries]
    added = [] if roles and Role.CONFIG not in roles else unknown(folder, recorded, Role.CONFIG)
    return [line for line in lines if line] + [f"{path} was added since, and would be read" for path in added]


def unknown(folder: epath.Path, recorded: RunManifest, *roles: Role) -> list[str]:
    """Files of the folder that its manifest does not name."""
    return [path for path in _present(folder) if path not in recorded.entries and (not roles or _role(path) in roles)]


def recorded_steps(folder: epath.Path) -> frozenset[int]:
    """The committed steps from a run's manifest; without one, the newest step in its metrics.

    Raises:
      UserError: the manifest was modified.
    """
    try:
        recorded = read(folder)
    except Corrupted as fault:
        raise UserError(f"{fault}: {_mend(folder)}") from None
    return _steps_of_metrics(folder) if recorded is None else recorded.steps


def lost_steps(folder: epath.Path) -> list[int]:
    """Committed steps that are missing and were not renamed by a run, oldest first."""
    recorded = recorded_steps(folder)
    return sorted(recorded - set(_committed(folder))) if recorded else []


def _steps_of_metrics(folder: epath.Path) -> frozenset[int]:
    """The newest checkpoint in metrics.jsonl that no later start or roll-back has invalidated."""
    path, steps = folder / METRICS, set[int]()
    if not path.exists():
        return frozenset()
    for line in stores.of(path).lines(path):
        if b'"event"' not in line:
            continue
        try:
            record = json.loads(line)
            event, step = record["event"], int(record["step"])
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            continue
        if event in ("start", "roll_back"):
            steps = {other for other in steps if other <= step}
        elif event == "checkpoint":
            steps.add(step)
    return frozenset({max(steps)} if steps else ())


def _committed(folder: epath.Path) -> list[int]:
    inner = folder / CHECKPOINTS
    if not inner.is_dir():
        return []
    names = [path.name for path in inner.iterdir() if path.name.isascii() and path.name.isdecimal()]
    return [int(name) for name in names if manifest.exists(inner / name)]


def _mend(folder: epath.Path) -> str:
    return f"restore it from a copy; or, if the folder is as you want it, run capibara convert seal {folder}"


def _present(folder: epath.Path) -> list[str]:
    """The files of a run folder outside its checkpoints, except incomplete ones."""
    try:
        return _present_or_raise(folder)
    except OSError as error:
        if (cause := bucket_faults.refused([error])) is not None:
            raise cause from error
        raise UserError(f"{folder} cannot be read ({manifest.one_line(error)}): copy it again") from None


def _present_or_raise(folder: epath.Path) -> list[str]:
    names = []
    for path in sorted(folder.iterdir()):
        if path.name in (CHECKPOINTS, TRACKERS, NAME):
            continue
        if stores.of(path).is_link(path):  # to a folder: what is there is not the run's
            inner = [path.name] * path.exists()
        else:
            inner = [f"{path.name}/{name}" for name in stores.of(path).list(path)] if path.is_dir() else [path.name]
        names += [name for name in inner if not name.endswith(PARTIAL)]
    return names


def _role(path: str) -> Role:
    first, _, inner = path.partition("/")
    if first in (tokenizer_files.OWN, tokenizer_files.ORIGIN) or path in (
        CONFIG,
        tokenizer_files.PATHS,
        *tokenizer_files.FILES,
    ):
        return Role.CONFIG
    return Role.LOG if first == "tensorboard" or path.endswith(".jsonl") and not inner else Role.OUTPUT


def _entries_of(folder: epath.Path, paths: Iterable[str]) -> dict[str, Entry]:
    entries = {}
    for path in paths:
        if (folder / path).is_dir():
            if _role(path) is Role.CONFIG:
                raise UserError(f"{folder / path} is a link to a folder: put a copy in its place")
            continue
        size, digest = hashing.first_hash(folder / path, stores.of(folder).size(folder / path))
        entries[path] = Entry(path, size, digest, _role(path))
    return entries


def _hash_or_nothing(path: epath.Path) -> str:
    return hashing.file_hash(path) if path.exists() else ""


def _fault(folder: epath.Path, entry: Entry) -> str | None:
    path = folder / entry.path
    try:
        check_own(folder, entry.path)
    except UserError as error:
        return str(error)
    try:
        size = stores.of(path).size(path)
        if path.is_dir():
            return f"{entry.path} is a folder"
        if entry.role is Role.CONFIG and size > limits.TEXT_BYTES:
            return f"{entry.path} has {size:,} bytes, more than any file that a run is read by"
        if entry.before is not None and hashing.file_hash(path) == entry.before:
            return None
        if size < entry.size or (size != entry.size and entry.role is not Role.LOG):
            return f"{entry.path} has {size} bytes, not {entry.size}"
        digest = hashing.first_hash(path, entry.size)[1]
    except (FileNotFoundError, NotADirectoryError):
        return None if entry.before == "" else f"{entry.path} is gone"
    except OSError as error:
        if (cause := bucket_faults.refused([error])) is not None:  # nothing is known of the file
            raise cause from error
        return f"{entry.path} cannot be read ({manifest.one_line(error)})"
    return None if digest == entry.xxh128 else f"{entry.path} has changed since it was written"


def _change(folder: epath.Path, entries: Callable[[RunManifest], Mapping[str, Entry]]) -> None:
    with _LOCK:
        recorded = _read_or_empty(folder)
        _write(folder, dataclasses.replace(recorded, entries=entries(recorded)))


def _read_or_empty(folder: epath.Path) -> RunManifest:
    """The manifest to change; a folder without one starts with its existing steps."""
    try:
        recorded = read(folder)
    except Corrupted as fault:
        raise UserError(f"{fault}: {_mend(folder)}") from None
    return RunManifest(steps=frozenset(_committed(folder))) if recorded is None else recorded


def _write(folder: epath.Path, recorded: RunManifest) -> None:
    entries = [recorded.entries[path] for path in sorted(recorded.entries)]
    files = [{k: v for k, v in dataclasses.asdict(entry).items() if v is not None} for entry in entries]
    values = {"format": _FORMAT, "steps": sorted(recorded.steps), "files": files, "data": recorded.data}
    stores.of(folder).make_folder(folder)
    stores.of(folder).write_atomic(folder / NAME, json.dumps(values | {"xxh128": _digest(values)}, indent=1).encode())


def _digest(values: Mapping[str, object]) -> str:
    return hashing.hash_of(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


def folder_of(model_dir: str | os.PathLike[str]) -> epath.Path:
    """A run folder as a path."""
    return stores.folder_of(os.fspath(model_dir))
