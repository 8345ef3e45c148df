"""Rows that were packed before fill a batch as the packing itself does, and corrupted ones are refused."""

import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.data.dataset import Dataset, Kind
from capibara.data.packing import packing, rows
from capibara.data.packing.packing import Document, Packing
from capibara.data.pipeline.examples import Assembler
from capibara.data.shards.source import ShardedSource
from capibara.data.text import protobuf
from capibara.data.tokenizers.vocabulary import ByteVocabulary

LENGTH = 16
SOURCE = ShardedSource(files=("x.array_record",))


def row(**changes):
    whole = rows.PackedRow(
        ids=np.arange(5, 17, dtype=np.int32),
        starts=np.array([0, 4], np.int32),
        previous=np.array([0, 77], np.int32),
        documents=np.array([3, 1 << 40], np.uint64),
        domains=(),
        length=LENGTH,
        vocabulary=ByteVocabulary().fingerprint(),
    )
    return whole._replace(**changes)


def decoded(record):
    return rows.decode(protobuf.example(record))


@pytest.mark.parametrize("most", [300, 70_000])
def test_a_row_comes_back(most):
    one = row(ids=np.linspace(0, most, 12).astype(np.int32), domains=("sql", ""), length=100_000)
    found = decoded(one.encode())
    assert all(np.array_equal(a, b) for a, b in zip(found, one)) and found.ids.dtype == np.int32


@pytest.mark.parametrize("chosen", [Packing.BEST_FIT, Packing.CONCAT])
def test_a_batch_is_filled_as_by_the_packing(chosen):
    random = np.random.default_rng(0)
    documents = [
        Document(random.integers(1, 250, size).astype(np.int32), None, 0, domain=1 + i % 2, position=(i,))
        for i, size in enumerate(random.integers(1, 40, 30).tolist())
    ]
    window = packing.Window(documents, length=LENGTH, packing=chosen, pad_id=9)
    expected, found = (packing.empty_batch(len(window), LENGTH, 9, domains=True) for _ in range(2))
    packed = []
    for i in range(len(window)):
        window.fill(expected, i, i)
        segments = expected["segment_ids"][i]
        count = np.count_nonzero(segments)
        starts = np.flatnonzero(np.diff(segments[:count], prepend=0)).astype(np.int32)
        numbers = np.array([at for (at,) in window.positions(i)], np.uint64)
        ids, previous = expected["targets"][i, :count], expected["tokens"][i, starts]
        one = row(ids=ids, starts=starts, previous=previous, documents=numbers)
        packed.append(rows.PackedDocuments(decoded(one.encode()), expected["domains"][i, starts], (i,)))
    again = rows.PackedWindow(packed, pad_id=9)
    for i in range(len(again)):
        again.fill(found, i, i)
    assert len(again) == len(window) and again.positions(3) == [(3,)]
    assert all(np.array_equal(found[key], expected[key]) for key in expected)


def test_the_checksum_is_of_the_tokens():
    one, other = row(), row(ids=np.arange(6, 18, dtype=np.int32))
    windows = [rows.PackedWindow([rows.PackedDocuments(each, None, ())], pad_id=0) for each in (one, other, row())]
    assert windows[0].checksum == windows[2].checksum != windows[1].checksum


@pytest.mark.parametrize(
    "changes",
    [
        {"starts": np.array([0, 12], np.int32)},
        {"starts": np.array([1, 4], np.int32)},
        {"starts": np.array([0, 4, 5], np.int32)},
        {"length": 3},
        {"domains": ("one",)},
        {"ids": np.zeros(0, np.int32)},
    ],
)
def test_what_does_not_fit_is_refused(changes):
    with pytest.raises(protobuf.Malformed, match="no packed row"):
        decoded(row(**changes).encode())


def test_a_missing_feature_is_refused():
    with pytest.raises(protobuf.Malformed, match="starts"):
        rows.decode({name: value for name, value in protobuf.example(row().encode()).items() if name != "starts"})


@pytest.mark.parametrize(
    "changes, options, words",
    [
        ({"length": 32}, {}, "Dataset.length \\(16\\) must be 32"),
        ({"vocabulary": "other"}, {}, "must be the one of the packed rows \\(other\\)"),
        ({}, {"kind": Kind.MASKED}, "Dataset.kind \\('masked'\\)"),
    ],
)
def test_rows_for_another_run_are_refused(changes, options, words):
    dataset = Dataset(source=SOURCE, vocabulary=ByteVocabulary(), length=LENGTH, **options)
    with pytest.raises(UserError, match=words):
        Assembler(dataset, adds_end=True).packed(row(**changes), (0,))


def test_domains_are_numbered():
    dataset = Dataset(source=SOURCE, vocabulary=ByteVocabulary(), length=LENGTH, domains=("python", "sql"))
    packed = Assembler(dataset, adds_end=True).packed(row(domains=("sql", "other")), (0,))
    assert packed.domains.tolist() == [2, 0]
