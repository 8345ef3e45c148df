"""Worker processes on Grain: each packs some rows of every batch.

Every row carries the state of its stream after it, so the state of a batch is known without asking the workers, and
the number of workers may change from one start to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
from absl import flags

from capibara.data.feeds import SourceFeed
from capibara.data.packing import empty_batch
from capibara.data.stream import RowStream, State
from capibara.types import BATCH_KEYS, Batch


class RowDataset(grain.IterDataset):
    """Packed rows in turn: row 0 of a batch, row 1, ..., row 0 of the next; endless."""

    def __init__(self, feed: SourceFeed, states: Sequence[State]):
        super().__init__()
        first, total = feed.share.first_row, feed.share.batch_size
        self._feed, self._total = feed, total
        self._rows = [(first + i, state) for i, state in enumerate(states)]

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Grain gives worker w of n the slice w::n; worker outputs are interleaved in the same order."""
        del sequential_slice
        self._rows = self._rows[sl]

    def __iter__(self) -> RowIterator:
        return RowIterator(self._feed, self._rows, self._total)


class RowIterator(grain.DatasetIterator):
    """Iterator of `RowDataset`: rows [T] of a batch and the state [4] after each."""

    def __init__(self, feed: SourceFeed, rows: Sequence[tuple[int, State]], total: int):
        super().__init__()
        self._feed, self._rows, self._total = feed, rows, total
        self._pad_id = feed.dataset.get_vocabulary().pad_id
        self._open([state for _, state in rows], 0)

    def _open(self, states: Sequence[State], turn: int) -> None:
        self._states, self._turn = list(states), turn
        self._streams: list[RowStream] = [
            self._feed.stream(index, self._total, state)
            for (index, _), state in zip(self._rows, self._states, strict=True)
        ]

    def __next__(self) -> dict[str, np.ndarray]:
        row = next(self._streams[self._turn])
        batch = empty_batch(1, self._feed.dataset.length, self._pad_id)
        row.fill(batch, 0)
        self._states[self._turn] = row.state
        self._turn = (self._turn + 1) % len(self._streams)
        return {**{key: value[0] for key, value in batch.items()}, "state": np.array(row.state, np.int64)}

    def get_state(self) -> dict[str, Any]:
        return {"turn": self._turn, "rows": [list(state) for state in self._states]}

    def set_state(self, state: dict[str, Any]) -> None:
        self._open([State(*row) for row in state["rows"]], state["turn"])


def batches(feed: SourceFeed, states: Sequence[State]) -> Iterator[tuple[Batch, Sequence[State]]]:
    """Batches after `states`, made by `feed.dataset.workers` processes; endless."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # Grain asks for flags of its own, and our verbs do not use absl's
    rows = len(states)
    # Workers take turns by element, so only a divisor of the rows gives every worker the same rows each time.
    count = max(n for n in range(1, min(rows, feed.dataset.workers) + 1) if rows % n == 0)
    dataset = RowDataset(feed, states).mp_prefetch(
        grain.MultiprocessingOptions(num_workers=count, per_worker_buffer_size=max(2, 2 * rows // count))
    )
    iterator = iter(dataset)
    try:
        while True:
            elements = [next(iterator) for _ in range(rows)]
            batch = {key: np.stack([element[key] for element in elements]) for key in BATCH_KEYS}
            yield batch, [State(*map(int, element["state"])) for element in elements]
    finally:
        iterator.close()
