"""Packed rows: every token once, nothing crosses a document, and the state of a stream is exact."""

from __future__ import annotations

import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.data.packing.packing import Document, Packing, Window, empty_batch
from capibara.data.pipeline.stream import Layout, RowStream, State

BOS = 1


def make_documents(seed: int, count: int = 60, longest: int = 70) -> list[np.ndarray]:
    """Documents whose tokens are all different, so that a token tells where it came from."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, longest, count)
    ids = np.arange(10, 10 + lengths.sum(), dtype=np.int32)
    return np.split(ids, np.cumsum(lengths)[:-1])


def layout(packing: Packing, length: int = 16, *, seeds: tuple[int, ...] | None = (3,), rows: int = 8) -> Layout:
    return Layout(length=length, packing=packing, pad_id=0, window_rows=rows, window_documents=4, shuffle_seeds=seeds)


def reader(documents: list[np.ndarray], apart: int = 1):
    """A reader whose documents have the numbers 0, `apart`, 2 `apart`, ..."""
    numbered = [(i * apart, Document(ids, None, BOS)) for i, ids in enumerate(documents)]
    return lambda begin: (pair for pair in numbered if pair[0] >= begin)


def read_all(stream: RowStream, length: int = 16) -> tuple[dict[str, np.ndarray], list[State]]:
    rows = list(stream)
    batch = empty_batch(len(rows), length)
    for b, row in enumerate(rows):
        row.fill(batch, b)
    return batch, [row.state for row in rows]


def check_rows(batch: dict[str, np.ndarray], documents: list[np.ndarray]) -> None:
    """Everything that must hold of packed rows, whatever packed them."""
    previous = {}
    for ids in documents:
        previous |= dict(zip(ids.tolist(), [BOS, *ids.tolist()], strict=False))
    tokens, targets, segments = batch["tokens"], batch["targets"], batch["segment_ids"]
    real = segments > 0
    assert (batch["weights"] == real).all()
    for key in ("tokens", "targets", "positions"):
        assert (batch[key][~real] == 0).all()
    # The input at every target is the token before it in its own document, the beginning token at the first.
    assert [previous[t] for t in targets[real].tolist()] == tokens[real].tolist()
    for row in range(len(tokens)):
        used = segments[row][real[row]]
        assert (segments[row][: len(used)] == used).all(), "padding lies at the end"
        assert used[0] == 1 and set(np.diff(used)) <= {0, 1}
        for segment in range(1, used[-1] + 1):
            at = np.flatnonzero(segments[row] == segment)
            assert (batch["positions"][row][at] == np.arange(len(at))).all()
            assert (np.diff(targets[row][at]) == 1).all(), "a segment is one run of one document"


@pytest.mark.parametrize("packing", [Packing.BEST_FIT, Packing.CONCAT])
@pytest.mark.parametrize("seed", range(5))
def test_every_token_once(packing, seed):
    documents = make_documents(seed)
    batch, _ = read_all(RowStream(reader(documents), layout(packing)))
    check_rows(batch, documents)
    packed = np.sort(batch["targets"][batch["segment_ids"] > 0])
    assert (packed == np.concatenate(documents)).all()


def test_one_document_a_row_truncates():
    documents = make_documents(0)
    batch, _ = read_all(RowStream(reader(documents), layout(Packing.NONE, seeds=None)))
    check_rows(batch, documents)
    kept = [ids[:16] for ids in documents if len(ids)]
    assert batch["targets"][batch["segment_ids"] > 0].tolist() == np.concatenate(kept).tolist()
    assert batch["segment_ids"].max() == 1


def test_concat_has_no_padding_before_the_end():
    documents = make_documents(1)
    batch, _ = read_all(RowStream(reader(documents), layout(Packing.CONCAT, seeds=None)))
    assert (batch["segment_ids"][:-1] > 0).all()
    assert batch["targets"][batch["segment_ids"] > 0].tolist() == np.concatenate(documents).tolist()


def test_best_fit_cuts_only_documents_longer_than_a_row():
    documents = make_documents(2, longest=16)
    window = Window([Document(d, None, BOS) for d in documents], length=16, packing=Packing.BEST_FIT, pad_id=0)
    batch = empty_batch(len(window), 16)
    for b in range(len(window)):
        window.fill(batch, b, b)
    begins = {int(d[0]) for d in documents if len(d)}
    first = (batch["positions"] == 0) & (batch["segment_ids"] > 0)
    assert set(batch["targets"][first].tolist()) == begins


def test_best_fit_fills_rows():
    documents = make_documents(3, count=3000, longest=900)
    stream = RowStream(reader(documents), layout(Packing.BEST_FIT, length=512, rows=256))
    batch, _ = read_all(stream, 512)
    assert (batch["segment_ids"] > 0).mean() >= 0.98


@pytest.mark.parametrize("apart", [1, 1000])
@pytest.mark.parametrize("packing", list(Packing))
def test_a_restored_stream_resumes_exactly(packing, apart):
    read = reader(make_documents(4), apart)
    whole, states = read_all(RowStream(read, layout(packing), first_rows=3))
    for at, state in enumerate(states[:-1]):
        rest, _ = read_all(RowStream(read, layout(packing), first_rows=3, state=state))
        for key in whole:
            assert (rest[key] == whole[key][at + 1 :]).all()
    assert len(list(RowStream(read, layout(packing), first_rows=3, state=states[-1]))) == 0


def test_a_document_longer_than_several_windows():
    documents = [np.arange(10, 1000, dtype=np.int32), np.arange(2000, 2005, dtype=np.int32)]
    narrow = Layout(length=8, packing=Packing.CONCAT, pad_id=0, window_rows=2, window_documents=1, shuffle_seeds=None)
    whole, states = read_all(RowStream(reader(documents), narrow), 8)
    check_rows(whole, documents)
    assert whole["targets"][whole["segment_ids"] > 0].tolist() == np.concatenate(documents).tolist()
    rest, _ = read_all(RowStream(reader(documents), narrow, state=states[40]), 8)
    assert (rest["tokens"] == whole["tokens"][41:]).all()


def test_changed_documents_are_noticed_on_restore():
    documents = make_documents(5)
    stream = RowStream(reader(documents), layout(Packing.BEST_FIT))
    state = next(stream).state
    documents[1] = documents[1] + 1
    with pytest.raises(UserError, match="the data has changed"):
        next(RowStream(reader(documents), layout(Packing.BEST_FIT), state=state))


@pytest.mark.parametrize("packing", [Packing.BEST_FIT, Packing.CONCAT])
def test_loss_weights_travel_with_their_tokens(packing):
    documents = make_documents(6)
    weighted = [(i, Document(ids, (ids % 2).astype(np.float32), BOS)) for i, ids in enumerate(documents)]
    batch, _ = read_all(RowStream(lambda begin: iter(weighted[begin:]), layout(packing)))
    real = batch["segment_ids"] > 0
    assert (batch["weights"][real] == batch["targets"][real] % 2).all()


def test_padding_id_other_than_zero():
    window = Window([Document(np.array([5, 6], np.int32), None, 9)], length=4, packing=Packing.BEST_FIT, pad_id=9)
    batch = empty_batch(2, 4, 9)
    window.fill(batch, 0, 0)
    assert batch["tokens"].tolist() == [[9, 5, 9, 9], [9, 9, 9, 9]]
    assert batch["targets"].tolist() == [[5, 6, 9, 9], [9, 9, 9, 9]]
    assert batch["weights"].tolist() == [[1, 1, 0, 0], [0, 0, 0, 0]]
