"""What is said of two models' scores: their difference, its interval and how probable it is by chance."""

from __future__ import annotations

import math

import numpy as np
import pytest

from capibara.api.comparison import Comparison


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
