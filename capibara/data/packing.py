"""Documents into rows of fixed length.

A window of documents is laid out in rows at once. Tokens are copied only when a row is asked for, so that a window
costs four bytes a token, and a row a few slices.
"""

from __future__ import annotations

import bisect
import enum
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from capibara.data.shuffle import permutation
from capibara.types import Batch

Piece = tuple[int, int]  # start and stop in the window's tokens


class Packing(enum.StrEnum):
    """How documents share rows.

    BEST_FIT: a document longer than a row is cut into rows and a rest; rests and short documents go, longest first,
      where they leave the least space. No document is cut without need.
    CONCAT: documents follow each other and are cut wherever a row is full. No padding.
    NONE: one document a row, truncated or padded.
    """

    BEST_FIT = "best_fit"
    CONCAT = "concat"
    NONE = "none"


class Document(NamedTuple):
    """A tokenized document, or the rest of one.

    Attributes:
      ids: [n] int32.
      weights: [n] float32 loss weights; None is 1 everywhere.
      previous: the input at the first position: the beginning token, or the token before a rest.
    """

    ids: np.ndarray
    weights: np.ndarray | None
    previous: int


class Window:
    """Documents laid out in rows: `len`, and `fill(batch, b, i)` to copy row `i` into row `b` of a batch."""

    def __init__(self, documents: Sequence[Document], *, length: int, packing: Packing, pad_id: int):
        """Lays the documents out.

        Args:
          documents: what to pack; documents without tokens are left out.
          length: positions in a row.
          packing: how documents share rows.
          pad_id: stands in `tokens` and `targets` on padding.
        """
        documents = [document for document in documents if len(document.ids)]
        lengths = np.array([len(document.ids) for document in documents], np.int64)
        stops = np.cumsum(lengths)
        starts = stops - lengths
        self._pad_id = pad_id
        self._iota = np.arange(length, dtype=np.int32)
        self._targets = np.concatenate([document.ids for document in documents] or [np.zeros(0, np.int32)])
        self._tokens = np.empty_like(self._targets)
        self._tokens[1:] = self._targets[:-1]
        self._tokens[starts] = [document.previous for document in documents]
        self._weights: np.ndarray | None = None
        if any(document.weights is not None for document in documents):
            ones = (np.ones(len(d.ids), np.float32) if d.weights is None else d.weights for d in documents)
            self._weights = np.concatenate(list(ones))
        self._rows = _LAYOUTS[packing](starts, stops, length)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def checksum(self) -> int:
        """CRC-32 of the window's tokens, by which a restored stream knows that the data is still the same."""
        return zlib.crc32(self._targets)

    def shuffle(self, *seeds: int) -> None:
        """Permutes the rows."""
        self._rows = [self._rows[i] for i in permutation(len(self._rows), *seeds)]

    def fill(self, batch: Batch, b: int, i: int) -> None:
        """Copies row `i` into row `b` of an `empty_batch`."""
        tokens, targets, weights = batch["tokens"][b], batch["targets"][b], batch["weights"][b]
        segment_ids, positions = batch["segment_ids"][b], batch["positions"][b]
        at = 0
        for segment, (start, stop) in enumerate(self._rows[i], 1):
            end = at + stop - start
            tokens[at:end] = self._tokens[start:stop]
            targets[at:end] = self._targets[start:stop]
            weights[at:end] = 1.0 if self._weights is None else self._weights[start:stop]
            segment_ids[at:end] = segment
            positions[at:end] = self._iota[: stop - start]
            at = end
        if self._pad_id:
            tokens[at:] = self._pad_id
            targets[at:] = self._pad_id


def empty_batch(rows: int, length: int, pad_id: int = 0) -> dict[str, np.ndarray]:
    """A batch [rows, length] of padding."""
    return {
        "tokens": np.full((rows, length), pad_id, np.int32) if pad_id else np.zeros((rows, length), np.int32),
        "targets": np.full((rows, length), pad_id, np.int32) if pad_id else np.zeros((rows, length), np.int32),
        "weights": np.zeros((rows, length), np.float32),
        "segment_ids": np.zeros((rows, length), np.int32),
        "positions": np.zeros((rows, length), np.int32),
    }


def _best_fit(starts: np.ndarray, stops: np.ndarray, length: int) -> list[list[Piece]]:
    rows: list[list[Piece]] = []
    rests: list[Piece] = []
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        while stop - start >= length:
            rows.append([(start, start + length)])
            start += length
        if start < stop:
            rests.append((start, stop))
    rests.sort(key=lambda piece: piece[0] - piece[1])
    open_rows: list[tuple[int, int]] = []  # (free positions, row), sorted
    for start, stop in rests:
        need = stop - start
        at = bisect.bisect_left(open_rows, (need, -1))
        if at < len(open_rows):
            free, row = open_rows.pop(at)
            rows[row].append((start, stop))
        else:
            free, row = length, len(rows)
            rows.append([(start, stop)])
        if free > need:
            bisect.insort(open_rows, (free - need, row))
    # Back into the order of the corpus, for whoever does not shuffle.
    rows.sort(key=lambda pieces: pieces[0][0])
    return rows


def _concat(starts: np.ndarray, stops: np.ndarray, length: int) -> list[list[Piece]]:
    total = int(stops[-1]) if len(stops) else 0
    cuts = np.unique(np.concatenate([starts, np.arange(0, total, length), [total]])).astype(np.int64)
    rows: list[list[Piece]] = [[] for _ in range(-(-total // length))]
    for start, stop in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        rows[start // length].append((start, stop))
    return rows


def _one_a_row(starts: np.ndarray, stops: np.ndarray, length: int) -> list[list[Piece]]:
    stops = np.minimum(stops, starts + length)
    return [[piece] for piece in zip(starts.tolist(), stops.tolist(), strict=True)]


_LAYOUTS = {Packing.BEST_FIT: _best_fit, Packing.CONCAT: _concat, Packing.NONE: _one_a_row}
