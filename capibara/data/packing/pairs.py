"""Pairs of inputs and targets into the rows of an encoder-decoder, as seqio's EncDecFeatureConverter lays them out.

A side that is longer than its rows is trimmed. The decoder reads the targets moved right by one, the padding id first
in every segment; targets that are not padding count towards the loss; segment i of a row's targets belongs to segment
i of its inputs.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from capibara.core.types import Batch
from capibara.data.packing.packing import Packing, Rows


class Pair(NamedTuple):
    """What the encoder reads, and what the decoder is to predict from it: [n] and [m] int32."""

    inputs: np.ndarray
    targets: np.ndarray


class Pairs(NamedTuple):
    """The pairs made of one document: one, or as many as the document has chunks; perhaps none.

    Attributes:
      pairs: none of them without targets.
      domain: index of the document's domain, 0 where none is known.
      place: where the document is in the data.
    """

    pairs: Sequence[Pair]
    domain: int = 0
    place: tuple[int, ...] = ()

    def need(self, encoder_length: int, length: int) -> int:
        """Decoder positions that the pairs take, counting an encoder position as length / encoder_length of one."""
        return sum(
            max(min(len(pair.targets), length), -(-min(len(pair.inputs), encoder_length) * length // encoder_length))
            for pair in self.pairs
        )


class PairWindow(Rows):
    """Pairs laid out in rows: `len`, and `fill(batch, b, i)` to copy row `i` into row `b` of a batch."""

    def __init__(self, documents: Sequence[Pairs], *, encoder_length: int, length: int, packing: Packing, pad_id: int):
        """Lays the pairs out.

        Args:
          documents: what to pack.
          encoder_length: positions of a row's inputs.
          length: positions of a row's targets.
          packing: best fit, or none; pairs cannot be cut.
          pad_id: stands on padding, and begins what the decoder reads.
        """
        blank = np.array([pad_id], np.int32)  # without it, targets without inputs would see those of their neighbours
        self._pairs = [
            Pair(pair.inputs[:encoder_length] if len(pair.inputs) else blank, pair.targets[:length])
            for document in documents
            for pair in document.pairs
        ]
        self._domains = [document.domain for document in documents for _ in document.pairs]
        self._places = [document.place for document in documents for _ in document.pairs]
        self._pad_id, self._packing = pad_id, packing
        if packing is Packing.NONE:
            self._rows = [[i] for i in range(len(self._pairs))]
        else:
            sizes = np.array([[len(pair.inputs), len(pair.targets)] for pair in self._pairs]).reshape(-1, 2)
            self._rows = _best_fit(sizes, np.array([encoder_length, length]))

    @property
    def checksum(self) -> int:
        """CRC-32 of the window's tokens, by which a restored stream knows that the data is still the same."""
        checksum = 0
        for pair in self._pairs:
            checksum = zlib.crc32(pair.targets.data, zlib.crc32(pair.inputs.data, checksum))
        return checksum

    def places(self, i: int) -> list[tuple[int, ...]]:
        """Of the documents that row `i` has pairs of."""
        return list(dict.fromkeys(self._places[index] for index in self._rows[i]))

    def fill(self, batch: Batch, b: int, i: int) -> None:
        """Copies row `i` into row `b` of an `empty_batch`."""
        row = {key: value[b] for key, value in batch.items()}
        input_end = target_end = 0
        for segment, index in enumerate(self._rows[i], 1):
            inputs, targets = self._pairs[index]
            start, input_end = input_end, input_end + len(inputs)
            row["encoder_tokens"][start:input_end] = inputs
            row["encoder_segment_ids"][start:input_end] = segment
            row["encoder_positions"][start:input_end] = np.arange(len(inputs))
            start, target_end = target_end, target_end + len(targets)
            row["tokens"][start] = self._pad_id
            row["tokens"][start + 1 : target_end] = targets[:-1]
            row["targets"][start:target_end] = targets
            row["weights"][start:target_end] = targets != self._pad_id
            row["segment_ids"][start:target_end] = segment
            row["positions"][start:target_end] = np.arange(len(targets))
            if "domains" in row:
                row["domains"][start:target_end] = self._domains[index]
        if self._packing is Packing.NONE and target_end < len(row["tokens"]):
            # seqio moves a row that is not packed as a whole: the last target is read on padding, where nothing counts.
            row["tokens"][target_end] = self._pairs[self._rows[i][0]].targets[-1]


def _best_fit(sizes: np.ndarray, capacity: np.ndarray) -> list[list[int]]:
    """Rows of the indices of `sizes` [n, 2]: the largest first, each where it leaves the least share of a row free."""
    order = np.argsort(-np.max(sizes / capacity, axis=1, initial=0), kind="stable")
    rows: list[list[int]] = []
    free = np.empty((len(sizes), 2), np.int64)
    for index in order.tolist():
        left = free[: len(rows)] - sizes[index]
        spare = np.where((left >= 0).all(axis=1), (left / capacity).sum(axis=1), np.inf)
        at = int(np.argmin(spare)) if len(rows) else 0
        if not len(rows) or spare[at] == np.inf:
            at = len(rows)
            rows.append([])
            free[at] = capacity
        rows[at].append(index)
        free[at] -= sizes[index]
    # Back into the order of the corpus, for whoever does not shuffle.
    for row in rows:
        row.sort()
    rows.sort(key=lambda row: row[0])
    return rows
