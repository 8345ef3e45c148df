"""Rows of an encoder-decoder: equal to those of seqio's EncDecFeatureConverter, and no pair lost, cut or mixed up."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from capibara.core.types import BATCH_KEYS, ENCODER_KEYS, UserError
from capibara.data.dataset import Dataset, Kind
from capibara.data.packing.packing import Packing, empty_batch
from capibara.data.packing.pairs import Pair, Pairs, PairWindow
from capibara.data.pipeline.loader import make_loader
from capibara.data.sources.sources import JsonlSource
from capibara.data.tokenizers.vocabulary import ByteVocabulary

S, T = 24, 16
# Ours beside seqio's name.
NAMES = {
    "tokens": "decoder_input_tokens",
    "targets": "decoder_target_tokens",
    "weights": "decoder_loss_weights",
    "segment_ids": "decoder_segment_ids",
    "positions": "decoder_positions",
    "encoder_tokens": "encoder_input_tokens",
    "encoder_segment_ids": "encoder_segment_ids",
    "encoder_positions": "encoder_positions",
}


def make_examples(count: int = 50, *, longest: float = 0.5) -> list[dict[str, np.ndarray]]:
    """Pairs of random tokens that end in 1, up to `longest` times as long as a row."""
    rng = np.random.default_rng(0)

    def ids(limit):
        return np.append(rng.integers(2, 100, rng.integers(1, limit)), 1).astype(np.int32)

    return [{"inputs": ids(int(longest * S)), "targets": ids(int(longest * T))} for _ in range(count)]


def ours(examples, packing: Packing) -> dict[str, np.ndarray]:
    documents = [Pairs([Pair(example["inputs"], example["targets"])]) for example in examples]
    window = PairWindow(documents, encoder_length=S, length=T, packing=packing, pad_id=0)
    batch = empty_batch(len(window), T, encoder_length=S)
    for b in range(len(window)):
        window.fill(batch, b, b)
    return batch


def test_rows_begin_with_the_decoders_own_token():
    pairs = [Pair(np.array([5, 1], np.int32), np.array([6, 0, 1], np.int32))] * 2
    window = PairWindow([Pairs(pairs)], encoder_length=S, length=T, packing=Packing.BEST_FIT, pad_id=0, start_id=2)
    batch = empty_batch(1, T, encoder_length=S)
    window.fill(batch, 0, 0)
    assert batch["tokens"][0, :6].tolist() == [2, 6, 0, 2, 6, 0]
    assert batch["weights"][0, :6].tolist() == [1, 0, 1, 1, 0, 1]


def seqios(examples, *, pack: bool) -> dict[str, np.ndarray]:
    import seqio
    import tensorflow as tf

    signature = {name: tf.TensorSpec([None], tf.int32) for name in ("inputs", "targets")}
    dataset = tf.data.Dataset.from_generator(lambda: iter(examples), output_signature=signature)
    lengths = {"inputs": S, "targets": T}
    dataset = seqio.utils.trim_dataset(dataset, lengths, ("inputs", "targets"))
    rows = list(seqio.EncDecFeatureConverter(pack=pack)(dataset, lengths).as_numpy_iterator())
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def segments_of(batch, names=None) -> dict[bytes, dict[str, list]]:
    """What each packed pair looks like, wherever it lies, by its own tokens."""
    name = (lambda key: key) if names is None else names.get
    found = {}
    for b, segments in enumerate(batch[name("segment_ids")]):
        for segment in range(1, segments.max() + 1):
            pair = {}
            for key in NAMES:
                side = "encoder_segment_ids" if key.startswith("encoder") else "segment_ids"
                at = batch[name(side)][b] == segment
                if not key.endswith("segment_ids"):
                    pair[key] = batch[name(key)][b][at].tolist()
            found[json.dumps([pair["encoder_tokens"], pair["targets"]])] = pair
    return found


@pytest.mark.parametrize("longest", [0.5, 2], ids=["whole", "trimmed"])
def test_rows_of_one_pair_are_those_of_seqio(longest):
    examples = make_examples(longest=longest)
    mine, theirs = ours(examples, Packing.NONE), seqios(examples, pack=False)
    assert set(theirs) < set(NAMES.values())
    for key, name in NAMES.items():
        if name in theirs:  # seqio tells segments and positions only of packed rows
            np.testing.assert_array_equal(mine[key], theirs[name], err_msg=key)
    np.testing.assert_array_equal(mine["segment_ids"], mine["targets"] > 0)
    np.testing.assert_array_equal(mine["encoder_segment_ids"], mine["encoder_tokens"] > 0)


@pytest.mark.parametrize("longest", [0.5, 2], ids=["whole", "trimmed"])
def test_packed_pairs_are_those_of_seqio(longest):
    """Row by row seqio fills in the order of the examples and we where they fit best, so pairs are compared."""
    examples = make_examples(longest=longest)
    mine, theirs = ours(examples, Packing.BEST_FIT), seqios(examples, pack=True)
    assert set(theirs) == set(NAMES.values())
    assert segments_of(mine) == segments_of(theirs, NAMES)
    assert len(segments_of(mine)) == len(examples)
    assert len(mine["tokens"]) <= len(theirs["decoder_input_tokens"])
    for side in ("", "encoder_"):
        padding = mine[f"{side}segment_ids"] == 0
        assert not any(mine[key][padding].any() for key in NAMES if key.startswith("encoder") == bool(side))


def test_a_row_packed_alike_is_equal_in_every_array():
    examples = make_examples(8)
    theirs = seqios(examples, pack=True)
    count = int(theirs["decoder_segment_ids"][0].max())  # seqio's first row holds the first examples
    assert count > 1
    mine = ours(examples[:count], Packing.BEST_FIT)
    for key, name in NAMES.items():
        np.testing.assert_array_equal(mine[key][0], theirs[name][0], err_msg=key)


def test_best_fit_fills_the_side_that_is_full():
    rng = np.random.default_rng(1)
    sizes = [(int(rng.integers(1, 400)), int(rng.integers(1, 100))) for _ in range(400)]
    documents = [Pairs([Pair(np.ones(i, np.int32), np.ones(t, np.int32))]) for i, t in sizes]
    window = PairWindow(documents, encoder_length=512, length=128, packing=Packing.BEST_FIT, pad_id=0)
    assert max(sum(i for i, _ in sizes) / 512, sum(t for _, t in sizes) / 128) / len(window) > 0.9


def test_a_pair_without_inputs_sees_none_of_its_neighbours():
    documents = [Pairs([Pair(np.zeros(0, np.int32), np.array([5, 1], np.int32))]), Pairs([])]
    window = PairWindow(documents, encoder_length=4, length=4, packing=Packing.BEST_FIT, pad_id=0)
    batch = empty_batch(1, 4, encoder_length=4)
    window.fill(batch, 0, 0)
    assert len(window) == 1
    assert batch["encoder_segment_ids"].tolist() == [[1, 0, 0, 0]] and batch["segment_ids"].tolist() == [[1, 1, 0, 0]]


@pytest.fixture
def pairs_file(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rng = np.random.default_rng(2)
    lines = [{"inputs": f"{i}:" + "q" * int(rng.integers(0, 40)), "targets": f"{i}!"} for i in range(60)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def make_dataset(path, **changes) -> Dataset:
    source = JsonlSource(files=(str(path),), field="targets", inputs_field="inputs", validation_fraction=0.2)
    defaults = dict(
        source=source,
        vocabulary=ByteVocabulary(),
        kind=Kind.ENCODER_DECODER,
        length=T,
        encoder_length=64,
        window_rows=4,
        window_documents=8,
    )
    return Dataset(**{**defaults, **changes})


def test_pairs_of_a_file_stay_together(pairs_file):
    decode = ByteVocabulary().decode
    batches = list(make_loader(make_dataset(pairs_file), batch_size=4, epochs=1))
    seen = []
    for batch in batches:
        shapes = {key: (value.shape, value.dtype) for key, value in batch.items()}
        assert shapes == make_dataset(pairs_file).batch_spec(4)
        for pair in segments_of(batch).values():
            inputs, targets = decode(pair["encoder_tokens"]), decode(pair["targets"])
            assert inputs.split(":")[0] + "!" == targets
            assert pair["encoder_tokens"][-1] == pair["targets"][-1] == ByteVocabulary().eos_id
            seen.append(targets)
    assert len(seen) == len(set(seen)) == len(make_dataset(pairs_file).source.open("train"))


def test_a_decoder_reads_the_inputs_of_a_pair_without_loss(pairs_file):
    dataset = make_dataset(pairs_file, kind=Kind.CAUSAL, encoder_length=None, length=64, packing=Packing.NONE)
    batch = next(make_loader(dataset, batch_size=4))
    decode = ByteVocabulary().decode
    for targets, weights in zip(batch["targets"], batch["weights"], strict=True):
        assert decode(targets[weights > 0]).endswith("!") and ":" in decode(targets[weights == 0])


@pytest.mark.parametrize("packing", [Packing.BEST_FIT, pytest.param(Packing.NONE, marks=pytest.mark.heavy)])
def test_resume_is_exact(pairs_file, packing):
    dataset = make_dataset(pairs_file, packing=packing)
    loader = make_loader(dataset, batch_size=2)
    whole = list(itertools.islice(loader, 12))
    loader.close()
    loader = make_loader(dataset, batch_size=2)
    list(itertools.islice(loader, 5))
    state = json.loads(json.dumps(loader.get_state()))
    loader.close()
    for workers in (0, 2):
        again = make_loader(make_dataset(pairs_file, packing=packing, workers=workers), batch_size=2)
        again.set_state(state)
        for one, other in zip(itertools.islice(again, 7), whole[5:], strict=True):
            for key in BATCH_KEYS + ENCODER_KEYS:
                np.testing.assert_array_equal(one[key], other[key])
        again.close()
    with pytest.raises(UserError, match="Dataset.encoder_length was 64, is 32"):
        make_loader(make_dataset(pairs_file, packing=packing, encoder_length=32), batch_size=2).set_state(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder_length": None}, r"encoder_length \(None\) with kind 'encoder_decoder': set it, e.g. to 64"),
        ({"kind": "causal"}, r"encoder_length \(64\) with kind 'causal': leave it out"),
        ({"encoder_length": 1}, r"encoder_length \(1\) must be at least 2"),
        ({"packing": "concat"}, "would separate inputs from targets: try 'best_fit'"),
        ({"domains": ("a", "a")}, "must be distinct names"),
    ],
)
def test_mistakes(pairs_file, change, message):
    with pytest.raises(UserError, match=message):
        make_dataset(pairs_file, **change)
