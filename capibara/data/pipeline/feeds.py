"""Feeds: the rows of a loader, in order, from a source."""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from capibara.core.types import HostBatch, UserError
from capibara.data.dataset import Dataset, Kind
from capibara.data.pipeline.examples import Tally
from capibara.data.pipeline.readers import BlockReader, DocumentReader, Reader
from capibara.data.pipeline.stream import DocumentRows, Layout, Row, RowStream, State
from capibara.data.sources.sources import Blocks, CombinedDocuments, DataFormat
from capibara.data.text import provenance
from capibara.data.text.counts import Counts
from capibara.data.tokenizers.decoder_start import start_id

_NOUNS = {
    DataFormat.TEXTS: "conversations",
    DataFormat.PREFERENCES: "preference pairs",
    DataFormat.UNPAIRED: "answers",
    DataFormat.PROMPTS: "prompts",
    DataFormat.STEPS: "solutions",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """One host's part of a split: see `make_loader`."""

    split: str
    batch_size: int
    shard_index: int
    shard_count: int
    epochs: int | None
    privacy: Mapping[str, float] | None = None
    places: tuple[int, ...] | None = None

    @property
    def rows(self) -> int:
        return self.batch_size // self.shard_count

    @property
    def first_row(self) -> int:
        return self.shard_index * self.rows


class Feed(abc.ABC):
    """Makes the batches of one host, starting from any states.

    Attributes:
      first_row: index of the feed's first state among the states of all hosts; for a source, of its first row.
      counts: what the source has read and left out; None: a SeqIO task does not say.
    """

    first_row: int
    counts: Counts | None = None

    def __init__(self, dataset: Dataset, share: Share):
        self.dataset, self.share = dataset, share

    @abc.abstractmethod
    def initial_state(self) -> list[State]:
        """The states of this host's streams before the first batch."""

    @abc.abstractmethod
    def batches(self, states: Sequence[State]) -> Iterator[tuple[HostBatch, Sequence[State]]]:
        """Yields the batches after `states`, each with the states after it."""

    @abc.abstractmethod
    def next_rows(self, states: Sequence[State]) -> list[Row]:
        """This host's rows of the batch after `states`, for an endless feed; reads them again, thread-safe."""

    @abc.abstractmethod
    def name(self, position: tuple[int, ...]) -> dict[str, Any]:
        """Identifies the document at one of a row's `positions`, for reports."""

    def epochs(self, states: Sequence[State]) -> float | None:
        """The passes over the data before `states`, for an endless feed; None: not known. It may read a window again."""
        return None

    @abc.abstractmethod
    def data_fingerprint(self) -> dict[str, Any]:
        """A JSON value that is equal only for the same documents in the same order."""

    @functools.cached_property
    def datasets(self) -> list[provenance.Value]:
        """The data sets that are read, for the checkpoints; a resumed run does not compare them."""
        return provenance.of_source(self.dataset.source)

    def settings(self) -> dict[str, Any]:
        """All settings that must be equal for a saved state to stand for the same rows."""
        dataset, share = self.dataset, self.share
        return {
            "split": share.split,
            "batch_size": share.batch_size,
            "epochs": share.epochs,
            "length": dataset.length,
            "packing": str(dataset.packing),
            "append_eos": dataset.append_eos,
            "shuffle": dataset.shuffle,
            "seed": dataset.seed,
            "window": [dataset.window_rows, dataset.window_documents],
            "vocabulary": dataset.get_vocabulary().fingerprint(),
            "data": self.data_fingerprint(),
            **({} if share.privacy is None else {"privacy": dict(share.privacy)}),
            **({} if share.places is None else {"places": [*share.places]}),
            **_objective_settings(dataset),
        }

    def understood(self, settings: Mapping[str, object]) -> Mapping[str, Any]:
        """Converts the settings of a saved state to those of this version.

        Raises:
          UserError: this version cannot resume from such a state.
        """
        return settings

    @property
    def shuffles(self) -> bool:
        return self.dataset.shuffle and self.share.split == "train"


class SourceFeed(Feed):
    """Rows of documents with random access."""

    def __init__(self, dataset: Dataset, share: Share):
        super().__init__(dataset, share)
        self.documents = dataset.documents(share.split)
        self._fingerprint, self.counts = self.documents.fingerprint(), self.documents.counts
        self.tally = Tally(_NOUNS[dataset.data_format])
        self._endless = share.epochs is None
        self.first_row = share.first_row if self._endless else 0
        self._ranges = self._rows_apart()
        if self._endless and isinstance(self.documents, Blocks) and len(self.documents) < share.batch_size:
            raise UserError(
                f"Dataset.source has {len(self.documents)} blocks, must have at least one for each of the "
                f"{share.batch_size} rows of a batch (Plan.batch_size) on {share.shard_count} hosts: lower "
                "ShardedSource.block_bytes, or write more shards or row groups"
            )

    def initial_state(self) -> list[State]:
        return [State()] * (self.share.rows if self._endless else 1)

    def data_fingerprint(self) -> dict[str, Any]:
        return self._fingerprint

    def batches(self, states: Sequence[State]) -> Iterator[tuple[HostBatch, Sequence[State]]]:
        if not self._endless:
            share = self.share
            return in_turn([self.stream(0, 1, states[0])], share.batch_size, share.first_row, share.rows, self.dataset)
        return stream_a_row(self.row_streams(self.first_row, states), self.dataset)

    def next_rows(self, states: Sequence[State]) -> list[Row]:
        return [next(stream) for stream in self.row_streams(self.first_row, states)]

    def name(self, position: tuple[int, ...]) -> dict[str, Any]:
        return self._reader(0, 1).name(position)

    def epochs(self, states: Sequence[State]) -> float | None:
        if self._ranges:  # each source has passes of its own
            return None
        begin, count = states[0], self.share.batch_size
        epochs = self._reader(self.first_row, count).epochs
        if not begin.row:
            return epochs(begin.document)
        # Rows of a window are shuffled: what was read is its share, and only its rows tell how many it has.
        window = [row.state for row in _to_reset(self.stream(self.first_row, count, begin))]
        share = begin.row / (begin.row + len(window))
        return (1 - share) * epochs(begin.document) + share * epochs(window[-1].document)

    def row_streams(self, first: int, states: Sequence[State]) -> list[Iterator[Row]]:
        """Opens the streams of the global rows from `first` on, at `states`."""
        return [self.stream(first + i, self.share.batch_size, state) for i, state in enumerate(states)]

    def stream(self, index: int, count: int, state: State) -> Iterator[Row]:
        """Opens stream `index` of `count`."""
        layout = layout_of(self.dataset, count, (self.dataset.seed, index) if self.shuffles else None)
        if self.share.privacy is not None:
            return DocumentRows(self._reader(index, count).read, layout, state)
        first_rows = math.ceil(layout.window_rows * (index + 1) / count)
        return RowStream(self._reader(index, count).read, layout, first_rows=first_rows, state=state)

    def _rows_apart(self) -> list[range]:
        """The documents of each part that has rows of its own; empty: all rows have all documents."""
        documents, share = self.documents, self.share
        if not (self._endless and isinstance(documents, CombinedDocuments) and documents.separate):
            return []
        ranges = documents.ranges()
        if share.batch_size % len(ranges):
            raise UserError(
                f"Plan.batch_size ({share.batch_size}) must be a multiple of the {len(ranges)} sources of CombinedSource with rows = "
                f"'apart': try {max(1, round(share.batch_size / len(ranges))) * len(ranges)}"
            )
        if share.privacy is not None:
            raise UserError("CombinedSource.rows = 'apart' is not supported with Trainer.privacy: leave it out")
        return ranges

    def _reader(self, index: int, count: int) -> Reader:
        documents, dataset, tally, epochs = self.documents, self.dataset, self.tally, self.share.epochs
        need, shuffles = layout_of(dataset, count, None).need, self.shuffles
        if isinstance(documents, Blocks):
            return BlockReader(
                documents, dataset, tally, index=index, count=count, shuffles=shuffles, epochs=epochs, need=need
            )
        # With privacy a pass begins with a batch: numbers without a document pad the last one.
        rows = self.share.batch_size
        size = None if self.share.privacy is None else math.ceil(len(documents) / rows) * rows
        within = None
        if self._ranges and count > 1:  # one of the streams of a batch
            count //= len(self._ranges)
            part, index = divmod(index if self.share.places is None else self.share.places[index], count)
            within = self._ranges[part]
        read = functools.partial(DocumentReader, within=within, size=size)
        return read(documents, dataset, tally, index=index, count=count, shuffles=shuffles, epochs=epochs, need=need)


def _to_reset(rows: Iterator[Row]) -> Iterator[Row]:
    """The rows up to the last of the window."""
    for row in rows:
        yield row
        if not row.state.row:
            return


def _objective_settings(dataset: Dataset) -> dict[str, Any]:
    """Settings of kinds other than causal that decide the rows; states of the causal kind do not have them."""
    settings: dict[str, Any] = {}
    if dataset.kind is not Kind.CAUSAL:
        settings["kind"] = str(dataset.kind)
    if dataset.kind is Kind.MASKED:
        settings["masking"] = dataclasses.asdict(dataset.masking)
        settings["mask_id"] = dataset.get_vocabulary().mask_id
    if dataset.kind is Kind.ENCODER_DECODER:
        settings["encoder_length"] = dataset.encoder_length
        settings["span_corruption"] = dataclasses.asdict(dataset.span_corruption)
        settings["sentinels"] = [*dataset.get_vocabulary().sentinel_ids[:1]]
        if (first := start_id(dataset.get_vocabulary())) != dataset.get_vocabulary().pad_id:
            settings["start_id"] = first
    if dataset.source is not None and dataset.source.has_conversations:
        settings["too_long"] = str(dataset.too_long)
    if dataset.has_answers:
        settings["pairs_per_row"] = dataset.most_pairs
    return settings | ({"domains": list(dataset.domains)} if dataset.domains else {})


def layout_of(dataset: Dataset, streams: int, seeds: tuple[int, ...] | None) -> Layout:
    """The layout of each of `streams` streams of a dataset."""
    return Layout(
        length=dataset.length,
        packing=dataset.packing,
        pad_id=dataset.get_vocabulary().pad_id,
        start_id=start_id(dataset.get_vocabulary()) if dataset.kind is Kind.ENCODER_DECODER else None,
        window_rows=dataset.window_rows,
        window_documents=math.ceil(dataset.window_documents / streams),
        shuffle_seeds=seeds,
        encoder_length=dataset.encoder_length,
        most_pairs=dataset.most_pairs if dataset.has_answers else None,
    )


def stream_a_row(streams: Sequence[Iterator[Row]], dataset: Dataset) -> Iterator[tuple[HostBatch, Sequence[State]]]:
    """Yields batches whose rows have one stream each; endless."""
    while True:
        batch = dataset.empty_batch(len(streams))
        states = []
        for b, stream in enumerate(streams):
            row = next(stream)
            row.fill(batch, b)
            states.append(row.state)
        yield batch, states


def in_turn(
    streams: Sequence[Iterator[Row]], each: int, skip: int, rows: int, dataset: Dataset
) -> Iterator[tuple[HostBatch, Sequence[State]]]:
    """Yields batches with the same number of rows of each stream; pads the last one with rows of weight 0.

    Args:
      streams: the streams of which this host has rows; other hosts may read them, too.
      each: number of consecutive rows of every stream in a global batch.
      skip: number of these rows that belong to earlier hosts.
      rows: number of rows of this host.
      dataset: for the shapes and padding.
    """
    while True:
        batch = dataset.empty_batch(rows)
        states = {}
        for at, row in round_of(streams, each):
            states[at // each] = row.state
            if skip <= at < skip + rows:
                row.fill(batch, at - skip)
        if len(states) < len(streams):
            return
        yield batch, [states[s] for s in range(len(streams))]


def round_of(streams: Sequence[Iterator[Row]], each: int) -> Iterator[tuple[int, Row]]:
    """Yields `each` rows of every stream, fewer at its end, after their index among the rows of all streams."""
    for s, stream in enumerate(streams):
        for i, row in enumerate(itertools.islice(stream, each)):
            yield s * each + i, row
