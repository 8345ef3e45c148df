"""Packs documents into rows of fixed length, of which pipeline/feeds.py fills batches.

A window of documents is packed at once. Tokens are copied only when a row is requested, so that a window needs four bytes
a token, and a row a few slices.
"""

from __future__ import annotations

import bisect
import enum
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from capibara.core.types import BATCH_KEYS, ENCODER_KEYS, HostBatch
from capibara.data.packing.shuffle import permutation

Piece = tuple[int, int]  # start and stop in the window's tokens
_PADDED = frozenset(("tokens", "targets", "encoder_tokens"))  # arrays padded with the padding id; the others with 0


class Packing(enum.StrEnum):
    """How documents share rows.

    BEST_FIT: a document longer than a row is cut into full rows and a rest; rests and short documents are placed, longest
      first, into the row where they leave the least space. Documents that fit a row are not cut.
    CONCAT: documents are concatenated and cut wherever a row is full; there is no padding.
    NONE: one document per row, truncated or padded.
    """

    BEST_FIT = "best_fit"
    CONCAT = "concat"
    NONE = "none"


class Document(NamedTuple):
    """A tokenized document, or the rest of one after a cut.

    Attributes:
      ids: [n] int32, the targets.
      weights: [n] float32 loss weights; None: 1 everywhere.
      previous: the input at the first position: the beginning token, or the token before a rest.
      domain: number of its domain; 0: unknown.
      read: [n] int32, the inputs, if they are not the shifted targets (`previous`, then `ids`); None: they are.
      position: its position in the data.
      number: its number in the split, from 1, for batches with `numbers`; 0: not needed.
      prefix: number of leading positions that read its inputs; the last of them predicts the first target.
    """

    ids: np.ndarray
    weights: np.ndarray | None
    previous: int
    domain: int = 0
    read: np.ndarray | None = None
    position: tuple[int, ...] = ()
    number: int = 0
    prefix: int = 0

    @classmethod
    def after(cls, ids: np.ndarray, weights: np.ndarray | None, begin: Sequence[int]) -> Document:
        """A text after the ids that begin it; without any, the text's first token is only an input."""
        if len(begin) != 1:
            weights = np.ones(len(ids), np.float32) if weights is None and begin else weights
            weights = None if weights is None else np.concatenate([np.zeros(len(begin), np.float32), weights])[1:]
            ids = np.concatenate([np.array(begin, np.int32), ids])
            return cls(ids[1:], weights, int(ids[0]) if len(ids) else 0)
        return cls(ids, weights, begin[0])

    def cut(self, start: int, stop: int | None = None) -> Document:
        """The document's tokens from `start` to `stop` as a document."""
        if not start and stop is None:
            return self
        return Document(
            self.ids[start:stop],
            None if self.weights is None else self.weights[start:stop],
            int(self.ids[start - 1]) if start else self.previous,
            self.domain,
            None if self.read is None else self.read[start:stop],
            self.position,
            self.number,
            max(0, self.prefix - start),
        )


class Rows:
    """Base class of windows: a list of packed rows (`_rows`) with a length that can be shuffled."""

    _rows: list

    def __len__(self) -> int:
        return len(self._rows)

    def shuffle(self, *seeds: int) -> None:
        """Permutes the rows."""
        self._rows = [self._rows[i] for i in permutation(len(self._rows), *seeds)]


class Window(Rows):
    """Documents packed into rows; `fill(batch, b, i)` copies row `i` into row `b` of a batch."""

    def __init__(self, documents: Sequence[Document], *, length: int, packing: Packing, pad_id: int):
        """Packs the documents.

        Args:
          documents: the documents; empty ones are dropped.
          length: positions in a row.
          packing: how documents share rows.
          pad_id: the padding id of `tokens` and `targets`.
        """
        documents = [document for document in documents if len(document.ids)]
        lengths = np.array([len(document.ids) for document in documents], np.int64)
        stops = np.cumsum(lengths)
        starts = stops - lengths
        self._pad_id = pad_id
        self._starts, self._positions = starts, [document.position for document in documents]
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
        """CRC-32 of the window's tokens, with which a restored stream checks that the data has not changed."""
        return zlib.crc32(self._targets.data)

    def positions(self, i: int) -> list[tuple[int, ...]]:
        """The positions in the data of row `i`'s documents."""
        firsts = [start for start, _ in self._rows[i]]
        return [self._positions[n] for n in np.searchsorted(self._starts, firsts, side="right") - 1]

    def fill(self, batch: HostBatch, b: int, i: int) -> None:
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
    labels: bool = False,
) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Key -> shape and dtype of every array of a batch.

    Args:
      rows: rows of the batch.
      length: positions in a row of the decoder (or of the only stack).
      encoder_length: positions in a row of the encoder of an encoder-decoder; None: there is none.
      domains: whether there is `domains`.
      numbers: whether there is `numbers`.
      prefix: whether there is `prefix`.
      labels: whether there is `labels`.
    """
    shape: tuple[int, ...] = (rows, length)
    spec = {key: (shape, np.dtype(np.float32 if key == "weights" else np.int32)) for key in BATCH_KEYS}
    if encoder_length is not None:
        spec |= {key: ((rows, encoder_length), np.dtype(np.int32)) for key in ENCODER_KEYS}
    more = {"domains": domains, "numbers": numbers, "prefix": prefix}
    spec |= {key: (shape, np.dtype(np.int32)) for key, is_needed in more.items() if is_needed}
    return spec | ({"labels": (shape, np.dtype(np.float32))} if labels else {})


def empty_batch(rows: int, length: int, pad_id: int = 0, **more: Any) -> dict[str, np.ndarray]:
    """A batch of padding with the arrays of `batch_spec`."""
    spec = batch_spec(rows, length, **more)
    batch = {key: np.zeros(shape, dtype) for key, (shape, dtype) in spec.items()}
    if pad_id:
        for key in _PADDED & set(batch):
            batch[key].fill(pad_id)
    return batch


def best_fit(sizes: Sequence[int], length: int, most: int | None = None) -> list[list[int]]:
    """Best-fit-decreasing bin packing.

    Args:
      sizes: size of each item.
      length: capacity of a row.
      most: the largest number of items in a row; None: any.

    Returns:
      The indices of the items of each row.
    """
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
    # Restore the order of the corpus, which matters without shuffling.
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
