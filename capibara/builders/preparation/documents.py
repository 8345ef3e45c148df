"""The documents of a corpus: its files are cut into parts of about equal size, which workers read on their own.

The files decide the parts and the order of the documents, not the number of workers.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from capibara.builders import fingerprints, reading
from capibara.builders.fingerprints import Input
from capibara.builders.problems import Kind, Problems
from capibara.core import limits
from capibara.core.types import UserError
from capibara.data.shards.parquet import ParquetRows
from capibara.data.sources import disk
from capibara.storage import copies, stores
from capibara.storage.store import Entry

ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet", ".txt", ".md")  # of the files of a folder
NO_TEXT = "no_text"  # kind of problem: a record without the field
_BLOCK_BYTES, _SLACK_BYTES = 4 << 20, 1 << 16  # read at a time; read after a piece for its last line
_BOM, _WIDE = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")


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
    """

    text: str
    domain: str | None
    document_bytes: int


def files_of(patterns: Sequence[str]) -> list[Entry]:
    """The files that paths, folders, globs and addresses name, sorted, each once.

    Raises:
      UserError: a pattern matches no file, or a store refuses.
    """
    remote = [pattern for pattern in patterns if not stores.of(pattern).has_local_paths]
    found = stores.listed(remote)
    for pattern in remote:
        if not stores.of(pattern).matching(pattern):
            raise UserError(f"IN ({pattern!r}) matches no file")
    if local := [pattern for pattern in patterns if pattern not in remote]:
        found += [Entry(path, os.path.getsize(path), "") for path in reading.expand(local, ENDINGS)]
    if not found:
        raise UserError("IN is empty: name at least one file, folder or glob")
    return sorted(set(found))


def inputs_of(files: Sequence[Entry]) -> tuple[Input, ...]:
    """The sizes and hashes of files; reads those in buckets, too.

    Raises:
      UserError: a file cannot be read.
    """
    local = [file for file in files if stores.of(file.url).has_local_paths]
    remote = [_hashed(file) for file in files if file not in local]
    return tuple(sorted([*fingerprints.inputs_of([file.url for file in local]), *remote], key=lambda one: one.path))


def _hashed(file: Entry) -> Input:
    digest = hashlib.sha256()
    for at in range(0, file.size, _BLOCK_BYTES):
        digest.update(_read(file, at, min(at + _BLOCK_BYTES, file.size)))
    return Input(path=file.url, bytes=file.size, sha256=digest.hexdigest())


def parts_of(files: Sequence[Entry], fields: Fields, part_bytes: int, problems: Problems) -> list[CorpusPart]:
    """Cuts files into parts.

    Args:
      files: sorted.
      fields: the columns of Parquet files.
      part_bytes: size of a part in bytes, approximately.
      problems: counts the Parquet files that cannot be read.
    """
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
    elif _is_read_whole(file.url):
        yield Piece(file, file_format, 0, 0), file.size
    else:
        # A text file is cut where a part ends only if it is longer than a document may be.
        step = part_bytes if file_format is FileFormat.JSONL else max(part_bytes, fields.document_bytes)
        for start in range(0, file.size, step):
            stop = min(start + step, file.size)
            yield Piece(file, file_format, start, stop), stop - start


def _format(url: str) -> FileFormat:
    name = url.lower()
    for ending in reading.COMPRESSED:
        name = name.removesuffix(ending)
    if name.endswith(".parquet"):
        return FileFormat.PARQUET
    return FileFormat.JSONL if name.endswith((".jsonl", ".ndjson", ".json")) else FileFormat.TEXT


def _is_read_whole(url: str) -> bool:
    """Whether a file has no ranges: it is compressed, or may be one JSON value."""
    return url.lower().endswith((*reading.COMPRESSED, ".json"))


def _table(fields: Fields) -> ParquetRows:
    columns = (fields.text,) if fields.domain is None else (fields.text, fields.domain)
    return ParquetRows(block_bytes=_BLOCK_BYTES, columns=columns)


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
                message = str(error).removeprefix(f"{piece.file.url} ")
                self.problems.add(piece.file.url, self.last_lines, Kind.UNREADABLE, message)

    def _rows(self, piece: Piece) -> Iterator[Document]:
        for row, values in _table(self.fields).records(piece.file, piece.start, piece.stop):
            assert not isinstance(values, bytes)
            yield from self._document(piece.file.url, row + 1, dict(values))

    def _whole(self, piece: Piece) -> Iterator[Document]:
        url = piece.file.url
        path, found = copies.local_file(url), Problems()
        if piece.format is FileFormat.JSONL:
            for record in reading.records(path, found):
                yield from self._document(url, record.number, record.value)
        else:
            text, size = [], 0
            for line in reading.lines(path, found):
                text.append(line.text)
                size += len(line.text) + 1
                if size >= self.fields.document_bytes:
                    yield self._of_file(url, "\n".join([*text, ""]))
                    text, size = [], 0
            if text:
                yield self._of_file(url, "\n".join([*text, ""]))
        self.problems.merge(moved(found, path, url))

    def _json_lines(self, piece: Piece) -> Iterator[Document]:
        url = piece.file.url
        for line, is_ended in self._lines(piece):
            try:
                value = limits.parse_json(line)
            except ValueError as error:
                is_cut = not is_ended and line.lstrip().startswith(b"{")
                kind = Kind.TRUNCATED if is_cut else Kind.ENCODING if _no_utf8(line) else Kind.MALFORMED
                self.problems.add(url, self.last_lines, kind, limits.cause(error))
                continue
            yield from self._document(url, self.last_lines, value)

    def _document(self, url: str, line: int, record: Any) -> Iterator[Document]:
        if not isinstance(record, dict):
            message = f"is {type(record).__name__}, must be a JSON object"
            self.problems.add(url, line, Kind.MALFORMED, message)
            return
        text = record.get(self.fields.text)
        if not isinstance(text, str):
            message = f"has no field {self.fields.text!r} (it has: {limits.shortened(', '.join(record))[1:-1]})"
            if self.fields.text in record:
                message = f"its field {self.fields.text!r} is {type(text).__name__}, must be a text"
            self.problems.add(url, line, NO_TEXT, message)
            return
        domain = record.get(self.fields.domain) if self.fields.domain is not None else None
        yield Document(text, str(domain) if domain is not None else "")

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
        """The lines that begin in a piece, without empty ones of JSON, and whether each has a line end."""
        file, at = piece.file, max(0, piece.start - 1)  # the byte before: a line end means that a line begins here
        rest, line_at, dropped = b"", at, 0  # dropped: bytes of a line that is too long
        is_inside = piece.start > 0  # a line that begins before the piece
        while at < file.size:
            near_end = piece.stop + _SLACK_BYTES if at < piece.stop else file.size
            block = _read(file, at, min(at + _BLOCK_BYTES, near_end, file.size))
            at += len(block)
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                if not is_inside:
                    if line_at >= piece.stop:
                        return
                    yield from self._line(piece, line, dropped > 0, True)
                line_at, dropped, is_inside = line_at + dropped + len(line) + 1, 0, False
            if line_at >= piece.stop and not is_inside:
                return
            if len(rest) > limits.LINE_BYTES:
                dropped, rest = dropped + len(rest), b""
        if (rest or dropped) and not is_inside:
            yield from self._line(piece, rest, dropped > 0, False)

    def _line(self, piece: Piece, line: bytes, is_long: bool, is_ended: bool) -> Iterator[tuple[bytes, bool]]:
        self.last_lines += 1
        url = piece.file.url
        if is_long or len(line) > limits.LINE_BYTES:
            self.problems.add(url, self.last_lines, Kind.TOO_LONG, f"more than {limits.LINE_BYTES:,} bytes: split it")
            return
        if not piece.start and self.last_lines == 1:
            if line.startswith(_WIDE):
                raise UserError(f"{url} is no text in UTF-8 but in UTF-16: convert it")
            line = line.removeprefix(_BOM)
        line = line.removesuffix(b"\r")
        if line or piece.format is FileFormat.TEXT:
            yield line, is_ended


def moved(problems: Problems, path: str, new_path: str, lines: int = 0) -> Problems:
    """Problems of which those of one file are named otherwise, and are `lines` further down."""
    value = problems.as_json()
    for one in value["first"]:
        if one["path"] == path:
            one["path"] = new_path
            one["line"] += lines if one["line"] else 0
    return Problems.from_json(value)


def _no_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return True
    return b"\0" in line


def _read(file: Entry, start: int, stop: int) -> bytes:
    return stores.of(file.url).read_range(file.url, start, stop)
