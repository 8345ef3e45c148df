"""Solutions with labelled steps: where scores are read, and lines that are refused."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.data.chat.steps import StepsJsonlSource
from capibara.data.chat.template import ChatTemplate
from capibara.data.dataset import Dataset
from capibara.data.pipeline.loader import make_loader
from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary


@pytest.fixture
def dataset(tmp_path, toy_tokenizer):
    def make(*lines, separator="\n", length=64):
        path = tmp_path / "solutions.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        files = (str(path),)
        template = ChatTemplate(tokenizer=toy_tokenizer)
        source = StepsJsonlSource(files=files, validation_files=files, template=template, separator=separator)
        vocabulary = TokenizerJsonVocabulary(path=toy_tokenizer)
        return Dataset(source=source, vocabulary=vocabulary, length=length, shuffle=False, workers=0)

    return make


@pytest.mark.parametrize("separator", ["\n", " ##"])
def test_a_label_stands_at_the_last_token_of_its_separator(dataset, separator):
    solution = {"prompt": "q", "steps": ["ab", "c", "de"], "labels": [True, False, True]}
    other = {"question": "r", "completions": ["x"], "labels": [False]}
    data = dataset(solution, other, separator=separator)
    with contextlib.closing(make_loader(data, split="train", batch_size=1, epochs=1)) as loader:
        (batch,) = loader
    inputs = batch["tokens"][0]
    text = f"<|turn|>u:q<|end|><|turn|>a:ab{separator}c{separator}de{separator}"
    ids, _ = data.get_vocabulary().encode_rendered(text)
    assert inputs[: len(ids)].tolist() == ids.tolist()  # the last token is an input, too
    assert batch["targets"][0][: len(ids) - 1].tolist() == ids[1:].tolist()
    at = np.flatnonzero(batch["weights"][0])
    last = data.get_vocabulary().encode_rendered(separator)[0][-1]
    assert inputs[at].tolist() == [last] * 4 and batch["labels"][0][at].tolist() == [1, 0, 1, 0]
    assert batch["segment_ids"][0][at].tolist() == [1, 1, 1, 3]
    assert at[:3].tolist() == [len(data.get_vocabulary().encode_rendered(text[:end])[0]) - 1 for end in (
        text.index("ab") + 2 + len(separator), text.index(f"c{separator}") + 1 + len(separator), len(text)
    )]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ({"prompt": "q", "labels": [True]}, "steps is None, must be a list of texts"),
        ({"prompt": "q", "steps": [], "labels": []}, r"steps is \[\], must be a list of texts"),
        ({"prompt": "q", "steps": ["a", ""], "labels": [True, True]}, "must be a list of texts"),
        ({"prompt": "q", "steps": ["a", "\n"], "labels": [True, True]}, "must be a list of texts"),
        ({"prompt": "q", "steps": ["a"], "labels": [1]}, r"labels is \[1\], must be a list of true and false"),
        ({"prompt": "q", "steps": ["a"], "labels": [True, False]}, "steps are 1 and labels 2, must be as many"),
        ({"steps": ["a"], "labels": [True]}, "has no prompt"),
    ],
)
def test_a_line_that_is_none_is_named(dataset, line, error):
    data = dataset({"prompt": "q", "steps": ["a"], "labels": [True]}, line)
    with pytest.raises(UserError, match=f"solutions.jsonl:2.*{error}"):
        data.documents("train")


def test_a_separator_ends_each_step(toy_tokenizer):
    with pytest.raises(UserError, match="separator is empty"):
        StepsJsonlSource(files=("a",), template=ChatTemplate(tokenizer=toy_tokenizer), separator="")


def test_another_separator_is_other_data(dataset):
    """A run does not resume with it."""
    line = {"prompt": "q", "steps": ["a"], "labels": [True]}
    prints = [
        dataset(line, separator=separator).source.open("train").fingerprint() for separator in ("\n", "\n", " ##")
    ]
    assert prints[0] == prints[1] != prints[2]
