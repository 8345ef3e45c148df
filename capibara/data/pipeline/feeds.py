"""Feeds: where a loader's rows come from, and in which order."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from capibara.core.types import Batch, UserError
from capibara.data.dataset import Dataset, Kind
from capibara.data.packing.examples import Tally
from capibara.data.sources.readers import BlockReader, DocumentReader, Reader
from capibara.data.sources.sources import Blocks, DataFormat
from capibara.data.sources.stream import Layout, Row, RowStream, State

_NOUNS = {DataFormat.TEXTS: "conversations", DataFormat.PREFERENCES: "preference pairs", DataFormat.PROMPTS: "prompts"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """One host's share of a split: see `make_loader`."""

    split: str
    batch_size: int
    shard_index: int
    shard_count: int
    epochs: int | None

    @property
    def rows(self) -> int:
        return self.batch_size // self.shard_count

    @property
    def first_row(self) -> int:
        return self.shard_index * self.rows


class Feed(abc.ABC):
    """Batches of one host from given states.

    Attributes:
      first_row: number of the first of the feed's states among those of all hosts: for a source, that of its row.
    """

    first_row: int

    def __init__(self, dataset: Dataset, share: Share):
        self.dataset, self.share = dataset, share

    @abc.abstractmethod
    def initial_state(self) -> list[State]:
        """States of the streams that this host needs, before the first batch."""

    @abc.abstractmethod
    def batches(self, states: Sequence[State]) -> Iterator[tuple[Batch, Sequence[State]]]:
        """Batches after `states`, each with the states after it."""

    @abc.abstractmethod
    def next_rows(self, states: Sequence[State]) -> list[Row]:
        """This host's rows of the batch after `states`, of an endless feed; read anew, from any thread."""

    @abc.abstractmethod
    def name(self, place: tuple[int, ...]) -> dict[str, Any]:
        """How a person finds the document of a row's `places` again."""

    @abc.abstractmethod
    def data_fingerprint(self) -> dict[str, Any]:
        """JSON-able; equal only for the same documents in the same order."""

    def settings(self) -> dict[str, Any]:
        """Everything that must be equal for a state to mean the same rows."""
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
            **_objective_settings(dataset),
        }

    def understood(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """The settings of a saved state as this version would write them.

        Raises:
          UserError: this version cannot continue such a state.
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
        self._fingerprint = self.documents.fingerprint()
        self.tally = Tally(_NOUNS[dataset.data_format])
        self._endless = share.epochs is None
        self.first_row = share.first_row if self._endless else 0
        if self._endless and isinstance(self.documents, Blocks) and len(self.documents) < share.batch_size:
            raise UserError(
                f"Dataset.source has {len(self.documents)} blocks for the {share.batch_size} rows of a batch "
                f"(Plan.batch_size) on {share.shard_count} hosts, and each row needs one of its own: lower "
                "ShardedSource.block_bytes, or write files of more shards or row groups"
            )

    def initial_state(self) -> list[State]:
        return [State()] * (self.share.rows if self._endless else 1)

    def data_fingerprint(self) -> dict[str, Any]:
        return self._fingerprint

    def batches(self, states: Sequence[State]) -> Iterator[tuple[Batch, Sequence[State]]]:
        if not self._endless:
            share = self.share
            return in_turn([self.stream(0, 1, states[0])], share.batch_size, share.first_row, share.rows, self.dataset)
        return stream_a_row(self.row_streams(self.first_row, states), self.dataset)

    def next_rows(self, states: Sequence[State]) -> list[Row]:
        return [next(stream) for stream in self.row_streams(self.first_row, states)]

    def name(self, place: tuple[int, ...]) -> dict[str, Any]:
        return self._reader(0, 1).name(place)

    def row_streams(self, first: int, states: Sequence[State]) -> list[RowStream]:
        """Streams of the global rows from `first` on, at `states`."""
        return [self.stream(first + i, self.share.batch_size, state) for i, state in enumerate(states)]

    def stream(self, index: int, count: int, state: State) -> RowStream:
        """Stream `index` of `count`."""
        layout = layout_of(self.dataset, count, (self.dataset.seed, index) if self.shuffles else None)
        first_rows = math.ceil(layout.window_rows * (index + 1) / count)
        return RowStream(self._reader(index, count).read, layout, first_rows=first_rows, state=state)

    def _reader(self, index: int, count: int) -> Reader:
        documents, dataset, tally, epochs = self.documents, self.dataset, self.tally, self.share.epochs
        of = {"index": index, "count": count}
        need, shuffles = layout_of(dataset, count, None).need, self.shuffles
        if isinstance(documents, Blocks):
            return BlockReader(documents, dataset, tally, **of, shuffles=shuffles, epochs=epochs, need=need)
        return DocumentReader(documents, dataset, tally, **of, shuffles=shuffles, epochs=epochs, need=need)


def _objective_settings(dataset: Dataset) -> dict[str, Any]:
    """What else decides the rows; nothing for a decoder's, whose states are older than the other kinds."""
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
    if dataset.source is not None and dataset.source.has_conversations:
        settings["too_long"] = str(dataset.too_long)
    if dataset.data_format is DataFormat.PREFERENCES:
        settings["pairs_per_row"] = dataset.most_pairs
    return settings | ({"domains": list(dataset.domains)} if dataset.domains else {})


def layout_of(dataset: Dataset, streams: int, seeds: tuple[int, ...] | None) -> Layout:
    """How each of `streams` streams of a dataset is packed."""
    return Layout(
        length=dataset.length,
        packing=dataset.packing,
        pad_id=dataset.get_vocabulary().pad_id,
        window_rows=dataset.window_rows,
        window_documents=math.ceil(dataset.window_documents / streams),
        shuffle_seeds=seeds,
        encoder_length=dataset.encoder_length,
        most_pairs=dataset.most_pairs if dataset.data_format is DataFormat.PREFERENCES else None,
    )


def stream_a_row(streams: Sequence[RowStream], dataset: Dataset) -> Iterator[tuple[Batch, Sequence[State]]]:
    """Batches whose rows have a stream each; endless."""
    while True:
        batch = dataset.empty_batch(len(streams))
        states = []
        for b, stream in enumerate(streams):
            row = next(stream)
            row.fill(batch, b)
            states.append(row.state)
        yield batch, states


def in_turn(
    streams: Sequence[RowStream], each: int, skip: int, rows: int, dataset: Dataset
) -> Iterator[tuple[Batch, Sequence[State]]]:
    """Batches of what the streams have in turn; the last one is filled with rows of weight 0.

    Args:
      streams: the rows; each stream is read by every host that takes rows of it.
      each: so many consecutive rows of every stream are in a global batch.
      skip: of these rows of all streams, those that belong to the hosts before.
      rows: that are this host's.
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


def round_of(streams: Sequence[RowStream], each: int) -> Iterator[tuple[int, Row]]:
    """`each` rows of every stream, fewer where it ends, with their numbers among the rows of all."""
    for s, stream in enumerate(streams):
        for i, row in enumerate(itertools.islice(stream, each)):
            yield s * each + i, row
