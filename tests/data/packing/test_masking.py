"""Span corruption and masking: nothing lost, the published shares, the same on every start."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.data.dataset import Dataset, Kind
from capibara.data.packing.masking import Masking, SpanCorruption
from capibara.data.pipeline.loader import make_loader
from capibara.data.sources.sources import JsonlSource
from capibara.data.tokenizers.vocabulary import ByteVocabulary, SentencePieceVocabulary, TokenizerJsonVocabulary

SENTINELS = range(999, 899, -1)


def restored(inputs, targets, sentinels=SENTINELS) -> list[int]:
    """The text, with each sentinel of the inputs replaced by what the targets tell of it."""
    spans, text = {}, []
    for token in targets.tolist():
        if token in sentinels:
            span = spans.setdefault(token, [])
        else:
            span.append(token)
    for token in inputs.tolist():
        text += spans.pop(token) if token in sentinels else [token]
    assert not spans
    return text


@pytest.mark.parametrize("length", [2, 3, 10, 100, 568])
def test_inputs_and_targets_together_are_the_text(length):
    ids = np.arange(1, length + 1, dtype=np.int32)
    for seed in range(20):
        inputs, targets = SpanCorruption().apply(ids, SENTINELS, (seed,))
        assert inputs.dtype == targets.dtype == np.int32
        assert restored(inputs, targets) == ids.tolist()
        noise, spans = SpanCorruption().counts(length)
        assert (len(inputs), len(targets)) == (length - noise + spans, noise + spans)
        used = [token for token in inputs.tolist() if token in SENTINELS]
        assert used == list(SENTINELS[:spans]) == [token for token in targets.tolist() if token in SENTINELS]
        assert inputs[0] not in SENTINELS and targets[0] in SENTINELS  # as T5: a text begins with what is kept


def test_counts_are_those_of_t5():
    # 568 tokens fill 512 inputs and 114 targets, end tokens included (t5.data's random_spans_helper).
    assert SpanCorruption().counts(568) == (85, 28)
    assert SpanCorruption().longest_text(511, 113) == 568
    assert SpanCorruption(noise_density=0.9, mean_span_length=1.0).counts(10) == (9, 1)


def test_every_place_is_removed_as_often():
    ids = np.arange(1, 201, dtype=np.int32)
    kept = np.zeros(202)
    for seed in range(1500):
        inputs, _ = SpanCorruption().apply(ids, SENTINELS, (seed,))
        kept[inputs[inputs < 900]] += 1
    share = 1 - kept[1:201] / 1500
    assert share.mean() == pytest.approx(0.15) and share[0] == 0
    # Away from the ends, where T5's way of cutting favours what is kept.
    assert np.abs(share[20:-20] - 0.15).max() < 0.045


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SpanCorruption(noise_density=1.0), "noise_density"),
        (lambda: SpanCorruption(mean_span_length=0.5), "mean_span_length"),
        (lambda: Masking(chosen=0.0), "chosen"),
        (lambda: Masking(masked=0.8, random=0.3), "together at most 1"),
    ],
)
def test_impossible_shares_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_masking_has_the_shares_of_bert():
    ids = np.full(100_000, 7, np.int32)
    ids[::10] = 1
    random_ids = np.arange(100, 200, dtype=np.int32)
    read, weights = Masking().apply(ids, special=(1,), mask_id=50, random_ids=random_ids, seeds=(3,))
    chosen = weights > 0
    assert weights.dtype == np.float32 and read.dtype == np.int32
    assert chosen.sum() == 13_500 and (ids[chosen] == 7).all() and (read[~chosen] == ids[~chosen]).all()
    assert (read[chosen] == 50).mean() == pytest.approx(0.8, abs=0.01)
    assert (read[chosen] == 7).mean() == pytest.approx(0.1, abs=0.01)
    counts = np.bincount(read[chosen], minlength=200)[100:]
    assert counts.sum() / chosen.sum() == pytest.approx(0.1, abs=0.01) and counts.min() > 0


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(97, 123, rng.integers(0, 300)))) for _ in range(60)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def make_dataset(path, kind, **changes) -> Dataset:
    source = JsonlSource(files=(str(path),), validation_fraction=0.2)
    sizes = dict(length=64) if kind is Kind.MASKED else dict(length=20, encoder_length=64)
    defaults = dict(source=source, vocabulary=ByteVocabulary(), window_rows=4, window_documents=8, kind=kind, **sizes)
    return Dataset(**{**defaults, **changes})


def rows_of(batch):
    """The segments of a batch: one dict of arrays each."""
    for b in range(len(batch["tokens"])):
        for segment in range(1, batch["segment_ids"][b].max() + 1):
            sides = {False: batch["segment_ids"][b] == segment}
            if "encoder_tokens" in batch:
                sides[True] = batch["encoder_segment_ids"][b] == segment
            yield {key: value[b][sides[key.startswith("encoder")]] for key, value in batch.items()}


def test_a_text_becomes_pairs_of_the_encoder_decoder(corpus):
    dataset = make_dataset(corpus, Kind.ENCODER_DECODER)
    vocabulary = dataset.vocabulary
    pieces = []
    for batch in make_loader(dataset, split="validation", batch_size=4, epochs=1):
        for row in rows_of(batch):
            assert row["encoder_tokens"][-1] == row["targets"][-1] == vocabulary.eos_id
            text = restored(row["encoder_tokens"][:-1], row["targets"][:-1], vocabulary.sentinel_ids)
            pieces.append(vocabulary.decode(text))
    documents = dataset.source.open("validation")
    chunk = SpanCorruption().longest_text(63, 19)
    wanted = [documents[i][at : at + chunk] for i in range(len(documents)) for at in range(0, len(documents[i]), chunk)]
    assert sorted(pieces) == sorted(text for text in wanted if len(text) > 1)


def test_masked_rows_are_the_texts(corpus):
    dataset = make_dataset(corpus, Kind.MASKED)
    mask_id = dataset.vocabulary.mask_id
    assert mask_id == dataset.vocabulary.size - 1
    texts, chosen, masked = [], 0, 0
    for batch in make_loader(dataset, split="validation", batch_size=4, epochs=1):
        weights = batch["weights"] > 0
        assert (batch["tokens"][~weights] == batch["targets"][~weights]).all()
        assert (dataset.vocabulary.token_bytes()[batch["targets"][weights]] == 1).all()
        chosen, masked = chosen + weights.sum(), masked + (batch["tokens"] == mask_id).sum()
        texts += [dataset.vocabulary.decode(row["targets"]) for row in rows_of(batch)]
    documents = dataset.source.open("validation")
    assert sorted("".join(texts)) == sorted("".join(documents[i] for i in range(len(documents))))
    assert chosen / len("".join(texts)) == pytest.approx(0.15, abs=0.01)
    assert masked / chosen == pytest.approx(0.8, abs=0.1)


@pytest.mark.parametrize("kind", [Kind.ENCODER_DECODER, Kind.MASKED])
def test_the_objective_resumes_and_does_not_depend_on_the_hosts(corpus, kind):
    dataset = make_dataset(corpus, kind)
    loader = make_loader(dataset, batch_size=4)
    whole = list(itertools.islice(loader, 40))  # more than one epoch
    loader.close()
    halves = [make_loader(dataset, batch_size=4, shard_index=i, shard_count=2) for i in range(2)]
    for batch, *parts in zip(whole[:10], *halves):
        for key in batch:
            np.testing.assert_array_equal(batch[key], np.concatenate([part[key] for part in parts]))
    for half in halves:
        half.close()
    loader = make_loader(dataset, batch_size=4)
    list(itertools.islice(loader, 17))
    state = json.loads(json.dumps(loader.get_state()))
    loader.close()
    loader.set_state(state)
    for batch, again in zip(whole[17:], loader):
        for key in batch:
            np.testing.assert_array_equal(batch[key], again[key])
    loader.close()


@pytest.mark.parametrize("kind", [Kind.ENCODER_DECODER, Kind.MASKED])
def test_every_epoch_has_spans_and_masks_of_its_own(corpus, kind):
    dataset = make_dataset(corpus, kind, window_rows=1, window_documents=1, shuffle=False)
    rows = [row for batch in make_loader(dataset, batch_size=1, epochs=2) for row in rows_of(batch)]
    half = len(rows) // 2
    key = "encoder_tokens" if kind is Kind.ENCODER_DECODER else "tokens"
    same = [np.array_equal(one[key], two[key]) for one, two in zip(rows[:half], rows[half:], strict=True)]
    assert np.mean(same) < 0.2  # the shortest have few ways


def test_a_state_of_another_objective_is_refused(corpus):
    dataset = make_dataset(corpus, Kind.MASKED)
    loader = make_loader(dataset, batch_size=4)
    next(loader)
    state = loader.get_state()
    loader.close()
    with pytest.raises(UserError, match="Dataset.masking.chosen was 0.15, is 0.2"):
        make_loader(make_dataset(corpus, Kind.MASKED, masking=Masking(chosen=0.2)), batch_size=4).set_state(state)
    with pytest.raises(UserError, match="Dataset.kind was 'masked', is None"):
        make_loader(make_dataset(corpus, Kind.CAUSAL, length=64, encoder_length=None), batch_size=4).set_state(state)


def test_sentinels_and_masks_of_vocabularies(tmp_path, corpus):
    import tokenizers
    from tokenizers import models

    assert ByteVocabulary().sentinel_ids[:2] == range(383, 381, -1) and len(ByteVocabulary().sentinel_ids) == 125
    extra = ByteVocabulary(extra_ids=100, size_multiple=1)
    assert (extra.size, extra.sentinel_ids[0], extra.sentinel_ids[-1]) == (359, 358, 259)
    full = ByteVocabulary(size_multiple=1)
    with pytest.raises(UserError, match=r"no unused id .* set ByteVocabulary.extra_ids = 1"):
        full.mask_id  # noqa: B018
    with pytest.raises(UserError, match="has 0 unused ids, .* needs 3 .*: set ByteVocabulary.extra_ids = 100"):
        next(make_loader(make_dataset(corpus, Kind.ENCODER_DECODER, vocabulary=full), batch_size=1))
    with pytest.raises(UserError, match="extra_ids"):
        ByteVocabulary(extra_ids=-1)

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "<extra_id_0>", "<extra_id_1>"]
    word = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    word.save(str(tmp_path / "tokenizer.json"))
    bert = TokenizerJsonVocabulary(path=str(tmp_path / "tokenizer.json"))
    assert (bert.mask_id, bert.bos_id, bert.eos_id, bert.pad_id, tuple(bert.sentinel_ids)) == (4, 2, 3, 0, (6, 7))


def test_sentinels_of_sentencepiece_and_seqio(tmp_path):
    import seqio

    from capibara.data.sources.sources import StdlibSource
    from capibara.data.tasks.tasks import SeqioVocabulary
    from capibara.data.train_vocabulary import train_sentencepiece

    path = str(tmp_path / "a.model")
    train_sentencepiece(StdlibSource().open("validation"), path, size=400, report=lambda line: None)
    ours = SentencePieceVocabulary(path=path, extra_ids=100)
    theirs = SeqioVocabulary(vocabulary=seqio.SentencePieceVocabulary(path, extra_ids=100))
    assert list(ours.sentinel_ids) == list(theirs.sentinel_ids) == list(range(499, 399, -1))
    assert ours.size == theirs.size == 512 and ours.mask_id == 499
    none = SeqioVocabulary(vocabulary=seqio.SentencePieceVocabulary(path, extra_ids=0))
    assert none.sentinel_ids[0] == none.size - 1


def test_bert_texts_begin_with_cls(tmp_path, corpus):
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(97, 123))]
    word = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    word.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    word.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    word.save(str(tmp_path / "tokenizer.json"))
    vocabulary = TokenizerJsonVocabulary(path=str(tmp_path / "tokenizer.json"))
    batch = next(make_loader(make_dataset(corpus, Kind.MASKED, vocabulary=vocabulary, packing="none"), batch_size=4))
    assert (batch["tokens"][:, 0] == 2).all() and (batch["targets"][:, 0] == 2).all()
    assert not batch["weights"][:, 0].any()
