"""Packs pairs of answers: both answers of a pair are in one row, as segments that each begin with the prompt."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from capibara.core.types import HostBatch
from capibara.data.packing.packing import Document, Rows, best_fit


class Answers(NamedTuple):
    """A tokenized preference pair, or a labelled answer.

    Attributes:
      chosen: the prompt and the preferred answer, or the labelled one; only the answer has weights.
      rejected: the prompt and the other answer; of a labelled answer the mismatched one, or an empty document.
      number: the pair's number in its split, from 1.
      position: the pair's position in the data.
      label: of an answer: 1: desirable, 0: undesirable; of a pair its margin; of a solution one for each of its positions; None:
        there are no `labels`.
    """

    chosen: Document
    rejected: Document
    number: int
    position: tuple[int, ...] = ()
    label: float | np.ndarray | None = None

    @property
    def need(self) -> int:
        """Positions of a row that the pair needs."""
        return len(self.chosen.ids) + len(self.rejected.ids)


class PreferenceWindow(Rows):
    """Preference pairs packed into rows; `fill(batch, b, i)` copies row `i` into row `b` of a batch."""

    def __init__(self, pairs: Sequence[Answers], *, length: int, most_pairs: int, pad_id: int):
        """Packs the pairs.

        Args:
          pairs: the pairs, none longer than a row; empty ones are dropped.
          length: positions in a row.
          most_pairs: the largest number of pairs in a row.
          pad_id: the padding id of `tokens` and `targets`.
        """
        self._pairs = [pair for pair in pairs if pair.need]
        self._pad_id = pad_id
        rows = best_fit([pair.need for pair in self._pairs], length, most_pairs)
        # Restore the order of the corpus, which matters without shuffling.
        self._rows = sorted(sorted(row) for row in rows)

    @property
    def checksum(self) -> int:
        """CRC-32 of the window's tokens, with which a restored stream checks that the data has not changed."""
        checksum = 0
        for pair in self._pairs:
            checksum = zlib.crc32(pair.rejected.ids.data, zlib.crc32(pair.chosen.ids.data, checksum))
        return checksum

    def positions(self, i: int) -> list[tuple[int, ...]]:
        """The positions in the data of row `i`'s pairs."""
        return [self._pairs[index].position for index in self._rows[i]]

    def fill(self, batch: HostBatch, b: int, i: int) -> None:
        """Copies row `i` into row `b` of an `empty_batch`."""
        row = {key: value[b] for key, value in batch.items()}
        answers = [(self._pairs[index], side) for index in self._rows[i] for side in (0, 1)]
        end = 0
        for segment, (pair, side) in enumerate(answers, 1):
            answer = (pair.chosen, pair.rejected)[side]
            begin, end = end, end + len(answer.ids)
            if begin == end:
                continue
            row["tokens"][begin] = answer.previous
            row["tokens"][begin + 1 : end] = answer.ids[:-1]
            row["targets"][begin:end] = answer.ids
            row["weights"][begin:end] = answer.weights
            row["segment_ids"][begin:end] = segment
            row["positions"][begin:end] = np.arange(len(answer.ids))
            first = begin + int(np.argmax(answer.weights > 0))
            row["numbers"][first] = 2 * pair.number - 1 + side
            if isinstance(pair.label, np.ndarray):
                row["labels"][begin:end] = pair.label
            elif side == 0 and pair.label is not None:
                row["labels"][first] = pair.label
        row["tokens"][end:] = self._pad_id
        row["targets"][end:] = self._pad_id
