"""Checks a file of faiss before faiss reads it, which allocates what the file declares and opens files that it names.

Reads the kinds of index that `quantizers` makes, and refuses all others. The format is that of faiss/impl/index_write.cpp. Every
count follows from the number of vectors and their dimensions, so nothing that the file declares is trusted.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from capibara.core.limits import Refused, shortened
from capibara.retrieval.quantizers import Codes, Quantizer

_SCALAR_CODES = {0: Codes.INT8, 4: Codes.FLOAT16}
_PQ_VALUES = 256  # of a byte


def quantizer_of(content: np.ndarray, count: int, dims: int) -> Quantizer:
    """The settings of an index, once its whole file is checked.

    Args:
      content: the file: uint8 [bytes].
      count: of its vectors, at least 1.
      dims: of a vector, at least 1.

    Raises:
      Refused: the file is not one that faiss writes for `count` vectors of `dims`, or has values that are not finite.
    """
    reader = _Reader(content)
    result = reader.index(count, dims)
    reader.end()
    return result


class _Reader:
    """Reads a file of faiss from its start to its end; every method raises Refused."""

    def __init__(self, content: np.ndarray):
        self._content, self._position = content, 0

    def index(self, count: int, dims: int) -> Quantizer:
        match self._kind():
            case b"IxPT":
                return self._transformed(count, dims)
            case b"IxRF":
                self._header(count, dims)
                base, refined = self._codes(self._kind(), count, dims), self._codes(self._kind(), count, dims)
                self._floats(1)  # `Quantizer.searched` sets it
                return dataclasses.replace(base, refined=refined.codes)
            case b"IwPQ":
                return self._listed(count, dims)
            case kind:
                return self._codes(kind, count, dims)

    def end(self) -> None:
        if rest := len(self._content) - self._position:
            raise Refused(f"{rest:,} bytes after its end")

    def _codes(self, kind: bytes, count: int, dims: int) -> Quantizer:
        """An index that compares a query with every vector."""
        if kind not in (b"IxFI", b"IxSQ", b"IxPq"):
            raise Refused(f"an index of the kind {shortened(kind)}, which `capibara prepare index` does not write")
        self._header(count, dims)
        if kind == b"IxFI":
            self._vector("<f4", count * dims)
            return Quantizer(codes=Codes.FLOAT32)
        if kind == b"IxSQ":
            return Quantizer(codes=self._scalar(count, dims))
        size = self._product(dims)
        self._vector("u1", count * size)
        self._equal("<i4", 0, "kind of search")
        self._take(5)  # of searches by Hamming distance
        return Quantizer(pq_bytes=size)

    def _scalar(self, count: int, dims: int) -> Codes:
        codes = _SCALAR_CODES.get(number := self._number("<i4"))
        if codes is None:
            raise Refused(f"scalar codes of the kind {number}, which `capibara prepare index` does not write")
        self._take(8)  # how the range was trained
        size = dims * (2 if codes is Codes.FLOAT16 else 1)
        self._equal("<u8", dims, "dimensions of a code")
        self._equal("<u8", size, "bytes of a code")
        self._vector("<f4", 0 if codes is Codes.FLOAT16 else 2 * dims)
        stored = self._vector("u1", count * size)
        if codes is Codes.FLOAT16:
            _check_finite(stored.view("<f2"))
        return codes

    def _product(self, dims: int) -> int:
        """A product quantizer; returns the bytes of a code."""
        self._equal("<u8", dims, "dimensions of a code")
        size = self._number("<u8")
        if not 1 <= size <= dims or dims % size:
            raise Refused(f"codes of {size:,} parts, must divide {dims} dimensions")
        self._equal("<u8", 8, "bits of a part of a code")
        self._vector("<f4", dims * _PQ_VALUES)
        return size

    def _transformed(self, count: int, dims: int) -> Quantizer:
        """Rotated vectors, or their principal components."""
        self._header(count, dims)
        self._equal("<i4", 1, "transforms")
        kind = self._kind()
        if kind == b"Pcam":
            self._take(13)  # options of its training
            for size in (dims, dims, dims * dims):  # the mean, the variances and the axes
                self._vector("<f4", size)
        elif kind != b"LTra":
            raise Refused(f"a transform of the kind {shortened(kind)}, which `capibara prepare index` does not write")
        has_bias = self._number("u1") != 0
        values = self._number("<u8")
        transformed = values // dims
        if not 1 <= transformed <= dims or values % dims:
            raise Refused(f"a transform of {values:,} values, must make 1 to {dims} dimensions of {dims}")
        self._floats(values)
        self._vector("<f4", transformed if has_bias else 0)
        self._equal("<i4", dims, "dimensions before the transform")
        self._equal("<i4", transformed, "dimensions after the transform")
        self._equal("u1", 1, "trained")
        result = self._codes(self._kind(), count, transformed)
        return (
            dataclasses.replace(result, opq=True)
            if kind == b"LTra"
            else dataclasses.replace(result, reduced=transformed)
        )

    def _listed(self, count: int, dims: int) -> Quantizer:
        """An inverted file of product codes."""
        self._header(count, dims)
        lists = self._number("<u8")
        if not 1 <= lists <= count:
            raise Refused(f"{lists:,} lists, must be from 1 to its {count:,} vectors")
        self._take(8)  # how many are searched: `Quantizer.searched` sets it
        if self._codes(self._kind(), lists, dims).codes is not Codes.FLOAT32:
            raise Refused("centers of lists that are no float32")
        self._equal("u1", 0, "kind of map")
        self._vector("<i8", 0)
        self._take(1)  # whether codes are of the distance to the center
        bytes_of_code = self._number("<u8")
        size = self._product(dims)
        if size != bytes_of_code:
            raise Refused(f"codes of {size} and of {bytes_of_code:,} bytes")
        if (kind := self._kind()) != b"ilar":  # others map files that they name
            raise Refused(f"lists of the kind {shortened(kind)}, which `capibara prepare index` does not write")
        self._equal("<u8", lists, "lists")
        self._equal("<u8", size, "bytes of a code")
        ids = []
        for length in self._lengths(lists, count):
            self._take(length * size)
            ids.append(self._take(8 * length).view("<i8"))
        if not np.array_equal(np.sort(np.concatenate(ids)), np.arange(count)):
            raise Refused(f"lists that do not have each of its {count:,} vectors once")
        return Quantizer(lists=lists, pq_bytes=size)

    def _lengths(self, lists: int, count: int) -> list[int]:
        """The lengths of all lists that have vectors, together `count`."""
        kind = self._kind()
        if kind == b"full":
            lengths = self._vector("<u8", lists)
        elif kind == b"sprs":
            pairs = self._number("<u8")
            if pairs > 2 * lists or pairs % 2:
                raise Refused(f"{pairs:,} numbers of lists, must be at most {2 * lists:,} and even")
            numbers, lengths = self._take(8 * pairs).view("<u8").reshape(-1, 2).T
            if len(np.unique(numbers)) != len(numbers) or (numbers >= lists).any():
                raise Refused(f"lists whose numbers are not from 0 to {lists - 1:,}, each once")
        else:
            raise Refused(
                f"lengths of lists of the kind {shortened(kind)}, which `capibara prepare index` does not write"
            )
        if (lengths > count).any() or lengths.sum() != count:
            raise Refused(f"lists whose lengths do not add up to its {count:,} vectors")
        return [int(length) for length in lengths]

    def _header(self, count: int, dims: int) -> None:
        self._equal("<i4", dims, "dimensions")
        self._equal("<i8", count, "vectors")
        self._take(16)  # unused
        self._equal("u1", 1, "trained")
        self._equal("<i4", 0, "metric")  # inner products

    def _kind(self) -> bytes:
        return self._take(4).tobytes()

    def _number(self, form: str) -> int:
        return int(self._take(np.dtype(form).itemsize).view(form)[0])

    def _equal(self, form: str, value: int, name: str) -> None:
        if (number := self._number(form)) != value:
            raise Refused(f"{number:,} as its {name}, must be {value:,}")

    def _vector(self, form: str, size: int) -> np.ndarray:
        """An array that stands behind its size."""
        self._equal("<u8", size, "size of an array")
        return self._floats(size) if form == "<f4" else self._take(size * np.dtype(form).itemsize).view(form)

    def _floats(self, size: int) -> np.ndarray:
        values = self._take(4 * size).view("<f4")
        _check_finite(values)
        return values

    def _take(self, size: int) -> np.ndarray:
        first = self._position
        if size > len(self._content) - first:
            raise Refused(f"{len(self._content):,} bytes, but {size:,} more are declared at byte {first:,}")
        self._position += size
        return self._content[first : self._position]


def _check_finite(values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise Refused("values that are not finite")
