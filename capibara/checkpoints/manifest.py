"""The manifest of a checkpoint: all its files with sizes and hashes. A step without one does not exist.

It is written last, after all other files are on disk, and removed first, so that a step exists completely or not at
all, whenever the program or the machine stops. The hashes are those that xxh128sum prints: they detect random
corruption; encryption protects against manipulation.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import itertools
import json
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from etils import epath

import capibara
from capibara.core import extras, limits
from capibara.core.types import UserError
from capibara.storage import hashing, stores, threads

NAME = "manifest.json"
RUN = "run.json"  # the first file of a step that is written; the manifest is the last
_FORMAT = 2
MOST_FILES, _MOST_BYTES, _MOST_VALUES = 400_000, 128 << 20, 8_000_000  # 300 bytes and 20 values a file
_SHOWN = 3  # most corrupted files that a message names
_TRIES, _PAUSE_S = 3, 0.5  # for a read that the disk refuses

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "libtpu")  # packages whose versions are recorded
_GIT_S = 5.0

T = TypeVar("T")


class Corrupted(Exception):
    """A step's files are not those that were saved; the message is one line."""


class Unreadable(UserError):
    """A step's files cannot be read now; whether they are intact is unknown."""


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a checkpoint.

    Attributes:
      path: relative to the step's folder.
      size: bytes.
      xxh128: hash of the intended bytes: array chunks are hashed in memory, before they are written.
      array: name of the array that the file is a chunk of; None: it is none.
      chunk: index of the chunk along each dimension.
      step: the older step whose folder contains it; None: its own step's.
      content: hash of the contents of a compressed or encrypted chunk; with encryption a keyed hash.
    """

    path: str
    size: int
    xxh128: str
    array: str | None = None
    chunk: tuple[int, ...] | None = None
    step: int | None = None
    content: str | None = None

    def describe(self) -> str:
        """The file's path with its step and array, for messages."""
        path = self.path if self.step is None else f"{self.path} of step {self.step}"
        return path if self.array is None else f"{path} (array {self.array})"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The manifest of a step.

    Attributes:
      step: number of the step.
      files: all files except the manifest.
      about: origin of the step, as JSON values.
      encryption: cipher and key id of all files except this one and the arrays' layouts; None: not encrypted.
      mac: signature of all this with the key; None: not encrypted.
    """

    step: int
    files: tuple[File, ...]
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    encryption: Mapping[str, str] | None = None
    mac: str | None = None

    def signed(self) -> bytes:
        """The signed bytes: everything except `mac`."""
        return _canonical({name: value for name, value in _values(self).items() if name != "mac"})

    @functools.cached_property
    def by_path(self) -> dict[str, File]:
        """The files by path."""
        return {file.path: file for file in self.files}

    @functools.cached_property
    def by_folder(self) -> dict[str, list[File]]:
        """The files by folder, relative to the step's."""
        result: dict[str, list[File]] = {}
        for file in self.files:
            result.setdefault(file.path.rpartition("/")[0], []).append(file)
        return result


def write(folder: epath.Path, manifest: Manifest) -> None:
    """Commits a step; its files must be on disk already.

    Raises:
      UserError: it has more files than `read` accepts.
    """
    if len(manifest.files) > MOST_FILES:
        raise UserError(
            f"step {manifest.step} has {len(manifest.files):,} files, must have at most {MOST_FILES:,}: spread arrays over "
            "fewer devices (Plan.fsdp, Plan.tensor), or loop over layers (layer_loop = 'scan')"
        )
    values = _values(manifest)
    values["xxh128"] = hashing.hash_of(_canonical(values))
    # One file per line; indent= would bypass the C encoder. Nothing follows the last brace: every missing byte is
    # noticed.
    files = ",\n".join(map(json.dumps, values.pop("files")))
    stores.of(folder).write_atomic(folder / NAME, f'{json.dumps(values)[:-1]},\n"files": [\n{files}\n]}}'.encode())


def exists(folder: epath.Path) -> bool:
    """Whether a step was committed; its files are not checked."""
    return (folder / NAME).exists()


def read(folder: epath.Path) -> Manifest:
    """The manifest in a step's folder, which is named after the step.

    Raises:
      Corrupted: it is missing, was modified, or belongs to another step.
      Unreadable: the disk cannot read it.
    """
    text = _patiently(NAME, folder / NAME, lambda: stores.of(folder).read(folder / NAME, _MOST_BYTES))
    try:
        values = limits.parse_json(text, values=_MOST_VALUES, finite=False)
        if len(values.get("files", ())) > MOST_FILES:
            raise ValueError(f"it names more than {MOST_FILES:,} files")
        digest = values.pop("xxh128")
        if digest != hashing.hash_of(_canonical(values)):
            raise Corrupted(f"{NAME} has changed since it was written")
        if values["format"] != _FORMAT:
            raise Corrupted(f"{NAME} is of format {values['format']}, this version of capibara reads {_FORMAT}")
        files = tuple(_file(file) for file in values["files"])
        manifest = Manifest(values["step"], files, values["about"], values.get("encryption"), values.get("mac"))
        _check_types(manifest)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Corrupted(f"{NAME} cannot be read ({one_line(error)})") from error
    if str(manifest.step) != folder.name:
        raise Corrupted(f"{NAME} is of step {manifest.step}")
    return manifest


def faults(folder: epath.Path, manifest: Manifest, selected: Callable[[File], bool] = lambda file: True) -> list[str]:
    """Faults of a step's files, one per line; empty if they are intact.

    Reads and hashes the files, in threads.

    Args:
      folder: of the step.
      manifest: its manifest.
      selected: selects the files to check.

    Raises:
      Unreadable: the disk cannot read them.
    """
    files = [file for file in manifest.files if selected(file)]
    return [line for line in threads.each(lambda file: _fault(folder, file), files) if line]


def strays(folder: epath.Path, manifest: Manifest) -> list[str]:
    """Files in a step's folder that do not belong to it, and are harmless (.DS_Store, .nfs...)."""
    unstepped = {file.path for file in manifest.files if file.step is None}
    return [path for path in stores.of(folder).list(folder) if path not in unstepped and path != NAME]


def verify(folder: epath.Path, selected: Callable[[File], bool] = lambda file: True) -> Manifest:
    """The manifest of a step, after its files were verified.

    Raises:
      Corrupted: some are not intact.
    """
    manifest = read(folder)
    if result := faults(folder, manifest, selected):
        more = f" and {len(result) - _SHOWN} more" if len(result) > _SHOWN else ""
        raise Corrupted("; ".join(result[:_SHOWN]) + more)
    return manifest


def of_disk(folder: epath.Path, paths: Sequence[str]) -> list[File]:
    """Manifest entries for files on disk."""
    return threads.each(
        lambda path: File(path, stores.of(folder).size(folder / path), hashing.file_hash(folder / path)), paths
    )


def place(folder: epath.Path, file: File) -> epath.Path:
    """The path of a file of a step."""
    return (folder if file.step is None else folder.parent / str(file.step)) / file.path


def is_there(folder: epath.Path, file: File) -> bool:
    """Whether a file of a step exists with its size; its contents are not checked."""
    try:
        return stores.of(folder).size(place(folder, file)) == file.size
    except OSError:
        return False


def contents(folder: epath.Path, file: File, *, check: bool = True) -> np.ndarray:
    """The bytes of a file, uint8 [size], verified in the same pass.

    Args:
      folder: of the step.
      file: of its manifest.
      check: whether to compare the hash; the size is always compared.

    Raises:
      Corrupted: they are not intact.
    """
    path = place(folder, file)

    def once() -> np.ndarray:
        _check_size(path, file)
        result, digest = hashing.read_hashed(path, file.size)
        _check_hash(digest if check else file.xxh128, file)
        return result

    return _patiently(file.describe(), path, once)


def _fault(folder: epath.Path, file: File) -> str | None:
    path = place(folder, file)

    def once() -> None:
        _check_size(path, file)
        _check_hash(hashing.file_hash(path), file)

    try:
        return _patiently(file.describe(), path, once)
    except Corrupted as fault:
        return str(fault)


def _check_size(path: epath.Path, file: File) -> None:
    if (size := stores.of(path).size(path)) != file.size:
        raise Corrupted(f"{file.describe()} has {size} bytes, not {file.size}")


def _check_hash(digest: str, file: File) -> None:
    if digest != file.xxh128:
        raise Corrupted(f"{file.describe()} has changed since it was saved")


def _patiently(subject: str, path: epath.Path, read: Callable[[], T]) -> T:
    """Calls `read`, repeatedly if the disk refuses; reports corruption only when it is certain."""
    for attempt in itertools.count(1):
        try:
            return read()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise Corrupted(f"{subject} is gone") from error
        except limits.Refused as error:
            raise Corrupted(f"{subject} has {error}") from None
        except OSError as error:
            if attempt < _TRIES:
                time.sleep(_PAUSE_S)
            elif error.errno == errno.EIO:
                raise Corrupted(f"{subject} cannot be read ({one_line(error)})") from error
            else:
                raise Unreadable(
                    f"{path} cannot be read ({error.strerror or one_line(error)}): nothing was changed; see to it that it "
                    "can be, and run the command again"
                ) from error
    raise AssertionError("unreachable")


def _values(manifest: Manifest) -> dict[str, Any]:
    values = {"format": _FORMAT, "step": manifest.step, "about": dict(manifest.about)}
    if manifest.encryption is not None:
        values |= {"encryption": dict(manifest.encryption), "mac": manifest.mac}
    values["files"] = [
        {name: value for name, value in dataclasses.asdict(file).items() if value is not None}
        for file in sorted(manifest.files, key=lambda file: file.path)
    ]
    return values


def _canonical(values: Mapping[str, object]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def _file(values: Mapping[str, Any]) -> File:
    """Parses a manifest's entry of a file, which is untrusted."""
    file = File(**values)
    if file.chunk is not None:
        file = dataclasses.replace(file, chunk=tuple(file.chunk))
    texts = all(isinstance(text, str) for text in (file.path, file.xxh128, file.array or "", file.content or ""))
    counts = (file.size, file.step or 0, *(file.chunk or ()))
    if not texts or not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError(f"it has the file {limits.shortened(values)}")
    limits.inside("", file.path, NAME)
    return file


def _check_types(manifest: Manifest) -> None:
    about, encryption = manifest.about, manifest.encryption
    types: dict[str, tuple[type, ...]] = {name: (str, type(None)) for name in ("date", "commit", "capibara")}
    types |= {"score": (int, float, type(None)), "parent": (int, type(None)), "run": (dict, type(None))}
    right = isinstance(about, dict) and all(isinstance(about.get(name), kinds) for name, kinds in types.items())
    for values in (about.get("run") or {}, encryption or {}) if right else ():
        right &= isinstance(values, dict) and all(isinstance(text, str) for text in values.values())
    if not right or type(manifest.step) is not int or not isinstance(manifest.mac, str | None):
        raise ValueError("what it says of itself is of another kind")


def one_line(error: BaseException) -> str:
    """An error's message, shortened to one line."""
    return (str(error).strip() or type(error).__name__).split("\n")[0][:160]


def provenance(config: str) -> dict[str, Any]:
    """The origin of a run's checkpoints for their manifests, as JSON values.

    Args:
      config: the operative Gin configuration.
    """
    import jax

    return {
        "capibara": capibara.__version__,
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := extras.version(name))},
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "commit": commit(),
        "config": config,
    }


def commit() -> str | None:
    """The git commit of the current folder, with "+" if files differ; None: it is in no repository."""
    result = _git("rev-parse", "HEAD")
    if not result:
        return None
    return result + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*command: str) -> str | None:
    try:
        done = subprocess.run(["git", *command], capture_output=True, text=True, timeout=_GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
