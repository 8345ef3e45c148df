"""The documents of a corpus: its files are cut into parts of about equal size, which workers read on their own.

The files decide the parts and the order of the documents, not the number of workers.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import dataclasses
import enum
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from capibara.builders.files import fingerprints, reading
from capibara.builders.files.fingerprints import Input
from capibara.builders.files.problems import Kind, Problems
from capibara.core import extras, limits
from capibara.core.types import UserError
from capibara.data.shards.parquet import ParquetRows
from capibara.data.text import disk, plain
from capibara.storage import copies, packed, stores
from capibara.storage.store import Entry

ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet", ".txt", ".md")  # of the files of a folder
NO_TEXT = "no_text"  # a kind of problem besides those of any file: a record without the field
BLOCK_BYTES, _SLACK_BYTES = 1 << 20, 1 << 16  # read at a time; read after a piece for its last line
_REMOTE_BYTES, _REMOTE_THREADS = 8 << 20, 8  # of a bucket, in which each request takes its time
_ROWS_BYTES = 4 << 20  # of Parquet files that are read at a time
FAST_BYTES = limits.MIB  # of a line that is parsed without limits: it has too few values to do harm
_PARTS, _LEAST_PART_BYTES = 64, 4 << 20  # of a small corpus, so that all workers have some
_BOM, _WIDE = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")


class FileFormat(enum.StrEnum):
    """The format of an input file."""

    JSONL = "jsonl"
    PARQUET = "parquet"
    TEXT = "text"


class Document(NamedTuple):
    """A document of a corpus.

    Attributes:
      text: its text.
      domain: such as "python"; "": unknown.
    """

    text: str
    domain: str


class Piece(NamedTuple):
    """A range of a file: of bytes, or of the rows of a Parquet file.

    Attributes:
      file: the file.
      format: its format.
      start, stop: the range; a line belongs to the piece in which it begins. stop 0: the whole file, which is compressed.
    """

    file: Entry
    format: FileFormat
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusPart:
    """What one worker reads at a time. Only its first piece may begin inside a file.

    Attributes:
      number: from 0, in the order of the corpus.
      pieces: what it consists of.
    """

    number: int
    pieces: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fields:
    """Where a document is in a record.

    Attributes:
      text: the field, or column, with the text.
      domain: the one with the domain, which a record may lack; None: there is none.
      document_bytes: a text file is one document; a longer one is cut at line ends into documents of at least so many bytes.
      encoding: of JSON lines and texts. A file in another one than UTF-8 is read whole, from a plain copy.
    """

    text: str
    domain: str | None
    document_bytes: int
    encoding: str = plain.UTF_8


def files_of(patterns: Sequence[str], problems: Problems) -> list[Entry]:
    """The files that paths, folders, globs and addresses name, sorted, each once.

    Args:
      patterns: what the user named.
      problems: counts what is left out: files of a folder with other endings or hidden, links to folders, files that are
        empty or cannot be opened.

    Raises:
      UserError: a pattern matches no file, or a store refuses.
    """
    remote = [pattern for pattern in patterns if not stores.of(pattern).has_local_paths]
    result = stores.listed(remote)
    for pattern in remote:
        if not stores.of(pattern).matching(pattern):
            raise UserError(f"IN ({pattern!r}) matches no file")
    for file in result:
        if not file.size:
            problems.add(file.url, 0, Kind.EMPTY, "has no byte")
    sizes = reading.local_files([pattern for pattern in patterns if pattern not in remote], ENDINGS, problems)
    files = {file for file in result if file.size} | {Entry(path, size, "") for path, size in sizes.items()}
    if not files:
        raise reading.nothing_to_read(problems)
    return sorted(files)


def inputs_of(files: Sequence[Entry]) -> tuple[Input, ...]:
    """The sizes and hashes of files; reads those in buckets, too.

    Raises:
      UserError: a file cannot be read.
    """
    local = [file for file in files if stores.of(file.url).has_local_paths]
    with concurrent.futures.ThreadPoolExecutor(_REMOTE_THREADS) as pool:
        remote = [*pool.map(_hashed, (file for file in files if not stores.of(file.url).has_local_paths))]
    return tuple(sorted([*fingerprints.inputs_of([file.url for file in local]), *remote], key=lambda item: item.path))


def _hashed(file: Entry) -> Input:
    digest = hashlib.sha256()
    for at in range(0, file.size, _REMOTE_BYTES):
        digest.update(_read(file, at, min(at + _REMOTE_BYTES, file.size)))
    return Input(path=file.url, bytes=file.size, sha256=digest.hexdigest())


def parts_of(files: Sequence[Entry], fields: Fields, part_bytes: int, problems: Problems) -> list[CorpusPart]:
    """Cuts files into parts.

    Args:
      files: sorted.
      fields: the columns of Parquet files.
      part_bytes: the largest size of a part in bytes, approximately.
      problems: counts the Parquet files that cannot be read.

    Raises:
      UserError: a library is not installed.
    """
    part_bytes = min(part_bytes, max(_LEAST_PART_BYTES, sum(file.size for file in files) // _PARTS))
    parts: list[CorpusPart] = []
    pieces: list[Piece] = []
    size = 0
    for file in files:
        for piece, piece_bytes in _pieces(file, fields, part_bytes, problems):
            pieces.append(piece)
            size += piece_bytes
            if size >= part_bytes:
                parts.append(CorpusPart(number=len(parts), pieces=tuple(pieces)))
                pieces, size = [], 0
    return [*parts, CorpusPart(number=len(parts), pieces=tuple(pieces))] if pieces else parts


def _pieces(file: Entry, fields: Fields, part_bytes: int, problems: Problems) -> Iterator[tuple[Piece, int]]:
    """The pieces of a file, and the size of each in bytes."""
    _check_libraries(file.url)
    file_format = _format(file.url)
    if file_format is FileFormat.PARQUET:
        try:
            rows = _table(fields).blocks(file)
        except UserError as error:
            problems.add(file.url, 0, Kind.CORRUPTED, str(error).removeprefix(f"{file.url} "))
            return
        # Row groups that are read together have about the size of a part.
        row_bytes = file.size / max(1, int(rows[-1, 1]) if len(rows) else 1)
        for start, stop in rows.tolist():
            yield Piece(file, file_format, start, stop), int((stop - start) * row_bytes)
    elif _is_read_whole(file.url, fields):
        yield Piece(file, file_format, 0, 0), file.size
    else:
        # A text file is cut where a part ends only if it is longer than a document may be.
        step = part_bytes if file_format is FileFormat.JSONL else max(part_bytes, fields.document_bytes)
        for start in range(0, file.size, step):
            stop = min(start + step, file.size)
            yield Piece(file, file_format, start, stop), stop - start


def _check_libraries(url: str) -> None:
    """Raises UserError if a library that reads a file is not installed."""
    if (file_format := _format(url)) is FileFormat.PARQUET:
        extras.require("pyarrow.parquet", extra="builders", why=url)
    elif url.lower().endswith(".zst"):
        extras.require("zstandard", extra="builders", why=url)
    elif file_format is FileFormat.JSONL:
        extras.require("orjson", extra="builders", why=url)


def _format(url: str) -> FileFormat:
    name = packed.plain_name(url)
    if name.endswith(".parquet"):
        return FileFormat.PARQUET
    return FileFormat.JSONL if name.endswith((".jsonl", ".ndjson", ".json")) else FileFormat.TEXT


def _is_read_whole(url: str, fields: Fields) -> bool:
    """Whether a file has no ranges: it is compressed, in another encoding, or may be one JSON value."""
    is_utf8 = plain.checked_encoding("CorpusPreparation.encoding", fields.encoding) == plain.UTF_8
    return not is_utf8 or url.lower().endswith((*packed.COMPRESSED, ".json"))


def _table(fields: Fields) -> ParquetRows:
    columns = (fields.text,) if fields.domain is None else (fields.text, fields.domain)
    return ParquetRows(block_bytes=_ROWS_BYTES, columns=columns)


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class PartReader:
    """Iterator over the documents of a part; what cannot be read is counted and skipped.

    Line numbers count from the part's first piece, which may begin inside a file: `moved` corrects them.

    Attributes:
      part: what to read.
      fields: where the documents are.
      problems: of the part.
      last_lines: lines of the last piece that was read.
    """

    part: CorpusPart
    fields: Fields
    problems: Problems = dataclasses.field(default_factory=Problems)
    last_lines: int = 0

    def __iter__(self) -> Iterator[Document]:
        for piece in self.part.pieces:
            _check_libraries(piece.file.url)  # a missing one is no fault of the file
            self.last_lines = 0
            try:
                if piece.format is FileFormat.PARQUET:
                    yield from self._rows(piece)
                elif not piece.stop:
                    yield from self._whole(piece)
                elif piece.format is FileFormat.JSONL:
                    yield from self._json_lines(piece)
                else:
                    yield from self._texts(piece)
            except UserError as error:
                kind = Kind.ENCODING if isinstance(error, plain.NotText) else Kind.UNREADABLE
                self.problems.add(piece.file.url, self.last_lines, kind, str(error).removeprefix(f"{piece.file.url} "))

    def _rows(self, piece: Piece) -> Iterator[Document]:
        for row, values in _table(self.fields).records(piece.file, piece.start, piece.stop):
            assert not isinstance(values, bytes)
            if (document := self._document(piece.file.url, row + 1, dict(values))) is not None:
                yield document

    def _whole(self, piece: Piece) -> Iterator[Document]:
        url = piece.file.url
        path, result = copies.local_file(url), Problems()
        if self.fields.encoding != plain.UTF_8:
            (path,) = plain.copies_of("CorpusPreparation.encoding", [path], self.fields.encoding)
        if piece.format is FileFormat.JSONL:
            for record in reading.records(path, result):
                if (document := self._document(url, record.number, record.value)) is not None:
                    yield document
        else:
            text, size = [], 0
            for line in reading.lines(path, result):
                text.append(line.text)
                size += len(line.text) + 1
                if size >= self.fields.document_bytes:
                    yield self._of_file(url, "\n".join([*text, ""]))
                    text, size = [], 0
            if text:
                yield self._of_file(url, "\n".join([*text, ""]))
        self.problems.merge(moved(result, path, url))

    def _json_lines(self, piece: Piece) -> Iterator[Document]:
        url = piece.file.url
        loads = extras.require("orjson", extra="builders", why="JSON lines").loads
        for line, is_ended in self._lines(piece):
            if not line:
                continue
            try:
                value = _parsed(line, loads)
            except ValueError as error:
                if not line.strip():
                    continue
                is_cut = not is_ended and line.lstrip().startswith(b"{")
                self.problems.add(url, self.last_lines, reading.kind_of(error, is_cut), limits.cause(error))
                continue
            if (document := self._document(url, self.last_lines, value)) is not None:
                yield document

    def _document(self, url: str, line: int, record: object) -> Document | None:
        """The document of a record; None: it is counted in `problems`."""
        if not isinstance(record, dict):
            message = f"is {disk.kind(record)}, must be a JSON object"
            self.problems.add(url, line, Kind.MALFORMED, message)
            return None
        text = record.get(self.fields.text)
        if not isinstance(text, str):
            message = f"has no field {self.fields.text!r} (it has: {limits.shortened(', '.join(record))[1:-1]})"
            if self.fields.text in record:
                message = f"its field {self.fields.text!r} is {disk.kind(text)}, must be a text"
            self.problems.add(url, line, NO_TEXT, message)
            return None
        domain = record.get(self.fields.domain) if self.fields.domain is not None else None
        return Document(text, str(domain) if domain is not None else "")

    def _texts(self, piece: Piece) -> Iterator[Document]:
        url, texts, size = piece.file.url, [], 0
        for line, is_ended in self._lines(piece):
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                message = f"no text in UTF-8: {error.reason} at byte {error.start} of the line"
                self.problems.add(url, self.last_lines, Kind.ENCODING, message)
                continue
            if "\0" in text:
                self.problems.add(url, self.last_lines, Kind.ENCODING, "has a NUL: it is no text")
                continue
            texts.append(f"{text}\n" if is_ended else text)
            size += len(line) + 1
            if size >= self.fields.document_bytes:
                yield self._of_file(url, "".join(texts))
                texts, size = [], 0
        if texts:
            yield self._of_file(url, "".join(texts))

    def _of_file(self, url: str, text: str) -> Document:
        return Document(text, disk.domain_of(url) or "" if self.fields.domain is not None else "")

    def _lines(self, piece: Piece) -> Iterator[tuple[bytes, bool]]:
        """The lines that begin in a piece, and whether each has a line end, without empty ones of JSON.

        Too long ones are counted in `problems`.
        """
        is_first, has_empty = not piece.start, piece.format is FileFormat.TEXT
        for lines, is_ended in _line_blocks(piece):
            for line in lines:
                self.last_lines += 1
                if not line and line is not None and not has_empty:
                    continue
                if line is None:
                    message = f"more than {limits.LINE_BYTES:,} bytes: split it"
                    self.problems.add(piece.file.url, self.last_lines, Kind.TOO_LONG, message)
                    continue
                if is_first and self.last_lines == 1:
                    _check_first(piece.file.url, line)
                    line = line.removeprefix(_BOM)
                yield line.removesuffix(b"\r"), is_ended


def _check_first(url: str, line: bytes) -> None:
    """Raises plain.NotText if a file begins as other formats do."""
    if line.startswith(_WIDE):
        raise plain.NotText(f"{url} is no text in UTF-8 but in UTF-16: convert it, or name its encoding")
    if line.startswith(_PACKED):
        raise plain.NotText(f"{url} is compressed, but its name does not end in .gz or .zst: rename it")


def _line_blocks(piece: Piece) -> Iterator[tuple[Sequence[bytes | None], bool]]:
    """The lines that begin in a piece, some at a time, and whether they have a line end; None: one that is too long."""
    file, at = piece.file, max(0, piece.start - 1)  # the byte before: a line end means that a line begins here
    started: list[bytes] = []  # blocks of an unfinished line
    size, dropped = 0, 0  # bytes of `begun`, and those that are gone, as the line is too long
    is_inside = piece.start > 0  # the first line begins before the piece
    block_bytes = BLOCK_BYTES if stores.of(file.url).has_local_paths else _REMOTE_BYTES
    while at < file.size:
        near_end = piece.stop + _SLACK_BYTES if at < piece.stop else file.size
        block = _read(file, at, min(at + block_bytes, near_end, file.size))
        first = at - size - dropped  # where the first line begins
        at += len(block)
        started.append(block)
        size += len(block)
        if b"\n" in block:
            lines: list[bytes | None] = [*b"".join(started).split(b"\n")]
            may_be_long = dropped + size > limits.LINE_BYTES
            started = [lines.pop() or b""]
            size = len(started[0])
            if at > piece.stop:
                begins = [*itertools.accumulate((len(line or b"") + 1 for line in lines), initial=first + dropped)]
                begins[0] = first
                del lines[bisect.bisect_left(begins, piece.stop) :]
            if may_be_long:
                lines = [None if line is None or len(line) > limits.LINE_BYTES else line for line in lines]
                lines[:1] = [None] if dropped and lines else lines[:1]
            yield lines[int(is_inside) :], True
            dropped, is_inside = 0, False
        if at - size - dropped >= piece.stop and not is_inside:
            return
        if size > limits.LINE_BYTES:
            dropped, started, size = dropped + size, [], 0
    if (size or dropped) and not is_inside:
        yield [None if dropped or size > limits.LINE_BYTES else b"".join(started)], False


def _parsed(line: bytes, loads: Callable[[bytes], Any]) -> Any:
    """The value of a line of JSON, by a parser that is fast, but has no limits.

    Raises:
      ValueError: it is not JSON.
    """
    if len(line) <= FAST_BYTES:
        try:
            return loads(line)
        except ValueError:  # the other one says why
            pass
    return limits.parse_json(line)


def moved(problems: Problems, path: str, new_path: str, lines: int = 0) -> Problems:
    """Problems of which those of one file are named otherwise, and are `lines` further down."""
    value = problems.as_json()
    for item in value["first"]:
        if item["path"] == path:
            item["path"] = new_path
            item["line"] += lines if item["line"] else 0
    return Problems.from_json(value)


def _read(file: Entry, start: int, stop: int) -> bytes:
    return stores.of(file.url).read_range(file.url, start, stop)
