"""The evolutionary search of LongRoPE (Ding et al. 2024, arXiv:2402.13753, algorithm 1) over scalings of rotary positions.

An individual is a divisor of each frequency, which must not fall from one frequency to the next lower one, and the number of first
tokens whose frequencies are left alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from capibara.config import configurable
from capibara.core.types import UserError

_DIGITS = 2  # of a divisor; the paper's step is 0.01


class Individual(NamedTuple):
    """A scaling: the divisor of each frequency, from the highest frequency on, and the number of first tokens without it."""

    factors: tuple[float, ...]
    unscaled_tokens: int = 0


Loss = Callable[[Individual], float]


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeSearch:
    """How a scaling is searched; the defaults are the paper's, but for `unscaled_tokens`.

    Attributes:
      documents: number of documents whose mean loss is minimised; as many more, where there are any, test the result.
      population: number of individuals of the first generation.
      parents: number of the best individuals, of which the next generation is made, and which stay in it.
      mutations: number of mutated parents of a generation.
      crossovers: number of individuals of a generation that are made of two parents.
      iterations: number of generations after the first.
      mutation_probability: of a divisor, and of the number of first tokens.
      reach: the largest divisor, as a multiple of the ratio of the lengths.
      unscaled_tokens: the numbers of first tokens that are tried, beside the 0 of the scalings by formulas. Hugging Face folders and GGUF files hold 0 alone; the paper tries
        0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 64, 128 and 256.
      attention_factor: multiplies queries and keys; None: sqrt(1 + ln(ratio) / ln(original length)), as in `Rope`.
      seed: of the draws.
    """

    documents: int = 5
    population: int = 64
    parents: int = 32
    mutations: int = 16
    crossovers: int = 16
    iterations: int = 40
    mutation_probability: float = 0.3
    reach: float = 1.25
    unscaled_tokens: tuple[int, ...] = (0,)
    attention_factor: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("documents", "population", "parents"):
            if getattr(self, name) < 1:
                raise UserError(f"RopeSearch.{name} is {getattr(self, name)}, must be at least 1")
        for name in ("mutations", "crossovers", "iterations", "seed"):
            if getattr(self, name) < 0:
                raise UserError(f"RopeSearch.{name} is {getattr(self, name)}, must be at least 0")
        if not 0 < self.mutation_probability <= 1:
            raise UserError(
                f"RopeSearch.mutation_probability is {self.mutation_probability}, must be above 0 and at most 1: try 0.3"
            )
        if not 1 <= self.reach < np.inf:
            raise UserError(f"RopeSearch.reach is {self.reach}, must be finite and at least 1: try 1.25")
        if self.attention_factor is not None and not 0 < self.attention_factor < np.inf:
            raise UserError(
                f"RopeSearch.attention_factor is {self.attention_factor}, must be finite and above 0: try 1.0"
            )
        if not self.unscaled_tokens or min(self.unscaled_tokens) < 0:
            raise UserError(
                f"RopeSearch.unscaled_tokens is {self.unscaled_tokens}, must be numbers of at least 0: try (0, 4, 16)"
            )

    @property
    def evaluations(self) -> int:
        """The largest number of individuals whose loss is computed, beside those that the search starts from."""
        return self.population + self.iterations * (self.mutations + self.crossovers)


def search(settings: RopeSearch, starts: Sequence[Individual], largest: float, loss: Loss) -> tuple[Individual, float]:
    """The best individual and its loss; with equal settings and losses the individuals are drawn in the same order.

    Args:
      settings: how is searched.
      starts: individuals of the first generation, with divisors from 1 to `largest` that do not fall.
      largest: the largest divisor.
      loss: of an individual; called once for each.
    """
    rng = np.random.default_rng(settings.seed)
    losses: dict[Individual, float] = {}

    def best(individuals: Sequence[Individual]) -> list[Individual]:
        for individual in individuals:
            if individual not in losses:
                losses[individual] = loss(individual)
        return sorted(dict.fromkeys(individuals), key=losses.__getitem__)[: settings.parents]

    first = list(starts)
    while len(first) < settings.population:
        first.append(_mutated(starts[len(first) % len(starts)], settings, largest, rng))
    parents = best(first)
    for _ in range(settings.iterations):
        mutations = [
            _mutated(parents[rng.integers(len(parents))], settings, largest, rng) for _ in range(settings.mutations)
        ]
        pairs = [rng.integers(len(parents), size=2) for _ in range(settings.crossovers)]
        parents = best([*parents, *mutations, *(_crossed(parents[a], parents[b], rng) for a, b in pairs)])
    return parents[0], losses[parents[0]]


def _mutated(individual: Individual, settings: RopeSearch, largest: float, rng: np.random.Generator) -> Individual:
    """An individual with some divisors drawn between their neighbours, or anew: the order then decides which frequency gets them."""
    factors = np.array(individual.factors)
    chosen = rng.random(len(factors)) < settings.mutation_probability
    if rng.random() < 0.5:
        factors[chosen] = rng.uniform(1.0, largest, np.count_nonzero(chosen))
        factors = np.sort(factors)
    else:
        bounds = np.concatenate([[1.0], factors, [largest]])
        drawn = rng.uniform(bounds[:-2], bounds[2:])
        factors = np.maximum.accumulate(np.where(chosen, drawn, factors))
    unscaled = individual.unscaled_tokens
    if rng.random() < settings.mutation_probability:
        unscaled = int(rng.choice(settings.unscaled_tokens))
    return Individual(tuple(factors.round(_DIGITS).tolist()), unscaled)


def _crossed(a: Individual, b: Individual, rng: np.random.Generator) -> Individual:
    """An individual with each divisor of either parent; one below the one before it becomes equal to that."""
    is_of_a = rng.random(len(a.factors)) < 0.5
    factors = np.maximum.accumulate(np.where(is_of_a, a.factors, b.factors))
    return Individual(tuple(factors.tolist()), (a if rng.random() < 0.5 else b).unscaled_tokens)
