"""The manifest of a checkpoint: each of its files with its size and hash. A step without one does not exist.

It is written last, when all other files are on the disk, and removed first: so a step is there whole or not at all,
whenever the program or the machine stops. The hashes are those that sha256sum prints.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath

from capibara.training import storage

NAME = "manifest.json"
RUN = "run.json"  # the first file of a step that is written, as the manifest is the last
DAMAGED, UNFINISHED, ROLLED_BACK = ".damaged", ".unfinished", ".rolled_back"  # end names of steps moved aside
_FORMAT = 1
_SHOWN = 3  # damaged files that a message names


class Damaged(Exception):
    """A step's files are not those that were saved; one line."""


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a checkpoint.

    Attributes:
      path: relative to the step's folder.
      size: bytes.
      sha256: of the bytes that were meant to be written: those of an array are hashed in memory.
      array: the array that the file is a chunk of; None: it is none.
      chunk: which, counted in chunks along each dimension.
    """

    path: str
    size: int
    sha256: str
    array: str | None = None
    chunk: tuple[int, ...] | None = None

    def describe(self) -> str:
        """The file with what it holds."""
        return self.path if self.array is None else f"{self.path} (array {self.array})"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
      step: the step that it is of.
      files: all files but the manifest.
      about: who wrote it, with what, as JSON values.
    """

    step: int
    files: tuple[File, ...]
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def write(folder: epath.Path, manifest: Manifest) -> None:
    """Makes a step exist: its files must be on the disk already."""
    values = {"format": _FORMAT, "step": manifest.step, "about": dict(manifest.about)}
    values["files"] = [
        {name: value for name, value in dataclasses.asdict(file).items() if value is not None}
        for file in sorted(manifest.files, key=lambda file: file.path)
    ]
    values["sha256"] = _digest(values)
    storage.write(folder / NAME, json.dumps(values, indent=1).encode())


def is_step(name: str) -> bool:
    """Whether a folder's name is that of a step."""
    return name.isascii() and name.isdecimal() and str(int(name)) == name


def folder_of(model_dir: str) -> epath.Path:
    """Where a run folder has its steps."""
    return storage.folder_of(model_dir) / "checkpoints"


def steps(folder: epath.Path) -> list[int]:
    """The committed steps of a folder, oldest first; of what has become of their files since nothing is said."""
    return sorted(int(path.name) for path in folder.iterdir() if is_step(path.name) and exists(path))


def prune(folder: epath.Path, kept: Sequence[int], dropped: Sequence[int]) -> bool:
    """Removes steps, provided that the newest or another of those that are kept is what was saved; whether it did."""
    if not any(is_whole(folder / str(step)) for step in sorted(kept, reverse=True)):
        return False
    for step in dropped:
        remove(folder / str(step))
    return True


def is_whole(folder: epath.Path) -> bool:
    """Whether a step's files are those that were saved; where they are not the log says why."""
    try:
        verify(folder)
    except Damaged as fault:
        logging.getLogger(__name__).warning("%s is damaged: %s", folder, fault)
        return False
    return True


def is_unfinished(folder: epath.Path) -> bool:
    """Whether a step's folder is what a save of ours left that did not come to its end."""
    if not folder.is_dir() or exists(folder):
        return False
    names = {path.name for path in folder.iterdir()}
    return not names or any(name.startswith(RUN) for name in names)


def remove(folder: epath.Path) -> None:
    """Removes a step's folder, if it is there; no half of it is taken for a step, whenever this is stopped."""
    if not folder.exists():
        return
    storage.remove(folder / NAME)
    if not storage.is_remote(folder):  # half of it could be taken for what another program wrote
        gone = folder.with_name(folder.name + UNFINISHED)
        if gone.exists():
            gone.rmtree()
        folder = folder.rename(gone)
    folder.rmtree()


def exists(folder: epath.Path) -> bool:
    """Whether a step was committed; says nothing of what has become of its files since."""
    return (folder / NAME).exists()


def read(folder: epath.Path) -> Manifest:
    """The manifest of a step's folder, which is named after the step.

    Raises:
      Damaged: there is none, it has changed since it was written, or it is of another step.
    """
    try:
        values = json.loads((folder / NAME).read_bytes())
        digest = values.pop("sha256")
        if digest != _digest(values):
            raise Damaged(f"{NAME} has changed since it was written")
        if values["format"] != _FORMAT:
            raise Damaged(f"{NAME} is of format {values['format']}, this version of capibara reads {_FORMAT}")
        files = tuple(File(**{**file, "chunk": _tuple(file.get("chunk"))}) for file in values["files"])
        manifest = Manifest(step=values["step"], files=files, about=values["about"])
    except FileNotFoundError as error:
        raise Damaged(f"it has no {NAME}") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"{NAME} cannot be read ({_one_line(error)})") from error
    if str(manifest.step) != folder.name:
        raise Damaged(f"{NAME} is of step {manifest.step}")
    return manifest


def faults(folder: epath.Path, manifest: Manifest, wanted: Callable[[File], bool] = lambda file: True) -> list[str]:
    """What is wrong with the files of a step, a line each; nothing where they are those that were saved.

    All files are read and hashed, in threads.

    Args:
      folder: of the step.
      manifest: its manifest.
      wanted: the files to look at; where it leaves some out, files that do not belong there are not looked for.
    """
    try:
        present = set(storage.files_below(folder)) - {NAME}
    except OSError as error:
        return [f"{folder} cannot be read ({_one_line(error)})"]
    files = [file for file in manifest.files if wanted(file)]
    found = [line for line in storage.each(lambda file: _fault(folder, file), files) if line]
    if len(files) == len(manifest.files):
        found += [f"{path} does not belong there" for path in sorted(present - {file.path for file in files})]
    return found


def verify(folder: epath.Path, wanted: Callable[[File], bool] = lambda file: True) -> Manifest:
    """The manifest of a step whose files are those that were saved.

    Raises:
      Damaged: some are not.
    """
    manifest = read(folder)
    if found := faults(folder, manifest, wanted):
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise Damaged("; ".join(found[:_SHOWN]) + more)
    return manifest


def of_disk(folder: epath.Path, paths: Sequence[str]) -> list[File]:
    """Files as they are on the disk."""
    return storage.each(lambda path: File(path, (folder / path).stat().length, storage.sha256(folder / path)), paths)


def _fault(folder: epath.Path, file: File) -> str | None:
    path = folder / file.path
    try:
        size = path.stat().length
        if size != file.size:
            return f"{file.describe()} has {size} bytes, not {file.size}"
        return None if storage.sha256(path) == file.sha256 else f"{file.describe()} has changed since it was saved"
    except FileNotFoundError:
        return f"{file.describe()} is gone"
    except OSError as error:
        return f"{file.describe()} cannot be read ({_one_line(error)})"


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _tuple(values: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def _one_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0][:160]
