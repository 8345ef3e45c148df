"""Writes a split as JSON lines and as Parquet."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterator
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, BinaryIO, Self

import numpy as np

from capibara.builders.redaction.redact import Json
from capibara.builders.routing.rows import Scratch
from capibara.builders.routing.selection import SHARED, Selection
from capibara.builders.routing.splits import NAMES
from capibara.builders.writing import Output
from capibara.core import extras, limits

if TYPE_CHECKING:
    import pyarrow

_OPEN_FILES = 64
_GROUP_BYTES, _GROUP_ROWS = 8 * limits.MIB, 10_000  # of a row group, at most (and one record)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """A file of a split.

    Attributes:
      split: a position in `splits.NAMES`.
      name: the file's name without its ending.
      begin, end: its range of the split's examples.
    """

    split: int
    name: str
    begin: int
    end: int


def shards(selection: Selection, count: int) -> list[Shard]:
    """The files of all splits; train has `count`."""
    result = []
    for split, name in enumerate(NAMES):
        size, pieces = len(selection.orders[split][0]), count if split == 0 else 1
        edges = np.linspace(0, size, pieces + 1).astype(int).tolist()
        for number, (begin, end) in enumerate(zip(edges, edges[1:])):
            suffix = f"-{number:05d}-of-{pieces:05d}" if pieces > 1 else ""
            result.append(Shard(split=split, name=f"{name}{suffix}", begin=begin, end=end))
    return result


def write(output: Output, shard: Shard, selection: Selection, scratch: Scratch, about: dict[str, str]) -> None:
    """Writes a file of a split, as JSON lines and as Parquet, unless both are whole.

    Args:
      output: the output folder.
      shard: which file.
      selection: the examples.
      scratch: where they are.
      about: the metadata of the Parquet file.

    Raises:
      UserError: pyarrow is not installed, or the disk is full.
    """
    lines_name, table_name = f"{shard.name}.jsonl", f"{shard.name}.parquet"
    if all(output.parts.done(name) is not None for name in (lines_name, table_name)):
        return
    with output.part(lines_name) as lines, output.part(table_name) as table, _Examples(scratch) as examples:
        rows, repeats = (column[shard.begin : shard.end] for column in selection.orders[shard.split])
        offsets = selection.rows["offset"][rows]
        with _ParquetFile(table.path, about) as parquet:
            for row, repeat, offset in zip(rows.tolist(), repeats.tolist(), offsets.tolist()):
                record = examples.read(row, offset) | {"split": NAMES[shard.split], "repeat": repeat}
                lines.write_record(record)
                parquet.add(record)
        table.records = lines.records


class _Examples:
    """The examples of all input files; a context manager."""

    def __init__(self, scratch: Scratch):
        self._scratch = scratch
        self._files: collections.OrderedDict[int, BinaryIO] = collections.OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()

    def read(self, row: int, offset: int) -> dict[str, Json]:
        """The record of a row."""
        number = self._scratch.where(row)
        if number not in self._files:
            if len(self._files) == _OPEN_FILES:
                self._files.popitem(last=False)[1].close()
            self._files[number] = open(self._scratch.path("examples", number), "rb")
        self._files.move_to_end(number)
        self._files[number].seek(offset)
        return json.loads(self._files[number].readline())


def _schema(library: ModuleType, about: dict[str, str]) -> pyarrow.Schema:
    text, number = library.string(), library.float64()
    fields: dict[str, pyarrow.DataType] = {
        "id": text,
        "text": text,
        "domain": text,
        "label_source": text,
        "confidence": number,
        "difficulty": text,
        "difficulty_score": number,
        "languages": library.list_(text),
        "kind": text,
        "source": text,
        "record": text,
        "split": text,
        "repeat": library.int32(),
    }
    return library.schema([library.field(name, kind, nullable=False) for name, kind in fields.items()], about)


class _ParquetFile:
    """A Parquet file that is written in row groups; a context manager."""

    def __init__(self, path: str, about: dict[str, str]):
        self._library = extras.require("pyarrow", extra="builders", why="Parquet files")
        writer = extras.require("pyarrow.parquet", extra="builders", why="Parquet files").ParquetWriter
        self._schema = _schema(self._library, about)
        self._writer = writer(path, self._schema, compression="zstd")
        self._records: list[dict[str, Json]] = []
        self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._flush()
        self._writer.close()

    def add(self, record: dict[str, Json]) -> None:
        """Appends a record."""
        self._records.append(record)
        self._bytes += len(str(record["text"]))
        if self._bytes >= _GROUP_BYTES or len(self._records) >= _GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._records:
            self._writer.write_table(self._library.Table.from_pylist(self._records, self._schema))
        self._records, self._bytes = [], 0


def leaks(selection: Selection, scratch: Scratch, paths: list[str]) -> Iterator[dict[str, Json]]:
    """The records of leaks.jsonl."""
    for leak in selection.leaks:
        row, first = int(leak["row"]), int(leak["first"])
        yield {
            "path": paths[scratch.where(row)],
            "line": int(selection.rows["line"][row]),
            "split": NAMES[leak["split"]],
            "of_path": paths[scratch.where(first)],
            "of_line": int(selection.rows["line"][first]),
            "of_split": NAMES[leak["first_split"]],
            "shared": SHARED[leak["shared"]],
            "action": "dropped" if SHARED[leak["shared"]] == "text" else "linked",
        }
