"""Where documents come from: the standard library, text files, JSON lines, Hugging Face datasets.

A source is configuration; `open(split)` gives its documents with random access. Documents that are not given to the
validation split by name are divided by a hash of their own name or number, so a document never changes sides when
others are added.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from capibara.config import configurable
from capibara.core import limits
from capibara.core.types import UserError
from capibara.data.pipeline.shuffle import mix, permutation
from capibara.data.sources import disk

LINE_VALUES = 1_000_000  # of JSON in a line
_CHECK_WHOLE_BYTES = 64 << 20  # JSON-lines files up to this size are parsed once before the run starts


class DataFormat(enum.StrEnum):
    """What the documents of a source are for.

    TEXTS: to be predicted.
    PREFERENCES: of two answers the first is to become likelier than the second.
    PROMPTS: to be answered in training, by the model itself.
    """

    TEXTS = "texts"
    PREFERENCES = "preferences"
    PROMPTS = "prompts"


class Example(NamedTuple):
    """One document as its source tells it.

    Attributes:
      text: the document, or what is to be predicted from `inputs`.
      inputs: what `text` answers, translates, ...; None where there is only text.
      domain: what it is about ("python", "sql", ...), where the source knows.
      loss: ranges of characters of a rendered conversation that carry loss; None: `text` is no such thing.
      rejected: of a preference pair, whose chosen answer this is.
    """

    text: str
    inputs: str | None = None
    domain: str | None = None
    loss: tuple[tuple[int, int], ...] | None = None
    rejected: Example | None = None

    @property
    def whole(self) -> str:
        """All text of a document."""
        return self.text if self.inputs is None else f"{self.inputs}\n{self.text}"


class Corpus(abc.ABC):
    """The documents of one split: a fingerprint that a checkpoint can be held against, and a sample."""

    @abc.abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """JSON-able; equal only for the same documents in the same order."""

    @abc.abstractmethod
    def texts(self, seed: int) -> Iterator[str]:
        """All documents' texts, in a seeded order."""


class Documents(Corpus):
    """Documents with random access: `len` and `example(i)`."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def example(self, i: int) -> Example: ...

    def __getitem__(self, i: int) -> str:
        """All text of a document."""
        return self.example(i).whole

    def texts(self, seed: int) -> Iterator[str]:
        return (self[i] for i in permutation(len(self), seed).tolist())


class Blocks(Corpus):
    """Documents in blocks that are read whole: `len` is their number, how many documents are in each nobody knows before.

    Attributes:
      mix_blocks: so many are read together, and their documents mixed, where there is shuffling.
    """

    mix_blocks: int

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def examples(self, i: int) -> list[Example]:
        """The documents of a block; from any thread."""

    @abc.abstractmethod
    def name(self, i: int) -> dict[str, Any]:
        """How a person finds a block again; JSON-able."""

    def texts(self, seed: int) -> Iterator[str]:
        for i in permutation(len(self), seed).tolist():
            yield from (example.whole for example in self.examples(i))


class Source(abc.ABC):
    """Configuration of a corpus."""

    @property
    def has_conversations(self) -> bool:
        """Whether documents are rendered conversations (`Example.loss`), which must not be cut anywhere."""
        return False

    @property
    def data_format(self) -> DataFormat:
        """What the documents are for."""
        return DataFormat.TEXTS

    @abc.abstractmethod
    def open(self, split: str) -> Documents | Blocks:
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
      domain: of all documents.
    """

    validation_fraction: float = 0.03
    include_tests: bool = False
    domain: str | None = "python"

    def __post_init__(self) -> None:
        disk.check_fraction(self.validation_fraction)

    def open(self, split: str) -> Documents:
        root = sysconfig.get_paths()["stdlib"]
        paths = self.paths(split)
        return _FileDocuments(paths, [os.path.relpath(path, root) for path in paths], self.domain)

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
        chosen = disk.split_by_hash(disk.name_hashes(names), split, self.validation_fraction, "StdlibSource")
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
      domain: of all documents; None: what a file's extension says (.py is "python", .sql is "sql").
    """

    files: tuple[str, ...]
    validation_files: tuple[str, ...] = ()
    validation_fraction: float = 0.03
    document_bytes: int = 1 << 16
    domain: str | None = None

    def __post_init__(self) -> None:
        disk.check_fraction(self.validation_fraction)
        if self.document_bytes < 1:
            raise UserError(f"document_bytes ({self.document_bytes}) must be at least 1: try 65536")

    def open(self, split: str) -> Documents:
        name, paths, explicit = disk.choose_files("TextSource", self.files, self.validation_files, split)
        file_of, start, stop = [], [], []
        for i, path in enumerate(paths):
            for first, last in disk.line_ranges(path, self.document_bytes):
                file_of.append(i)
                start.append(first)
                stop.append(last)
        if not file_of:
            raise UserError(f"{name} ({disk.shown(paths)}) hold no text: the corpus is empty")
        ranges = np.array([file_of, start, stop], np.int64).T
        if not explicit:
            files = disk.name_hashes([os.path.basename(path) for path in paths])
            keys = files[ranges[:, 0]] + ranges[:, 1].astype(np.uint64)
            ranges = ranges[disk.split_by_hash(mix(keys), split, self.validation_fraction, name)]
        return _RangeDocuments(paths, ranges, [self.domain or disk.domain_of(path) for path in paths])


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonlSource(Source):
    """JSON lines, one document a line.

    Attributes:
      files: paths or globs of the training files.
      field: the field that holds the text (of pairs, what is to be predicted).
      inputs_field: the field that holds what the text is to be predicted from; None: there is only text.
      domain_field: the field that names a document's domain, where a line has it.
      validation_files: paths or globs of the validation files; empty holds out a share of the lines.
      validation_fraction: the share held out where no validation files are given.
      domain: of the lines that have no `domain_field`.
    """

    files: tuple[str, ...]
    field: str = "text"
    inputs_field: str | None = None
    domain_field: str = "domain"
    validation_files: tuple[str, ...] = ()
    validation_fraction: float = 0.03
    domain: str | None = None

    def __post_init__(self) -> None:
        disk.check_fraction(self.validation_fraction)

    def open(self, split: str) -> Documents:
        files, fraction = (self.files, self.validation_files), self.validation_fraction
        return open_lines(
            "JsonlSource", files, fraction, split, lambda paths, lines: _JsonlDocuments(paths, lines, self)
        )


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFaceSource(Source):
    """A dataset of the `datasets` library: a saved folder, local files, or a hub name.

    Attributes:
      path: a folder written by `save_to_disk`, or the first argument of `datasets.load_dataset`.
      name: the dataset's configuration, where it has several.
      field: the column that holds the text (of pairs, what is to be predicted).
      inputs_field: the column that holds what the text is to be predicted from; None: there is only text.
      domain_field: the column that names a document's domain; None: no column does.
      data_files: files for the generic builders ("json", "csv", "parquet", "text").
      train_split: name of the training split.
      validation_split: name of the validation split; None holds out a share of the training split.
      validation_fraction: the share held out where no validation split is named.
      domain: of all documents, where no column names it.
    """

    path: str
    name: str | None = None
    field: str = "text"
    inputs_field: str | None = None
    domain_field: str | None = None
    data_files: tuple[str, ...] = ()
    train_split: str = "train"
    validation_split: str | None = None
    validation_fraction: float = 0.03
    domain: str | None = None

    def __post_init__(self) -> None:
        disk.check_fraction(self.validation_fraction)

    def open(self, split: str) -> Documents:
        disk.check_split(split)
        explicit, chosen = self.validation_split is not None, self.train_split
        if self.validation_split is not None and split == "validation":
            chosen = self.validation_split
        table = self._load(chosen)
        for name in ("field", "inputs_field", "domain_field"):
            column = getattr(self, name)
            if column is not None and column not in table.column_names:
                raise UserError(f"HuggingFaceSource.{name} ({column!r}) is not one of {', '.join(table.column_names)}")
        if not len(table):
            raise UserError(f"HuggingFaceSource.path ({self.path!r}) has no rows: the corpus is empty")
        rows = np.arange(len(table))
        if not explicit:
            rows = disk.split_by_hash(mix(rows.astype(np.uint64)), split, self.validation_fraction, "HuggingFaceSource")
        return _TableDocuments(table, rows, self)

    def _load(self, split: str) -> Any:
        from capibara.core import extras

        datasets = extras.require("datasets", extra="hf")
        try:
            if os.path.isfile(os.path.join(self.path, "dataset_dict.json")):
                return datasets.load_from_disk(self.path)[split]
            if os.path.isfile(os.path.join(self.path, "dataset_info.json")):
                return datasets.load_from_disk(self.path)
            files = {"data_files": list(self.data_files)} if self.data_files else {}
            return datasets.load_dataset(self.path, self.name, split=split, **files)
        # The errors of pyarrow, fsspec and datasets are of many classes; whatever a file does to them is the file's fault.
        except Exception as error:
            message = f"{type(error).__name__}: {limits.cause(error, 200)}"
            raise UserError(f"HuggingFaceSource.path ({self.path!r}), split {split!r}: {message}") from error


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class CombinedSource(Source):
    """Several sources as one: a pass holds each document of each once, and shuffling mixes them.

    Attributes:
      sources: in Gin, scopes tell sources of one kind apart: (@sql/TextSource(), @js/TextSource()).
    """

    sources: tuple[Source, ...]

    def __post_init__(self) -> None:
        if not self.sources:
            raise UserError("CombinedSource.sources is empty: give at least one source")
        if len({source.data_format for source in self.sources}) > 1:
            kinds = ", ".join(sorted({str(source.data_format) for source in self.sources}))
            raise UserError(f"CombinedSource.sources hold different things ({kinds}): give sources of one of these")

    @property
    def has_conversations(self) -> bool:
        return any(source.has_conversations for source in self.sources)

    @property
    def data_format(self) -> DataFormat:
        return self.sources[0].data_format

    def open(self, split: str) -> Documents | Blocks:
        parts = [source.open(split) for source in self.sources]
        blocks = [part for part in parts if isinstance(part, Blocks)]
        documents = [part for part in parts if not isinstance(part, Blocks)]
        if not documents:
            return _CombinedBlocks(blocks)
        for source, part in zip(self.sources, parts, strict=True):
            if isinstance(part, Blocks):
                name = type(source).__name__
                raise UserError(f"CombinedSource.sources holds {name} beside others: give all of them as @{name}()")
        return _CombinedDocuments(documents)


class _CombinedBlocks(Blocks):
    """The blocks of several splits, one after the other."""

    def __init__(self, parts: Sequence[Blocks]):
        self._parts = list(parts)
        self._stops = np.cumsum([len(part) for part in parts])
        self.mix_blocks = max(part.mix_blocks for part in parts)

    def __len__(self) -> int:
        return int(self._stops[-1])

    def examples(self, i: int) -> list[Example]:
        part, inner = self._part(i)
        return part.examples(inner)

    def name(self, i: int) -> dict[str, Any]:
        part, inner = self._part(i)
        return part.name(inner)

    def _part(self, i: int) -> tuple[Blocks, int]:
        """The part that a block is in, and its number there."""
        at = int(np.searchsorted(self._stops, i, side="right"))
        return self._parts[at], i - int(self._stops[at] - len(self._parts[at]))

    def fingerprint(self) -> dict[str, Any]:
        return {str(i): part.fingerprint() for i, part in enumerate(self._parts)}


class _CombinedDocuments(Documents):
    """The documents of several splits, one after the other."""

    def __init__(self, parts: Sequence[Documents]):
        self._parts = list(parts)
        self._stops = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._stops[-1])

    def example(self, i: int) -> Example:
        part, inner = self._part(i)
        return part.example(inner)

    def record(self, i: int) -> Any:
        """What the JSON of a document's line says, where the parts are `LineDocuments`."""
        part, inner = self._part(i)
        return part.record(inner)

    def where(self, i: int) -> str:
        """The file and the line's number in it, as `record`."""
        part, inner = self._part(i)
        return part.where(inner)

    def _part(self, i: int) -> tuple[Any, int]:
        """The part that a document is in, and its number there."""
        at = int(np.searchsorted(self._stops, i, side="right"))
        return self._parts[at], i - int(self._stops[at] - len(self._parts[at]))

    def fingerprint(self) -> dict[str, Any]:
        return {str(i): part.fingerprint() for i, part in enumerate(self._parts)}


class _FileDocuments(Documents):
    """One document a file."""

    def __init__(self, paths: Sequence[str], names: Sequence[str], domain: str | None):
        self._paths, self._names, self._domain = list(paths), list(names), domain

    def __len__(self) -> int:
        return len(self._paths)

    def example(self, i: int) -> Example:
        with limits.opened(self._paths[i]) as file:
            return Example(file.read().decode("utf-8", errors="replace"), domain=self._domain)

    def fingerprint(self) -> dict[str, Any]:
        return disk.fingerprint(self._paths, self._names, len(self))


class _RangeDocuments(Documents):
    """Byte ranges of files: rows of (file, start, stop); each file has its domain."""

    def __init__(self, paths: Sequence[str], ranges: np.ndarray, domains: Sequence[str | None]):
        self._paths, self._ranges, self._domains = list(paths), ranges, list(domains)

    def __len__(self) -> int:
        return len(self._ranges)

    def example(self, i: int) -> Example:
        return Example(self._read(i).decode("utf-8", errors="replace"), domain=self._domains[int(self._ranges[i][0])])

    def _read(self, i: int) -> bytes:
        file_index, start, stop = (int(n) for n in self._ranges[i][:3])
        with open(self._paths[file_index], "rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def fingerprint(self) -> dict[str, Any]:
        names = [os.path.basename(path) for path in self._paths]
        return disk.fingerprint(self._paths, names, len(self), self._ranges.tobytes())


class LineDocuments(_RangeDocuments):
    """Lines of JSON: rows of (file, start, stop, line number)."""

    def check(self, i: int) -> None:
        """Raises a UserError where line `i` cannot be read; quicker than making an example of it, where that takes long."""
        self.example(i)

    def record(self, i: int) -> Any:
        """What the JSON of line `i` says."""
        line = self._read(i)
        try:
            return limits.parse_json(line, values=LINE_VALUES, finite=False)
        except ValueError as error:
            raise UserError(f"{self.where(i)} is not JSON ({limits.cause(error)}): {disk.excerpt(line)}") from error

    def where(self, i: int) -> str:
        """The file and the line's number in it."""
        file_index, _, _, line = (int(n) for n in self._ranges[i])
        return f"{self._paths[file_index]}:{line}"


def open_lines(
    source: str,
    files: tuple[Sequence[str], Sequence[str]],
    fraction: float,
    split: str,
    make: Callable[[Sequence[str], np.ndarray], LineDocuments],
) -> LineDocuments:
    """The lines of a split of JSON-lines files; small files are read through before the run starts.

    Args:
      source: what the source is called, for errors.
      files: paths or globs of the training files, and of the validation files.
      fraction: the share of the lines held out where there are no validation files.
      split: "train" or "validation".
      make: documents of paths and of rows of (file, start, stop, line number).
    """
    name, paths, explicit = disk.choose_files(source, *files, split)
    tables = []
    for i, path in enumerate(paths):
        starts, stops, numbers = disk.line_bounds(path)
        tables.append(np.stack((np.full(len(starts), i), starts, stops, numbers), axis=1))
    lines = np.concatenate(tables)
    if not len(lines):
        raise UserError(f"{name} ({disk.shown(paths)}) hold no lines: the corpus is empty")
    # A file that is no JSON shall be called that, not too short to be divided.
    whole = make(paths, lines)
    for first in np.unique(lines[:, 0], return_index=True)[1]:
        whole.check(first)
    if not explicit:
        hashes = disk.name_hashes([os.path.basename(path) for path in paths])
        keys = hashes[lines[:, 0]] + lines[:, 3].astype(np.uint64)
        lines = lines[disk.split_by_hash(mix(keys), split, fraction, name)]
    documents = make(paths, lines)
    if sum(os.path.getsize(path) for path in paths) <= _CHECK_WHOLE_BYTES:
        for i in range(len(documents)):
            documents.check(i)
    return documents


class _JsonlDocuments(LineDocuments):
    """One document a line."""

    def __init__(self, paths: Sequence[str], ranges: np.ndarray, source: JsonlSource):
        super().__init__(paths, ranges, [source.domain] * len(paths))
        self._source = source

    def example(self, i: int) -> Example:
        source, record = self._source, self.record(i)
        domain = source.domain
        if isinstance(record, dict) and record.get(source.domain_field) is not None:
            domain = str(record[source.domain_field])
        inputs = source.inputs_field
        return Example(
            self._string(record, source.field, "field", i),
            None if inputs is None else self._string(record, inputs, "inputs_field", i),
            domain,
        )

    def _string(self, record: Any, field: str, parameter: str, i: int) -> str:
        if not isinstance(record, dict) or field not in record:
            fields = limits.shortened(", ".join(record))[1:-1] if isinstance(record, dict) else type(record).__name__
            raise UserError(f"{self.where(i)} has no field {field!r} (it has: {fields}): set JsonlSource.{parameter}")
        text = record[field]
        if not isinstance(text, str):
            raise UserError(f"{self.where(i)}: field {field!r} must be a string, not {type(text).__name__}")
        return text


class _TableDocuments(Documents):
    """Chosen rows of a Hugging Face dataset."""

    def __init__(self, table: Any, rows: np.ndarray, source: HuggingFaceSource):
        self._table, self._rows, self._source = table, rows, source

    def __len__(self) -> int:
        return len(self._rows)

    def example(self, i: int) -> Example:
        source, row = self._source, int(self._rows[i])
        record = self._table[row]
        columns = [source.field, *filter(None, (source.inputs_field, source.domain_field))]
        for column in columns:
            if not isinstance(record[column], str):
                kind = type(record[column]).__name__
                raise UserError(f"row {row}: field {column!r} must be text, not {kind}")
        return Example(
            record[source.field],
            None if source.inputs_field is None else record[source.inputs_field],
            source.domain if source.domain_field is None else record[source.domain_field],
        )

    def fingerprint(self) -> dict[str, Any]:
        digest = hashlib.blake2b(self._rows.tobytes(), digest_size=8).hexdigest()
        return {"documents": len(self), "table": getattr(self._table, "_fingerprint", ""), "digest": digest}
