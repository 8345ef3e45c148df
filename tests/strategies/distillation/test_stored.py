"""A teacher's log-probabilities on disk: what is read back is what was written, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import capibara as cb
from capibara.core.types import UserError
from capibara.models import api
from capibara.strategies.distillation.stored import StoredLogProbs, StoredReader, documents_of, write

MANIFEST = StoredLogProbs(teacher="large", vocabulary="v", vocab_size=99, top_k=3, temperature=1.0)


@pytest.fixture
def batch():
    """Two rows: documents of 4 and 3 tokens, one of 6, and padding; the first tokens have no loss."""
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 0, 0]], np.int32)
    rng = np.random.default_rng(0)
    weights = (segments > 0).astype(np.float32)
    weights[:, 0] = 0.0
    ids = {name: rng.integers(0, 99, segments.shape, np.int32) for name in ("tokens", "targets")}
    return {**ids, "weights": weights, "segment_ids": segments}


@pytest.fixture
def outputs(batch):
    rng = np.random.default_rng(1)
    shape = (*batch["tokens"].shape, 3)
    return -rng.random(shape).astype(np.float32), rng.integers(0, 99, shape, np.int32)


@pytest.fixture
def folder(batch, outputs, tmp_path):
    path = str(tmp_path / "stored")
    manifest = write(path, MANIFEST, [(batch, *outputs), (batch, *outputs)])  # the second time it has them all
    assert (manifest.documents, manifest.positions) == (3, 11) and StoredLogProbs.read(path) == manifest
    return path


def test_a_document_has_its_log_probabilities_wherever_it_stands(folder, batch, outputs):
    """In another row, behind another document."""
    rows = {name: np.zeros_like(value) for name, value in batch.items()}
    for name in ("tokens", "targets", "weights"):
        rows[name][0, :3], rows[name][0, 3:7] = batch[name][0, 4:7], batch[name][0, :4]
    rows["segment_ids"][0, :7] = [1, 1, 1, 2, 2, 2, 2]
    filled = StoredReader(folder).filled(rows)
    for name, value in zip(("teacher_log_p", "teacher_ids"), outputs):
        np.testing.assert_array_equal(filled[name][0, :3], value[0, 4:7])
        np.testing.assert_array_equal(filled[name][0, 4:7], value[0, 1:4])
    assert np.isfinite(filled["teacher_log_p"]).all()


@pytest.mark.parametrize("name", ["tokens", "targets", "weights"])
def test_another_document_is_named(name, folder, batch):
    batch[name][1, 3] = 1 - batch[name][1, 3]
    with pytest.raises(UserError, match=r"has nothing on a document of the data that begins with the tokens \["):
        StoredReader(folder).filled(batch)


def test_documents_without_loss_are_not_stored(batch):
    batch["weights"][0, :4] = 0.0
    assert [row for row, _, _ in documents_of(batch)] == [0, 1]


def rewrite(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "has no manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "has no manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text('{"format": 2}'), "its format is not 1"),
        (lambda folder: (folder / "ids.bin").write_bytes(b"12345678"), "is incomplete"),
        (lambda folder: (folder / "log_p.bin").open("ab").write(bytes(12)), "is incomplete"),
        (lambda folder: (folder / "documents.npy").write_bytes(b"no"), "is incomplete"),
        (lambda folder: np.save(folder / "documents.npy", np.zeros((3, 2))), "is incomplete .*has not 3 documents"),
        (lambda folder: np.save(folder / "documents.npy", np.zeros((2, 2), np.uint64)), "has not 3 documents"),
        (lambda folder: rewrite(folder, top_k="3"), r"StoredLogProbs.top_k \('3'\) must be int"),
        (lambda folder: rewrite(folder, top_k=0), "sizes are not positive"),
        (lambda folder: rewrite(folder, surprise=1), "surprise"),
        (lambda folder: rewrite(folder, positions=12), "is incomplete"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(change, error, folder, tmp_path):
    change(tmp_path / "stored")
    with pytest.raises(UserError, match=error):
        StoredReader(folder)


@pytest.mark.parametrize(
    ("name", "value"), [("ids.bin", -1), ("ids.bin", 99), ("log_p.bin", 1.0), ("log_p.bin", np.nan)]
)
def test_corrupted_values_are_named(name, value, folder, batch, tmp_path):
    path = tmp_path / "stored" / name
    values = np.fromfile(path, np.int32 if name == "ids.bin" else np.float32)
    values[4] = value
    values.tofile(path)
    with pytest.raises(UserError, match="is corrupted, it has values that are no log-probabilities or ids"):
        StoredReader(folder).filled(batch)


def test_data_without_loss_is_not_stored(batch, outputs, tmp_path):
    batch["weights"][:] = 0.0
    with pytest.raises(UserError, match="no token with loss"):
        write(str(tmp_path / "stored"), MANIFEST, [(batch, *outputs)])
    assert not [*tmp_path.iterdir()]


def test_what_is_not_finished_is_no_folder(batch, outputs, tmp_path):
    def interrupted():
        yield (batch, *outputs)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(str(tmp_path / "stored"), MANIFEST, interrupted())
    assert not (tmp_path / "stored").exists()


def test_a_student_without_some_of_the_ids_is_named(folder):
    loss = cb.Distillation(stored=folder)
    models = {
        size: api.build(cb.DecoderConfig(vocab_size=size, embed_dim=8, num_layers=1, num_heads=1, mlp_dim=8))
        for size in (98, 128)
    }
    assert loss.vocab_size(models[128]) == 99
    with pytest.raises(
        UserError, match=r"vocab_size is 98, and Distillation.stored \(.*\) has 99 ids: prepare it again"
    ):
        loss.objective(models[98], cb.Dataset(source=cb.StdlibSource(), vocabulary=cb.ByteVocabulary(), length=8))


def test_another_tokenizer_or_temperature_is_named():
    dataset = cb.Dataset(source=cb.StdlibSource(), vocabulary=cb.ByteVocabulary(), length=8)
    same = dataclasses.replace(MANIFEST, vocabulary=dataset.get_vocabulary().fingerprint())
    same.check("here", dataset, 1.0)
    with pytest.raises(UserError, match="is of another tokenizer than Dataset.vocabulary"):
        MANIFEST.check("here", dataset, 1.0)
    with pytest.raises(UserError, match="temperature is 2.0, and Distillation.stored"):
        same.check("here", dataset, 2.0)
