"""Metrics against the libraries that define them and against sums by hand."""

from __future__ import annotations

import math
import random
import re
import statistics
import string
import unicodedata

import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.evaluation import metrics, rouge_words
from capibara.evaluation.metrics import Choice, Estimate, PairScores


def computed(metric, targets, predictions):
    return metrics.computed(metric, targets, predictions)[0]


TARGETS = ["the cat sat on the mat", "there is a house in New Orleans", "to be, or not to be"]
TEXTS = ["the cat is on the mat today", "There is a house in New York", "to be or what"]


def test_answers_are_compared_as_squad_does():
    assert metrics.normalised(" The  cat's, An apple! ") == "cats apple"
    found = computed(metrics.exact_match, ["Paris", ["8", "eight"], "a dog"], ["  the paris.", "Eight", "cat"])
    assert found["exact_match"].value == pytest.approx(2 / 3)
    assert found["exact_match"].standard_error == pytest.approx(statistics.stdev([1, 1, 0]) / math.sqrt(3))
    strict = metrics.exact_match(["Paris"], ["paris"], normalise=False)
    assert strict == {"exact_match": [0.0]}


EQUAL = [
    ("-5", "\u22125"), ("1,234", "1234"), ("$1,234.50", "1234.50"), ("5.", "5"), ("(5)", "5"), ("+5", "5"), ("50%", "50"),
    ("-$5", "-5"), ("1990-1995", "1990\u20131995"), ("COVID-19", "covid19"), ("x = 5!", "x 5"), ("The 1,000,000.", "1000000"),
    ("#5", "5"), ("a 5-year-old", "5yearold"), ("e.g. Paris", "eg paris"), ("1. Paris", "1 paris"), ("**5**", "5"),
]  # fmt: skip
APART = [
    ("-5", "5"), ("1.5", "15"), ("1,5", "15"), (".5", "5"), ("0.5", "05"), ("3/4", "34"), ("10:30", "1030"), ("2-3", "23"),
    ("1e-5", "1e5"), ("10^3", "103"), ("2*3", "23"), ("-1.5", "1.5"), ("-.5", ".5"), ("x=-5", "x=5"), ("$-5", "$5"),
    ("1.2.3", "123"), ("1,23", "123"), ("0,123", "0123"), ("-5 to -3", "5 to 3"), ("-1,234", "1,234"), ("1990-1995", "19901995"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_what_is_equal_but_for_writing_is_a_match(one, other):
    assert metrics.exact_match([one, other], [other, one]) == {"exact_match": [1.0, 1.0]}


@pytest.mark.parametrize(("one", "other"), APART)
def test_other_numbers_are_no_match(one, other):
    for around in ("{}", "It is {}.", "({})", "the {}, a"):
        one_text, other_text = around.format(one), around.format(other)
        assert metrics.exact_match([one_text, other_text], [other_text, one_text]) == {"exact_match": [0.0, 0.0]}
    assert metrics.token_f1([one], [other])["f1"][0] < 1


def test_numbers_that_are_written_otherwise_stay_apart():
    """Every pair of decimals of a few digits, signs and points."""
    digits = ["0", "5", "15", "150"]
    texts = [
        f"{sign}{whole}{part}" for sign in ("", "-", "\u2212") for whole in digits for part in ("", ".5", ".05", ".15")
    ]
    for one in texts:
        for other in texts:
            same = metrics.normalised(one) == metrics.normalised(other)
            assert same == (one.replace("\u2212", "-") == other.replace("\u2212", "-")), (one, other)


def test_text_without_numbers_is_normalised_as_squad_does():
    """Against the definition: lower case, then punctuation, then articles, then white space."""
    draw = random.Random(1)
    letters = "abcthen ANT" + string.punctuation + "éж中"
    for _ in range(3000):
        text = "".join(draw.choices(letters, k=draw.randrange(30)))
        plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
        want = " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())
        assert metrics.normalised(text) == want, text


def test_f1_is_that_of_the_words_in_common():
    # 3 of 4 words are right, 3 of 5 are given: F1 = 2 * 3 / 9.
    assert metrics.token_f1(["one two three four"], ["four three two zero zero"]) == {"f1": [6 / 9]}
    assert metrics.token_f1([["no", "one two"]], ["one two"]) == {"f1": [1.0]}
    assert metrics.token_f1(["one", "the"], ["", "a"]) == {"f1": [0.0, 1.0]}  # of nothing but articles nothing is left


def test_several_samples_count_by_their_mean():
    assert metrics.exact_match(["yes", "no"], [["yes", "no"], ["no", "no"]]) == {"exact_match": [0.5, 1.0]}


def test_rouge_is_rouge_scores():
    from rouge_score.rouge_scorer import RougeScorer

    found = metrics.rouge(TARGETS, TEXTS)
    for i, (target, text) in enumerate(zip(TARGETS, TEXTS)):
        for kind, score in RougeScorer(["rouge1", "rouge2", "rougeL"]).score(target, text).items():
            assert found[kind][i] == score.fmeasure
    assert found["rouge1"][0] == pytest.approx(2 * 5 / (6 + 7))
    assert metrics.rouge([["x", TEXTS[0]]], TEXTS[:1])["rougeL"] == [1.0]
    with pytest.raises(UserError, match="rouge.kinds"):
        metrics.rouge(TARGETS, TEXTS, kinds=("rogue",))


SCRIPTS = {
    "Russian": ("Кошка сидит на ковре", "Кошка лежит на ковре", 4, 3),
    "Greek": ("η γάτα κάθεται", "η γάτα τρέχει", 3, 2),
    "French": ("l'été où ça brûle", "l'été où ça gèle", 5, 4),
    "Chinese": ("猫坐在垫子上", "猫躺在垫子上", 6, 5),
    "Japanese": ("ねこがいる", "ねこはいる", 5, 4),
    "Thai": ("แมว", "แมว", 3, 3),
    "Hindi": ("बिल्ली चटाई पर", "बिल्ली दरी पर", 3, 2),
    "Arabic": ("القطة على السجادة", "القطة تحت السجادة", 3, 2),
    "Korean": ("고양이 매트 위", "고양이 카펫 위", 3, 2),
    "mixed": ("Go 猫 2024", "go 狗 2024", 3, 2),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_rouge_has_words_of_every_script(script):
    """Both texts have `count` words, `common` of which are the same: F1 = common / count."""
    target, text, count, common = SCRIPTS[script]
    found = metrics.rouge([target, target], [text, target])
    assert found["rouge1"] == [pytest.approx(common / count), 1.0] and found["rougeL"][1] == 1.0
    decomposed = unicodedata.normalize("NFD", target)
    assert metrics.rouge([target], [decomposed])["rouge1"] == [1.0]


def test_rouge_of_ascii_is_rouge_scores_own():
    from rouge_score.tokenizers import DefaultTokenizer

    draw = random.Random(2)
    pieces = [
        "running",
        "cats",
        "the",
        "x_y",
        "1.5",
        "it's",
        "A-b",
        "\n",
        "Don't!",
        "ponies",
        "http://a.b/c",
        "__",
        "50%",
    ]
    for stem in (False, True):
        own, theirs = rouge_words.Words(stem), DefaultTokenizer(stem)
        for _ in range(500):
            text = draw.choice((" ", "", "--")).join(draw.choices(pieces, k=8))
            assert own.tokenize(text) == theirs.tokenize(text), text


def test_rouge_says_what_its_ascii_words_drop(caplog):
    with caplog.at_level("WARNING", logger="capibara"):
        found = metrics.rouge(["Кот cat"], ["Кит cat"], words="ascii")
        assert found["rouge1"] == [1.0]  # as rouge-score has it
        assert metrics.rouge(TARGETS, TEXTS, words="ascii") == metrics.rouge(TARGETS, TEXTS)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("rouge.words = 'ascii' drops 3 of the 6 letters of the targets, such as 'К'")
    with pytest.raises(UserError, match="rouge.words is 'all', must be 'unicode' or 'ascii'"):
        metrics.rouge(["a"], ["a"], words="all")


def test_bleu_is_sacrebleus():
    import sacrebleu

    found = computed(metrics.bleu, TARGETS, TEXTS)["bleu"]
    assert found.value == pytest.approx(sacrebleu.corpus_bleu(TEXTS, [TARGETS]).score, abs=1e-9)
    assert 10 < found.value < 90 and 0 < found.standard_error < 40
    two = [[target, text] for target, text in zip(TARGETS, TEXTS)]
    assert metrics.bleu(two, TEXTS)["bleu"].value == pytest.approx(100)
    with pytest.raises(UserError, match="num_samples = 1"):
        metrics.bleu(["a"], [["a", "b"]])
    with pytest.raises(UserError, match="bleu.tokenize is 'words'"):
        metrics.bleu(["a"], ["a"], tokenize="words")


def test_choices_are_ranked_with_and_without_their_length():
    choices = [Choice(-6.0, 2, 12), Choice(-5.0, 1, 2), Choice(-8.0, 4, 10)]
    # Sums: -6, -5, -8. A byte: -0.5, -2.5, -0.8. A token: -3, -5, -2.
    right = [metrics.choice_accuracy([target], [choices]) for target in range(3)]
    assert [one["accuracy"] for one in right] == [[0.0], [1.0], [0.0]]
    assert [one["accuracy_per_byte"] for one in right] == [[1.0], [0.0], [0.0]]
    assert [one["accuracy_per_token"] for one in right] == [[0.0], [0.0], [1.0]]


def test_what_a_metric_may_give():
    def good(targets, predictions):
        return {"each": [True, False], "all": np.float32(2), "said": Estimate(3.0, 0.5)}

    found = computed(good, "ab", "ab")
    assert found == {"each": Estimate(0.5, 0.5), "all": Estimate(2.0), "said": Estimate(3.0, 0.5)}
    assert computed(lambda t, p: {"x": [1]}, "a", "a") == {"x": Estimate(1.0, None)}

    def short(targets, predictions):
        return {"x": [1.0]}

    for value in (short, lambda t, p: {"x": "much"}, lambda t, p: {"x": {}}, lambda t, p: {"x": [[1], [2]]}):
        with pytest.raises(UserError, match="must be one number, or one per example"):
            computed(value, "ab", "ab")
    with pytest.raises(UserError, match="returns float, must return a dict"):
        computed(lambda t, p: 1.0, "a", "a")
    with pytest.raises(UserError, match="must be a text"):
        metrics.exact_match([{"test": ""}], ["a"])
    with pytest.raises(UserError, match="must be a text"):
        metrics.exact_match(["a"], [[Choice(-1.0, 1, 1)]])


def test_groups_divide_values_and_call_a_metric_of_all_again():
    calls = []

    def metric(targets, predictions):
        calls.append(len(targets))
        return {"same": [float(t == p) for t, p in zip(targets, predictions)]}

    targets, predictions, groups = ["a", "b", "c", "d"], ["a", "x", "c", "x"], ["two", "two", "one", "two"]
    total, of_groups = metrics.computed(metric, targets, predictions, groups)
    assert total["same"].value == 0.5 and calls == [4]
    assert list(of_groups) == ["one", "two"]
    assert of_groups["one"]["same"] == Estimate(1.0, None)
    assert of_groups["two"]["same"] == metrics.mean([1.0, 0.0, 0.0])
    assert metrics.computed(metric, targets, predictions)[1] == {}
    count = lambda targets, predictions: {"count": len(targets)}  # noqa: E731
    assert {
        key: item["count"].value for key, item in metrics.computed(count, targets, predictions, groups)[1].items()
    } == {
        "one": 1,
        "two": 3,
    }


def test_the_chosen_answer_of_a_pair_must_have_the_higher_score():
    scores = [PairScores(1.0, 0.5), PairScores(0.5, 0.5), PairScores(-1.0, 0.0)]
    assert metrics.pair_accuracy([None] * 3, scores) == {"accuracy": [1.0, 0.0, 0.0]}
