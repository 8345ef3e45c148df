"""Sources of documents: the standard library, text files, JSON lines, several together.

A source is configuration; `open(split)` returns its documents with random access. Without validation files a hash of each
document's name or number decides its split, so a document stays in its split when others are added.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
import io
import logging
import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from capibara.config import configurable
from capibara.core import limits
from capibara.core.fields import FilePath
from capibara.core.types import UserError
from capibara.data.packing.shuffle import mix, permutation
from capibara.data.text import counts, disk, plain
from capibara.data.text.counts import Counts

if TYPE_CHECKING:
    from capibara.data.packing.rows import PackedRow

LINE_VALUES = 1_000_000  # largest number of JSON values in a line
_CHECK_WHOLE_BYTES = 64 << 20  # JSON-lines files up to this size are parsed once before the run starts


class DataFormat(enum.StrEnum):
    """What the documents of a source are.

    TEXTS: texts, for language modelling.
    PREFERENCES: pairs of a preferred and a rejected answer.
    UNPAIRED: answers that are desirable or not.
    PROMPTS: prompts, which the model answers during training.
    STEPS: solutions whose steps are right or not.
    """

    TEXTS = "texts"
    PREFERENCES = "preferences"
    UNPAIRED = "unpaired preferences"
    PROMPTS = "prompts"
    STEPS = "solutions with labelled steps"


class Example(NamedTuple):
    """A document of a source.

    Attributes:
      text: the document, or the targets if there are `inputs`.
      inputs: the inputs from which `text` is predicted; None: there are none.
      domain: such as "python" or "sql"; None: unknown.
      loss: ranges of characters with loss, of a rendered conversation; None: `text` is not a conversation.
      rejected: the rejected answer of a preference pair, this is the chosen one; of an unpaired answer the mismatched one.
      label: of an unpaired answer 1: desirable, 0: undesirable; of a pair its margin; None: it has none.
      labels: of the ranges in `loss`, the ends of a solution's steps; empty: there are none.
      row: a row that was packed before, with no text; None: this is a document.
    """

    text: str
    inputs: str | None = None
    domain: str | None = None
    loss: tuple[tuple[int, int], ...] | None = None
    rejected: Example | None = None
    label: float | None = None
    labels: tuple[float, ...] = ()
    row: PackedRow | None = None

    @property
    def whole(self) -> str:
        """The whole text of the document, inputs included."""
        return self.text if self.inputs is None else f"{self.inputs}\n{self.text}"


class Corpus(abc.ABC):
    """The documents of one split, with a fingerprint that a resumed run compares."""

    @functools.cached_property
    def counts(self) -> Counts:
        """What was read, and what was not; a source that knows more than this assigns it."""
        return Counts()

    @abc.abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """A JSON value that is equal only for the same documents in the same order."""

    @abc.abstractmethod
    def texts(self, seed: int) -> Iterator[str]:
        """The texts of all documents, in a seeded order."""


class Documents(Corpus):
    """Documents with random access: `len` and `example(i)`."""

    @functools.cached_property
    def counts(self) -> Counts:
        return Counts(documents=len(self))

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
    """Documents in blocks that are read whole; `len` is the number of blocks. Their sizes are unknown until read.

    Attributes:
      mix_blocks: number of blocks whose documents are shuffled together.
    """

    mix_blocks: int

    @functools.cached_property
    def counts(self) -> Counts:
        return Counts(blocks=len(self))

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def examples(self, i: int) -> list[Example]:
        """The documents of a block; thread-safe."""

    @abc.abstractmethod
    def name(self, i: int) -> dict[str, Any]:
        """Identifies a block, as JSON, for reports."""

    def texts(self, seed: int) -> Iterator[str]:
        for i in permutation(len(self), seed).tolist():
            yield from (example.whole for example in self.examples(i))


class Source(abc.ABC):
    """Configuration of a corpus."""

    @property
    def has_conversations(self) -> bool:
        """Whether documents are rendered conversations (`Example.loss`), which packing must not cut."""
        return False

    @property
    def data_format(self) -> DataFormat:
        """What the documents are."""
        return DataFormat.TEXTS

    @property
    def has_labels(self) -> bool:
        """Whether batches have `labels` (`Example.label`)."""
        return False

    @abc.abstractmethod
    def open(self, split: str) -> Documents | Blocks:
        """Opens the split "train" or "validation".

        Raises:
          UserError: a file is missing, the corpus or the split is empty, or a line cannot be read.
        """


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class StdlibSource(Source):
    """The Python standard library of the running interpreter: one document per module, about 12 MB.

    Attributes:
      validation_fraction: fraction of the modules that is held out for validation.
      include_tests: also read the library's own tests, if they are installed.
      domain: the domain of all documents.
    """

    validation_fraction: float = 0.03
    include_tests: bool = False
    domain: str | None = "python"

    def __post_init__(self) -> None:
        disk.check_fraction(self.validation_fraction, type(self).__name__)

    def open(self, split: str) -> Documents:
        root = sysconfig.get_paths()["stdlib"]
        names = self._names(root)
        paths = self._chosen(root, names, split)
        documents = _FileDocuments(paths, [os.path.relpath(path, root) for path in paths], self.domain)
        size = sum(os.path.getsize(os.path.join(root, name)) for name in names)
        documents.counts = Counts(files=len(names), bytes=size, **counts.of_split(split, len(paths), len(names)))
        return documents

    def paths(self, split: str) -> list[str]:
        """Paths of the split's modules, sorted by name."""
        root = sysconfig.get_paths()["stdlib"]
        return self._chosen(root, self._names(root), split)

    def _chosen(self, root: str, names: list[str], split: str) -> list[str]:
        chosen = disk.split_by_hash(disk.name_hashes(names), split, self.validation_fraction, "StdlibSource")
        return [os.path.join(root, names[i]) for i in chosen]

    def _names(self, root: str) -> list[str]:
        """All modules, sorted."""
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
        return sorted(names)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSource(Source):
    """Text files, one document per file; long files are split at line ends.

    Attributes:
      files: paths or globs of the training files.
      validation_files: paths or globs of the validation files; empty: a fraction of `files` is held out.
      validation_fraction: the fraction that is held out if there are no validation files.
      document_bytes: a longer file is split into documents of about this many bytes.
      domain: the domain of all documents; None: by the file's extension (.py: "python", .sql: "sql").
      encoding: of the text, as Python names it, such as "utf-16" or "cp1252"; it is converted once.
    """

    files: tuple[FilePath, ...]
    validation_files: tuple[FilePath, ...] = ()
    validation_fraction: float = 0.03
    document_bytes: int = 1 << 16
    domain: str | None = None
    encoding: str = plain.UTF_8

    def __post_init__(self) -> None:
        disk.check_fraction(self.validation_fraction, type(self).__name__)
        if self.document_bytes < 1:
            raise UserError(f"document_bytes ({self.document_bytes}) must be at least 1: try 65536")

    def open(self, split: str) -> Documents:
        files = disk.choose_files("TextSource", self.files, self.validation_files, split, self.encoding)
        name, paths = files.parameter, files.paths
        file_of, start, stop = [], [], []
        for i, path in enumerate(paths):
            for first, last in disk.line_ranges(path, self.document_bytes):
                file_of.append(i)
                start.append(first)
                stop.append(last)
        if not file_of:
            raise UserError(f"{name} ({disk.shown(paths)}) have no text: the corpus is empty")
        ranges = np.array([file_of, start, stop], np.int64).T
        domains = [self.domain or disk.domain_of(path) for path in paths]
        if sum(os.path.getsize(path) for path in paths) <= _CHECK_WHOLE_BYTES:
            whole = _RangeDocuments(paths, ranges, domains)
            for i in range(len(whole)):
                whole.example(i)  # raises here if it is no text
        total = len(ranges)
        if not files.is_explicit:
            hashes = disk.name_hashes([os.path.basename(path) for path in paths])
            keys = hashes[ranges[:, 0]] + ranges[:, 1].astype(np.uint64)
            ranges = ranges[disk.split_by_hash(mix(keys), split, self.validation_fraction, name)]
        documents = _RangeDocuments(paths, ranges, domains)
        documents.counts = Counts(**files.counts(), **counts.of_split(split, len(ranges), total))
        return documents


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonlSource(Source):
    """JSON lines, one document per line.

    Attributes:
      files: paths or globs of the training files.
      field: the field with the text (or with the targets, of pairs).
      inputs_field: the field with the inputs; None: there are none.
      domain_field: the field with the document's domain, which a line may lack; None: there is none.
      validation_files: paths or globs of the validation files; empty: a fraction of the lines is held out.
      validation_fraction: the fraction that is held out if there are no validation files.
      domain: the domain of lines without `domain_field`.
      encoding: of the files, as Python names it, such as "utf-16"; they are converted once.
    """

    files: tuple[FilePath, ...]
    field: str = "text"
    inputs_field: str | None = None
    domain_field: str = "domain"
    validation_files: tuple[FilePath, ...] = ()
    validation_fraction: float = 0.03
    domain: str | None = None
    encoding: str = plain.UTF_8

    def __post_init__(self) -> None:
        disk.check_fraction(self.validation_fraction, type(self).__name__)

    def open(self, split: str) -> Documents:
        return open_lines(
            "JsonlSource",
            (self.files, self.validation_files),
            self.validation_fraction,
            split,
            lambda paths, lines: _JsonlDocuments(paths, lines, self),
            texts=(self.field,) if self.inputs_field is None else (self.field, self.inputs_field),
            encoding=self.encoding,
        )


class Rows(enum.StrEnum):
    """Which rows of a training batch have the documents of which source.

    MIXED: an epoch has every document of all sources once; shuffling mixes them.
    APART: the rows are cut into as many equal parts as there are sources, in their order, and each has epochs of its own. With
      as many nodes (Plan.node), or a multiple of them, each node has the documents of one source.
    """

    MIXED = "mixed"
    APART = "apart"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class CombinedSource(Source):
    """Concatenates several sources; the validation split has every document of each.

    Attributes:
      sources: the sources. In Gin use scopes for several of one class: (@sql/TextSource(), @js/TextSource()).
      rows: which rows of a training batch have which source's documents.
    """

    sources: tuple[Source, ...]
    rows: Rows = Rows.MIXED

    def __post_init__(self) -> None:
        if not self.sources:
            raise UserError("CombinedSource.sources is empty: name at least one source")
        if len({source.data_format for source in self.sources}) > 1:
            kinds = ", ".join(sorted({str(source.data_format) for source in self.sources}))
            raise UserError(f"CombinedSource.sources have different formats ({kinds}): use sources of one format")
        if any(isinstance(source, CombinedSource) and source.rows is Rows.APART for source in self.sources):
            raise UserError(
                "CombinedSource.sources has a CombinedSource with rows = 'separate': only the outer one may have that"
            )

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
        if blocks and self.rows is Rows.APART:
            raise UserError(
                "CombinedSource.rows = 'separate' needs documents with random access, and its sources have shards, which are read "
                "block by block: take others, such as @JsonlSource()"
            )
        if not documents:
            return _CombinedBlocks(blocks)
        for source, part in zip(self.sources, parts, strict=True):
            if isinstance(part, Blocks):
                name = type(source).__name__
                raise UserError(f"CombinedSource.sources mixes {name} with other sources: make all of them @{name}()")
        return CombinedDocuments(documents, separate=self.rows is Rows.APART and split == "train")


class _CombinedBlocks(Blocks):
    """Concatenated blocks of several splits."""

    def __init__(self, parts: Sequence[Blocks]):
        self._parts = list(parts)
        self._stops = np.cumsum([len(part) for part in parts])
        self.mix_blocks = max(part.mix_blocks for part in parts)
        self.counts = counts.total([part.counts for part in parts])

    def __len__(self) -> int:
        return int(self._stops[-1])

    def examples(self, i: int) -> list[Example]:
        part, inner = self._part(i)
        return part.examples(inner)

    def name(self, i: int) -> dict[str, Any]:
        part, inner = self._part(i)
        return part.name(inner)

    def _part(self, i: int) -> tuple[Blocks, int]:
        """The part that has a block, and the block's number in it."""
        at = int(np.searchsorted(self._stops, i, side="right"))
        return self._parts[at], i - int(self._stops[at] - len(self._parts[at]))

    def fingerprint(self) -> dict[str, Any]:
        return {str(i): part.fingerprint() for i, part in enumerate(self._parts)}


class CombinedDocuments(Documents):
    """Concatenated documents of several splits.

    Attributes:
      separate: whether each part has rows of its own.
    """

    def __init__(self, parts: Sequence[Documents], separate: bool = False):
        self._parts, self.separate = list(parts), separate
        self._stops = np.cumsum([len(part) for part in parts])
        self.counts = counts.total([part.counts for part in parts])

    def __len__(self) -> int:
        return int(self._stops[-1])

    def example(self, i: int) -> Example:
        part, inner = self._part(i)
        return part.example(inner)

    def ranges(self) -> list[range]:
        """The numbers of each part's documents."""
        return [range(int(stop) - len(part), int(stop)) for stop, part in zip(self._stops, self._parts, strict=True)]

    def record(self, i: int) -> Any:
        """The parsed JSON of a document's line, if the parts are `LineDocuments`."""
        part, inner = self._part(i)
        return part.record(inner)

    def where(self, i: int) -> str:
        """The document's file and line number, if the parts are `LineDocuments`."""
        part, inner = self._part(i)
        return part.where(inner)

    def _part(self, i: int) -> tuple[Any, int]:
        """The part that has a document, and the document's number in it."""
        at = int(np.searchsorted(self._stops, i, side="right"))
        return self._parts[at], i - int(self._stops[at] - len(self._parts[at]))

    def fingerprint(self) -> dict[str, Any]:
        rows = {"rows": str(Rows.APART)} if self.separate else {}
        return {str(i): part.fingerprint() for i, part in enumerate(self._parts)} | rows


def skipped(nulls: int, blank: int = 0) -> dict[str, int]:
    """The counts of records without a text, by reason."""
    return {reason: count for reason, count in (("null texts", nulls), ("blank lines", blank)) if count}


def tell_skipped(name: str, files: str, count: int, total: int) -> None:
    """Logs how many records have no text."""
    if count:
        logging.getLogger(__name__).warning("%s (%s): %d of %d texts are null: skipped", name, files, count, total)


class _FileDocuments(Documents):
    """One document per file of Python."""

    def __init__(self, paths: Sequence[str], names: Sequence[str], domain: str | None):
        self._paths, self._names, self._domain = list(paths), list(names), domain

    def __len__(self) -> int:
        return len(self._paths)

    def example(self, i: int) -> Example:
        with limits.opened(self._paths[i]) as file:
            content = file.read()
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
            text = content.decode(encoding)
        except (SyntaxError, UnicodeDecodeError):  # some of the library's own tests
            line = "%s is not in the encoding that it names: its other bytes are U+FFFD"
            logging.getLogger(__name__).warning(line, self._paths[i])
            text = content.decode(errors="replace")
        return Example(text, domain=self._domain)

    def fingerprint(self) -> dict[str, Any]:
        return disk.fingerprint(self._paths, self._names, len(self))


class _RangeDocuments(Documents):
    """Documents in byte ranges of files: rows of (file, start, stop), and one domain per file."""

    def __init__(self, paths: Sequence[str], ranges: np.ndarray, domains: Sequence[str | None]):
        self._paths, self._ranges, self._domains = list(paths), ranges, list(domains)

    def __len__(self) -> int:
        return len(self._ranges)

    def example(self, i: int) -> Example:
        file_index, start = (int(n) for n in self._ranges[i][:2])
        text = plain.decoded(self._read(i), self._paths[file_index], start, "TextSource.encoding")
        return Example(text, domain=self._domains[file_index])

    def _read(self, i: int) -> bytes:
        file_index, start, stop = (int(n) for n in self._ranges[i][:3])
        with open(self._paths[file_index], "rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def fingerprint(self) -> dict[str, Any]:
        names = [os.path.basename(path) for path in self._paths]
        return disk.fingerprint(self._paths, names, len(self), self._ranges.tobytes())


class LineDocuments(_RangeDocuments):
    """Documents in lines of JSON: rows of (file, start, stop, line number)."""

    def check(self, i: int) -> None:
        """Raises UserError if line `i` cannot be read; may be faster than `example`."""
        self.example(i)

    def record(self, i: int) -> Any:
        """The parsed JSON of line `i`."""
        line = self._read(i)
        try:
            return limits.parse_json(line, values=LINE_VALUES, finite=False)
        except ValueError as error:
            raise UserError(f"{self.where(i)} is not JSON ({limits.cause(error)}): {disk.excerpt(line)}") from error

    def where(self, i: int) -> str:
        """The file and line number."""
        file_index, _, _, line = (int(n) for n in self._ranges[i])
        return f"{plain.origin(self._paths[file_index])}:{line}"


def open_lines(
    source: str,
    files: tuple[Sequence[str], Sequence[str]],
    fraction: float,
    split: str,
    make: Callable[[Sequence[str], np.ndarray], LineDocuments],
    texts: Sequence[str] = (),
    encoding: str = plain.UTF_8,
) -> LineDocuments:
    """Opens a split of JSON-lines files; small files are checked completely before the run starts.

    Args:
      source: name of the source, for errors.
      files: paths or globs of the training files, and of the validation files.
      fraction: the fraction of the lines that is held out if there are no validation files.
      split: "train" or "validation".
      make: makes the documents from paths and rows of (file, start, stop, line number).
      texts: fields with texts; a line in which one is null is skipped.
      encoding: of the files.
    """
    chosen = disk.choose_files(source, *files, split, encoding, disk.RECORDS)
    name, paths = chosen.parameter, chosen.paths
    tables, total, blank = [], 0, 0
    for i, path in enumerate(paths):
        starts, stops, numbers, blank_here = disk.line_bounds(path)
        table = np.stack((np.full(len(starts), i), starts, stops, numbers), axis=1)
        total, blank = total + len(table), blank + blank_here
        tables.append(np.delete(table, disk.null_lines(path, starts, stops, texts), axis=0))
    lines = np.concatenate(tables)
    tell_skipped(name, disk.shown(paths), total - len(lines), total)
    if not total:
        raise UserError(f"{name} ({disk.shown(paths)}) have no lines: the corpus is empty")
    if not len(lines):
        raise UserError(
            f"{name} ({disk.shown(paths)}): all {total} texts are null: name another field than {', '.join(texts)}"
        )
    # Check before the split: a file that is not JSON must not be reported as too short to hold lines out.
    whole = make(paths, lines)
    for first in np.unique(lines[:, 0], return_index=True)[1]:
        whole.check(first)
    with_text = len(lines)
    if not chosen.is_explicit:
        hashes = disk.name_hashes([os.path.basename(path) for path in paths])
        keys = hashes[lines[:, 0]] + lines[:, 3].astype(np.uint64)
        lines = lines[disk.split_by_hash(mix(keys), split, fraction, name)]
    documents = make(paths, lines)
    numbers_of = counts.of_split(split, len(lines), with_text)
    documents.counts = Counts(**chosen.counts(), **numbers_of, skipped=skipped(total - with_text, blank))
    if sum(os.path.getsize(path) for path in paths) <= _CHECK_WHOLE_BYTES:
        for i in range(len(documents)):
            documents.check(i)
    return documents


class _JsonlDocuments(LineDocuments):
    """One document per line."""

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

    def _string(self, record: object, field: str, parameter: str, i: int) -> str:
        if not isinstance(record, dict):
            raise UserError(f"{self.where(i)} is no JSON object but {disk.kind(record)}: write one object a line")
        if field not in record:
            fields = limits.shortened(", ".join(record))[1:-1]
            raise UserError(f"{self.where(i)} has no field {field!r} (it has: {fields}): set JsonlSource.{parameter}")
        text = record[field]
        if not isinstance(text, str):
            raise UserError(f"{self.where(i)}: field {field!r} must be a string, not {disk.kind(text)}")
        return text
