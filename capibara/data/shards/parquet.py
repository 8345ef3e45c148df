"""Parquet files: a block is a row group, of which only the needed columns are read.

The checksums of pages are verified where the file has them: writers may leave them out, and pyarrow's does so by default
(`write_page_checksum`). The footer has none; what it says twice is compared.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import io
from typing import Any

import numpy as np

from capibara.core import extras, limits
from capibara.core.types import UserError
from capibara.data.shards.formats import Record, ShardFormat, read
from capibara.storage.store import Entry

MOST_BYTES = 1 << 30  # largest unpacked size of the needed columns of a row group
_BATCH_ROWS = 1024  # rows unpacked at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetRows(ShardFormat):
    """Rows of a table.

    Attributes:
      columns: the columns to read; a file may lack some of them.
    """

    columns: tuple[str, ...]

    @property
    def name(self) -> str:
        return "parquet"

    def blocks(self, shard: Entry) -> np.ndarray:
        groups = _metadata(shard)
        starts = np.cumsum([0, *(groups.row_group(i).num_rows for i in range(groups.num_row_groups))])
        bounds = np.stack([starts[:-1], starts[1:]], axis=1).astype(np.int64)
        return bounds[bounds[:, 0] < bounds[:, 1]]

    def records(self, shard: Entry, start: int, stop: int) -> list[tuple[int, Record]]:
        metadata = _metadata(shard)
        rows = np.cumsum([0, *(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))])
        group = int(np.searchsorted(rows, start, side="right")) - 1
        try:
            size = _unpacked_bytes(metadata.row_group(group), self.columns)
            if size > MOST_BYTES:
                raise UserError(
                    f"{shard.url} has a row group of {size / 2**30:.1f} GiB: write it with smaller ones (row_group_size=10000)"
                )
            with _opened(shard, metadata) as file:
                result = _rows(file, shard, group, list(self.columns))
        except Exception as error:  # pyarrow raises many classes: all are a fault of the file
            raise _corrupted(shard, error, start) from error
        if len(result) != stop - start:
            raise _corrupted(shard, f"a row group has {len(result):,} rows, {stop - start:,} were announced", start)
        return list(enumerate(result, start))


def columns(shard: Entry) -> tuple[str, ...]:
    """The names of a file's columns; raises UserError for what is no Parquet file."""
    _metadata(shard)
    with _opened(shard) as file:
        return tuple(field.name for field in file.schema_arrow)


def _unpacked_bytes(group: Any, columns: tuple[str, ...]) -> int:
    """The unpacked size of columns of a row group, as it says itself, or a larger one."""
    # pyarrow 26 aborts the process where the footer of a column is corrupted: its columns are looked at where they must be.
    if group.total_byte_size <= MOST_BYTES:
        return int(group.total_byte_size)
    chunks = [group.column(i) for i in range(group.num_columns)]
    selected = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns]
    return sum(chunk.total_uncompressed_size for chunk in selected)


def _rows(file: Any, shard: Entry, group: int, columns: list[str]) -> list[Record]:
    """The rows of a row group; checks the unpacked size again, since the metadata may be wrong."""
    result, size = [], 0
    for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False):
        size += batch.nbytes
        if size > MOST_BYTES:
            raise UserError(
                f"{shard.url} has a row group of more than {MOST_BYTES / 2**30:.0f} GiB: write it with smaller ones "
                "(row_group_size=10000)"
            )
        result += batch.to_pylist()
    return result


class _Ranges(io.RawIOBase):
    """A shard as a seekable file for pyarrow."""

    def __init__(self, shard: Entry):
        super().__init__()
        self._shard, self._at = shard, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._shard.size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        stop = self._shard.size if size < 0 else min(self._at + size, self._shard.size)
        content = read(self._shard, self._at, stop) if stop > self._at else b""
        self._at += len(content)
        return content


def _opened(shard: Entry, metadata: object = None) -> Any:
    parquet = extras.require("pyarrow.parquet", extra="parquet", why=shard.url)
    try:
        return parquet.ParquetFile(_Ranges(shard), metadata=metadata, pre_buffer=True, page_checksum_verification=True)
    except Exception as error:  # as above
        raise _corrupted(shard, error) from error


@functools.lru_cache(maxsize=256)
def _metadata(shard: Entry) -> Any:
    """The footer of a file; raises UserError if it contradicts itself."""
    with _opened(shard) as file:
        metadata = file.metadata
        names = {field.name for field in file.schema_arrow}
    groups = range(metadata.num_row_groups)
    if (total := sum(metadata.row_group(i).num_rows for i in groups)) != metadata.num_rows:
        raise _corrupted(shard, f"its row groups have {total:,} rows, its footer says {metadata.num_rows:,}")
    if groups:
        _check_names(shard, metadata, names)
    return metadata


def _check_names(shard: Entry, metadata: Any, names: set[str]) -> None:
    """Raises UserError unless columns have the names of the schema, so that none that may be missing is overlooked."""
    schema = (metadata.metadata or {}).get(b"ARROW:schema")
    if schema is not None:
        pyarrow = extras.require("pyarrow", extra="parquet", why=shard.url)
        try:
            others = {*pyarrow.ipc.read_schema(pyarrow.py_buffer(base64.b64decode(schema))).names}
        except Exception as error:  # as above
            raise _corrupted(shard, error) from error
    else:
        group = metadata.row_group(0)
        try:
            others = {group.column(i).path_in_schema.partition(".")[0] for i in range(group.num_columns)}
        except UnicodeDecodeError as error:
            raise _corrupted(shard, error) from error
    if others != names:
        odd = limits.shortened(min(others ^ names))
        raise _corrupted(shard, f"only one of its two lists of columns has {odd}")


def _corrupted(shard: Entry, error: Exception | str, row: int | None = None) -> UserError:
    if isinstance(error, UserError):
        return error
    why = error if isinstance(error, str) else limits.cause(error)
    if row is None:
        return UserError(f"{shard.url} is no Parquet file, or cut short ({why}): copy it again")
    return UserError(f"{shard.url} is corrupted in the row group that begins at row {row:,} ({why}): copy it again")
