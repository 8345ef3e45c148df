"""What is said of two models' scores: their difference, its interval and how probable it is by chance."""

from __future__ import annotations

import math

import numpy as np
import pytest

from capibara.api.comparison import Comparison, compare
from capibara.core.types import UserError
from capibara.evaluation.statistics.stopping import Reason, SequentialStopping


def compared(first, second):
    texts = tuple(str(number) for number in range(len(first)))
    return Comparison(("one", "two"), texts, (texts, texts), (tuple(first), tuple(second)))


@pytest.mark.parametrize("better", [0.1, -0.1])
def test_of_many_prompts_the_interval_and_the_p_value_are_those_of_the_normal_distribution(better):
    first, second = np.random.default_rng(0).normal([[0.0], [better]], 1.0, (2, 400))
    mean, error = (second - first).mean(), (second - first).std() / 400**0.5
    found = compared(first, second)
    np.testing.assert_allclose(found.differences, second - first)
    assert found.interval() == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.1 * error)
    assert found.interval(0.5) == pytest.approx((mean - 0.674 * error, mean + 0.674 * error), abs=0.1 * error)
    assert found.p_value() == pytest.approx(math.erfc(abs(mean) / error / 2**0.5), abs=0.02)


def test_equal_scores_differ_by_chance_alone():
    found = compared([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert found.p_value() == 1.0 and found.interval() == (0.0, 0.0)


class Answers:
    """A model that answers every prompt with itself and its name."""

    chats = False

    def __init__(self, path):
        self.path, self.asked = path, []

    def generate(self, prompts, **options):
        self.asked += prompts
        return [f"{self.path} {prompt}" for prompt in prompts]


def test_a_sequential_comparison_asks_no_more_than_it_needs():
    models, prompts = (Answers("one"), Answers("two")), [str(number) for number in range(200)]
    better = lambda prompt, answer: float(answer.startswith("two") or int(prompt) % 2)  # noqa: E731
    result = compare(*models, prompts, score=better, stopping=SequentialStopping(every=5))
    assert result.stopped.reason is Reason.DIFFERENT and result.stopped.bound.low > 0
    asked = result.stopped.asked
    assert asked < 60 and result.stopped.saved == 2 * (200 - asked)
    stopping, looks = SequentialStopping(), []
    sequence = stopping.sequence()
    for count, scores in enumerate(zip(*result.scores), 1):
        sequence.add(scores[1] - scores[0])
        looks += [count] if stopping.reason(sequence.bound) and count % 5 == 0 else []
    assert looks == [asked], "the first look at which the difference is known, after every five prompts"
    assert list(result.prompts) == models[0].asked == models[1].asked and len(set(result.prompts)) == asked
    assert result.prompts != tuple(prompts[:asked]), "prompts are asked in a random order"
    assert result.answers[1] == tuple(f"two {prompt}" for prompt in result.prompts) and min(result.scores[1]) == 1
    assert f"stopped after {asked} of 200 prompts (different)" in str(result)
    for name in ("interval", "p_value"):
        with pytest.raises(UserError, match=f"{name} is for a number of prompts that was fixed before"):
            getattr(result, name)()


def test_a_sequential_comparison_without_a_difference_asks_all():
    result = compare(
        Answers("one"), Answers("two"), ["a", "b", "c"], score=lambda *_: 1.0, stopping=SequentialStopping()
    )
    assert result.stopped.reason is Reason.ALL_ASKED and result.stopped.asked == 3 and result.stopped.saved == 0


@pytest.mark.parametrize(
    "score, message",
    [
        (None, "stopping needs scores: give score=function"),
        (
            lambda *_: 2.0,
            "a score is 2, must be from 0 to 1, by which the bound is made: set SequentialStopping.scores",
        ),
    ],
)
def test_what_a_sequential_comparison_needs_is_named(score, message):
    with pytest.raises(UserError, match=message):
        compare(Answers("one"), Answers("two"), ["a"], score=score, stopping=SequentialStopping())


def test_what_is_no_stopping_is_named():
    with pytest.raises(UserError, match="stopping is 5, must be cb.SequentialStopping"):
        compare(Answers("one"), Answers("two"), ["a"], score=lambda *_: 1.0, stopping=5)
