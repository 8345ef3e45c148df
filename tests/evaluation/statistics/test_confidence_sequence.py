"""The bound of a mean holds at every look, narrows, and ends a comparison no more often than alpha where none is better."""

from __future__ import annotations

import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.evaluation.statistics.confidence_sequence import ConfidenceSequence
from capibara.evaluation.statistics.stopping import Reason, SequentialStopping


def false_alarms(draw, runs: int, looks: int, alpha: float) -> tuple[float, float]:
    """The shares of runs in which a look at every value finds a difference: by the sequence, and by 1.96 standard errors."""
    rng, by_sequence, by_errors = np.random.default_rng(0), 0, 0
    for _ in range(runs):
        sequence, values = ConfidenceSequence(1.0, alpha), draw(rng, looks)
        found = False
        for value in values:
            sequence.add(value)
            found = found or sequence.bound.p_value <= alpha
        by_sequence += found
        count = np.arange(1, looks + 1)
        mean = np.cumsum(values) / count
        error = np.sqrt(np.maximum(np.cumsum(values**2) / count - mean**2, 0) / count)
        by_errors += bool((np.abs(mean) > 1.96 * error)[20:].any())
    return by_sequence / runs, by_errors / runs


# Of two models without a difference: of right and wrong answers, of scores between, and of rare and large differences.
DRAWS = {
    "right_or_wrong": lambda rng, count: rng.integers(0, 2, count) - rng.integers(0, 2, count).astype(float),
    "between": lambda rng, count: rng.uniform(-1, 1, count),
    "skewed": lambda rng, count: np.where(rng.random(count) < 0.1, 0.9, -0.1),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_looking_at_every_answer_makes_no_false_difference_likelier(draw):
    by_sequence, by_errors = false_alarms(draw, runs=200, looks=200, alpha=0.1)
    assert by_sequence <= 0.1  # of 200 runs; the guarantee is of their expectation, which is well below
    assert by_errors > 0.15, "an interval for a fixed number is wrong under peeking: the simulation looks often enough"


def test_the_interval_has_the_mean_at_every_look_and_narrows():
    rng, misses = np.random.default_rng(1), 0
    for _ in range(100):
        sequence, width, missed = ConfidenceSequence(1.0, 0.1), 2.0, False
        for value in rng.choice([-1.0, 0.0, 1.0], 150, p=[0.1, 0.5, 0.4]):
            sequence.add(value)
            bound = sequence.bound
            missed = missed or not bound.low <= 0.3 <= bound.high
            assert bound.high - bound.low <= width + 1e-12
            width = bound.high - bound.low
        misses += missed
    assert misses <= 10 and width < 0.6


def capital(values, mean, alpha):
    """The largest log capital so far of the hedged gambler, divided by two: section 4 of the paper, one number at a time."""
    larger = smaller = 0.0
    total, squares, count, best = 0.5, 0.25, 0, -np.inf
    for value in values:
        count += 1
        bet = np.sqrt(2 * np.log(2 / alpha) / (squares * np.log(count + 1)))
        larger += np.log(1 + min(bet, 0.5 / mean) * (value - mean))
        smaller += np.log(1 - min(bet, 0.5 / (1 - mean)) * (value - mean))
        best = max(best, larger - np.log(2), smaller - np.log(2))
        total += value
        squares += (value - total / (count + 1)) ** 2
    return best


def test_the_interval_is_that_of_an_independent_statement():
    alpha, rng = 0.1, np.random.default_rng(3)
    differences = rng.choice([-2.0, 0.0, 2.0], 120, p=[0.1, 0.3, 0.6])
    sequence = ConfidenceSequence(2.0, alpha)
    for value in differences:
        sequence.add(value)
    values = (differences / 2 + 1) / 2
    means = np.linspace(0, 1, 2001)[1:-1]
    inside = [4 * mean - 2 for mean in means if capital(values, mean, alpha) < np.log(1 / alpha)]
    bound = sequence.bound
    assert (bound.low, bound.high) == pytest.approx((inside[0] - 0.002, inside[-1] + 0.002))  # by a candidate wider
    assert bound.p_value == pytest.approx(np.exp(-capital(values, 0.5, alpha)), rel=1e-9)


def test_a_difference_is_told_and_its_size_and_sign():
    for sign in (1, -1):
        sequence, rng = ConfidenceSequence(2.0, 0.05), np.random.default_rng(2)
        for value in rng.choice([0.0, 1.0], 200, p=[0.6, 0.4]):
            sequence.add(sign * value)
        bound = sequence.bound
        low, high = (bound.low, bound.high) if sign > 0 else (-bound.high, -bound.low)
        assert 0.2 < low < 0.4 < high < 0.6 and bound.p_value < 1e-4


def test_a_comparison_stops_for_one_of_two_reasons():
    stopping = SequentialStopping(negligible=0.2)
    sequence = stopping.sequence()
    assert stopping.reason(sequence.bound) is None and sequence.bound.p_value == 1
    for _ in range(200):
        sequence.add(0.0)
    assert stopping.reason(sequence.bound) is Reason.NEGLIGIBLE
    assert SequentialStopping().reason(sequence.bound) is None
    sequence = stopping.sequence()
    for _ in range(20):
        sequence.add(-1.0)
    assert stopping.reason(sequence.bound) is Reason.DIFFERENT


@pytest.mark.parametrize(
    "options, message",
    [
        ({"alpha": 0.0}, "alpha is 0.0, must be above 0 and below 1"),
        ({"alpha": float("nan")}, "alpha is nan, must be above 0"),
        ({"every": 0}, "every is 0, must be at least 1"),
        ({"alpha": "x"}, "alpha \\('x'\\) must be float, not str"),
        ({"every": 1.5}, "every \\(1.5\\) must be int, not float"),
        ({"scores": (1.0, 1.0)}, "scores is \\(1.0, 1.0\\), must be a least and a larger number"),
        ({"negligible": 1.5}, "negligible is 1.5, must be above 0 and below 1"),
        ({"seed": -1}, "seed is -1, must be at least 0"),
    ],
)
def test_a_wrong_option_is_named(options, message):
    with pytest.raises(UserError, match=f"SequentialStopping.{message}"):
        SequentialStopping(**options)
