"""Batches of a prefix LM: those of seqio's PrefixLMFeatureConverter."""

from __future__ import annotations

import json

import numpy as np
import pytest

from capibara.data.dataset import Dataset
from capibara.data.packing.packing import Document, Packing, Window, empty_batch
from capibara.data.pipeline.loader import make_loader
from capibara.data.sources.sources import JsonlSource
from capibara.data.tokenizers.vocabulary import ByteVocabulary

T = 16
NAMES = {
    "tokens": "decoder_input_tokens",
    "targets": "decoder_target_tokens",
    "weights": "decoder_loss_weights",
    "prefix": "decoder_causal_attention",
}


def test_marks_are_those_of_seqio(tmp_path):
    import seqio
    import tensorflow as tf

    rng = np.random.default_rng(0)
    lines = [{"inputs": "x" * rng.integers(1, 6), "targets": "y" * rng.integers(1, 6)} for _ in range(6)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = JsonlSource(files=(str(tmp_path / "pairs.jsonl"),), field="targets", inputs_field="inputs")
    dataset = Dataset(
        source=source, vocabulary=ByteVocabulary(), kind="prefix", length=T, packing="none", shuffle=False, workers=0
    )
    with_loader = make_loader(dataset, batch_size=6)
    mine = next(with_loader)
    with_loader.close()
    vocabulary = ByteVocabulary()
    examples = [
        {
            "inputs": np.array(vocabulary.encode(line["inputs"]), np.int32),
            "targets": np.array([*vocabulary.encode(line["targets"]), vocabulary.eos_id], np.int32),
        }
        for line in lines
    ]
    signature = {name: tf.TensorSpec([None], tf.int32) for name in ("inputs", "targets")}
    data = tf.data.Dataset.from_generator(lambda: iter(examples), output_signature=signature)
    rows = seqio.PrefixLMFeatureConverter(pack=False)(data, {"inputs": T // 2, "targets": T // 2}).as_numpy_iterator()
    theirs = {}
    for row in rows:
        theirs[row["decoder_target_tokens"].tobytes()] = row
    assert mine["prefix"].any()
    for b in range(6):
        row = theirs[mine["targets"][b].tobytes()]
        real = mine["targets"][b] > 0
        for key, name in NAMES.items():  # what is read on padding is nobody's
            np.testing.assert_array_equal(mine[key][b][real], row[name][real], err_msg=key)
        assert not mine["prefix"][b][~real].any()


def test_the_rest_of_a_cut_document_keeps_its_marks():
    ids = np.arange(2, 22, dtype=np.int32)
    document = Document(ids, None, 0, prefix=18)
    assert document.cut(12).prefix == 6 and document.cut(19).prefix == 0
    window = Window([document], length=T, packing=Packing.BEST_FIT, pad_id=0)
    batch = empty_batch(2, T, prefix=True)
    for b in range(2):
        window.fill(batch, b, b)
    assert batch["prefix"][0].sum() == 16 and batch["prefix"][1].tolist() == [1, 1] + [0] * 14


@pytest.mark.parametrize("kind", ["causal", "prefix"])
def test_only_a_prefix_lm_has_marks(kind):
    dataset = Dataset(source=JsonlSource(files=("none",)), vocabulary=ByteVocabulary(), kind=kind, length=T)
    assert ("prefix" in dataset.batch_spec(2)) == (kind == "prefix")
