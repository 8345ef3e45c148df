"""What a rule is, and the plain mean.

A rule turns the candidates into one point. There are two kinds: a distance rule gives each candidate a weight, from nothing
but the distances between them; a coordinate rule combines the values of each coordinate by themselves.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from capibara.config import configurable
from capibara.consensus.aggregation.points import Points
from capibara.core.types import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """A robust mean of n candidates, at most f of which may be anything.

    Attributes:
      uses_distances: whether it has to know the distances between candidates.
    """

    uses_distances: ClassVar[bool] = True

    def largest_faults(self, candidates: int) -> int:
        """The breakdown point: the largest f that the rule withstands; by default any minority."""
        return minority(candidates)

    def check(self, candidates: int, faults: int) -> None:
        """Raises UserError where the rule cannot work on so many candidates; the breakdown point is checked elsewhere."""
        del candidates, faults


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistanceRule(Rule, abc.ABC):
    """A rule that weighs the candidates by their distances."""

    @abc.abstractmethod
    def weights(self, points: Points) -> jax.Array:
        """Weights [P] of the points, which sum to 1 unless all candidates are masked."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordinateRule(Rule, abc.ABC):
    """A rule that combines each coordinate by itself."""

    uses_distances: ClassVar[bool] = False

    def chosen(self, points: Points) -> jax.Array:
        """Which candidates [R] take part: by default all that are not masked."""
        return points.is_alive_R

    @abc.abstractmethod
    def combine(self, values_RC: jax.Array, chosen_R: jax.Array, faults: jax.Array) -> jax.Array:
        """The combined coordinates [C], of candidates of which `faults` may be faulty."""


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mean(DistanceRule):
    """The mean of all nodes. One faulty node moves it anywhere: its breakdown point is 0."""

    uses_distances: ClassVar[bool] = False

    def largest_faults(self, candidates: int) -> int:
        return 0

    def weights(self, points: Points) -> jax.Array:
        return points.uniform(points.is_alive_R)


def minority(candidates: int) -> int:
    """The largest f with 2 f < n."""
    return max((candidates - 1) // 2, 0)


def check_positive(owner: str, field: str, value: float) -> None:
    """Raises UserError unless a number is finite and above 0."""
    if not 0 < value < jnp.inf:
        raise UserError(f"{owner}.{field} is {value}, must be finite and above 0")
