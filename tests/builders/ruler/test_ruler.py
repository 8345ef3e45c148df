"""Long documents with questions: their lengths, their answers, and that they depend on the seed alone."""

from __future__ import annotations

import collections
import json
import re

import pytest

from capibara.builders.ruler.build import Ruler, examples, write
from capibara.builders.ruler.docstrings import summaries
from capibara.builders.ruler.tasks import TASKS
from capibara.cli.preparing import ruler as verb
from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import ByteVocabulary


def lines_of(**fields):
    return [*examples(Ruler(**fields), ByteVocabulary())]


def test_documents_fill_their_length():
    for line in lines_of(lengths=(512, 3000), examples=3):
        assert len(line["document"].encode()) == line["tokens"] <= line["length"]
        assert line["tokens"] > line["length"] - 150, "there was room for another sentence"


@pytest.mark.parametrize("task", ["needle", "needles", "facts"])
def test_a_fact_is_stated_once(task):
    for line in lines_of(tasks=(task,), examples=5, fact="note {key} {value};", question="{key}"):
        assert re.findall(rf"note {line['question']} (\w+);", line["document"]) == [line["answer"]]
    stated = len(re.findall("note", line["document"]))
    assert stated == {"needle": 1, "needles": 8}.get(task, stated) and (task != "facts" or stated > 100)


def test_variables_are_those_of_the_chain():
    for line in lines_of(tasks=("variables",), examples=5):
        value, values = re.search(r"\d+", line["question"])[0], {}
        for name, source in re.findall(r"(x\d+) = (\w+)\.", line["document"]):
            values[name] = values.get(source, source)  # in order: a variable is assigned before it is read
        assert line["answer"].split() == [name for name in values if values[name] == value]
        assert sorted(collections.Counter(values.values()).values()) == [5, 5]


@pytest.mark.parametrize("length", [1024, 20_000])
def test_common_words_are_the_most_frequent(length):
    for line in lines_of(tasks=("common_words",), lengths=(length,), examples=3):
        counts = collections.Counter(line["document"].split()).most_common(4)
        assert line["answer"].split() == sorted(word for word, _ in counts[:3]) and counts[2][1] > counts[3][1]


def test_docstrings_are_of_the_standard_library():
    assert len(summaries()) > 300 and "shutil.copyfile" in summaries()
    (line,) = lines_of(tasks=("docstrings",), examples=1)
    described = line["question"].partition("line: ")[2]
    assert summaries()[line["answer"]] == described and line["document"].count(described) == 1


def test_documents_depend_on_the_seed_and_not_on_each_other():
    few, many = lines_of(tasks=("facts",), examples=1), lines_of(tasks=("needle", "facts"), examples=2)
    assert few == many[2:3] and many[2] != many[3] and few != lines_of(tasks=("facts",), examples=1, seed=1)


def test_the_verb_writes_a_file(toy_tokenizer, tmp_path, capsys):
    out = tmp_path / "new" / "ruler.jsonl"
    verb.main([f"--tokenizer={toy_tokenizer}", f"--out={out}", "--gin.Ruler.examples=2", "--gin.Ruler.lengths=(1024,)"])
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(written) == 2 * len(TASKS) and f"{len(written)} documents in {out}" in capsys.readouterr().out
    with pytest.raises(UserError, match=f"--out={out} exists already: name another, or remove it"):
        verb.main([f"--tokenizer={toy_tokenizer}", f"--out={out}"])
    assert write(Ruler(examples=2, lengths=(1024,)), ByteVocabulary(), str(out)) == len(written)
    assert [json.loads(line) for line in out.read_text().splitlines()] == written  # the toy tokenizer has bytes, too


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tasks": ("needel",)}, "Ruler.tasks has 'needel', must be of needle, .*did you mean needle"),
        ({"tasks": ()}, "Ruler.tasks is empty"),
        ({"lengths": ()}, "Ruler.lengths is empty"),
        ({"lengths": (4096, 100)}, "Ruler.lengths has 100, must be at least 128"),
        ({"examples": 0}, "Ruler.examples is 0"),
        ({"seed": -1}, "Ruler.seed is -1, must be at least 0"),
        ({"fact": "{key} is {valu}"}, r"Ruler.fact is '\{key\} is \{valu\}', must have \{key\} and \{value\} once"),
        ({"question": "{key"}, r"Ruler.question is '\{key', must have \{key\} once"),
    ],
)
def test_mistakes_are_named(fields, message):
    with pytest.raises(UserError, match=message):
        Ruler(**fields)


def test_flags_that_are_missing_are_named(tmp_path):
    for flags, message in (([], "--tokenizer is missing"), (["--tokenizer=x"], "--out is missing")):
        with pytest.raises(UserError, match=message):
            verb.main(flags)
    with pytest.raises(UserError, match="facts have .* tokens: raise it"):
        lines_of(tasks=("needles",), lengths=(128,), examples=1)
