"""The search on a loss that is known: its order, its draws, and what is refused by name."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.evaluation.context.search import Individual, RopeSearch, search

GOAL = np.array([1.0, 1.2, 2.0, 3.0, 4.5, 4.5])
SMALL = RopeSearch(population=32, parents=16, mutations=16, crossovers=16, iterations=40, unscaled_tokens=(0, 4, 8))
STARTS = [Individual((4.0,) * 6), Individual(tuple(np.linspace(1.0, 4.0, 6)))]


def distance(individual: Individual) -> float:
    return float(np.abs(np.array(individual.factors) - GOAL).sum()) + abs(individual.unscaled_tokens - 8)


def test_the_search_comes_near_the_best_scaling_and_keeps_the_order():
    seen: list[Individual] = []
    best, loss = search(SMALL, STARTS, 5.0, lambda individual: seen.append(individual) or distance(individual))
    assert loss == distance(best) == min(map(distance, seen))
    assert loss < 0.5 < min(map(distance, STARTS)) and best.unscaled_tokens == 8
    assert len({*seen}) == len(seen) <= SMALL.evaluations  # each once
    for individual in seen:
        assert np.all(np.diff((1.0, *individual.factors, 5.0)) >= 0)
    again: list[Individual] = []
    search(SMALL, STARTS, 5.0, lambda individual: again.append(individual) or distance(individual))
    assert again == seen
    other: list[Individual] = []
    settings = dataclasses.replace(SMALL, seed=1)
    search(settings, STARTS, 5.0, lambda individual: other.append(individual) or distance(individual))
    assert other[: len(STARTS)] == seen[: len(STARTS)] and other != seen


def test_without_generations_the_best_of_the_first_is_taken():
    settings = dataclasses.replace(SMALL, population=2, iterations=0)
    assert search(settings, STARTS, 5.0, distance) == (STARTS[1], distance(STARTS[1]))


def test_only_the_given_numbers_of_tokens_are_tried():
    seen = set()
    settings = dataclasses.replace(SMALL, unscaled_tokens=(0,))
    search(settings, STARTS, 5.0, lambda individual: seen.add(individual.unscaled_tokens) or distance(individual))
    assert seen == {0}


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"documents": 0}, "RopeSearch.documents is 0, must be at least 1"),
        ({"parents": 0}, "RopeSearch.parents is 0, must be at least 1"),
        ({"iterations": -1}, "RopeSearch.iterations is -1, must be at least 0"),
        ({"mutation_probability": 0.0}, "RopeSearch.mutation_probability is 0.0, must be above 0"),
        ({"reach": 0.5}, "RopeSearch.reach is 0.5, must be finite and at least 1"),
        ({"attention_factor": 0.0}, "RopeSearch.attention_factor is 0.0, must be finite and above 0"),
        ({"unscaled_tokens": ()}, r"RopeSearch.unscaled_tokens is \(\), must be numbers of at least 0"),
        ({"unscaled_tokens": (-1,)}, r"RopeSearch.unscaled_tokens is \(-1,\), must be numbers"),
    ],
)
def test_settings_are_checked(fields, error):
    with pytest.raises(UserError, match=error):
        RopeSearch(**fields)
