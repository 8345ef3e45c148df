"""Texts begin as the tokenizer begins them, with one setting; ids without a row in the model are found.

The right values are `encode(text, add_special_tokens=True)` of tokenizers 0.23, which transformers 5.24 calls: it ignores
add_bos_token of tokenizer_config.json beside a tokenizer.json.
"""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import tokenizers
from tokenizers import processors

from capibara.core.types import UserError
from capibara.data.dataset import Dataset
from capibara.data.packing.packing import Document
from capibara.data.pipeline.examples import Assembler
from capibara.data.sources.sources import StdlibSource
from capibara.data.tokenizers import model_rows
from capibara.data.tokenizers.vocabulary import ByteVocabulary, SentencePieceVocabulary, TokenizerJsonVocabulary
from capibara.data.train_vocabulary import train_sentencepiece
from tests.data.tokenizers import kinds


def template(single, *names):
    return lambda of: processors.TemplateProcessing(single=single, special_tokens=[(n, of(n)) for n in names])


PROCESSORS = {
    "none": (kinds.llama_2, None, []),
    "a beginning token": (kinds.llama_2, template("<s> $A", "<s>"), ["<s>"]),
    "beginning and end": (kinds.llama_2, template("<s> $A </s>", "<s>", "</s>"), ["<s>"]),
    "an end only": (kinds.llama_2, template("$A </s>", "</s>"), []),
    "two tokens": (kinds.llama_2, template("<s> <unk> $A", "<s>", "<unk>"), ["<s>", "<unk>"]),
    "BERT's": (kinds.word_piece, lambda of: processors.BertProcessing(("[SEP]", of("[SEP]")), ("[CLS]", of("[CLS]"))), ["[CLS]"]),
    "byte level": (kinds.byte_level_bpe, lambda of: processors.ByteLevel(trim_offsets=True), []),
    "Llama 3's": (
        kinds.byte_level_bpe,
        lambda of: processors.Sequence([processors.ByteLevel(), template("<|endoftext|> $A", "<|endoftext|>")(of)]),
        ["<|endoftext|>"],
    ),
}  # fmt: skip


def folder_of(path, name, config=None):
    kind, processor, begin = PROCESSORS[name]
    made = kind()
    if processor is not None:
        made.post_processor = processor(made.token_to_id)
    path.mkdir(exist_ok=True)
    made.save(str(path / "tokenizer.json"))
    special = {"bos_token": begin[0] if begin else "<s>", "eos_token": "</s>"} if kind is kinds.llama_2 else {}
    if kind is kinds.word_piece:
        special = {"eos_token": "[SEP]"}
    (path / "tokenizer_config.json").write_text(json.dumps(special | (config or {})))
    return str(path), made, [made.token_to_id(one) for one in begin]


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}], ids=str)
@pytest.mark.parametrize("name", PROCESSORS)
def test_texts_begin_as_the_tokenizer_begins_them(tmp_path, name, config):
    path, library, begin = folder_of(tmp_path / "a", name, config)
    vocabulary = TokenizerJsonVocabulary(path=path)
    assert list(vocabulary.begin_ids) == begin
    for text in kinds.texts(20):
        whole = library.encode(text).ids
        want = whole[: len(whole) - name.count("end")] if "BERT" not in name else whole[:-1]
        assert vocabulary.prompt_ids(text) == (want or [vocabulary.bos_id])
    for adds in (True, False):
        own = TokenizerJsonVocabulary(path=path, add_bos_token=adds)
        assert own.begin_ids == ((own.bos_id,) if adds else ())
        assert f"add_bos_token = {adds}" in own.beginning()
    assert "as the tokenizer says" in vocabulary.beginning()
    other = TokenizerJsonVocabulary(path=path, add_bos_token=not begin)
    assert other.fingerprint() != vocabulary.fingerprint()


def test_a_sentencepiece_model_begins_texts_unless_its_folder_says_no(tmp_path):
    path = tmp_path / "tokenizer.model"
    train_sentencepiece(StdlibSource().open("validation"), str(path), size=400, report=lambda line: None)
    vocabulary = SentencePieceVocabulary(path=str(path))
    assert vocabulary.begin_ids == (vocabulary.bos_id,)
    for adds in (True, False):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": adds}))
        assert len(SentencePieceVocabulary(path=str(tmp_path)).begin_ids) == adds
        assert len(SentencePieceVocabulary(path=str(tmp_path), add_bos_token=not adds).begin_ids) == 1 - adds


@pytest.mark.parametrize("name", ["none", "a beginning token", "two tokens"])
def test_training_reads_what_the_tokenizer_makes_of_a_text(tmp_path, name):
    path, library, _ = folder_of(tmp_path / "a", name)
    vocabulary = TokenizerJsonVocabulary(path=path)
    for kind, inputs in (("causal", None), ("causal", "to be"), ("prefix", "to be")):
        assembler = Assembler(Dataset(source=StdlibSource(), vocabulary=vocabulary, kind=kind), adds_end=True)
        ids = np.array(library.encode("the river", add_special_tokens=False).ids, np.int32)
        before = None if inputs is None else np.array(library.encode(inputs, add_special_tokens=False).ids, np.int32)
        document = assembler(ids, before, None, (0,))
        begin = library.encode(inputs or "the river").ids
        read = begin if inputs else begin[: len(begin) - len(ids)]  # without loss
        whole = [*read, *ids.tolist(), vocabulary.eos_id]
        assert [document.previous, *document.ids.tolist()] == whole
        weights = np.ones(len(whole)) if document.weights is None else np.concatenate([[0], document.weights])
        assert weights[1:].tolist() == [float(i >= len(read)) for i in range(1, len(whole))]
        assert document.prefix == (len(read) if kind == "prefix" else 0)


def test_a_document_of_one_token_without_a_beginning_has_nothing_to_predict():
    document = Document.after(np.array([7], np.int32), None, ())
    assert document.previous == 7 and not len(document.ids)
    assert not len(Document.after(np.zeros(0, np.int32), None, ()).ids)


def test_a_tokenizer_with_ids_beyond_the_models_rows_is_told(tmp_path, caplog):
    made = kinds.llama_2()
    size = made.get_vocab_size()
    made.add_special_tokens(["<pad>", "<|im_end|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    vocabulary = TokenizerJsonVocabulary(path=str(tmp_path))
    with caplog.at_level(logging.WARNING):
        model_rows.check_vocabulary(vocabulary, size + 2, "m")
        assert not caplog.records
        model_rows.check_vocabulary(vocabulary, size + 1, "m")
    assert f"m: 1 tokens of the tokenizer ({size + 1} ('<|im_end|>')) have no row in its model" in caplog.text
    with pytest.raises(
        UserError, match=f"its tokenizer has ids up to {size + 1}, its model rows for ids up to {size - 2}"
    ):
        model_rows.check_vocabulary(vocabulary, size - 1, "m")
    begins = TokenizerJsonVocabulary(path=str(tmp_path), bos_token="<pad>", add_bos_token=True)
    with pytest.raises(UserError, match="begins texts with .*<pad>.*add_bos_token = False"):
        model_rows.check_vocabulary(begins, size, "m")
    with pytest.raises(UserError, match="its tokenizer has ids up to 258"):
        model_rows.check_vocabulary(ByteVocabulary(), 200, "m")
    model_rows.check_ids([0, np.int32(5), size], size + 1, vocabulary, "it")
    with pytest.raises(UserError, match=rf"it has token {size} \('<pad>'\), must be from 0 to {size - 1}"):
        model_rows.check_ids([0, size], size, vocabulary, "it")


def test_the_library_is_the_version_whose_behaviour_this_is():
    assert tokenizers.__version__.startswith("0.23")
