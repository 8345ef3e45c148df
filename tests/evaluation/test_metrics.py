"""Metrics against the libraries that define them and against sums by hand."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.evaluation import metrics
from capibara.evaluation.metrics import Choice, Estimate, computed

TARGETS = ["the cat sat on the mat", "there is a house in New Orleans", "to be, or not to be"]
TEXTS = ["the cat is on the mat today", "There is a house in New York", "to be or what"]


def test_answers_are_compared_as_squad_does():
    assert metrics.normalised(" The  cat's, An apple! ") == "cats apple"
    found = computed(metrics.exact_match, ["Paris", ["8", "eight"], "a dog"], ["  the paris.", "Eight", "cat"])
    assert found["exact_match"].value == pytest.approx(2 / 3)
    assert found["exact_match"].standard_error == pytest.approx(statistics.stdev([1, 1, 0]) / math.sqrt(3))
    strict = metrics.exact_match(["Paris"], ["paris"], normalise=False)
    assert strict == {"exact_match": [0.0]}


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
