"""Chunks of documents: all of the text, within their tokens, never across documents."""

from __future__ import annotations

import json

import pytest
import tokenizers

from capibara.builders.files.problems import Problems
from capibara.builders.preparation.documents import files_of, parts_of
from capibara.data.tokenizers.vocabulary import ByteVocabulary, TokenizerJsonVocabulary
from capibara.retrieval.chunking import Chunking, chunks_of, spans
from capibara.retrieval.settings import IndexPreparation

TEXT = "Capybaras graze — near wåter, ünder 水 and 🦫.\nThey rest at noon; they whistle."


@pytest.fixture(params=["bytes", "tokenizer.json"])
def vocabulary(request, tmp_path):
    if request.param == "bytes":
        return ByteVocabulary()
    model = tokenizers.models.BPE(
        {c: i for i, c in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}, []
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return TokenizerJsonVocabulary(path=str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("tokens, overlap", [(7, 0), (16, 5), (500, 20)])
def test_chunks_cover_a_document_and_overlap(vocabulary, tokens, overlap):
    ranges = [*Chunking(tokens=tokens, overlap=overlap).ranges(TEXT, vocabulary)]
    assert ranges[0][0] == 0 and ranges[-1][1] == len(TEXT)
    for (_, end), (start, _) in zip(ranges, ranges[1:]):
        assert start <= end and (not overlap or start < end)
    assert all(len(vocabulary.encode(TEXT[start:end])) <= tokens + 6 for start, end in ranges)  # whole characters


def test_chunks_stay_in_their_document_and_equal_ones_come_once(tmp_path):
    texts = ["a b c d", "  \n ", "a b c d", "e" * 25, ""]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) + "{bad\n")
    (tmp_path / "b.txt").write_text("a plain text")
    problems, fields = Problems(), IndexPreparation().fields
    parts = parts_of(files_of([str(tmp_path)], problems), fields, 1 << 20, problems)
    chunking = Chunking(tokens=10, overlap=0)
    chunks = [*chunks_of(parts, fields, chunking, ByteVocabulary(), problems)]
    assert [(c.document, c.text) for c in chunks if c.path.endswith("a.jsonl")] == [
        (1, "a b c d"), (4, "e" * 10), (4, "e" * 5),
    ]  # fmt: skip
    assert "".join(c.text for c in chunks if c.path.endswith("b.txt")) == "a plain text"
    assert problems.total == 1


def test_spans_are_parts_of_chunks_and_a_seed_decides_them():
    texts = [" ".join(f"w{i}x{j}" for j in range(12)) for i in range(5)]
    drawn = spans(texts, 30, 1)
    assert len(drawn) == 30 and all(any(span in text for text in texts) for span in drawn)
    assert all(len(span.split()) == 4 for span in drawn)
    assert drawn == spans(texts, 30, 1) != spans(texts, 30, 2)
