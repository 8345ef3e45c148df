"""Where documents come from: the standard library, text files, JSON lines, Hugging Face datasets.

A source is configuration; `open(split)` gives its documents with random access. Documents that are not given to the
validation split by name are divided by a hash of their own name or number, so a document never changes sides when
others are added.
"""

from __future__ import annotations

import abc
import dataclasses
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Sequence
from typing import Any

import numpy as np

from capibara.config import configurable
from capibara.data.shuffle import mix
from capibara.types import UserError

SPLITS = ("train", "validation")
_HASH_WHOLE_BYTES = 256 << 20  # corpora up to this size are fingerprinted by content, larger ones by size and time
_CHECK_WHOLE_BYTES = 64 << 20  # JSON-lines files up to this size are parsed once before the run starts


class Documents(abc.ABC):
    """The documents of one split: `len`, `[i] -> str`, and a fingerprint that a checkpoint can be held against."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __getitem__(self, i: int) -> str: ...

    @abc.abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """JSON-able; equal only for the same documents in the same order."""


class Source(abc.ABC):
    """Configuration of a corpus."""

    @abc.abstractmethod
    def open(self, split: str) -> Documents:
        """Documents of "train" or "validation".

        Raises:
          UserError: a file is missing, the corpus or the split is empty, or a line cannot be read.
        """


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class StdlibSource(Source):
    """The Python standard library of the running interpreter: one document a module, about 12 MB.

    Attributes:
      validation_fraction: share of the modules held out for validation.
      include_tests: also take the library's own tests, where the machine has them.
    """

    validation_fraction: float = 0.03
    include_tests: bool = False

    def __post_init__(self) -> None:
        _check_fraction(self.validation_fraction)

    def open(self, split: str) -> Documents:
        root = sysconfig.get_paths()["stdlib"]
        paths = self.paths(split)
        return _FileDocuments(paths, [os.path.relpath(path, root) for path in paths])

    def paths(self, split: str) -> list[str]:
        """Paths of the split's modules, sorted by name."""
        root = sysconfig.get_paths()["stdlib"]
        skip = {"site-packages", "dist-packages", "__pycache__"}
        if not self.include_tests:
            skip |= {"test", "tests", "idle_test"}
        names = []
        for folder, folders, files in os.walk(root):
            folders[:] = sorted(name for name in folders if name not in skip)
            relative = os.path.relpath(folder, root)
            names += [os.path.normpath(os.path.join(relative, name)) for name in files if name.endswith(".py")]
        if not names:
            raise UserError(f"the standard library at {root} has no .py files: use another Dataset.source")
        names.sort()
        chosen = _split_by_hash(_name_hashes(names), split, self.validation_fraction, "StdlibSource")
        return [os.path.join(root, names[i]) for i in chosen]


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSource(Source):
    """Text files, one document a file; long files are cut at line ends.

    Attributes:
      files: paths or globs of the training files.
      validation_files: paths or globs of the validation files; empty holds out a share of `files`.
      validation_fraction: the share held out where no validation files are given.
      document_bytes: a longer file becomes several documents of about this many bytes.
    """

    files: tuple[str, ...]
    validation_files: tuple[str, ...] = ()
    validation_fraction: float = 0.03
    document_bytes: int = 1 << 16

    def __post_init__(self) -> None:
        _check_fraction(self.validation_fraction)
        if self.document_bytes < 1:
            raise UserError(f"document_bytes ({self.document_bytes}) must be at least 1: try 65536")

    def open(self, split: str) -> Documents:
        name, paths, explicit = _choose_files("TextSource", self.files, self.validation_files, split)
        file_of, start, stop = [], [], []
        for i, path in enumerate(paths):
            for first, last in _line_ranges(path, self.document_bytes):
                file_of.append(i)
                start.append(first)
                stop.append(last)
        if not file_of:
            raise UserError(f"{name} ({_shown(paths)}) hold no text: the corpus is empty")
        ranges = np.array([file_of, start, stop], np.int64).T
        if not explicit:
            files = _name_hashes([os.path.basename(path) for path in paths])
            keys = files[ranges[:, 0]] + ranges[:, 1].astype(np.uint64)
            ranges = ranges[_split_by_hash(mix(keys), split, self.validation_fraction, name)]
        return _RangeDocuments(paths, ranges)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonlSource(Source):
    """JSON lines, one document a line.

    Attributes:
      files: paths or globs of the training files.
      field: the field that holds the text.
      validation_files: paths or globs of the validation files; empty holds out a share of the lines.
      validation_fraction: the share held out where no validation files are given.
    """

    files: tuple[str, ...]
    field: str = "text"
    validation_files: tuple[str, ...] = ()
    validation_fraction: float = 0.03

    def __post_init__(self) -> None:
        _check_fraction(self.validation_fraction)

    def open(self, split: str) -> Documents:
        name, paths, explicit = _choose_files("JsonlSource", self.files, self.validation_files, split)
        tables = []
        for i, path in enumerate(paths):
            starts, stops = _line_bounds(path)
            columns = (np.full(len(starts), i), starts, stops, np.arange(1, len(starts) + 1))
            tables.append(np.stack(columns, axis=1)[stops > starts])
        lines = np.concatenate(tables)
        if not len(lines):
            raise UserError(f"{name} ({_shown(paths)}) hold no lines: the corpus is empty")
        # A file that is no JSON shall be called that, not too short to be divided.
        whole = _JsonlDocuments(paths, lines, self.field)
        for first in np.unique(lines[:, 0], return_index=True)[1]:
            whole[first]
        if not explicit:
            files = _name_hashes([os.path.basename(path) for path in paths])
            keys = files[lines[:, 0]] + lines[:, 3].astype(np.uint64)
            lines = lines[_split_by_hash(mix(keys), split, self.validation_fraction, name)]
        documents = _JsonlDocuments(paths, lines, self.field)
        if sum(os.path.getsize(path) for path in paths) <= _CHECK_WHOLE_BYTES:
            for i in range(len(documents)):
                documents[i]
        return documents


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFaceSource(Source):
    """A dataset of the `datasets` library: a saved folder, local files, or a hub name.

    Attributes:
      path: a folder written by `save_to_disk`, or the first argument of `datasets.load_dataset`.
      name: the dataset's configuration, where it has several.
      field: the column that holds the text.
      data_files: files for the generic builders ("json", "csv", "parquet", "text").
      train_split: name of the training split.
      validation_split: name of the validation split; None holds out a share of the training split.
      validation_fraction: the share held out where no validation split is named.
    """

    path: str
    name: str | None = None
    field: str = "text"
    data_files: tuple[str, ...] = ()
    train_split: str = "train"
    validation_split: str | None = None
    validation_fraction: float = 0.03

    def __post_init__(self) -> None:
        _check_fraction(self.validation_fraction)

    def open(self, split: str) -> Documents:
        _check_split(split)
        explicit = self.validation_split is not None
        table = self._load(self.validation_split if explicit and split == "validation" else self.train_split)
        if self.field not in table.column_names:
            raise UserError(f"HuggingFaceSource.field ({self.field!r}) is not one of {', '.join(table.column_names)}")
        if not len(table):
            raise UserError(f"HuggingFaceSource.path ({self.path!r}) has no rows: the corpus is empty")
        rows = np.arange(len(table))
        if not explicit:
            rows = _split_by_hash(mix(rows.astype(np.uint64)), split, self.validation_fraction, "HuggingFaceSource")
        return _TableDocuments(table, rows, self.field)

    def _load(self, split: str) -> Any:
        from capibara import extras

        datasets = extras.require("datasets", extra="hf")
        try:
            if os.path.isfile(os.path.join(self.path, "dataset_dict.json")):
                return datasets.load_from_disk(self.path)[split]
            if os.path.isfile(os.path.join(self.path, "dataset_info.json")):
                return datasets.load_from_disk(self.path)
            files = {"data_files": list(self.data_files)} if self.data_files else {}
            return datasets.load_dataset(self.path, self.name, split=split, **files)
        except (OSError, ValueError, KeyError) as error:
            message = " ".join(str(error).split())[:200]
            raise UserError(f"HuggingFaceSource.path ({self.path!r}), split {split!r}: {message}") from error


class _FileDocuments(Documents):
    """One document a file."""

    def __init__(self, paths: Sequence[str], names: Sequence[str]):
        self._paths, self._names = list(paths), list(names)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, i: int) -> str:
        with open(self._paths[i], "rb") as file:
            return file.read().decode("utf-8", errors="replace")

    def fingerprint(self) -> dict[str, Any]:
        return _fingerprint(self._paths, self._names, len(self))


class _RangeDocuments(Documents):
    """Byte ranges of files: rows of (file, start, stop)."""

    def __init__(self, paths: Sequence[str], ranges: np.ndarray):
        self._paths, self._ranges = list(paths), ranges

    def __len__(self) -> int:
        return len(self._ranges)

    def __getitem__(self, i: int) -> str:
        return self._read(i).decode("utf-8", errors="replace")

    def _read(self, i: int) -> bytes:
        file_index, start, stop = (int(n) for n in self._ranges[i][:3])
        with open(self._paths[file_index], "rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def fingerprint(self) -> dict[str, Any]:
        names = [os.path.basename(path) for path in self._paths]
        return _fingerprint(self._paths, names, len(self), self._ranges.tobytes())


class _JsonlDocuments(_RangeDocuments):
    """Lines of files: rows of (file, start, stop, line number)."""

    def __init__(self, paths: Sequence[str], ranges: np.ndarray, field: str):
        super().__init__(paths, ranges)
        self._field = field

    def __getitem__(self, i: int) -> str:
        line = self._read(i)
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"{self._where(i)} is not JSON ({error}): {_excerpt(line)}") from error
        if not isinstance(record, dict) or self._field not in record:
            fields = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise UserError(f"{self._where(i)} has no field {self._field!r} (it has: {fields}): set JsonlSource.field")
        text = record[self._field]
        if not isinstance(text, str):
            raise UserError(f"{self._where(i)}: field {self._field!r} must be a string, not {type(text).__name__}")
        return text

    def _where(self, i: int) -> str:
        file_index, _, _, line = (int(n) for n in self._ranges[i])
        return f"{self._paths[file_index]}:{line}"


class _TableDocuments(Documents):
    """Chosen rows of a Hugging Face dataset."""

    def __init__(self, table: Any, rows: np.ndarray, field: str):
        self._table, self._rows, self._field = table, rows, field

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> str:
        text = self._table[int(self._rows[i])][self._field]
        if not isinstance(text, str):
            raise UserError(f"row {int(self._rows[i])}: field {self._field!r} must be text, not {type(text).__name__}")
        return text

    def fingerprint(self) -> dict[str, Any]:
        digest = hashlib.blake2b(self._rows.tobytes(), digest_size=8).hexdigest()
        return {"documents": len(self), "table": getattr(self._table, "_fingerprint", ""), "digest": digest}


def _fingerprint(paths: Sequence[str], names: Sequence[str], count: int, extra: bytes = b"") -> dict[str, Any]:
    digest = hashlib.blake2b(extra, digest_size=8)
    sizes = [os.path.getsize(path) for path in paths]
    for path, name, size in zip(paths, names, sizes, strict=True):
        digest.update(f"{name}\0{size}\0".encode())
        if sum(sizes) <= _HASH_WHOLE_BYTES:
            with open(path, "rb") as file:
                digest.update(file.read())
        else:
            digest.update(str(os.stat(path).st_mtime_ns).encode())
    return {"documents": count, "files": len(paths), "bytes": sum(sizes), "digest": digest.hexdigest()}


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise UserError(f"split ({split!r}) must be one of {', '.join(SPLITS)}")


def _check_fraction(fraction: float) -> None:
    if not 0 < fraction < 1:
        raise UserError(f"validation_fraction ({fraction}) must lie between 0 and 1: try 0.03")


def _choose_files(
    name: str, files: Sequence[str], validation_files: Sequence[str], split: str
) -> tuple[str, list[str], bool]:
    """The parameter that names the split's files, their paths, and whether nothing is to be held out of them."""
    _check_split(split)
    if validation_files and split == "validation":
        parameter, patterns = f"{name}.validation_files", validation_files
    else:
        parameter, patterns = f"{name}.files", files
    return parameter, _expand(parameter, patterns), bool(validation_files)


def _expand(name: str, patterns: Sequence[str]) -> list[str]:
    if isinstance(patterns, str):
        patterns = (patterns,)
    if not patterns:
        raise UserError(f"{name} is empty: name at least one file or glob")
    paths: list[str] = []
    for pattern in patterns:
        found = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        found = [path for path in found if os.path.isfile(path)]
        if not found:
            raise UserError(f"{name} ({pattern!r}) matches no file")
        paths += found
    return list(dict.fromkeys(paths))


def _line_ranges(path: str, target_bytes: int) -> list[tuple[int, int]]:
    """Byte ranges of about `target_bytes` that end at line ends (or, in a file without lines, between characters)."""
    size = os.path.getsize(path)
    ranges, start = [], 0
    with open(path, "rb") as file:
        while start < size:
            stop = min(start + target_bytes, size)
            if stop < size:
                file.seek(stop)
                ahead = file.read(target_bytes)
                newline = ahead.find(b"\n")
                if newline >= 0:
                    stop += newline + 1
                else:
                    while stop < size and ahead and ahead[0] & 0xC0 == 0x80:
                        stop, ahead = stop + 1, ahead[1:]
            ranges.append((start, stop))
            start = stop
    return ranges


def _line_bounds(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Starts and stops [lines] of the lines of a file, without their line ends."""
    size = os.path.getsize(path)
    if not size:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    content = np.memmap(path, np.uint8, "r")
    block = 64 << 20
    ends = [np.flatnonzero(content[i : i + block] == 0x0A) + i for i in range(0, size, block)]
    stops = np.concatenate(ends).astype(np.int64)
    if not len(stops) or stops[-1] != size - 1:
        stops = np.append(stops, size)
    starts = np.concatenate([[0], stops[:-1] + 1])
    # A line of nothing but a carriage return is blank too.
    lone = (stops - starts == 1) & (content[np.minimum(starts, size - 1)] == 0x0D)
    return starts, np.where(lone, starts, stops)


def _name_hashes(names: Sequence[str]) -> np.ndarray:
    digests = b"".join(hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=8).digest() for name in names)
    return np.frombuffer(digests, np.uint64)


def _split_by_hash(keys: np.ndarray, split: str, fraction: float, name: str) -> np.ndarray:
    """Indices of the documents of `split`, in order; both splits have at least one document."""
    _check_split(split)
    if len(keys) < 2:
        raise UserError(f"{name} has {len(keys)} document: none can be held out, give validation data of its own")
    held_out = keys < np.uint64(int(fraction * 2.0**64))
    held_out[np.argmin(keys)] = True
    held_out[np.argmax(keys)] = False
    return np.flatnonzero(held_out if split == "validation" else ~held_out)


def _shown(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def _excerpt(line: bytes) -> str:
    text = line[:60].decode("utf-8", errors="replace").strip()
    return repr(text + "..." if len(line) > 60 else text)
