"""Soups: means of models chosen by a metric, which hold two models at a time (Wortsman et al. 2022)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from capibara.core.types import Params, PyTree, UserError

Metric = Callable[[Params], float]


@dataclasses.dataclass(frozen=True)
class Soup:
    """A mean of models.

    Attributes:
      params: float32.
      members: the models in it, in the order in which they were added.
      score: its metric.
      scores: the metric of each model alone (`greedy`), or of the soup with it (`incremental`).
    """

    params: Params
    members: tuple[int, ...]
    score: float
    scores: tuple[float, ...]


def weighted(models: Iterable[Params], weights: Sequence[float]) -> Params:
    """The sum of models times their weights, float32; e.g. with `decay_weights`.

    Args:
      models: each is dropped before the next one is taken.
      weights: one for each.

    Raises:
      UserError: weights are not finite, or not one for each model.
    """
    for weight in weights:
        if not math.isfinite(weight):
            raise UserError(f"weights has {weight}, must be finite: try 0.5")
    total: list[np.ndarray] = []
    structure: PyTree = None
    count = 0
    for count, model in enumerate(models, 1):
        leaves, structure = jax.tree.flatten(model)
        if count <= len(weights):
            factor = np.float32(weights[count - 1])
            total = _mapped(lambda x, sum_: factor * x if sum_ is None else sum_ + factor * x, leaves, total)
    if count != len(weights) or not count:
        raise UserError(f"weights has {len(weights)} numbers, there are {count} models: set one for each")
    return jax.tree.unflatten(structure, total)


def uniform(models: Iterable[Params]) -> Params:
    """The mean of models, float32; each is dropped before the next one is taken.

    Raises:
      UserError: there are no models.
    """
    mean: list[np.ndarray] = []
    structure: PyTree = None
    for count, model in enumerate(models, 1):
        leaves, structure = jax.tree.flatten(model)
        mean = _mixed(leaves, mean, count)
    if structure is None:
        raise UserError("a soup has no models, must have at least one: name some")
    return jax.tree.unflatten(structure, mean)


def greedy(models: Sequence[Callable[[], Params]], metric: Metric, *, maximize: bool = True) -> Soup:
    """Adds models, the best first, each if the soup does not become worse: it is never worse than the best model.

    Args:
      models: each loads a model, and is called twice.
      metric: of parameters; models for which it is NaN are skipped.
      maximize: whether higher is better.

    Raises:
      UserError: there are no models, or the metric is NaN for all.
    """
    scores = tuple(metric(load()) for load in models)
    order = sorted(
        (i for i, score in enumerate(scores) if not math.isnan(score)), key=lambda i: scores[i], reverse=maximize
    )
    if not order:
        raise UserError(f"the metric has no value for any of the {len(models)} models: check it and the models")
    soup = _grown((models[i]() for i in order), metric, maximize)
    return dataclasses.replace(soup, members=tuple(order[i] for i in soup.members), scores=scores)


def incremental(models: Iterable[Params], metric: Metric, *, maximize: bool = True) -> Soup:
    """Adds models in the order in which they come, each if the soup does not become worse.

    Args:
      models: each is dropped before the next one is taken.
      metric, maximize: as in `greedy`.

    Raises:
      UserError: there are no models, or the metric is NaN for all.
    """
    return _grown(models, metric, maximize)


def decay_weights(multipliers: Sequence[float]) -> tuple[float, ...]:
    """Weights with which checkpoints of a constant learning rate make up for its decay (WSM, Tian et al. 2025).

    The updates between checkpoints i - 1 and i count as if the learning rate had been multiplied by `multipliers[i - 1]`:
    exact if updates are proportional to it. A linear decay is a uniform mean.

    Args:
      multipliers: one for each pair of successive checkpoints, from 0 to 1.

    Returns:
      a weight for each checkpoint, the one before the decay first; their sum is 1.

    Raises:
      UserError: a multiplier is not from 0 to 1.
    """
    for multiplier in multipliers:
        if not 0 <= multiplier <= 1:
            raise UserError(f"multipliers has {multiplier}, must be from 0 to 1: try 0.5")
    ends = (1.0, *multipliers, 0.0)
    return tuple(before - after for before, after in zip(ends, ends[1:]))


def _grown(models: Iterable[Params], metric: Metric, maximize: bool) -> Soup:
    soup: list[np.ndarray] = []
    structure: PyTree = None
    members: list[int] = []
    scores: list[float] = []
    best = math.nan
    for model in models:
        leaves, structure = jax.tree.flatten(model)
        del model  # the soup and the candidate remain
        candidate = _mixed(leaves, soup, len(members) + 1)
        score = metric(jax.tree.unflatten(structure, candidate))
        if not math.isnan(score) and (not members or (score >= best if maximize else score <= best)):
            soup, best = candidate, score
            members.append(len(scores))
        scores.append(score)
        del candidate
    if not members:
        raise UserError(f"the metric has no value for any of the {len(scores)} models: check it and the models")
    return Soup(jax.tree.unflatten(structure, soup), tuple(members), best, tuple(scores))


def _mixed(leaves: list[np.ndarray], mean: list[np.ndarray], count: int) -> list[np.ndarray]:
    """The mean of `count` models, from that of all but the last, whose leaves are dropped one by one."""
    return _mapped(lambda x, old: x if old is None else old + (x - old) / np.float32(count), leaves, mean)


def _mapped(
    fn: Callable[[np.ndarray, np.ndarray | None], np.ndarray], leaves: list[np.ndarray], old: list[np.ndarray]
) -> list[np.ndarray]:
    """`fn` of each leaf in float32 and the old one; leaves are taken out of their list."""
    created = []
    for i in range(len(leaves)):
        leaf, leaves[i] = leaves[i], np.zeros(0)
        created.append(fn(np.asarray(leaf, np.float32), old[i] if old else None))
    return created
