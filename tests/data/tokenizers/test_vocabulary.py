"""Vocabularies lose nothing, and know the bytes of their ids."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.data.sources.sources import StdlibSource, TextSource
from capibara.data.tokenizers.vocabulary import ByteVocabulary, SentencePieceVocabulary, TokenizerJsonVocabulary
from capibara.data.train_vocabulary import train_sentencepiece

CORPUS = "".join(f"def function_{i}(self, value):\n\treturn value * {i}  # naïve café\n\n" for i in range(400))


@pytest.fixture(scope="module")
def sentencepiece_path(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("vocabulary") / "new" / "tokenizer.model")
    lines: list[str] = []
    train_sentencepiece(StdlibSource().open("validation"), path, size=500, report=lines.append)
    assert "come back exactly" in lines[-1] and "bytes a token" in lines[-1]
    return path


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([CORPUS], trainer)
    path = str(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
    tokenizer.save(path)
    return path


@pytest.fixture(params=["byte", "sentencepiece", "tokenizer_json"])
def vocabulary(request):
    if request.param == "byte":
        return ByteVocabulary()
    if request.param == "sentencepiece":
        return SentencePieceVocabulary(path=request.getfixturevalue("sentencepiece_path"))
    return TokenizerJsonVocabulary(path=request.getfixturevalue("tokenizer_path"))


def random_texts(count: int) -> list[str]:
    rng = random.Random(0)
    ranges = [(0x20, 0x7E), (0x20, 0x7E), (0xA0, 0x17F), (0x4E00, 0x4FFF), (0x1F600, 0x1F64F), (0x2580, 0x2583)]

    def character() -> str:
        return chr(rng.randint(*rng.choice(ranges))) if rng.random() < 0.7 else rng.choice(" \n\t\r")

    return ["".join(character() for _ in range(rng.randint(0, 60))) for _ in range(count)]


FIXED = ["", " ", "  leading", "trailing \n", "\n\n\n", "\ttab\r\n", "▁▁ x ▁", "ﬁ ² Å", "0123456789", "<s></s><unk>"]


def test_round_trips(vocabulary):
    texts = FIXED + random_texts(300)
    for text, ids in zip(texts, vocabulary.encode_batch(texts), strict=True):
        assert ids.dtype == np.int32
        assert ids.tolist() == list(vocabulary.encode(text))
        assert vocabulary.decode(ids) == text
        assert vocabulary.token_bytes()[ids].sum() == len(text.encode())


def test_special_ids_stand_for_no_bytes(vocabulary):
    token_bytes = vocabulary.token_bytes()
    assert token_bytes.shape == (vocabulary.size,) and token_bytes.dtype == np.int32
    special = [vocabulary.pad_id, vocabulary.eos_id, vocabulary.bos_id]
    assert (token_bytes[special] == 0).all()
    ids = [vocabulary.bos_id, *vocabulary.encode("a b"), vocabulary.eos_id, vocabulary.size - 1, 10**6, -1]
    assert vocabulary.decode(ids).rstrip("\ufffd").startswith("a b")


def test_size_is_a_multiple(vocabulary):
    assert vocabulary.size % 128 == 0


def test_vocabularies_travel_to_workers(vocabulary):
    vocabulary.encode("load it")
    copy = pickle.loads(pickle.dumps(vocabulary))
    assert copy == vocabulary and copy.fingerprint() == vocabulary.fingerprint()
    assert copy.encode("x = 1") == vocabulary.encode("x = 1")


def test_fingerprints_differ(sentencepiece_path, tokenizer_path):
    vocabularies = [
        ByteVocabulary(),
        ByteVocabulary(size_multiple=1),
        SentencePieceVocabulary(path=sentencepiece_path),
        TokenizerJsonVocabulary(path=tokenizer_path),
    ]
    assert len({vocabulary.fingerprint() for vocabulary in vocabularies}) == 4


def test_bytes_are_those_of_byt5():
    vocabulary = ByteVocabulary(size_multiple=1)
    assert (vocabulary.size, vocabulary.pad_id, vocabulary.eos_id, vocabulary.bos_id) == (259, 0, 1, 0)
    assert vocabulary.encode("aé") == [100, 198, 172]
    assert vocabulary.decode([198, 100]) == "\ufffda"
    assert ByteVocabulary().size == 384


def test_a_lone_surrogate_does_not_stop_a_run():
    assert len(ByteVocabulary().encode("a\ud800b")) == 5


@pytest.mark.parametrize("make", [SentencePieceVocabulary, TokenizerJsonVocabulary])
def test_bad_files(tmp_path, make):
    with pytest.raises(UserError, match="does not exist"):
        make(path=str(tmp_path / "none")).encode("x")
    (tmp_path / "bad").write_text("not a model")
    with pytest.raises(UserError, match="is not a"):
        make(path=str(tmp_path / "bad")).encode("x")


def test_bad_sizes_and_names(tokenizer_path):
    with pytest.raises(UserError, match="size_multiple"):
        ByteVocabulary(size_multiple=0)
    with pytest.raises(UserError, match="eos_token"):
        TokenizerJsonVocabulary(path=tokenizer_path, eos_token="<nope>").eos_id  # noqa: B018


def test_training_refuses_sizes_that_do_not_fit(tmp_path):
    (tmp_path / "corpus.txt").write_text("a b c\n" * 20)
    documents = TextSource(files=(str(tmp_path / "corpus.txt"),), document_bytes=10).open("train")
    output = tmp_path / "out.model"
    with pytest.raises(UserError, match="size \\(100\\) must be at least"):
        train_sentencepiece(documents, str(output), size=100)
    with pytest.raises(UserError, match="too high"):
        train_sentencepiece(documents, str(output), size=5000, report=lambda line: None)
    assert not output.exists()
