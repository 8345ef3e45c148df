"""Sorted tables on disk: 64-bit keys of documents, of which a range can be read without the rest.

A table is 257 counts of keys by their first byte (uint32, cumulative), then columns: the keys (uint64) in their order, more
columns of uint64 where a key is longer, and the document of each key (uint32); all little-endian.
"""

from __future__ import annotations

import math
from typing import BinaryIO

import numpy as np

_FIRST_BYTES = 256
_TOGETHER = 1 << 21  # keys of all parts that are sorted at a time, in about 100 MB
_HEAD_BYTES = 4 * (_FIRST_BYTES + 1)


def encoded(keys: np.ndarray, documents: np.ndarray) -> bytes:
    """A table.

    Args:
      keys: [c, n] uint64; the first column decides the range of a key.
      documents: [n], the document of each key.
    """
    order = np.lexsort((documents, *keys[::-1]))
    keys, documents = keys[:, order], documents[order]
    edges = np.arange(_FIRST_BYTES, dtype=np.uint64) << np.uint64(56)
    begins = np.append(np.searchsorted(keys[0], edges), len(documents))
    return begins.astype("<u4").tobytes() + keys.astype("<u8").tobytes() + documents.astype("<u4").tobytes()


def size(count: int, columns: int = 1) -> int:
    """Bytes of a table of `count` keys with so many columns of uint64."""
    return _HEAD_BYTES + (8 * columns + 4) * count


def ranges(total: int) -> list[tuple[int, int]]:
    """Ranges of the keys' first byte; of `total` keys each has few enough to be sorted in memory."""
    pieces = min(_FIRST_BYTES, 1 << math.ceil(math.log2(max(1.0, total / _TOGETHER))))
    width = _FIRST_BYTES // pieces
    return [(first, first + width) for first in range(0, _FIRST_BYTES, width)]


def read(
    file: BinaryIO, at: int, count: int, within: tuple[int, int], columns: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """The keys of a range, [c, n] uint64, and their documents, [n] uint32.

    Args:
      file: the file.
      at: where the table begins in it.
      count: its number of keys.
      within: one of `ranges`.
      columns: columns of a key.
    """
    file.seek(at)
    begins = np.frombuffer(file.read(_HEAD_BYTES), "<u4")
    first, last = int(begins[within[0]]), int(begins[within[1]])
    result = []
    for column in range(columns):
        file.seek(at + _HEAD_BYTES + 8 * (column * count + first))
        result.append(np.frombuffer(file.read(8 * (last - first)), "<u8"))
    file.seek(at + _HEAD_BYTES + 8 * columns * count + 4 * first)
    return np.stack(result), np.frombuffer(file.read(4 * (last - first)), "<u4")


def repeated(keys: np.ndarray, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The documents whose key an earlier document has, and the first document with that key.

    Args:
      keys: [c, n] uint64.
      documents: [n], the documents that have them.
    """
    if not len(documents):
        return documents, documents
    order = np.lexsort((documents, *keys[::-1]))
    keys, documents = keys[:, order], documents[order]
    is_first = np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0))
    first = documents[np.maximum.accumulate(np.where(is_first, np.arange(len(documents)), 0))]
    return documents[~is_first], first[~is_first]
