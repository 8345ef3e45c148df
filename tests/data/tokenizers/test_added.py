"""Tokens that the files beside a tokenizer.json name: as transformers 5.24.0 reads such a folder."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from capibara.core.types import UserError
from capibara.data.chat.template import ChatTemplate
from capibara.data.tokenizers import added
from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary
from capibara.interop.gguf import vocabulary as gguf_vocabulary
from capibara.interop.merge import tokenizers as merged_tokenizers

TEXT = "a <s> b <a>x"
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def letters() -> Tokenizer:
    """A token for each of some characters, ids 0 to 35."""
    vocab = {
        token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "\u0120", *"<|>_/:"])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def token(content, special=True, **flags):
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, "special": special} | plain | flags


# Files beside the tokenizer.json -> what AutoTokenizer.from_pretrained(folder) of transformers 5.24.0 makes of them: ids of
# TEXT, and of each token with an id above those of the tokenizer.json whether it is special.
PLAIN = [3, 29, 1, 29, 4, 29, 30, 3, 32, 26]
FOUND = [3, 29, 1, 29, 4, 29, 36, 26]
CASES = {
    "nothing": ({}, {}, PLAIN, {}),
    "decoder": (
        {"added_tokens_decoder": {"37": token("<b>", False), "36": token("<a>"), "1": token("<s>")}},
        {},
        FOUND,
        {"<a>": True, "<b>": False},
    ),
    "decoder and fields": (
        {"eos_token": "<e>", "pad_token": "<p>", "additional_special_tokens": ["<x>", "<s>", "<y>"]}
        | {"added_tokens_decoder": {"36": token("<a>")}},
        {},
        FOUND,
        dict.fromkeys(("<a>", "<e>", "<p>", "<x>", "<y>"), True),
    ),
    "older files beside a decoder": (
        {"added_tokens_decoder": {"36": token("<a>")}},
        {"special_tokens_map.json": {"pad_token": "<p>"}, "added_tokens.json": {"<q>": 36}},
        FOUND,
        {"<a>": True},
    ),
    "older ids": ({}, {"added_tokens.json": {"<r>": 37, "<q>": 36}}, PLAIN, {"<q>": False, "<r>": False}),
    "older fields": ({}, {"special_tokens_map.json": {"additional_special_tokens": ["<a>"]}}, FOUND, {"<a>": True}),
    "two lists": ({"extra_special_tokens": ["<x>"], "additional_special_tokens": ["<y>"]}, {}, PLAIN, {"<x>": True}),
    "an object": (
        {"extra_special_tokens": {"image_token": "<x>", "other": "<y>"}}, {}, PLAIN, {"<x>": True, "<y>": True}
    ),
    "another field": ({"image_token": "<x>"}, {}, PLAIN, {"<x>": True}),
    "every field": (
        {"mask_token": "<m>", "cls_token": "<c>", "pad_token": "<p>", "sep_token": "<e>", "unk_token": "<u>"},
        {},
        PLAIN,
        dict.fromkeys(("<u>", "<e>", "<p>", "<c>", "<m>"), True),
    ),
    "other flags": ({"added_tokens_decoder": {"1": token("<s>", lstrip=True)}}, {}, [3, 1, *PLAIN[3:]], {}),
    "whole words": (
        {"added_tokens_decoder": {"36": token("<a>", False, normalized=True, single_word=True)}},
        {},
        PLAIN,
        {"<a>": False},
    ),
}  # fmt: skip


def folder_of(path: Path, config: dict, others: dict) -> str:
    letters().save(str(path / "tokenizer.json"))
    for name, values in {"tokenizer_config.json": NAMES | config, **others}.items():
        (path / name).write_text(json.dumps(values))
    return str(path)


@pytest.mark.parametrize("name", CASES)
def test_a_folder_is_read_with_the_tokens_that_its_files_name(name, tmp_path):
    config, others, ids, new = CASES[name]
    vocabulary = TokenizerJsonVocabulary(path=folder_of(tmp_path, config, others))
    assert vocabulary.encode(TEXT) == ids
    for number, (content, is_special) in enumerate(new.items(), 36):
        assert vocabulary.tokenizer.token_to_id(content) == number
        assert vocabulary.spelling(number) == (content if is_special else "")
        assert vocabulary.decode([3, number, 4]) == ("ab" if is_special else f"a{content}b")
    assert len(vocabulary.pieces) == 36 + len(new)


def with_a_merge(files):
    """The same tokenizer with a merge, without which GGUF files hold none."""
    spec = json.loads(files["tokenizer.json"])
    vocab = spec["model"]["vocab"]
    vocab["ab"] = vocab.pop(max(vocab, key=vocab.get))
    spec["model"]["merges"] = [["a", "b"]]
    return files | {"tokenizer.json": json.dumps(spec).encode()}


def test_every_reader_of_the_folder_has_them(tmp_path, caplog):
    config = {"additional_special_tokens": ["<a>"], "chat_template": "{{ messages[0]['content'] }}"}
    folder = folder_of(tmp_path, config, {})
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert TokenizerJsonVocabulary(path=folder).encode("<a>") == [36]
    assert "tokenizer.json does not have '<a>'" in caplog.text
    assert merged_tokenizers.tokens_of(files, folder)["<a>"] == 36
    assert gguf_vocabulary.metadata(with_a_merge(files), {"vocab_size": 64})["ggml.tokens"][36] == "<a>"
    assert "<a>" in ChatTemplate(tokenizer=folder).special_tokens  # or a user's text could become it


@pytest.mark.parametrize(
    "config, others, message",
    [
        ({"split_special_tokens": True}, {}, "has split_special_tokens = True"),
        (
            {"added_tokens_decoder": {"99": token("<a>")}},
            {},
            "is token 99 by its tokenizer_config.json, and 36 is the next",
        ),
        ({}, {"added_tokens.json": {"<q>": 40}}, "is token 40 by its added_tokens.json, and 36 is the next"),
        ({"added_tokens_decoder": {"36": 5}}, {}, "5 is named as a token, must be a text"),
        ({"added_tokens_decoder": {"x": token("<a>")}}, {}, "must have ids of tokens"),
        ({"added_tokens_decoder": ["<a>"]}, {}, "must have ids of tokens"),
        ({"pad_token": ["<p>"]}, {}, "is named as a token, must be a text"),
    ],
)
def test_what_contradicts_the_tokenizer_is_refused(config, others, message, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        _ = TokenizerJsonVocabulary(path=folder_of(tmp_path, config, others)).tokenizer
    assert "\n" not in str(error.value)


def test_padding_of_a_tokenizer_is_no_end_token(tmp_path):
    tokenizer = letters()
    tokenizer.enable_padding(length=8, pad_id=2, pad_token="</s>")
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    files = {"tokenizer.json": (tmp_path / "tokenizer.json").read_bytes()}
    assert added.of_files(files, "x").encode("abcdef").ids == [3, 4, 5, 6, 7, 8]
    assert gguf_vocabulary.metadata(with_a_merge(files), {"vocab_size": 64})["ggml.add_eos_token"] is False
