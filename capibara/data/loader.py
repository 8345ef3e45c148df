"""From a source or a SeqIO task to batches: packed, sharded over hosts, prefetched, and resumable to the row.

Row r of every global batch has a stream of its own: of the documents in their seeded order, those with number
r, r + batch_size, r + 2 batch_size, ... A host opens only the streams of its rows, so global batches do not depend on
how many hosts there are, and the state of a loader is four integers a row. A pass that must end (validation) uses one
stream, of which every host takes its rows, because all hosts have to see the same number of batches.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from capibara.config import configurable
from capibara.data import feeds
from capibara.data.packing import Packing
from capibara.data.prefetch import Prefetcher
from capibara.data.sources import SPLITS, Source
from capibara.data.stream import State
from capibara.data.vocabulary import Vocabulary
from capibara.types import Batch, UserError

_VERSION = 1


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """What to train on, and how it is laid out in rows.

    Attributes:
      source: documents with random access; exactly one of this and `mixture_or_task_name` is given.
      mixture_or_task_name: a registered SeqIO task or mixture.
      task_module: the Python module that registers it.
      vocabulary: the tokenizer. A SeqIO task brings its own: naming it here as well lets the model be compiled before
        SeqIO is imported, and it is checked against the task's.
      length: positions in a row.
      packing: how documents share rows.
      append_eos: whether an end token follows every document (a SeqIO task decides this in its preprocessors).
      shuffle: whether training documents and rows come in a seeded order.
      seed: the seed.
      use_cached: take a SeqIO task's examples from its offline cache.
      workers: processes that tokenize and pack; 0 is a thread of this process. SeqIO has threads of its own.
      prefetch: batches kept ready; 0 makes each one when it is asked for.
      window_rows: packing looks at so many rows' worth of documents at a time.
      window_documents: and at so many documents of all rows together, whose rows are then mixed.
    """

    source: Source | None = None
    mixture_or_task_name: str | None = None
    task_module: str | None = None
    vocabulary: Vocabulary | None = None
    length: int = 1024
    packing: Packing = Packing.BEST_FIT
    append_eos: bool = True
    shuffle: bool = True
    seed: int = 0
    use_cached: bool = False
    workers: int = 0
    prefetch: int = 4
    window_rows: int = 64
    window_documents: int = 128

    def __post_init__(self) -> None:
        if (self.source is None) == (self.mixture_or_task_name is None):
            given = "neither" if self.source is None else "both"
            raise UserError(f"Dataset needs one of source and mixture_or_task_name ({given} given)")
        if self.source is not None and self.vocabulary is None:
            raise UserError("Dataset.vocabulary is not set: a source needs one, such as @ByteVocabulary()")
        for name, least in (("length", 2), ("workers", 0), ("prefetch", 0), ("window_rows", 1), ("window_documents", 1)):
            if getattr(self, name) < least:
                raise UserError(f"Dataset.{name} ({getattr(self, name)}) must be at least {least}")

    @property
    def is_seqio(self) -> bool:
        return self.mixture_or_task_name is not None

    def preload(self) -> None:
        """Starts the imports that this dataset needs in a background thread; call it before a long compilation."""
        if self.is_seqio:
            from capibara.data import tasks

            tasks.preload(self.task_module)

    def get_vocabulary(self) -> Vocabulary:
        """The tokenizer; of a SeqIO task without `vocabulary` this imports SeqIO."""
        return self._task_vocabulary if self.vocabulary is None else self.vocabulary

    @functools.cached_property
    def _task_vocabulary(self) -> Vocabulary:
        from capibara.data import tasks

        return tasks.vocabulary_of(tasks.get(self.mixture_or_task_name, self.task_module))


def make_loader(
    dataset: Dataset,
    *,
    split: str = "train",
    batch_size: int,
    shard_index: int = 0,
    shard_count: int = 1,
    epochs: int | None = None,
) -> Loader:
    """Opens one host's share of a split.

    Args:
      dataset: what to read.
      split: "train" or "validation"; only training data is shuffled.
      batch_size: rows of the global batch, all hosts together.
      shard_index: this host; it gets rows [shard_index * n, (shard_index + 1) * n) with n = batch_size / shard_count.
      shard_count: number of hosts.
      epochs: passes over the data; None never ends. A loader that ends reads the split on every host, fills the last
        batch with rows of weight 0, and ends at the same batch everywhere.

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
    share = feeds.Share(
        split=split, batch_size=batch_size, shard_index=shard_index, shard_count=shard_count, epochs=epochs
    )
    if dataset.is_seqio:
        from capibara.data import tasks

        return Loader(dataset, share, lambda: tasks.TaskFeed(dataset, share))
    feed = feeds.SourceFeed(dataset, share)
    return Loader(dataset, share, lambda: feed)


class Loader:
    """Iterator of this host's batches [batch_size / shard_count, length], with exact state.

    Batches are made in a background thread from `start` (or the first `next`) on.
    """

    def __init__(self, dataset: Dataset, share: feeds.Share, open_feed: Callable[[], feeds.Feed]):
        """Use `make_loader`."""
        self._dataset, self._share, self._open_feed = dataset, share, open_feed
        self._feed: feeds.Feed | None = None if dataset.is_seqio else open_feed()
        self._prefetcher: Prefetcher | None = None
        self._restored: Mapping[str, Any] | None = None
        self._rows: Sequence[State] | None = None
        self._batches = 0
        self._wait_s = 0.0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def start(self) -> None:
        """Begins to prefetch (and to import SeqIO, for a task) in the background; `set_state` comes before this."""
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self._produce, self._dataset.prefetch)

    def __next__(self) -> Batch:
        begin_s = time.perf_counter()
        self.start()
        try:
            batch, self._rows = next(self._prefetcher)
        finally:
            self._wait_s += time.perf_counter() - begin_s
        self._batches += 1
        return batch

    def wait_s(self) -> float:
        """Seconds the consumer has waited for batches since this was last asked."""
        waited_s, self._wait_s = self._wait_s, 0.0
        return waited_s

    def get_state(self) -> dict[str, Any]:
        """JSON-able; stands for exactly the batches handed out, whatever was prefetched."""
        if self._rows is None and self._restored is not None:
            return dict(self._restored)
        feed = self._opened()
        rows = feed.initial_state() if self._rows is None else self._rows
        return {
            "version": _VERSION,
            "batches": self._batches,
            "first_row": feed.first_row,
            "rows": [list(map(int, row)) for row in rows],
            "settings": feed.settings(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Carries on after the batches that `state` stands for.

        For a SeqIO task the comparison with the data waits until SeqIO is imported: `next` raises then.

        Args:
          state: what `get_state` gave, or `merge_states` of all hosts' states.

        Raises:
          UserError: the state is of other data, another batch size, length, packing, seed or vocabulary.
        """
        if not isinstance(state, Mapping) or state.get("version") != _VERSION or "rows" not in state:
            raise UserError("the data state is not one that this version of capibara wrote: start a new run")
        self.close()
        self._restored = dict(state)
        self._rows, self._batches = None, int(state["batches"])
        if self._feed is not None:
            _restored_rows(self._feed, state)

    def close(self) -> None:
        """Stops the background thread and the workers; the loader can be started again by `set_state`."""
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

    def _produce(self) -> Iterator[tuple[Batch, Sequence[State]]]:
        feed = self._opened()
        rows = feed.initial_state() if self._restored is None else _restored_rows(feed, self._restored)
        return feed.batches(rows)


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state of all hosts' states of the same batch, from which any number of hosts can carry on."""
    states = sorted(states, key=lambda state: state["first_row"])
    if len({state["batches"] for state in states}) != 1:
        raise UserError(f"data states of different batches cannot be merged: {[s['batches'] for s in states]}")
    by_row = {state["first_row"] + i: row for state in states for i, row in enumerate(state["rows"])}
    return {**states[0], "rows": [by_row[row] for row in sorted(by_row)]}


def _restored_rows(feed: feeds.Feed, state: Mapping[str, Any]) -> list[State]:
    """The rows of `state` that this feed needs, after checking that they mean the same here."""
    differences = _differences(state["settings"], feed.settings())
    if differences:
        raise UserError(f"the data state does not fit this run: {'; '.join(differences)}; restore these or start anew")
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


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name in sorted(set(saved) | set(now)):
        was, is_ = saved.get(name), now.get(name)
        if isinstance(was, Mapping) and isinstance(is_, Mapping):
            found += _differences(was, is_, f"{prefix}{name}.")
        elif was != is_:
            found.append(f"{prefix}{name} was {was!r}, is {is_!r}")
    return found


def unigram_bits_per_byte(train: Iterator[Batch], validation: Iterator[Batch], token_bytes: np.ndarray) -> float:
    """Bits per byte of a unigram model: what a model must beat that has learnt more than frequencies.

    Args:
      train: batches whose targets are counted (take a number of them: a training loader may never end).
      validation: batches on which the model is measured.
      token_bytes: [V] from `Vocabulary.token_bytes`.
    """
    counts = _count(train, len(token_bytes)) + 1.0
    bits = -np.log2(counts / counts.sum())
    seen = _count(validation, len(token_bytes))
    byte_count = float(seen @ token_bytes)
    if not byte_count:
        raise UserError("the validation batches hold no text: a unigram baseline needs some")
    return float(seen @ bits) / byte_count


def _count(batches: Iterator[Batch], size: int) -> np.ndarray:
    counts = np.zeros(size, np.float64)
    for batch in batches:
        counts += np.bincount(batch["targets"][batch["weights"] > 0], minlength=size)
    return counts
