"""Worker processes on Grain: each packs some rows of every batch.

Workers send the states of the streams with the rows, so the state after a batch is known without another request, and the
number of workers may change when a run resumes.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
from absl import flags

from capibara.core.types import HostBatch
from capibara.data.dataset import Dataset
from capibara.data.pipeline.feeds import Share, SourceFeed, stream_a_row
from capibara.data.pipeline.stream import State


class RowGroups(grain.IterDataset):
    """Groups of consecutive rows: group 0, 1, ... of a batch, then group 0 of the next batch, ...; endless."""

    def __init__(self, feed: SourceFeed, states: Sequence[State], groups: int):
        """Splits the rows, whose streams are at `states`, into `groups` groups of equal size."""
        super().__init__()
        size = len(states) // groups
        self._feed = feed
        self._groups = [(feed.first_row + i * size, states[i * size : (i + 1) * size]) for i in range(groups)]

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Grain gives worker w of n the slice w::n, and interleaves the workers' elements in the same order."""
        del sequential_slice
        self._groups = self._groups[sl]

    def __iter__(self) -> RowGroupIterator:
        _end_with_parent()
        return RowGroupIterator(self._feed, self._groups)


@functools.cache
def _end_with_parent() -> None:
    """Makes this worker process end with its parent, even if that is killed."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="capibara-parent", daemon=True).start()


class RowGroupIterator(grain.DatasetIterator):
    """Iterator of `RowGroups`: a batch of the group's rows, with the states "state" [rows, 4] after it."""

    def __init__(self, feed: SourceFeed, groups: Sequence[tuple[int, Sequence[State]]]):
        super().__init__()
        self._feed, self._first_rows = feed, [first for first, _ in groups]
        self._open([states for _, states in groups], 0)

    def _open(self, states: Sequence[Sequence[State]], turn: int) -> None:
        self._states, self._turn = [list(group) for group in states], turn
        self._batches = [
            stream_a_row(self._feed.row_streams(first, group), self._feed.dataset)
            for first, group in zip(self._first_rows, self._states, strict=True)
        ]

    def __next__(self) -> dict[str, np.ndarray]:
        batch, states = next(self._batches[self._turn])
        self._states[self._turn] = list(states)
        self._turn = (self._turn + 1) % len(self._batches)
        return {**batch, "state": np.array(states, np.int64)}

    def get_state(self) -> dict[str, Any]:
        return {"turn": self._turn, "groups": [[list(state) for state in group] for group in self._states]}

    def set_state(self, state: dict[str, Any]) -> None:
        self._open([[State(*row) for row in group] for group in state["groups"]], state["turn"])


class WorkerFeed(SourceFeed):
    """Rows made by `workers` processes, or by fewer so that they divide the rows of this host; endless."""

    def __init__(self, dataset: Dataset, share: Share, workers: int):
        super().__init__(dataset, share)
        self._workers = workers

    def batches(self, states: Sequence[State]) -> Iterator[tuple[HostBatch, Sequence[State]]]:
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # Grain reads absl flags, which our verbs do not parse
        rows, keys = len(states), self.dataset.batch_spec(1)
        count = max(n for n in range(1, min(rows, self._workers) + 1) if rows % n == 0)
        options = grain.MultiprocessingOptions(num_workers=count, per_worker_buffer_size=max(1, self.dataset.prefetch))
        iterator = iter(RowGroups(self, states, count).mp_prefetch(options))
        try:
            while True:
                groups = [next(iterator) for _ in range(count)]
                batch = {key: np.concatenate([group[key] for group in groups]) for key in keys}
                yield batch, [State(*map(int, state)) for group in groups for state in group["state"]]
        finally:
            iterator.close()
