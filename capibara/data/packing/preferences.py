"""Preference pairs into rows: both answers of a pair lie in one row, each with the prompt before it and seeing only that."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from capibara.core.types import Batch
from capibara.data.packing.packing import Document, Rows, best_fit


class Answers(NamedTuple):
    """A tokenized preference pair.

    Attributes:
      chosen: the prompt with the answer that was preferred, which alone has weights.
      rejected: the same with the other one.
      number: of the pair in its split, counted from 1.
      place: where it is in the data.
    """

    chosen: Document
    rejected: Document
    number: int
    place: tuple[int, ...] = ()

    @property
    def need(self) -> int:
        """Positions of a row that the pair takes."""
        return len(self.chosen.ids) + len(self.rejected.ids)


class PreferenceWindow(Rows):
    """Pairs laid out in rows: `len`, and `fill(batch, b, i)` to copy row `i` into row `b` of a batch."""

    def __init__(self, pairs: Sequence[Answers], *, length: int, most_pairs: int, pad_id: int):
        """Lays the pairs out.

        Args:
          pairs: what to pack, none longer than a row; those without tokens are left out.
          length: positions in a row.
          most_pairs: pairs in a row, at most.
          pad_id: stands in `tokens` and `targets` on padding.
        """
        self._pairs = [pair for pair in pairs if pair.need]
        self._pad_id = pad_id
        rows = best_fit([pair.need for pair in self._pairs], length, most_pairs)
        # Back into the order of the corpus, for whoever does not shuffle.
        self._rows = sorted(sorted(row) for row in rows)

    @property
    def checksum(self) -> int:
        """CRC-32 of the window's tokens, by which a restored stream knows that the data is still the same."""
        checksum = 0
        for pair in self._pairs:
            checksum = zlib.crc32(pair.rejected.ids.data, zlib.crc32(pair.chosen.ids.data, checksum))
        return checksum

    def places(self, i: int) -> list[tuple[int, ...]]:
        """Of the pairs of row `i`."""
        return [self._pairs[index].place for index in self._rows[i]]

    def fill(self, batch: Batch, b: int, i: int) -> None:
        """Copies row `i` into row `b` of an `empty_batch`."""
        row = {key: value[b] for key, value in batch.items()}
        answers = [(self._pairs[index], side) for index in self._rows[i] for side in (0, 1)]
        end = 0
        for segment, (pair, side) in enumerate(answers, 1):
            answer = (pair.chosen, pair.rejected)[side]
            begin, end = end, end + len(answer.ids)
            row["tokens"][begin] = answer.previous
            row["tokens"][begin + 1 : end] = answer.ids[:-1]
            row["targets"][begin:end] = answer.ids
            row["weights"][begin:end] = answer.weights
            row["segment_ids"][begin:end] = segment
            row["positions"][begin:end] = np.arange(len(answer.ids))
            row["numbers"][begin + int(np.argmax(answer.weights > 0))] = 2 * pair.number - 1 + side
        row["tokens"][end:] = self._pad_id
        row["targets"][end:] = self._pad_id
