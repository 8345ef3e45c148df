"""Soups against plain means, and what each must hold whatever the metric is."""

from __future__ import annotations

import math
import weakref

import numpy as np
import pytest

from capibara.consensus import soups
from capibara.core.types import UserError

TARGET = np.float32([1, -2, 3, 0.5])


def models(count=5, seed=0):
    draw = np.random.default_rng(seed)
    return [
        {
            "a": TARGET[:2] + draw.standard_normal(2, np.float32),
            "b": {"c": TARGET[2:] + draw.standard_normal(2, np.float32)},
        }
        for _ in range(count)
    ]


def loss(params):
    return float(np.square(np.concatenate([params["a"], params["b"]["c"]]) - TARGET).sum())


def assert_equal(got, want):
    np.testing.assert_allclose(got["a"], want["a"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["b"]["c"], want["b"]["c"], rtol=1e-5, atol=1e-6)


def mean(given, weights):
    def of(part):
        return sum(weight * part(model) for weight, model in zip(weights, given, strict=True))

    return {"a": of(lambda model: model["a"]), "b": {"c": of(lambda model: model["b"]["c"])}}


def test_means():
    given = models()
    assert_equal(soups.uniform(iter(given)), mean(given, [0.2] * 5))
    assert_equal(soups.weighted(iter(given), [1, 0.5, 0, 2, -1]), mean(given, [1, 0.5, 0, 2, -1]))


@pytest.mark.parametrize("maximize", [False, True])
def test_a_greedy_soup_is_never_worse_than_its_best_member(maximize):
    sign = -1 if maximize else 1
    for seed in range(20):
        given = models(seed=seed)
        soup = soups.greedy([lambda model=model: model for model in given], lambda x: sign * loss(x), maximize=maximize)
        assert sign * soup.score <= min(map(loss, given)) + 1e-7
        assert soup.score == sign * loss(soup.params)
        assert soup.members[0] == np.argmin([loss(model) for model in given])
        assert_equal(soup.params, mean([given[i] for i in soup.members], [1 / len(soup.members)] * len(soup.members)))
        np.testing.assert_allclose(soup.scores, [sign * loss(model) for model in given], rtol=1e-6)


def test_an_incremental_soup_takes_what_improves_it():
    given = models()
    soup = soups.incremental(iter(given), loss, maximize=False)
    members, best = [], math.inf
    for i in range(len(given)):
        tried = [*members, i]
        if (score := loss(mean([given[j] for j in tried], [1 / len(tried)] * len(tried)))) <= best:
            members, best = tried, score
    assert soup.members == tuple(members) and 1 <= len(members)
    assert math.isclose(soup.score, best, rel_tol=1e-5)


def test_models_without_a_score_are_left_out():
    given = models()
    given[2]["a"][0] = np.nan
    loaders = [lambda model=model: model for model in given]
    for soup in (soups.greedy(loaders, loss, maximize=False), soups.incremental(given, loss, maximize=False)):
        assert 2 not in soup.members and math.isfinite(soup.score)
    with pytest.raises(UserError, match="no value for any of the 5 models"):
        soups.greedy(loaders, lambda params: math.nan)


def test_two_models_are_held_at_a_time():
    """The soup and the candidate: what came is gone when the metric is asked, but for a first one that is the soup."""
    seen, alive = [], []

    def made():
        array = TARGET.copy() + len(seen)
        seen.append(weakref.ref(array))
        return {"a": array[:2], "b": {"c": array[2:]}}

    def metric(params):
        alive.append(sum(ref() is not None for ref in seen))
        return -loss(params)

    soups.incremental((made() for _ in range(5)), metric, maximize=False)
    assert max(alive) <= 1, alive
    seen.clear(), alive.clear()
    soups.greedy([made] * 4, metric)
    assert max(alive) <= 1, alive


def test_checkpoints_make_up_for_a_decay():
    """Updates of a constant rate, merged, are those of the decayed rate; a linear decay is the uniform mean."""
    updates, start = [np.float32(value) for value in (1.0, 0.5, -2.0)], np.float32(3)
    checkpoints = [{"x": start + sum(updates[:i], np.float32(0))} for i in range(4)]
    weights = soups.decay_weights((0.9, 0.6, 0.1))
    got = soups.weighted(checkpoints, weights)["x"]
    np.testing.assert_allclose(got, start + 0.9 * updates[0] + 0.6 * updates[1] + 0.1 * updates[2], rtol=1e-6)
    assert math.isclose(sum(weights), 1)
    np.testing.assert_allclose(soups.decay_weights((0.75, 0.5, 0.25)), [0.25] * 4)


def test_mistakes():
    with pytest.raises(UserError, match="weights has 1 numbers, there are 5 models"):
        soups.weighted(models(), [1.0])
    with pytest.raises(UserError, match="weights has nan, must be finite"):
        soups.weighted(models(), [math.nan] * 5)
    with pytest.raises(UserError, match="multipliers has 2, must be from 0 to 1"):
        soups.decay_weights((2,))
    with pytest.raises(UserError, match="has no models"):
        soups.uniform([])
