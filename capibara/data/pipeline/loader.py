"""Makes batches from a source or a SeqIO task: packed, sharded over hosts, prefetched, and resumable to the row.

Row r of every global batch has its own stream: the documents number r, r + batch_size, r + 2 batch_size, ... in their
shuffled order. A host opens only the streams of its rows, so global batches do not depend on the number of hosts, and the
state of a loader is four integers per row. A finite pass (validation) uses one stream, from which every host takes its
rows, because all hosts must see the same number of batches. A SeqIO task, whose streams are expensive, has
`Dataset.task_shards` streams with several rows each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from capibara.core.types import HostBatch, UserError
from capibara.data.baseline import unigram_bits_per_byte
from capibara.data.dataset import Dataset
from capibara.data.pipeline import feeds
from capibara.data.pipeline.prefetch import Prefetcher
from capibara.data.pipeline.stream import State
from capibara.data.text.counts import Counts
from capibara.data.text.disk import SPLITS

# The public interface of this package for training.
__all__ = ["Dataset", "Loader", "Position", "make_loader", "merge_states", "unigram_bits_per_byte"]

_VERSION = 1
Position = Sequence[State] | None  # of a loader; None: before its first batch

# A feed's setting -> its name in Gin, for errors.
_PARAMETERS = {
    "batch_size": "Plan.batch_size",
    "data": "Dataset.source's (or task's) data",
    "window": "[Dataset.window_rows, Dataset.window_documents]",
    **{
        name: f"Dataset.{name}"
        for name in ("length", "packing", "append_eos", "shuffle", "seed", "vocabulary", "kind", "encoder_length")
        + ("span_corruption", "masking", "too_long", "domains", "pairs_per_row", "task_shards")
        + ("cached_order", "inputs_length")
    },
    "privacy": "Trainer.privacy",
    "places": "the hosts' places on the mesh (CombinedSource.rows = 'apart')",
}


def make_loader(
    dataset: Dataset,
    *,
    split: str = "train",
    batch_size: int,
    shard_index: int = 0,
    shard_count: int = 1,
    epochs: int | None = None,
    privacy: Mapping[str, float] | None = None,
    places: Sequence[int] | None = None,
) -> Loader:
    """Opens one host's part of a split.

    Args:
      dataset: what to read.
      split: "train" or "validation"; only training data is shuffled.
      batch_size: rows of the global batch, all hosts together.
      shard_index: this host; it gets rows [shard_index * n, (shard_index + 1) * n) with n = batch_size / shard_count.
      shard_count: number of hosts.
      epochs: passes over the data; None: endless. With a finite number every host reads the whole split, pads the last
        batch with rows of weight 0, and ends after the same batch.
      privacy: settings of differential privacy that a state must have to be resumed. Each document then has a row of its own
        in each pass, and passes begin with a batch. None: documents are packed as the dataset says.
      places: for sources with rows of their own: where on the mesh each row of the global batch comes to lie; None: in its
        own place.

    Raises:
      UserError: the source cannot be opened, or the rows do not divide over the hosts.
    """
    if split not in SPLITS:
        raise UserError(f"split ({split!r}) must be one of {', '.join(SPLITS)}")
    if batch_size < 1 or batch_size % shard_count:
        nearest = max(1, round(batch_size / shard_count)) * shard_count
        raise UserError(f"batch_size ({batch_size}) must be a multiple of the {shard_count} hosts: try {nearest}")
    if epochs is not None and epochs < 1:
        raise UserError(f"epochs ({epochs}) must be at least 1, or None for no end")
    if epochs is None:
        check_task_shards(dataset, batch_size, shard_count)
    share = feeds.Share(
        split=split,
        batch_size=batch_size,
        shard_index=shard_index,
        shard_count=shard_count,
        epochs=epochs,
        privacy=privacy,
        places=None if places is None else tuple(places),
    )
    if dataset.is_seqio:
        return Loader(dataset, share, lambda: _task_feed(dataset, share))
    workers = _default_workers() if dataset.workers is None else dataset.workers
    if workers and epochs is None:
        from capibara.data.pipeline.workers import WorkerFeed

        feed: feeds.SourceFeed = WorkerFeed(dataset, share, workers)
    else:
        feed = feeds.SourceFeed(dataset, share)
    return Loader(dataset, share, lambda: feed)


def check_task_shards(dataset: Dataset, batch_size: int, hosts: int) -> None:
    """Raises UserError if the streams of a SeqIO task do not divide over the rows and hosts of a training batch."""
    streams = dataset.task_shards

    def fits(shards: int) -> bool:
        return batch_size % shards == 0 and (shards % hosts == 0 or hosts % shards == 0)

    if not dataset.is_seqio or fits(streams):
        return
    constraint = f"must divide the {batch_size} rows of a batch (Plan.batch_size)"
    if batch_size % streams == 0:
        constraint = f"must divide the {hosts} hosts or be a multiple of them"
    fix = max(shards for shards in range(1, min(streams, batch_size) + 1) if fits(shards))
    raise UserError(f"Dataset.task_shards ({streams}) {constraint}: try {fix}")


def _default_workers() -> int:
    """One process per chip of this host if it has more cores than chips; 0 on a CPU, whose cores are the device."""
    import jax

    chips, cores = jax.local_device_count(), len(os.sched_getaffinity(0))
    return chips if jax.default_backend() != "cpu" and cores > chips else 0


def _task_feed(dataset: Dataset, share: feeds.Share) -> feeds.Feed:
    from capibara.data.pipeline.task_feed import TaskFeed

    return TaskFeed(dataset, share)


class Loader:
    """Iterator of this host's batches [batch_size / shard_count, length], with exact state.

    A batch has the arrays of `Dataset.batch_spec`. `start`, or the first `next`, starts a background thread that makes the
    batches.

    Attributes:
      batches: number of batches that were consumed, over all starts.
    """

    def __init__(self, dataset: Dataset, share: feeds.Share, open_feed: Callable[[], feeds.Feed]):
        """Use `make_loader`."""
        self._dataset, self._share, self._open_feed = dataset, share, open_feed
        self._feed: feeds.Feed | None = None if dataset.is_seqio else open_feed()
        self._prefetcher: Prefetcher | None = None
        self._restored: Mapping[str, Any] | None = None
        self._rows: Sequence[State] | None = None
        self.batches = 0
        self._wait_s = 0.0

    @property
    def counts(self) -> Counts | None:
        """What the source has read and left out; None: a SeqIO task does not say."""
        return None if self._feed is None else self._feed.counts

    def __iter__(self) -> Iterator[HostBatch]:
        return self

    def start(self) -> None:
        """Starts to prefetch (and to import SeqIO, for a task) in the background; call `set_state` before this."""
        self._prefetching()

    def check_first(self, limit_s: float | None = None) -> bool:
        """Makes the first batch, which `next` returns then; False: it is still being made after the time limit.

        Raises:
          UserError: no document can be read, or none fits into a row; or the split has none.
        """
        try:
            return self._prefetching().wait_first(limit_s)
        except StopIteration:
            raise UserError(
                f"the {self._share.split} split has no document: add text, or set Evaluation.every = 0"
            ) from None

    def _prefetching(self) -> Prefetcher:
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self._produce, self._dataset.prefetch)
        return self._prefetcher

    def __next__(self) -> HostBatch:
        begin_s = time.perf_counter()
        prefetcher = self._prefetching()
        try:
            batch, self._rows = next(prefetcher)
        finally:
            self._wait_s += time.perf_counter() - begin_s
        self.batches += 1
        return batch

    def wait_s(self) -> float:
        """Seconds that the consumer has waited for batches since the last call."""
        waited_s, self._wait_s = self._wait_s, 0.0
        return waited_s

    @property
    def position(self) -> Position:
        """The position after the consumed batches, for `documents_after`; it is cheap to keep."""
        return self._rows

    def documents_after(self, position: Position) -> dict[str, Any]:
        """The documents of this host's rows in the batch after a `position`; thread-safe.

        It reads them again, as a start from there would.

        Returns:
          A JSON value: `first_row`, the index of the first of these rows in the global batch, and `rows`, the documents
          of each row: for a source the epoch and the document's number in the split, for a SeqIO task the shard and the
          example's number in it.
        """
        feed = self._opened()
        rows = feed.next_rows(self._first_rows(feed) if position is None else position)
        named = [[feed.name(position) for position in row.positions()] for row in rows]
        return {"first_row": self._share.first_row, "rows": named}

    def epochs(self) -> float | None:
        """The passes over the data of the consumed batches; None: not known."""
        if self._rows is None or self._share.epochs is not None:
            return None
        return self._opened().epochs(self._rows)

    def get_state(self) -> dict[str, Any]:
        """The state after the consumed batches, as JSON; prefetched batches do not matter."""
        if self._rows is None and self._restored is not None:
            return dict(self._restored)
        feed = self._opened()
        rows = feed.initial_state() if self._rows is None else self._rows
        return {
            "version": _VERSION,
            "batches": self.batches,
            "first_row": feed.first_row,
            "rows": [list(map(int, row)) for row in rows],
            "settings": feed.settings(),
            "datasets": feed.datasets,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Resumes after the batches that were consumed at `state`.

        For a SeqIO task `next` compares it with the data, when SeqIO is imported, and raises then.

        Args:
          state: from `get_state`, or from `merge_states` of all hosts' states.

        Raises:
          UserError: the state is of other data, or of another batch size, length, packing, seed or vocabulary.
        """
        if not isinstance(state, Mapping) or state.get("version") != _VERSION or "rows" not in state:
            raise UserError("the data state is not one that this version of capibara wrote: start a new run")
        self.close()
        self._restored = dict(state)
        self._rows, self.batches = None, int(state["batches"])
        if self._feed is not None:
            _restored_rows(self._feed, state)

    def close(self) -> None:
        """Stops the background thread and the workers; `set_state` starts the loader again."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
            if self._rows is not None:
                self._restored = self.get_state()
                self._rows = None

    def _opened(self) -> feeds.Feed:
        if self._feed is None:
            self._feed = self._open_feed()
        return self._feed

    def _produce(self) -> Iterator[tuple[HostBatch, Sequence[State]]]:
        feed = self._opened()
        return feed.batches(self._first_rows(feed))

    def _first_rows(self, feed: feeds.Feed) -> list[State]:
        """The states before the first batch of this start."""
        return feed.initial_state() if self._restored is None else _restored_rows(feed, self._restored)


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges all hosts' states after the same batch to one from which any number of hosts can resume.

    Args:
      states: ordered by host.

    Raises:
      UserError: they are of different batches, or the hosts read different data.
    """
    for host, state in enumerate(states):
        if result := _differences(states[0]["settings"], state["settings"], nouns=("on host 0", f"on host {host}")):
            raise UserError(
                f"the hosts do not read the same data: {'; '.join(result)}: give all hosts the same files and settings"
            )
    states = sorted(states, key=lambda state: state["first_row"])
    if len({state["batches"] for state in states}) != 1:
        raise UserError(f"data states of different batches cannot be merged: {[s['batches'] for s in states]}")
    by_row: dict[int, Any] = {}
    for state in states:
        for row, stream in enumerate(state["rows"], state["first_row"]):
            if by_row.setdefault(row, stream) != stream:
                raise UserError(
                    f"the hosts do not read the same data: stream {row} is at {by_row[row]} on one host, at {stream} on "
                    "another: give all hosts the same files and settings"
                )
    return {**states[0], "rows": [by_row[row] for row in sorted(by_row)]}


def _restored_rows(feed: feeds.Feed, state: Mapping[str, Any]) -> list[State]:
    """The states of this feed's rows in a saved `state`, after a comparison of the settings."""
    differences = _differences(feed.understood(state["settings"]), feed.settings())
    if differences:
        raise UserError(
            f"the data state does not fit this run: {'; '.join(differences)}: "
            "set these back, or set another MODEL_DIR for a new run"
        )
    need = len(feed.initial_state())
    skip = feed.first_row - state["first_row"]
    rows = state["rows"][skip : skip + need] if skip >= 0 else []
    if len(rows) != need:
        have = f"{state['first_row']} to {state['first_row'] + len(state['rows']) - 1}"
        raise UserError(
            f"the data state holds rows {have}, but this host needs {need} rows from {feed.first_row}: "
            "merge the states of all hosts (merge_states)"
        )
    return [State(*map(int, row)) for row in rows]


def _differences(
    saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "", nouns: tuple[str, str] = ("was", "is")
) -> list[str]:
    result = []
    for name in sorted(set(saved) | set(now)):
        was, is_ = saved.get(name), now.get(name)
        if isinstance(was, Mapping) and isinstance(is_, Mapping):
            result += _differences(was, is_, f"{_PARAMETERS.get(prefix + name, prefix + name)}.", nouns)
        elif was != is_:
            first, second = nouns
            result.append(f"{_PARAMETERS.get(prefix + name, prefix + name)} {first} {was!r}, {second} {is_!r}")
    return result
