"""What a routing set keeps of each record in memory: 40 bytes; and tables on disk of what records share."""

from __future__ import annotations

import array
import enum
import hashlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from capibara.builders.preparation import tables
from capibara.builders.preparation.near import NearDuplicates, are_similar
from capibara.builders.writing import Part, Parts

FOLDERS = ("examples", "rows", "origins", "pieces", "texts", "near", "signatures", "contaminated")
DTYPE = np.dtype(
    [
        ("source", "<u8"),  # a hash of its source
        ("id", "<u8"),  # of its text
        ("offset", "<u8"),  # in the file of examples
        ("line", "<u4"),
        ("state", "u1"),
        ("domain", "u1"),
        ("label", "u1"),
        ("level", "u1"),
    ]
)


_CHUNK = 1 << 18  # keys of a table
_COMPARED = 1 << 16  # pairs of signatures at a time


def signature_dtype(near: NearDuplicates) -> np.dtype:
    """Of a record's number in its file, and its signature."""
    return np.dtype([("row", "<u4"), ("signature", "<u4", (near.permutations,))])


class State(enum.IntEnum):
    """What became of a record."""

    KEPT = 0
    NO_DOMAIN = 1
    AMBIGUOUS = 2
    OTHER_DOMAIN = 3
    TOO_SHORT = 4
    TOO_LONG = 5
    CONTAMINATED = 6
    DUPLICATE = 7


class Row(NamedTuple):
    """A row of `DTYPE`, in its order."""

    source: int
    id: int
    offset: int
    line: int
    state: State
    domain: int = 0
    label: int = 0
    level: int = 0


def name(folder: str, number: int) -> str:
    """The name of a part of an input file."""
    return f"{folder}/{number:06d}"


def key_of(text: str) -> int:
    """A hash of a text, of 64 bits."""
    return int.from_bytes(digest(text)[:8], "little")


def digest(text: str) -> bytes:
    """A hash of a text, of 128 bits."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Table:
    """Keys of records, written as tables of `_CHUNK` keys each, the last of fewer, while the records are read.

    Args:
      part: where the tables go.
      columns: of 64 bits of a key.
    """

    def __init__(self, part: Part, columns: int = 1):
        self._part = part
        self._keys = [array.array("Q") for _ in range(columns)]
        self._rows = array.array("I")

    def add(self, row: int, *key: int) -> None:
        """Adds a record's key."""
        for column, value in zip(self._keys, key, strict=True):
            column.append(value)
        self._rows.append(row)
        if len(self._rows) == _CHUNK:
            self.flush()

    def flush(self) -> None:
        """Writes what is not yet written; call it at the end."""
        if self._rows:
            keys = np.stack([np.frombuffer(column, np.uint64) for column in self._keys])
            self._part.write(tables.encoded(keys, np.frombuffer(self._rows, np.uint32)))
            self._part.records += len(self._rows)
        self._keys = [array.array("Q") for _ in self._keys]
        self._rows = array.array("I")


class Scratch:
    """The parts of all input files, as one.

    Args:
      parts: where they are.
      files: how many input files there are.
    """

    def __init__(self, parts: Parts, files: int):
        self._parts = parts
        self.files = files
        self._counts = {folder: [self._records(folder, number) for number in range(files)] for folder in FOLDERS}
        self.begins = np.cumsum([0, *self._counts["rows"]])

    def _records(self, folder: str, number: int) -> int:
        part = self._parts.done(name(folder, number))
        assert part is not None, "it was read"
        return part.file.records

    def path(self, folder: str, number: int) -> str:
        """The file of a part."""
        return self._parts.path(name(folder, number))

    def rows(self) -> np.ndarray:
        """[n] of `DTYPE`, of all records in their order."""
        result = np.zeros(int(self.begins[-1]), DTYPE)
        for number, (begin, end) in enumerate(zip(self.begins, self.begins[1:])):
            if end > begin:
                result[begin:end] = np.fromfile(self.path("rows", number), DTYPE)
        return result

    def repeated(self, folder: str, columns: int = 1) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Records that share a key with an earlier one, and the first with that key, for one range of keys at a time."""
        counts = self._counts[folder]
        for within in tables.ranges(sum(counts)):
            keys, rows = [np.zeros((columns, 0), np.uint64)], [np.zeros(0, np.uint32)]
            for number, count in enumerate(counts):
                with open(self.path(folder, number), "rb") as file:
                    for chunk in range(math.ceil(count / _CHUNK)):
                        size = min(_CHUNK, count - chunk * _CHUNK)
                        result, local = tables.read(file, chunk * tables.size(_CHUNK, columns), size, within, columns)
                        keys.append(result)
                        rows.append(local + np.uint32(self.begins[number]))
            yield tables.repeated(np.concatenate(keys, axis=1), np.concatenate(rows))

    def similar(self, near: NearDuplicates) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Records that are similar to an earlier one, and the earlier one, as `repeated`."""
        for rows, others in self.repeated("near"):
            rows, others = np.unique(np.stack([rows, others]), axis=1)
            for begin in range(0, len(rows), _COMPARED):
                pair = rows[begin : begin + _COMPARED], others[begin : begin + _COMPARED]
                item, other = (self._signatures(part, near) for part in pair)
                result = are_similar(item, other, near)
                yield pair[0][result], pair[1][result]

    def _signatures(self, rows: np.ndarray, near: NearDuplicates) -> np.ndarray:
        """[k, permutations] uint32, of records that have a signature."""
        result = np.zeros((len(rows), near.permutations), np.uint32)
        numbers = np.searchsorted(self.begins, rows, side="right") - 1
        for number in np.unique(numbers).tolist():
            signed = np.memmap(self.path("signatures", number), signature_dtype(near), "r")
            here = np.flatnonzero(numbers == number)
            result[here] = signed["signature"][np.searchsorted(signed["row"], rows[here] - self.begins[number])]
        return result

    def where(self, row: int) -> int:
        """The number of the input file of a record."""
        return int(np.searchsorted(self.begins, row, side="right")) - 1
