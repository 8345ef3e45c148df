"""What the files beside a tokenizer.json say: one answer for the vocabulary and for the chat template."""

from __future__ import annotations

import json

import pytest

from capibara.core.types import UserError
from capibara.data.chat.formats import Conversation
from capibara.data.chat.template import ChatTemplate
from capibara.data.tokenizers.files import over, special_tokens
from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary

TALK = Conversation([{"role": "user", "content": "x"}], None)


@pytest.fixture
def folder(tokenizer_file, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}|{{ eos_token }}")
    return tmp_path


def put(folder, name, values):
    (folder / name).write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("config", "older", "bos", "eos"),
    [
        # As transformers 5 reads them: PreTrainedTokenizerFast.from_pretrained(folder).special_tokens_map.
        ({"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}, None, "<s>", "</s>"),
        (None, {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}}, "<bos>", "<eos>"),
        ({"eos_token": "</s>"}, {"bos_token": "<bos>", "eos_token": "<eos>"}, "<bos>", "<eos>"),
        ({"eos_token": "</s>", "added_tokens_decoder": {}, "bos_token": "<s>"}, {"eos_token": "<eos>"}, "<s>", "</s>"),
    ],
)
def test_vocabulary_and_template_know_the_same_tokens(folder, config, older, bos, eos):
    for name, values in (("tokenizer_config.json", config), ("special_tokens_map.json", older)):
        if values is not None:
            put(folder, name, values)
    vocabulary, template = TokenizerJsonVocabulary(path=str(folder)), ChatTemplate(tokenizer=str(folder))
    assert template.render(TALK, "a:1").text == f"{bos}|{eos}"
    found = [vocabulary.tokenizer.id_to_token(i) for i in (vocabulary.bos_id, vocabulary.eos_id)]
    assert found == [bos, eos]


def test_what_is_no_token_is_passed_over(folder):
    values = {"eos_token": "</s>", "bos_token": None, "add_bos_token": True, "pad_token": {"id": 3}, "other": "x"}
    put(folder, "tokenizer_config.json", values)
    assert special_tokens(str(folder)) == {"eos_token": "</s>"}
    assert special_tokens(str(folder / "none")) == {}


@pytest.mark.parametrize("token", [5, 1.5, True, ["</s>"]], ids=str)
@pytest.mark.parametrize("field", ["eos_token", "bos_token", "pad_token"])
def test_a_special_token_that_is_no_text_is_refused(folder, field, token):
    put(folder, "tokenizer_config.json", {field: token})
    with pytest.raises(UserError, match=f"tokenizer_config.json has {field} = .*, must be a text, or an object"):
        special_tokens(str(folder))


@pytest.mark.parametrize(
    ("text", "message"), [("[]", "is no JSON object"), ("{", "cannot be read"), ("\xff", "cannot be read")]
)
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_broken_file_is_told_alike(folder, name, text, message):
    (folder / name).write_bytes(text.encode("latin-1"))
    for read in (
        lambda: TokenizerJsonVocabulary(path=str(folder)).eos_id,
        lambda: ChatTemplate(tokenizer=str(folder)).render(TALK, "a:1"),
    ):
        with pytest.raises(UserError, match=f"{name} {message}"):
            read()


@pytest.mark.parametrize(
    "base, own, expected",
    [
        (("tokenizer.json", "chat_template.jinja"), (), {"tokenizer.json": "base", "chat_template.jinja": "base"}),
        (
            ("tokenizer.json", "added_tokens.json", "chat_template.jinja", "generation_config.json"),
            ("tokenizer.json", "tokenizer_config.json"),
            {"tokenizer.json": "own", "tokenizer_config.json": "own", "generation_config.json": "base"},
        ),
        (("tokenizer.json", "tokenizer_config.json"), ("tokenizer.model",), {"tokenizer.model": "own"}),
        (("tokenizer.json", "chat_template.jinja"), ("tokenizer_config.json",), {"tokenizer.json": "base", "tokenizer_config.json": "own"}),
        (
            ("tokenizer.json", "tokenizer_config.json"),
            ("chat_template.jinja",),
            {"tokenizer.json": "base", "tokenizer_config.json": "base", "chat_template.jinja": "own"},
        ),
    ],
)  # fmt: skip
def test_an_adapters_tokenizer_is_taken_whole(base, own, expected, tmp_path):
    # A template in the adapter's tokenizer_config.json is not hidden by the base's chat_template.jinja.
    for name in own:
        (tmp_path / name).write_text('{"chat_template": "own"}')
    found = over({name: b"base" for name in base}, str(tmp_path))
    assert {name: "base" if content == b"base" else "own" for name, content in found.items()} == expected


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_an_end_token_without_an_id_of_the_tokenizer_is_told(folder, file, capfd):
    size = TokenizerJsonVocabulary(path=str(folder)).size
    put(folder, file, {"eos_token_id": [3, size, -1]})
    vocabulary = TokenizerJsonVocabulary(path=str(folder))
    assert vocabulary.end_ids == tuple(dict.fromkeys((vocabulary.eos_id, 3)))
    said = f"note: {folder} has eos_token_id = [{size}, -1], which never ends a text: the tokenizer has ids from 0 to {size - 1}\n"
    assert capfd.readouterr().err == said
    put(folder, file, {"eos_token_id": [3, size - 1]})
    assert TokenizerJsonVocabulary(path=str(folder)).end_ids and capfd.readouterr().err == ""
