"""Preference pairs into rows: both answers of a pair lie in one row, each with the prompt before it and seeing only that."""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from capibara.data.packing import Document
from capibara.data.shuffle import permutation
from capibara.types import Batch


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


class PreferenceWindow:
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
        self._rows = _best_fit([pair.need for pair in self._pairs], length, most_pairs)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def checksum(self) -> int:
        """CRC-32 of the window's tokens, by which a restored stream knows that the data is still the same."""
        checksum = 0
        for pair in self._pairs:
            checksum = zlib.crc32(pair.rejected.ids, zlib.crc32(pair.chosen.ids, checksum))
        return checksum

    def shuffle(self, *seeds: int) -> None:
        """Permutes the rows."""
        self._rows = [self._rows[i] for i in permutation(len(self._rows), *seeds)]

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


def _best_fit(sizes: Sequence[int], length: int, most: int) -> list[list[int]]:
    """Rows of the indices of `sizes`: the largest first, each where it leaves the least space, up to `most` in a row."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (free positions, row), sorted
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = bisect.bisect_left(open_rows, (sizes[index], -1))
        if at < len(open_rows):
            free, row = open_rows.pop(at)
        else:
            free, row = length, len(rows)
            rows.append([])
        rows[row].append(index)
        if free > sizes[index] and len(rows[row]) < most:
            bisect.insort(open_rows, (free - sizes[index], row))
    # Back into the order of the corpus, for whoever does not shuffle.
    for row in rows:
        row.sort()
    rows.sort(key=lambda row: row[0])
    return rows
