"""A first look at a large file: some of its lines, evenly spaced, so that its charts are drawn before all of it is read."""

from __future__ import annotations

import concurrent.futures
import dataclasses

import numpy as np

from capibara.monitoring.reading import parsing
from capibara.monitoring.reading.parsing import Era, Rows
from capibara.storage import stores

_SHARE = 0.25  # of the file, at most
_THREADS = 8  # requests at once


@dataclasses.dataclass(frozen=True)
class _Pace:
    """How much is read of files of a store.

    Attributes:
      blocks: at most.
      block_bytes: of each.
    """

    blocks: int
    block_bytes: int


DISK, _BUCKET = _Pace(512, 16 << 10), _Pace(64, 64 << 10)


@dataclasses.dataclass(frozen=True)
class Preview:
    """Some lines of a file.

    Attributes:
      eras: what they say, without samples; their rows' steps ascend.
      end: the end of the file's last whole line; 0: none was found.
      tail: the bytes before it.
    """

    eras: list[Era]
    end: int
    tail: bytes


def preview(path: str, size: int) -> Preview:
    """Reads blocks of a file, the first and the last among them.

    Raises:
      UserError, TryAgain: the file cannot be read.
    """
    store = stores.of(path)
    pace = DISK if store.has_local_paths else _BUCKET
    count = max(2, min(pace.blocks, int(size * _SHARE) // pace.block_bytes))
    begins = np.linspace(0, max(0, size - pace.block_bytes), count).astype(np.int64).tolist()
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        blocks = list(pool.map(lambda at: store.read_range(path, at, min(size, at + pace.block_bytes)), begins))
    lines = [_whole_lines(block, is_first=at == 0) for at, block in zip(begins, blocks, strict=True)]
    end = begins[-1] + blocks[-1].rfind(b"\n") + 1 if b"\n" in blocks[-1] else 0
    return Preview([_shown(era) for era in parsing.parse_text(b"".join(lines), 0)], end, lines[-1])


def _whole_lines(block: bytes, *, is_first: bool) -> bytes:
    begin = 0 if is_first else block.find(b"\n") + 1
    return block[begin : block.rfind(b"\n") + 1]


def _shown(era: Era) -> Era:
    """An era without samples, whose places in the file are not those in the blocks, and without rows that were repeated."""
    return Era(era.again, {kind: _ascending(rows) for kind, rows in era.rows.items()}, era.events, [])


def _ascending(rows: Rows) -> Rows:
    """The rows that no later one repeats: a start or a roll-back between two blocks is not seen."""
    lowest_after = np.minimum.accumulate(rows.steps[::-1])[::-1]
    keep = np.append(rows.steps[:-1] < lowest_after[1:], True)
    if keep.all():
        return rows
    columns = {name: column[keep] for name, column in rows.columns.items()}
    return Rows(rows.steps[keep], rows.times[keep], columns)
