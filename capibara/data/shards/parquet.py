"""Parquet files: a block is a row group, of which only the needed columns are read."""

from __future__ import annotations

import dataclasses
import functools
import io
from typing import Any

import numpy as np

from capibara.core import extras, limits
from capibara.core.types import UserError
from capibara.data.shards.formats import Record, ShardFormat, read
from capibara.storage.store import Entry

_MOST_BYTES = 1 << 30  # largest unpacked size of the needed columns of a row group
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
        about = metadata.row_group(group)
        chunks = [about.column(i) for i in range(about.num_columns)]
        selected = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in self.columns]
        size = sum(chunk.total_uncompressed_size for chunk in selected)
        if size > _MOST_BYTES:
            raise UserError(
                f"{shard.url} has a row group of {size / 2**30:.1f} GiB: write it with smaller ones (row_group_size=10000)"
            )
        with _opened(shard, metadata) as file:
            try:
                found = _rows(file, shard, group, list(self.columns))
            except (OSError, ValueError) as error:  # base classes of pyarrow's errors
                raise _corrupted(shard, error) from error
        if len(found) != stop - start:
            raise _corrupted(shard, f"a row group has {len(found):,} rows, {stop - start:,} were announced")
        return list(enumerate(found, start))


def _rows(file: Any, shard: Entry, group: int, columns: list[str]) -> list[Record]:
    """The rows of a row group; checks the unpacked size again, since the metadata may be wrong."""
    found, size = [], 0
    for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False):
        size += batch.nbytes
        if size > _MOST_BYTES:
            raise UserError(
                f"{shard.url} has a row group of more than {_MOST_BYTES / 2**30:.0f} GiB: write it with smaller ones "
                "(row_group_size=10000)"
            )
        found += batch.to_pylist()
    return found


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


def _opened(shard: Entry, metadata: Any = None) -> Any:
    parquet = extras.require("pyarrow.parquet", extra="parquet", why=shard.url)
    try:
        return parquet.ParquetFile(_Ranges(shard), metadata=metadata, pre_buffer=True)
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise _corrupted(shard, error) from error


@functools.lru_cache(maxsize=256)
def _metadata(shard: Entry) -> Any:
    with _opened(shard) as file:
        return file.metadata


def _corrupted(shard: Entry, error: Exception | str) -> UserError:
    if isinstance(error, UserError):
        return error
    return UserError(
        f"{shard.url} is no Parquet file, or cut short ({error if isinstance(error, str) else limits.cause(error)}): copy it again"
    )
