"""Packs pairs of inputs and targets into rows of an encoder-decoder, in the layout of seqio's EncDecFeatureConverter.

A side that is longer than its row is trimmed. The decoder reads the targets shifted right by one, with the padding id
first in every segment. Targets that are not padding have loss. Segment i of a row's targets belongs to segment i of its
inputs.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from capibara.core.types import HostBatch
from capibara.data.packing.packing import Packing, Rows


class Pair(NamedTuple):
    """The encoder's inputs and the decoder's targets: [n] and [m] int32."""

    inputs: np.ndarray
    targets: np.ndarray


class Pairs(NamedTuple):
    """The pairs of one document: usually one; one per chunk after span corruption; possibly none.

    Attributes:
      pairs: the pairs, each with targets.
      domain: number of the document's domain; 0: unknown.
      position: the document's position in the data.
    """

    pairs: Sequence[Pair]
    domain: int = 0
    position: tuple[int, ...] = ()

    def need(self, encoder_length: int, length: int) -> int:
        """Decoder positions that the pairs need; an encoder position counts as length / encoder_length of one."""
        return sum(
            max(min(len(pair.targets), length), -(-min(len(pair.inputs), encoder_length) * length // encoder_length))
            for pair in self.pairs
        )


class PairWindow(Rows):
    """Pairs packed into rows; `fill(batch, b, i)` copies row `i` into row `b` of a batch."""

    def __init__(
        self,
        documents: Sequence[Pairs],
        *,
        encoder_length: int,
        length: int,
        packing: Packing,
        pad_id: int,
        start_id: int | None = None,
    ):
        """Packs the pairs.

        Args:
          documents: the pairs of each document.
          encoder_length: positions of a row's inputs.
          length: positions of a row's targets.
          packing: best fit or none; pairs cannot be cut.
          pad_id: the padding id.
          start_id: the decoder's first input; None: the padding id.
        """
        blank = np.array(
            [pad_id], np.int32
        )  # in place of empty inputs: targets without keys of their own would attend to others
        self._pairs = [
            Pair(pair.inputs[:encoder_length] if len(pair.inputs) else blank, pair.targets[:length])
            for document in documents
            for pair in document.pairs
        ]
        self._domains = [document.domain for document in documents for _ in document.pairs]
        self._positions = [document.position for document in documents for _ in document.pairs]
        self._pad_id, self._packing = pad_id, packing
        self._start_id = pad_id if start_id is None else start_id
        if packing is Packing.NONE:
            self._rows = [[i] for i in range(len(self._pairs))]
        else:
            sizes = np.array([[len(pair.inputs), len(pair.targets)] for pair in self._pairs]).reshape(-1, 2)
            self._rows = _best_fit(sizes, np.array([encoder_length, length]))

    @property
    def checksum(self) -> int:
        """CRC-32 of the window's tokens, with which a restored stream checks that the data has not changed."""
        checksum = 0
        for pair in self._pairs:
            checksum = zlib.crc32(pair.targets.data, zlib.crc32(pair.inputs.data, checksum))
        return checksum

    def positions(self, i: int) -> list[tuple[int, ...]]:
        """The positions in the data of row `i`'s documents."""
        return list(dict.fromkeys(self._positions[index] for index in self._rows[i]))

    def fill(self, batch: HostBatch, b: int, i: int) -> None:
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
            row["tokens"][start] = self._start_id
            row["tokens"][start + 1 : target_end] = targets[:-1]
            row["targets"][start:target_end] = targets
            row["weights"][start:target_end] = targets != self._pad_id
            row["segment_ids"][start:target_end] = segment
            row["positions"][start:target_end] = np.arange(len(targets))
            if "domains" in row:
                row["domains"][start:target_end] = self._domains[index]
        if self._packing is Packing.NONE and target_end < len(row["tokens"]):
            # As in seqio, an unpacked row is shifted as a whole: the last target is an input on padding, without loss.
            row["tokens"][target_end] = self._pairs[self._rows[i][0]].targets[-1]


def _best_fit(sizes: np.ndarray, capacity: np.ndarray) -> list[list[int]]:
    """Best-fit-decreasing bin packing of pairs: `sizes` [n, 2], the rows' `capacity` [2]; returns the indices per row."""
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
    # Restore the order of the corpus, which matters without shuffling.
    for row in rows:
        row.sort()
    rows.sort(key=lambda row: row[0])
    return rows
