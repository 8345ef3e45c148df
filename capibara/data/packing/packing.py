"""Documents into rows of fixed length.

A window of documents is laid out in rows at once. Tokens are copied only when a row is asked for, so that a window
costs four bytes a token, and a row a few slices.
"""

from __future__ import annotations

import bisect
import enum
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from capibara.core.types import BATCH_KEYS, ENCODER_KEYS, Batch
from capibara.data.pipeline.shuffle import permutation

Piece = tuple[int, int]  # start and stop in the window's tokens
_PADDED = frozenset(("tokens", "targets", "encoder_tokens"))  # what holds the padding id on padding; the rest is 0


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
      ids: [n] int32, what is to be predicted.
      weights: [n] float32 loss weights; None is 1 everywhere.
      previous: the input at the first position: the beginning token, or the token before a rest.
      domain: index of its domain, 0 where none is known.
      read: [n] int32, what the model reads instead of `previous` and the ids before; None: those.
      place: where it is in the data.
      number: its own in the split, counted from 1, where batches tell it.
      prefix: so many of its first positions read its inputs; the first of its targets is predicted by the last of them.
    """

    ids: np.ndarray
    weights: np.ndarray | None
    previous: int
    domain: int = 0
    read: np.ndarray | None = None
    place: tuple[int, ...] = ()
    number: int = 0
    prefix: int = 0

    def cut(self, start: int, stop: int | None = None) -> Document:
        """Its tokens from `start` to `stop`, as a document."""
        if not start and stop is None:
            return self
        return Document(
            self.ids[start:stop],
            None if self.weights is None else self.weights[start:stop],
            int(self.ids[start - 1]) if start else self.previous,
            self.domain,
            None if self.read is None else self.read[start:stop],
            self.place,
            self.number,
            max(0, self.prefix - start),
        )


class Rows:
    """What every window is: rows that can be counted and shuffled; `_rows` says what lies in each."""

    _rows: list

    def __len__(self) -> int:
        return len(self._rows)

    def shuffle(self, *seeds: int) -> None:
        """Permutes the rows."""
        self._rows = [self._rows[i] for i in permutation(len(self._rows), *seeds)]


class Window(Rows):
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
        self._starts, self._places = starts, [document.place for document in documents]
        self._numbers = [document.number for document in documents]
        self._iota = np.arange(length, dtype=np.int32)
        self._targets = np.concatenate([document.ids for document in documents] or [np.zeros(0, np.int32)])
        if any(document.read is not None for document in documents):
            self._tokens = np.concatenate([document.read for document in documents])
        else:
            self._tokens = np.empty_like(self._targets)
            self._tokens[1:] = self._targets[:-1]
            self._tokens[starts] = [document.previous for document in documents]
        self._weights: np.ndarray | None = None
        if any(document.weights is not None for document in documents):
            ones = (np.ones(len(d.ids), np.float32) if d.weights is None else d.weights for d in documents)
            self._weights = np.concatenate(list(ones))
        self._domains: np.ndarray | None = None
        if any(document.domain for document in documents):
            self._domains = np.repeat(np.array([document.domain for document in documents], np.int32), lengths)
        self._prefix: np.ndarray | None = None
        if any(document.prefix for document in documents):
            self._prefix = np.zeros(len(self._targets), np.int32)
            for start, document in zip(starts, documents):
                self._prefix[start : start + min(document.prefix, len(document.ids))] = 1
        self._rows = _LAYOUTS[packing](starts, stops, length)

    @property
    def checksum(self) -> int:
        """CRC-32 of the window's tokens, by which a restored stream knows that the data is still the same."""
        return zlib.crc32(self._targets.data)

    def places(self, i: int) -> list[tuple[int, ...]]:
        """Of the documents that row `i` has tokens of."""
        firsts = [start for start, _ in self._rows[i]]
        return [self._places[n] for n in np.searchsorted(self._starts, firsts, side="right") - 1]

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
            if self._domains is not None and "domains" in batch:
                batch["domains"][b, at:end] = self._domains[start:stop]
            if self._prefix is not None and "prefix" in batch:
                batch["prefix"][b, at:end] = self._prefix[start:stop]
            if "numbers" in batch:
                batch["numbers"][b, at] = self._numbers[int(np.searchsorted(self._starts, start))]
            at = end
        if self._pad_id:
            tokens[at:] = self._pad_id
            targets[at:] = self._pad_id


def batch_spec(
    rows: int,
    length: int,
    *,
    encoder_length: int | None = None,
    domains: bool = False,
    numbers: bool = False,
    prefix: bool = False,
) -> dict[str, tuple[tuple[int, int], np.dtype]]:
    """Shape and dtype of every array of a batch, by its key.

    Args:
      rows: of the batch.
      length: positions of a row that the decoder (or the only stack) reads.
      encoder_length: positions that the encoder of an encoder-decoder reads; None: there is none.
      domains: whether documents have domains.
      numbers: whether documents are told by their number.
      prefix: whether places that read a document's inputs are marked.
    """
    spec = {key: ((rows, length), np.dtype(np.float32 if key == "weights" else np.int32)) for key in BATCH_KEYS}
    if encoder_length is not None:
        spec |= {key: ((rows, encoder_length), np.dtype(np.int32)) for key in ENCODER_KEYS}
    more = {"domains": domains, "numbers": numbers, "prefix": prefix}
    spec |= {key: ((rows, length), np.dtype(np.int32)) for key, wanted in more.items() if wanted}
    return spec


def empty_batch(rows: int, length: int, pad_id: int = 0, **more: Any) -> dict[str, np.ndarray]:
    """A batch of padding with the arrays of `batch_spec`."""
    spec = batch_spec(rows, length, **more)
    batch = {key: np.zeros(shape, dtype) for key, (shape, dtype) in spec.items()}
    if pad_id:
        for key in _PADDED & set(batch):
            batch[key].fill(pad_id)
    return batch


def best_fit(sizes: Sequence[int], length: int, most: int | None = None) -> list[list[int]]:
    """Rows of the indices of `sizes`: the largest first, each where it leaves the least space, up to `most` in a row."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (free positions, row), sorted
    for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        need = sizes[index]
        at = bisect.bisect_left(open_rows, (need, -1))
        if at < len(open_rows):
            free, row = open_rows.pop(at)
            rows[row].append(index)
        else:
            free, row = length, len(rows)
            rows.append([index])
        if free > need and len(rows[row]) != most:
            bisect.insort(open_rows, (free - need, row))
    return rows


def _best_fit(starts: np.ndarray, stops: np.ndarray, length: int) -> list[list[Piece]]:
    rows: list[list[Piece]] = []
    rests: list[Piece] = []
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        while stop - start >= length:
            rows.append([(start, start + length)])
            start += length
        if start < stop:
            rests.append((start, stop))
    rows += [[rests[i] for i in row] for row in best_fit([stop - start for start, stop in rests], length)]
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
