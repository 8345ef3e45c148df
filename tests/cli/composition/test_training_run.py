"""What a run that begins from another model is told of that model's tokenizer."""

import dataclasses
import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from capibara.cli.composition import training_run
from capibara.data.dataset import Dataset
from capibara.data.sources.sources import StdlibSource
from capibara.data.tokenizers import files
from capibara.data.tokenizers.vocabulary import ByteVocabulary, TokenizerJsonVocabulary


@dataclasses.dataclass
class Foreign:
    tokenizer: dict[str, bytes]


@dataclasses.dataclass
class Loader:
    foreign: Foreign


def folder_of(path, letters, **config):
    path.mkdir()
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(["<eos>", *letters])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", **config}))
    return str(path)


def told(theirs, vocabulary):
    dataset = Dataset(source=StdlibSource(), vocabulary=vocabulary)
    return training_run._other_tokenizer("base", Loader(Foreign(theirs)), dataset)


@pytest.mark.parametrize(
    "letters, config, expected",
    [
        ("abc", {}, None),
        ("abc", {"model_max_length": 7}, None),
        ("abcd", {}, None),  # one more token
        ("abd", {}, "token 3 is 'c', not 'd'"),
        ("acb", {}, "'b' is token 2, not 3"),
        ("abc", {"pad_token": "<pad>"}, None),
    ],
)
def test_another_tokenizer_of_the_initial_weights_is_told(letters, config, expected, tmp_path):
    own = TokenizerJsonVocabulary(path=folder_of(tmp_path / "own", "abc"))
    theirs = files.carried(folder_of(tmp_path / "theirs", letters, **config))
    lines = told(theirs, own)
    assert lines == (
        [f"note: the tokenizer of Trainer.init_from (base) is another than Dataset.vocabulary: {expected}"]
        if expected
        else []
    )


def test_bytes_are_another_tokenizer_and_a_model_may_have_none(tmp_path):
    theirs = files.carried(folder_of(tmp_path / "theirs", "abc"))
    assert told(theirs, ByteVocabulary())[0].endswith("ByteVocabulary has no such tokens")
    assert told({}, ByteVocabulary()) == [] and told({"generation_config.json": b"{}"}, ByteVocabulary()) == []
