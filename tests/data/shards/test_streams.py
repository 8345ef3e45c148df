"""Training from shards: exact resume, any number of hosts, no document lost or twice, faults of the store survived."""

from __future__ import annotations

import collections
import itertools
import json

import numpy as np
import pytest

from capibara.core.types import BATCH_KEYS, UserError
from capibara.data.dataset import Dataset
from capibara.data.packing.packing import Packing
from capibara.data.pipeline.loader import make_loader, merge_states
from capibara.data.shards.source import Format, ShardedSource
from capibara.data.sources.sources import CombinedSource, JsonlSource
from capibara.data.tokenizers.vocabulary import ByteVocabulary

BATCH = 4


def dataset_of(files: str, kind: str = "jsonl", **changes) -> Dataset:
    source = ShardedSource(
        files=(files,), format=Format(kind), block_bytes=200, mix_blocks=3, document_bytes=1, validation_fraction=0.1
    )
    defaults = dict(source=source, vocabulary=ByteVocabulary(), length=64, window_rows=4, window_documents=8, seed=5)
    return Dataset(**{**defaults, **changes})


def take(loader, count: int) -> list[dict[str, np.ndarray]]:
    return list(itertools.islice(loader, count))


def assert_same(first, second) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        for key in BATCH_KEYS:
            np.testing.assert_array_equal(one[key], other[key])


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("packing", list(Packing))
def test_resume_skips_none_and_repeats_none(corpus, kind, packing):
    dataset = dataset_of(corpus(kind), kind, packing=packing)
    loader = make_loader(dataset, batch_size=BATCH)
    whole = take(loader, 40)
    loader.close()
    for stop in (0, 1, 7, 23):
        first = make_loader(dataset, batch_size=BATCH)
        begun = take(first, stop)
        state = json.loads(json.dumps(first.get_state()))
        take(first, 2)  # what was handed out after the state was taken does not count
        first.close()
        second = make_loader(dataset, batch_size=BATCH)
        second.set_state(state)
        assert_same(begun + take(second, 40 - stop), whole)
        second.close()


def test_workers_give_the_same_batches(corpus, tmp_path):
    import fsspec

    files = corpus("jsonl")  # in memory, which a worker does not share
    for path, content in fsspec.filesystem("memory").store.items():
        (tmp_path / path.rpartition("/")[2]).write_bytes(content.getvalue())
    files = f"{tmp_path}/part-*.jsonl"
    loader = make_loader(dataset_of(files), batch_size=BATCH)
    whole = take(loader, 12)
    loader.close()
    loader = make_loader(dataset_of(files, workers=2), batch_size=BATCH)
    begun = take(loader, 5)
    state = loader.get_state()
    loader.close()
    loader = make_loader(dataset_of(files), batch_size=BATCH)
    loader.set_state(state)
    assert_same(begun + take(loader, 7), whole)
    loader.close()


@pytest.mark.parametrize("kind", ["jsonl", "array_record"])
def test_an_epoch_over_2_then_4_then_1_hosts_has_every_document_once(corpus, kind):
    dataset = dataset_of(corpus(kind, longest=50), kind)  # shorter than a row: none of them is cut
    single = make_loader(dataset, batch_size=BATCH)
    whole = take(single, 53)
    single.close()
    state, joined, ledger = None, [], collections.Counter()
    for hosts, steps in ((2, 8), (4, 5), (1, 40)):
        parts, states = [], []
        for host in range(hosts):
            loader = make_loader(dataset, batch_size=BATCH, shard_index=host, shard_count=hosts)
            if state is not None:
                loader.set_state(state)
            parts.append([])
            for _ in range(steps):
                for row in loader.documents_after(loader.position)["rows"]:
                    ledger.update(tuple(one.values()) for one in row)
                parts[-1].append(next(loader))
            states.append(loader.get_state())
            loader.close()
        state = merge_states(states)
        joined += [{key: np.concatenate([one[key] for one in step]) for key in BATCH_KEYS} for step in zip(*parts)]
    assert_same(joined, whole)
    assert set(ledger.values()) == {1}
    blocks = dataset.source.open("train")
    everything = {(*blocks.name(i).values(), k, 0) for i in range(len(blocks)) for k in range(len(blocks.examples(i)))}
    assert {place for place in ledger if place[-1] == 0} == everything and len(everything) >= 80


def test_blocks_of_an_epoch_are_each_read_once_over_all_rows(corpus):
    dataset = dataset_of(corpus("jsonl"), length=8, packing=Packing.NONE, window_rows=1, window_documents=1)
    blocks = dataset.source.open("train")
    documents = {example.text for i in range(len(blocks)) for example in blocks.examples(i)}
    loader = make_loader(dataset, batch_size=BATCH)
    seen: collections.Counter = collections.Counter()
    position = None
    for _ in range(len(documents)):
        for row in loader.documents_after(position)["rows"]:
            (one,) = row
            if one["epoch"] == 0:
                seen[one["file"], one["block"], one["document"]] += 1
        next(loader)
        position = loader.position
    loader.close()
    assert set(seen.values()) == {1} and len(seen) == len(documents)


def test_validation_reads_every_held_out_document_once_on_any_number_of_hosts(corpus):
    dataset = dataset_of(corpus("tfrecord"), "tfrecord", length=80, packing=Packing.NONE)
    blocks = dataset.source.open("validation")
    expected = sorted(example.text for i in range(len(blocks)) for example in blocks.examples(i))
    for hosts in (1, 2):
        found = []
        for host in range(hosts):
            loader = make_loader(
                dataset, split="validation", batch_size=2, shard_index=host, shard_count=hosts, epochs=1
            )
            for batch in loader:
                rows = zip(batch["targets"], batch["segment_ids"], strict=True)
                found += [ByteVocabulary().decode(row[segments == 1]) for row, segments in rows if segments.any()]
            loader.close()
        assert sorted(found) == expected


def test_fewer_blocks_than_rows_are_refused(corpus):
    dataset = dataset_of(corpus("jsonl", shards=2))
    with pytest.raises(
        UserError, match=r"has \d+ blocks, must have at least one for each of the 512 rows .* on 8 hosts"
    ):
        make_loader(dataset, batch_size=512, shard_index=0, shard_count=8)


def test_other_data_and_other_blocks_do_not_fit_a_state(corpus):
    import dataclasses

    dataset = dataset_of(corpus("jsonl"))
    loader = make_loader(dataset, batch_size=BATCH)
    take(loader, 2)
    state = loader.get_state()
    loader.close()
    for change in ({"block_bytes": 100}, {"mix_blocks": 1}, {"validation_fraction": 0.3}):
        other = dataclasses.replace(dataset, source=dataclasses.replace(dataset.source, **change))
        with pytest.raises(UserError, match="the data state does not fit this run: Dataset.source's"):
            make_loader(other, batch_size=BATCH).set_state(state)


def test_a_restart_reads_the_index_and_the_blocks_at_hand(corpus, monkeypatch):
    """In a fresh process, or a loader of its own: neither the shards nor their ends are read again."""
    from capibara.storage import remote

    dataset = dataset_of(corpus("jsonl", count=4000, shards=20))
    loader = make_loader(dataset, batch_size=BATCH)
    take(loader, 200)
    state = loader.get_state()
    after = take(loader, 1)
    loader.close()
    read, total = remote.read, []
    monkeypatch.setattr(remote, "read", lambda url, start, stop: total.append(stop - start) or read(url, start, stop))
    loader = make_loader(dataset, batch_size=BATCH)
    loader.set_state(state)
    assert_same(take(loader, 1), after)
    loader.close()
    # Each row: the groups at hand and the next, of 3 blocks, each with what is read beyond it; and the check of fields.
    assert len(total) <= BATCH * 3 * 4 + 1


def test_sources_of_shards_are_combined(corpus, tmp_path):
    first, second = dataset_of(corpus("jsonl")).source, dataset_of(corpus("parquet"), "parquet").source
    loader = make_loader(dataset_of("", source=CombinedSource(sources=(first, second))), batch_size=BATCH)
    take(loader, 5)
    files = {one["file"].rpartition(".")[2] for row in loader.documents_after(loader.position)["rows"] for one in row}
    loader.close()
    assert files <= {"jsonl", "parquet"}
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    mixed = CombinedSource(sources=(first, JsonlSource(files=(str(tmp_path / "a.jsonl"),))))
    with pytest.raises(UserError, match="make all of them @ShardedSource"):
        mixed.open("train")


def test_empty_documents_alone_are_refused(corpus, tmp_path):
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n' * 50)
    dataset = dataset_of(str(tmp_path / "empty.jsonl"))
    loader = make_loader(dataset, batch_size=1)
    with pytest.raises(UserError, match="have no text"):
        next(loader)
    loader.close()
