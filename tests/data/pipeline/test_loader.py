"""The loader: exact state, the same global batches for any number of hosts, and passes that end."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import json
import os

import numpy as np
import pytest

from capibara.core.types import BATCH_KEYS, UserError
from capibara.data.baseline import unigram_bits_per_byte
from capibara.data.dataset import Dataset, Kind
from capibara.data.packing.packing import Packing
from capibara.data.pipeline.loader import make_loader, merge_states
from capibara.data.sources.sources import CombinedSource, JsonlSource
from capibara.data.tokenizers.vocabulary import ByteVocabulary

DOCUMENTS = 97
BATCH = 4


@pytest.fixture
def corpus(tmp_path):
    """JSON lines that each name their own number, long and short."""
    rng = np.random.default_rng(0)
    path = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"text": f"<{i}>" + "x" * int(rng.integers(1, 90))}) for i in range(DOCUMENTS)]
    path.write_text("\n".join(lines) + "\n")
    return path


def make_dataset(path, **changes) -> Dataset:
    source = JsonlSource(files=(str(path),), validation_fraction=0.2)
    defaults = dict(source=source, vocabulary=ByteVocabulary(), length=64, window_rows=4, window_documents=8, seed=5)
    return Dataset(**{**defaults, **changes})


def take(loader, count: int) -> list[dict[str, np.ndarray]]:
    return list(itertools.islice(loader, count))


def assert_same(first, second) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        for key in BATCH_KEYS:
            np.testing.assert_array_equal(one[key], other[key])


def ledger(batches) -> collections.Counter:
    """How often each document began in the batches, told by the name in its text."""
    seen: collections.Counter = collections.Counter()
    for batch in batches:
        for row, segments in zip(batch["targets"], batch["segment_ids"], strict=True):
            for segment in range(1, segments.max(initial=0) + 1):
                text = ByteVocabulary().decode(row[segments == segment])
                if text.startswith("<"):
                    seen[int(text[1 : text.index(">")])] += 1
    return seen


@pytest.mark.parametrize("packing", list(Packing))
@pytest.mark.parametrize("prefetch", [0, 3])
def test_resume_skips_none_and_repeats_none(corpus, packing, prefetch):
    dataset = make_dataset(corpus, packing=packing, prefetch=prefetch)
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
        assert second.get_state() == state
        assert_same(begun + take(second, 40 - stop), whole)
        second.close()


def test_resume_twice_with_workers(corpus):
    dataset = make_dataset(corpus)
    loader = make_loader(dataset, batch_size=BATCH)
    whole = take(loader, 30)
    states = []
    loader.close()
    resumed, state = [], None
    for workers, count in ((2, 9), (0, 5), (3, 16)):  # 3 workers do not divide 4 rows: 2 are used
        loader = make_loader(make_dataset(corpus, workers=workers), batch_size=BATCH)
        if state is not None:
            loader.set_state(state)
        resumed += take(loader, count)
        state = loader.get_state()
        states.append(state["batches"])
        loader.close()
    assert states == [9, 14, 30]
    assert_same(resumed, whole)


@pytest.mark.parametrize("backend, chips, cores, expected", [("tpu", 4, 112, 4), ("tpu", 4, 4, 0), ("cpu", 8, 64, 0)])
def test_workers_are_as_many_as_chips_where_there_are_cores(corpus, monkeypatch, backend, chips, cores, expected):
    import jax

    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "local_device_count", lambda: chips)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    for given, used in ((None, expected), (0, 0), (3, 3)):
        loader = make_loader(make_dataset(corpus, workers=given), batch_size=BATCH)
        assert getattr(loader._feed, "_workers", 0) == used
    validation = make_loader(make_dataset(corpus), split="validation", batch_size=BATCH, epochs=1)
    assert not hasattr(validation._feed, "_workers")


def test_every_epoch_holds_every_document_once(corpus):
    # Windows of one document: with larger ones, rows of two epochs mix at the edge between them.
    dataset = make_dataset(corpus, packing=Packing.NONE, length=5, window_rows=1, window_documents=1)
    documents = len(dataset.source.open("train"))
    loader = make_loader(dataset, batch_size=1)
    orders = []
    for _ in range(3):
        epoch = ledger(take(loader, documents))
        assert set(epoch.values()) == {1} and len(epoch) == documents
        orders.append(list(epoch))
    loader.close()
    assert orders[0] != orders[1] != orders[2] != sorted(orders[2])


@pytest.mark.parametrize("epochs", [None, 1])
def test_global_batches_do_not_depend_on_the_number_of_hosts(corpus, epochs):
    dataset = make_dataset(corpus)
    split = "train" if epochs is None else "validation"

    def read(shard_count: int) -> list[dict[str, np.ndarray]]:
        loaders = [
            make_loader(dataset, split=split, batch_size=BATCH, shard_index=i, shard_count=shard_count, epochs=epochs)
            for i in range(shard_count)
        ]
        shares = [take(loader, 12) for loader in loaders]
        for loader in loaders:
            loader.close()
        parts = zip(*shares, strict=True)
        return [{key: np.concatenate([part[key] for part in each]) for key in BATCH_KEYS} for each in parts]

    whole = read(1)
    assert whole
    for shard_count in (2, 4):
        assert_same(read(shard_count), whole)


def test_states_of_two_hosts_resume_on_four(corpus):
    dataset = make_dataset(corpus)
    loader = make_loader(dataset, batch_size=BATCH)
    whole = take(loader, 10)
    loader.close()
    states = []
    for i in range(2):
        half = make_loader(dataset, batch_size=BATCH, shard_index=i, shard_count=2)
        take(half, 6)
        states.append(half.get_state())
        half.close()
    quarter = make_loader(dataset, batch_size=BATCH, shard_index=3, shard_count=4)
    with pytest.raises(UserError, match="merge"):
        quarter.set_state(states[0])
    quarter.set_state(merge_states(states[::-1]))
    assert_same(take(quarter, 4), [{key: batch[key][3:] for key in BATCH_KEYS} for batch in whole[6:]])
    quarter.close()


def test_hosts_that_read_different_data_are_refused(corpus):
    states = []
    for i, seed in enumerate((0, 0, 1)):
        dataset = dataclasses.replace(make_dataset(corpus), seed=seed)
        loader = make_loader(dataset, batch_size=3, shard_index=i, shard_count=3)
        states.append(loader.get_state())
        loader.close()
    assert len(merge_states(states[:2])["rows"]) == 2
    with pytest.raises(
        UserError, match=r"not read the same data: Dataset.seed on host 0 0, on host 2 1: give all hosts"
    ):
        merge_states(states)
    again = copy.deepcopy(states[0])
    again["rows"][0][0] += 1
    with pytest.raises(UserError, match="not read the same data: stream 0 is at"):
        merge_states([*states[:2], again])


def test_validation_ends_with_full_shapes_and_every_document_once(corpus):
    dataset = make_dataset(corpus)
    documents = dataset.source.open("validation")
    batches = list(make_loader(dataset, split="validation", batch_size=BATCH, epochs=1))
    assert {batch["tokens"].shape for batch in batches} == {(BATCH, 64)}
    seen = ledger(batches)
    assert set(seen.values()) == {1} and len(seen) == len(documents)
    tokens = sum(len(documents[i]) + 1 for i in range(len(documents)))
    assert sum(batch["weights"].sum() for batch in batches) == tokens
    used = np.concatenate([batch["weights"].any(axis=1) for batch in batches])
    assert not (used[1:] & ~used[:-1]).any(), "rows of weight 0 come last"
    assert len(used) - used.sum() < BATCH


def test_a_finite_pass_resumes(corpus):
    dataset = make_dataset(corpus)
    loader = make_loader(dataset, batch_size=BATCH, epochs=2)
    whole = list(loader)
    assert set(ledger(whole).values()) == {2}
    again = make_loader(dataset, batch_size=BATCH, epochs=2)
    begun = take(again, 3)
    state = again.get_state()
    again.close()
    again.set_state(state)
    assert_same(begun + list(again), whole)
    with pytest.raises(StopIteration):
        next(again)


def test_splits_share_no_document_and_seeds_differ(corpus):
    dataset = make_dataset(corpus)
    train = ledger(make_loader(dataset, batch_size=BATCH, epochs=1))
    validation = ledger(make_loader(dataset, split="validation", batch_size=BATCH, epochs=1))
    assert not set(train) & set(validation) and len(train) + len(validation) == DOCUMENTS
    first = next(make_loader(dataset, batch_size=BATCH))
    other = next(make_loader(make_dataset(corpus, seed=6), batch_size=BATCH))
    assert not np.array_equal(first["tokens"], other["tokens"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"length": 32}, "Dataset.length was 64, is 32"),
        ({"seed": 6}, "Dataset.seed was 5, is 6"),
        ({"packing": Packing.CONCAT}, "Dataset.packing was 'best_fit', is 'concat'"),
        ({"vocabulary": ByteVocabulary(size_multiple=1)}, "Dataset.vocabulary was"),
        ({"shuffle": False}, "Dataset.shuffle was True, is False"),
        ({"window_rows": 5}, r"Dataset.window_rows, Dataset.window_documents\] was \[4, 8\], is \[5, 8\]"),
        ({"append_eos": False}, "Dataset.append_eos was True, is False"),
    ],
)
def test_a_state_of_another_run_is_refused(corpus, change, named):
    loader = make_loader(make_dataset(corpus), batch_size=BATCH)
    next(loader)
    state = loader.get_state()
    loader.close()
    with pytest.raises(UserError, match=f"{named}.*: set these back, or set another MODEL_DIR"):
        make_loader(make_dataset(corpus, **change), batch_size=BATCH).set_state(state)


def test_a_state_of_another_batch_size_or_other_data_is_refused(corpus):
    dataset = make_dataset(corpus)
    loader = make_loader(dataset, batch_size=BATCH)
    next(loader)
    state = loader.get_state()
    loader.close()
    with pytest.raises(UserError, match="Plan.batch_size was 4, is 8"):
        make_loader(dataset, batch_size=8).set_state(state)
    text = corpus.read_text()
    corpus.write_text(text.replace("<3>x", "<3>y"))
    with pytest.raises(UserError, match=r"Dataset.source's .* data.digest was"):
        make_loader(dataset, batch_size=BATCH).set_state(state)
    corpus.write_text(text + json.dumps({"text": "more"}) + "\n")
    with pytest.raises(UserError, match=r"Dataset.source's .* data.bytes was"):
        make_loader(dataset, batch_size=BATCH).set_state(state)


@pytest.mark.parametrize("damage", [None, [], {}, {"version": 99, "rows": []}])
def test_a_corrupted_state_is_refused(corpus, damage):
    with pytest.raises(UserError, match="data state"):
        make_loader(make_dataset(corpus), batch_size=BATCH).set_state(damage)


def test_batches_are_never_written_again(corpus):
    loader = make_loader(make_dataset(corpus, prefetch=2), batch_size=BATCH)
    kept = take(loader, 3)
    copies = copy.deepcopy(kept)
    take(loader, 10)
    loader.close()
    assert_same(kept, copies)


def test_wait_time_is_counted_once(corpus):
    loader = make_loader(make_dataset(corpus), batch_size=BATCH)
    take(loader, 3)
    assert loader.wait_s() > 0
    assert loader.wait_s() == 0
    loader.close()


def test_bad_arguments(corpus):
    dataset = make_dataset(corpus)
    with pytest.raises(UserError, match=r"batch_size \(6\) must be a multiple of the 4 hosts: try 8"):
        make_loader(dataset, batch_size=6, shard_count=4)
    with pytest.raises(UserError, match="split"):
        make_loader(dataset, split="test", batch_size=4)
    with pytest.raises(UserError, match="epochs"):
        make_loader(dataset, batch_size=4, epochs=0)
    with pytest.raises(UserError, match="neither is set"):
        Dataset()
    with pytest.raises(UserError, match="both are set"):
        make_dataset(corpus, mixture_or_task_name="x")
    with pytest.raises(UserError, match="vocabulary"):
        make_dataset(corpus, vocabulary=None)
    with pytest.raises(UserError, match=r"length \(1\)"):
        make_dataset(corpus, length=1)


def test_an_error_in_the_background_reaches_the_consumer(corpus):
    dataset = make_dataset(corpus)
    loader = make_loader(dataset, batch_size=BATCH)
    corpus.write_bytes(b"?" * corpus.stat().st_size)
    with pytest.raises(UserError, match=r"corpus.jsonl:\d+ is not JSON"):
        next(loader)
    with pytest.raises(UserError):
        next(loader)


@pytest.mark.parametrize("options", [{}, {"split": "validation", "epochs": 1}], ids=["train", "validation"])
@pytest.mark.parametrize("append_eos", [True, False])
def test_documents_without_text_are_refused(tmp_path, append_eos, options):
    """Neither a loop without end nor rows of end tokens."""
    path = tmp_path / "blank.jsonl"
    path.write_text('{"text": ""}\n' * 5)
    loader = make_loader(make_dataset(path, append_eos=append_eos), batch_size=2, **options)
    with pytest.raises(UserError, match="the documents have no text: the corpus is empty"):
        next(loader)


def test_a_few_documents_without_text_do_no_harm(tmp_path):
    """Row 0 has the blank documents alone: with end tokens it is filled, without them it would never be."""
    path, none = tmp_path / "some.jsonl", tmp_path / "none.jsonl"
    path.write_text('{"text": ""}\n{"text": "capybara"}\n' * 4)
    none.write_text('{"text": "held out"}\n')
    source = JsonlSource(files=(str(path),), validation_files=(str(none),))
    loader = make_loader(make_dataset(path, source=source, shuffle=False), batch_size=2)
    assert set(next(loader)["targets"][0]) == {ByteVocabulary().eos_id}
    loader.close()
    loader = make_loader(make_dataset(path, source=source, shuffle=False, append_eos=False), batch_size=2)
    with pytest.raises(UserError, match="a row's stream has only empty documents"):
        next(loader)


def row_texts(batch):
    """Of each row the texts that it has parts of."""
    for row, segments in zip(batch["targets"], batch["segment_ids"], strict=True):
        yield [ByteVocabulary().decode(row[segments == n]) for n in range(1, segments.max(initial=0) + 1)]


@pytest.mark.parametrize("packing", list(Packing))
def test_the_documents_of_a_batch_can_be_told_afterwards(corpus, packing):
    """Of any batch, whatever was prefetched since, in any epoch, before and after a stop."""
    dataset = make_dataset(corpus, packing=packing, shuffle=True)
    documents = dataset.source.open("train")
    loader = make_loader(dataset, batch_size=BATCH)
    told = []
    for number in range(60):
        position = loader.position
        batch = next(loader)
        if number == 30:
            loader.set_state(loader.get_state())
        if number % 5 == 0:
            told.append((batch, position, loader.documents_after(position)))
    assert loader.documents_after(told[-1][1]) == told[-1][2]
    epochs = set()
    for batch, _, found in told:
        assert found["first_row"] == 0 and len(found["rows"]) == BATCH
        for texts, names in zip(row_texts(batch), found["rows"], strict=True):
            assert len(texts) == len(names) > 0
            for text, name in zip(texts, names, strict=True):
                assert text in documents.example(name["document"]).text
            epochs |= {name["epoch"] for name in names}
    assert epochs == set(range(max(epochs) + 1)) and len(epochs) > 1


def test_each_host_tells_the_documents_of_its_rows(corpus):
    dataset = make_dataset(corpus)
    alone = make_loader(dataset, batch_size=BATCH)
    hosts = [make_loader(dataset, batch_size=BATCH, shard_index=i, shard_count=2) for i in range(2)]
    whole = alone.documents_after(alone.position)
    parts = [host.documents_after(host.position) for host in hosts]
    assert parts[0]["rows"] + parts[1]["rows"] == whole["rows"]
    assert [part["first_row"] for part in parts] == [0, 2]


def test_the_documents_of_pairs_are_told_once_a_row(corpus):
    """Span corruption cuts a document into pairs; what was not corrupted of each stands in its row."""
    vocabulary = ByteVocabulary(extra_ids=100)
    dataset = make_dataset(corpus, kind=Kind.ENCODER_DECODER, encoder_length=64, length=32, vocabulary=vocabulary)
    documents = dataset.source.open("train")
    loader = make_loader(dataset, batch_size=BATCH)
    position = loader.position
    batch = next(loader)
    for row, (ids, names) in enumerate(
        zip(batch["encoder_tokens"], loader.documents_after(position)["rows"], strict=True)
    ):
        assert 0 < len(names) <= batch["encoder_segment_ids"][row].max()
        assert len({tuple(name.items()) for name in names}) == len(names)
        begun = {text.split(">")[0] for text in vocabulary.decode(ids).split("<")[1:]}
        named = {documents.example(name["document"]).text[1:].split(">")[0] for name in names}
        assert {number for number in begun if number.isdecimal()} <= named


def test_unigram_bits_per_byte():
    batch = {"targets": np.array([[3, 3, 4, 4, 1, 0]]), "weights": np.array([[1, 1, 1, 1, 1, 0]], np.float32)}
    token_bytes = np.array([0, 0, 0, 1, 1, 0, 0, 0], np.int32)
    # Counts plus one: 3 of 13 for either byte, 2 of 13 for the end, all of it spread over the four bytes.
    bits = -(4 * np.log2(3 / 13) + np.log2(2 / 13)) / 4
    assert unigram_bits_per_byte([batch], [batch], token_bytes) == pytest.approx(bits)
    half = {key: value[:, :3] for key, value in batch.items()}  # of one host; the other has an end and a 4
    of_all = np.array([0, 1, 0, 0, 1, 0, 0, 0]).__add__
    assert unigram_bits_per_byte([half], [half], token_bytes, of_all) == pytest.approx(bits)


class TestRowsApart:
    """Three sources of different sizes, of which each has a third of the rows."""

    @pytest.fixture
    def dataset(self, tmp_path):
        sources = []
        for name, count in (("a", 40), ("b", 7), ("c", 23)):
            path = tmp_path / f"{name}.jsonl"
            path.write_text("".join(json.dumps({"text": f"{name}{number:03d}."}) + "\n" for number in range(count)))
            sources.append(JsonlSource(files=(str(path),), validation_fraction=0.2))
        source = CombinedSource(sources=tuple(sources), rows="apart")
        return Dataset(
            source=source,
            vocabulary=ByteVocabulary(),
            length=16,
            packing=Packing.NONE,
            window_rows=4,
            window_documents=8,
        )

    def texts(self, batch):
        return [
            ByteVocabulary().decode(row[segments > 0]) for row, segments in zip(batch["targets"], batch["segment_ids"])
        ]

    def test_each_source_has_its_rows_and_passes_of_its_own(self, dataset):
        batches = [self.texts(batch) for batch in take(make_loader(dataset, batch_size=6), 40)]
        sizes = {name: len(source.open("train")) for name, source in zip("abc", dataset.source.sources)}
        for at, name in enumerate("abc"):
            seen = collections.Counter(text for rows in batches for text in rows[2 * at : 2 * at + 2])
            assert all(text.startswith(name) for text in seen) and len(seen) == sizes[name]
            # A window may be ahead of another row's by its documents.
            assert max(seen.values()) - min(seen.values()) <= 2 + 16 // sizes[name]

    def test_hosts_and_resumed_runs_read_the_same_rows_and_name_them(self, dataset):
        whole = make_loader(dataset, batch_size=6)
        batches = take(whole, 9)
        parts = [make_loader(dataset, batch_size=6, shard_index=host, shard_count=2) for host in range(2)]
        for batch in batches[:5]:
            halves = [next(part) for part in parts]
            np.testing.assert_array_equal(np.concatenate([half["tokens"] for half in halves]), batch["tokens"])
        resumed = make_loader(dataset, batch_size=6)
        resumed.set_state(merge_states([part.get_state() for part in parts]))
        position = resumed.documents_after(None)
        assert_same(take(resumed, 4), batches[5:])
        documents = dataset.documents("train")
        names = [documents.example(row[0]["document"]).text for row in position["rows"]]
        assert [text.split(".")[0] for text in self.texts(batches[5])] == [name.rstrip(".") for name in names]

    def test_the_validation_split_is_of_all_and_the_order_is_in_the_state(self, dataset):
        seen = [
            text
            for batch in make_loader(dataset, split="validation", batch_size=6, epochs=1)
            for text in self.texts(batch)
        ]
        assert {text[0] for text in seen if text} == set("abc")
        mixed = dataclasses.replace(dataset, source=dataclasses.replace(dataset.source, rows="mixed"))
        state = make_loader(dataset, batch_size=6).get_state()
        with pytest.raises(UserError, match="rows was 'apart', is None"):
            make_loader(mixed, batch_size=6).set_state(state)

    def test_rows_that_do_not_divide_are_refused(self, dataset):
        with pytest.raises(UserError, match=r"Plan.batch_size .8. must be a multiple of the 3 sources .*: try 9"):
            make_loader(dataset, batch_size=8)

    def test_a_source_has_the_rows_of_its_place_on_the_mesh(self, dataset):
        places = [0, 3, 1, 4, 2, 5]
        for batch in take(make_loader(dataset, batch_size=6, places=places), 5):
            assert [text[0] for text in self.texts(batch)] == ["aabbcc"[place] for place in places]

    def test_only_the_outer_source_may_have_rows_apart(self, dataset):
        with pytest.raises(UserError, match="only the outer one may have that"):
            CombinedSource(sources=(dataset.source,))


def test_the_documents_of_a_private_batch_are_named(corpus):
    dataset = make_dataset(corpus, packing=Packing.NONE)
    loader = make_loader(dataset, batch_size=8, privacy={"clip_norm": 1.0})
    documents, position = dataset.documents("train"), None
    for _ in range(2 * len(documents) // 8):
        named = loader.documents_after(position)["rows"]
        batch = next(loader)
        position = loader.position
        for row, segments, names in zip(batch["targets"], batch["segment_ids"], named, strict=True):
            text = ByteVocabulary().decode(row[segments > 0])
            assert [documents.example(name["document"]).text[:8] for name in names] == ([text[:8]] if text else [])


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("window", [{}, {"window_documents": 400}])  # a window of five passes
def test_passes_over_the_data_are_counted(corpus, shuffle, window):
    dataset = make_dataset(corpus, shuffle=shuffle, **window)
    loader = make_loader(dataset, batch_size=BATCH)
    assert loader.epochs() is None  # before the first batch
    begun, size = 0, len(dataset.documents("train"))
    for count in (3, 20, 77):
        begun += sum(ledger(take(loader, count)).values())
        assert loader.epochs() == pytest.approx(begun / size, abs=0.25)  # a window of the first row
    loader.close()
