"""A resumable output folder: parts that are written whole or not at all, then a manifest of all.

  OUT/manifest.json          written last, when everything else is whole
  OUT/NAME                   the files of the data set
  OUT/lineage.jsonl          OpenLineage events, the only file that has times (see capibara.builders.lineage)
  OUT/.building/plan.json    inputs and settings of an unfinished build
  OUT/.building/done/        a record of each part that is whole, with its hash, counts and problems
  OUT/.building/scratch/     parts that are not for the user; the folder goes when the build is finished

The same inputs, settings and version make the same bytes, no matter how often the build was killed and run again.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Self

import capibara
from capibara.builders.files import fingerprints
from capibara.builders.files.fingerprints import File, Input
from capibara.builders.files.manifest import MANIFEST, VERSION, Manifest, WholePart, read_manifest
from capibara.builders.files.problems import Problems
from capibara.builders.lineage import events, history, recording
from capibara.core import limits
from capibara.core.types import UserError
from capibara.storage import disk, outputs, stores

_BUILDING, _PLAN, _DONE, _SCRATCH = ".building", "plan.json", "done", "scratch"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Durability(enum.Enum):
    """What a whole part survives."""

    POWER_LOSS = "power_loss"  # it is on the disk before it is recorded
    KILL = "kill"  # of the build; quick, and enough for what is verified before it is used and can be written again


class Part:
    """A part that is being written; a context manager's value (see `Parts.write`).

    Attributes:
      path: the temporary file, for a library that writes by name; do not mix it with `write`.
      records: how many records it has; `write_record` counts.
      counts: for the builder's own counts.
      problems: for what was wrong with the input.
    """

    def __init__(self, path: str):
        self.path = path
        self.records = 0
        self.counts: collections.Counter[str] = collections.Counter()
        self.problems = Problems()
        self._file: BinaryIO | None = None

    def write(self, data: bytes) -> None:
        """Appends bytes."""
        if self._file is None:
            self._file = open(self.path, "wb", buffering=limits.MIB)
        self._file.write(data)

    def write_record(self, value: Mapping[str, object]) -> None:
        """Appends a line of JSON, and counts it."""
        self.write(fingerprints.canonical(value).encode() + b"\n")
        self.records += 1

    def close(self) -> None:
        """Closes the file; an empty part is an empty file."""
        if self._file is None:
            self._file = open(self.path, "ab")
        self._file.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a folder, by name; can be sent to worker processes.

    Attributes:
      folder: where they are.
      records: the folder of the records of whole parts.
      durability: what they survive.
    """

    folder: str
    records: str
    durability: Durability = Durability.POWER_LOSS

    def path(self, name: str) -> str:
        """The file of a part."""
        return limits.inside(self.folder, name, "the builder")

    def done(self, name: str) -> WholePart | None:
        """A part that an earlier run wrote, verified by its hash; None: it is to be written."""
        try:
            result = _read_part(limits.read_json(self._record(name)), name)
            if _is_whole(self.folder, result.file):
                return result
        except (FileNotFoundError, UserError):  # killed before it was whole, or changed by hand
            return None
        return None

    @contextlib.contextmanager
    def write(self, name: str) -> Iterator[Part]:
        """Writes a part under a temporary name; it is renamed and recorded when the context ends without an error.

        Args:
          name: its name in the folder; it must not be written by two writers at once.

        Raises:
          UserError: the disk is full, or the folder cannot be written.
        """
        path, record = self.path(name), self._record(name)
        part = Part(f"{path}.partial")
        with _failure_explained(path):
            for item in (path, record):
                os.makedirs(os.path.dirname(item), exist_ok=True)
            for item in (record, path, part.path):  # the record first, so that it never names another content
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(item)
            try:
                yield part
                part.close()
                with open(part.path, "rb") as file:
                    digest, size = hashlib.file_digest(file, "sha256").hexdigest(), file.tell()
                    if self.durability is Durability.POWER_LOSS:
                        os.fsync(file.fileno())
                os.replace(part.path, path)
                if self.durability is Durability.POWER_LOSS:
                    disk.sync_entry(os.path.dirname(path))
                whole = File(name=name, bytes=size, sha256=digest, records=part.records)
                _save(record, _part_json(whole, part), self.durability)
            except BaseException:
                with contextlib.suppress(OSError):
                    part.close()
                with contextlib.suppress(OSError):
                    os.unlink(part.path)
                raise

    def all(self) -> list[WholePart]:
        """The recorded parts, sorted by name; without those whose records a power loss has corrupted, which are to be written.

        Raises:
          UserError: a record that survives it is corrupted.
        """
        result = []
        for above, _, names in os.walk(self.records):
            for entry in names:
                path = os.path.join(above, entry)
                name = os.path.relpath(path, self.records).removesuffix(".json")
                try:
                    result += [_read_part(limits.read_json(path), name)] if path.endswith(".json") else []
                except UserError:
                    if self.durability is Durability.POWER_LOSS:
                        raise
        return sorted(result, key=lambda item: item.file.name)

    def _record(self, name: str) -> str:
        return limits.inside(self.records, f"{name}.json", "the builder")


class Output:
    """A resumable output folder of one build; a context manager that holds the folder for this process alone.

    It records the build's lineage, to a server, too, where OPENLINEAGE_URL names one.

    Args:
      folder: the user's --out; it is created.
      kind: the builder, such as "playbooks".
      config: the settings as JSON; all that changes what is written must be here.
      inputs: the files that are read (`fingerprints.inputs_of`).
      adjustable: names of settings that an unfinished build may change, because none of the parts that it reuses depend on them.

    Raises:
      UserError: another process builds there, or the folder has other files, or the output of other inputs, settings or
        version.
    """

    def __init__(
        self,
        folder: str,
        kind: str,
        config: Mapping[str, Any],
        inputs: Sequence[Input],
        adjustable: Collection[str] = (),
    ):
        if not stores.of(folder).has_local_paths:
            raise UserError(f"--out ({folder}) must be a local folder: name one, and copy it there")
        self.folder, self.kind = folder, kind
        self.config: Mapping[str, Any] = json.loads(fingerprints.canonical(dict(config)))
        self.inputs = tuple(sorted(inputs, key=lambda item: item.path))
        self._adjustable = adjustable
        self._recorder: recording.Recorder | None = None
        building = os.path.join(folder, _BUILDING)
        scratch = os.path.join(building, _SCRATCH)
        self.parts = Parts(folder=folder, records=os.path.join(building, _DONE))
        self.scratch = Parts(folder=scratch, records=os.path.join(scratch, _DONE), durability=Durability.KILL)
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise UserError(f"--out ({folder}) is a file, must be a folder: name another one")
        with outputs.unwritable_told(folder):
            os.makedirs(folder, exist_ok=True)
            self._lock: int | None = _lock(folder)
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None and self._recorder is not None:
                with contextlib.suppress(UserError):  # a full disk, which the error says already
                    self._recorder.fail(error)
            if error is not None and not self._has_parts():
                # What is tried next may have other settings or inputs, and nothing here is worth keeping to these.
                shutil.rmtree(os.path.join(self.folder, _BUILDING), ignore_errors=True)
        finally:
            self.close()

    def close(self) -> None:
        """Lets other processes build there."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def done(self) -> Manifest | None:
        """The manifest of an earlier run that finished, if all of its files have their hash; None: build.

        Where a file of it is missing or has changed, the manifest is removed, so that everything is built again.
        """
        path = os.path.join(self.folder, MANIFEST)
        if not os.path.exists(path):
            self._begin()
            return None
        manifest = read_manifest(self.folder)
        wrong = [file.name for file in manifest.files if not _is_whole(self.folder, file)]
        if not wrong:
            if os.path.exists(os.path.join(self.folder, _BUILDING)):  # killed just before the end
                self._end(manifest)
            return manifest
        logging.getLogger(__name__).warning("%s has changed or is missing: it is built again", ", ".join(wrong[:5]))
        with _failure_explained(path):
            _save(self._plan_path(), self._plan())
            os.unlink(path)
        self._begin()
        return None

    def part(self, name: str) -> contextlib.AbstractContextManager[Part]:
        """`Parts.write` of a file of the data set."""
        self._begin()
        return self.parts.write(name)

    def finish(self, counts: Mapping[str, int] | None = None, problems: Problems | None = None) -> Manifest:
        """Writes the manifest of all parts.

        Args:
          counts: added to the counts of the parts.
          problems: added to the problems of the parts.

        Raises:
          UserError: the disk is full, a part is missing, or an input has changed during the build.
        """
        _check_unchanged(self.inputs)
        parts = self.parts.all()
        for part in parts:
            if not os.path.exists(self.parts.path(part.file.name)):
                raise UserError(f"{self.parts.path(part.file.name)} was removed during the build: run this again")
        manifest = Manifest.of_parts(self.kind, self.config, self.inputs, parts, counts, problems)
        path = os.path.join(self.folder, MANIFEST)
        with _failure_explained(path):
            _save(path, manifest.as_json())
        self._end(manifest)
        return manifest

    def _has_parts(self) -> bool:
        """Whether an unfinished or finished build has whole parts."""
        try:
            return os.path.exists(os.path.join(self.folder, MANIFEST)) or bool(self.parts.all() or self.scratch.all())
        except (OSError, UserError):
            return True

    def _begin(self) -> None:
        """Records the beginning of the build, once."""
        if self._recorder is None:
            self._recorder = recording.build(self.folder, self.kind, self.config, self.inputs)

    def _end(self, manifest: Manifest) -> None:
        """Records the end of the build, once; what only an unfinished build needs is removed last."""
        if history.maker(self.folder, manifest.fingerprint) is None or self._recorder is not None:
            self._begin()
            assert self._recorder is not None
            self._recorder.complete(
                events.outputs_of(os.path.abspath(self.folder), manifest.files, manifest.fingerprint)
            )
            self._recorder = None
        shutil.rmtree(os.path.join(self.folder, _BUILDING), ignore_errors=True)

    def _check(self) -> None:
        """Refuses a folder of another build; begins a new build, or resumes one."""
        path = os.path.join(self.folder, MANIFEST)
        with _failure_explained(path):
            if os.path.exists(path):
                self._compare(path)
            elif os.path.exists(self._plan_path()):
                self._compare(self._plan_path(), self._adjustable)
                _save(self._plan_path(), self._plan())
            else:
                strange = sorted({*os.listdir(self.folder)} - {_BUILDING, history.FILE})
                if strange:
                    raise UserError(
                        f"--out ({self.folder}) has files of no build ({limits.shortened(strange[0])}): name a new folder"
                    )
                shutil.rmtree(os.path.join(self.folder, _BUILDING), ignore_errors=True)  # killed before its plan
                _save(self._plan_path(), self._plan())

    def _compare(self, path: str, adjustable: Collection[str] = ()) -> None:
        """Raises UserError if the folder was begun with other inputs, settings or version; `adjustable` settings may differ."""
        result, plan = limits.read_json(path), self._plan()
        fix = "name another folder, or remove this one"
        for key in ("format", "kind", "version"):
            if result.get(key) != plan[key]:
                theirs, ours = limits.shortened(result.get(key)), limits.shortened(plan[key])
                raise UserError(f"--out ({self.folder}) was built with {key} {theirs}, not {ours}: {fix}")
        if isinstance(before := result.get("config"), dict):
            before |= {name: self.config[name] for name in adjustable}
        if (name := _difference(before, plan["config"])) is not None:
            raise UserError(f"--out ({self.folder}) was built with other settings ({name}): {fix}")
        if (name := _difference(_by_path(result.get("inputs")), _by_path(plan["inputs"]))) is not None:
            raise UserError(f"--out ({self.folder}) was built from other inputs ({name}): {fix}")

    def _plan_path(self) -> str:
        return os.path.join(self.folder, _BUILDING, _PLAN)

    def _plan(self) -> dict[str, Any]:
        return {
            "format": VERSION,
            "kind": self.kind,
            "version": capibara.__version__,
            "config": self.config,
            "inputs": [dataclasses.asdict(item) for item in self.inputs],
        }


def _check_unchanged(inputs: Sequence[Input]) -> None:
    """Raises UserError for an input that has another size now, such as a log that is being written."""
    for item in inputs:
        with contextlib.suppress(OSError):
            if stores.of(item.path).has_local_paths and os.path.getsize(item.path) != item.bytes:
                raise UserError(
                    f"{item.path} has changed during the build (it had {item.bytes:,} bytes): copy it, and build from the "
                    "copy in another folder"
                )


def _read_part(record: Mapping[str, Any], name: str) -> WholePart:
    """A part's record.

    Raises:
      UserError: it is corrupted.
    """
    try:
        counts = {str(key): int(count) for key, count in record["counts"].items()}
        return WholePart(
            file=File(name=name, **record["file"]), counts=counts, problems=Problems.from_json(record["problems"])
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the record of {name} is corrupted ({limits.cause(error)}): remove the folder") from None


def _part_json(file: File, part: Part) -> dict[str, Any]:
    about = {"bytes": file.bytes, "sha256": file.sha256, "records": file.records}
    return {"file": about, "counts": dict(sorted(part.counts.items())), "problems": part.problems.as_json()}


def _is_whole(folder: str, file: File) -> bool:
    """Whether a file has the recorded size and hash."""
    try:
        path = limits.inside(folder, file.name, "the manifest")
        if limits.check_file(path) != file.bytes:
            return False
        return fingerprints.hash_file(path).sha256 == file.sha256
    except (FileNotFoundError, UserError):
        return False


def _save(path: str, value: Mapping[str, object], durability: Durability = Durability.POWER_LOSS) -> None:
    """Writes a JSON file whole."""
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    partial = f"{path}.partial"
    with open(partial, "wb") as file:
        file.write(text.encode("utf-8", "backslashreplace") + b"\n")
        file.flush()
        if durability is Durability.POWER_LOSS:
            os.fsync(file.fileno())
    os.replace(partial, path)
    if durability is Durability.POWER_LOSS:
        disk.sync_entry(os.path.dirname(path))


def _lock(folder: str) -> int:
    """A descriptor of the folder, locked for this process; the lock ends with the process."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            f"--out ({folder}) is being built by another process: wait for its end, or name another folder"
        ) from None
    except OSError:  # a file system without locks
        pass
    return descriptor


@contextlib.contextmanager
def _failure_explained(path: str) -> Iterator[None]:
    """Context in which a full disk or an unwritable folder becomes a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise UserError(
                f"disk full while writing {path}: free some space, then run the same command again (whole parts are kept)"
            ) from error
        if error.filename is None or not os.fspath(error.filename).startswith(os.path.dirname(path)):
            raise  # of what the builder reads
        raise UserError(f"{path} cannot be written ({error.strerror}): name a folder in which you may write") from error


def _by_path(inputs: object) -> object:
    """Inputs by path, for a comparison."""
    if not isinstance(inputs, list):
        return None
    return {str(item.get("path")): (item.get("bytes"), item.get("sha256")) for item in inputs if isinstance(item, dict)}


def _difference(actual: object, expected: object) -> str | None:
    """The first name at which two JSON values differ, such as "filter.least"; None: they are equal."""
    if isinstance(actual, dict) and isinstance(expected, dict):
        for key in sorted({*actual, *expected}):
            if (inner := _difference(actual.get(key), expected.get(key))) is not None:
                return f"{key}.{inner}" if inner and not inner.startswith(" ") else f"{key}{inner}"
        return None
    if fingerprints.canonical(actual) == fingerprints.canonical(expected):  # 1 is not True here
        return None
    return f" was {limits.shortened(actual, 40)}, is {limits.shortened(expected, 40)}"
