"""Rules that trust the candidates with near neighbours: Krum, Multi-Krum, Bulyan, and MoNNA's nearest neighbours.

Shape letters as in points.py.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import ClassVar

import jax
import jax.numpy as jnp

from capibara.config import configurable
from capibara.consensus.aggregation.coordinates import mean_around_median
from capibara.consensus.aggregation.points import Points, ranks
from capibara.consensus.aggregation.rules import CoordinateRule, DistanceRule, minority
from capibara.core.types import UserError


class Neighbours(enum.StrEnum):
    """How many nearest neighbours a score of Krum counts.

    FEWER: n - f - 2, as Blanchard et al. 2017 have it, whose proof needs 2 f + 2 < n.
    MORE: n - f - 1, all that may be honest, for which Allouah et al. 2023 (arXiv:2302.01772) prove any f < n / 2.
    """

    FEWER = "n-f-2"
    MORE = "n-f-1"

    @property
    def left_out(self) -> int:
        """How many fewer than n - f they are."""
        return 2 if self is Neighbours.FEWER else 1

    def largest_faults(self, candidates: int) -> int:
        """The largest f that Krum withstands with so many neighbours."""
        return max((candidates - 3) // 2, 0) if self is Neighbours.FEWER else minority(candidates)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Krum(DistanceRule):
    """The candidate that has the smallest sum of squared distances to its nearest neighbours.

    Breakdown point: 2 f + 2 < n; with `n-f-1` neighbours f < n / 2. Source: Blanchard et al. 2017, arXiv:1703.02757.

    Attributes:
      neighbours: how many neighbours count.
    """

    neighbours: Neighbours = Neighbours.FEWER

    def largest_faults(self, candidates: int) -> int:
        return self.neighbours.largest_faults(candidates)

    def weights(self, points: Points) -> jax.Array:
        return points.uniform(ranks(self.scores(points)) < 1)

    def scores(self, points: Points) -> jax.Array:
        """The sums [R] of squared distances to the nearest neighbours; infinite for masked candidates."""
        return _scores(points.squared_RR, points.is_alive_R, points.honest - self.neighbours.left_out)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiKrum(Krum):
    """The mean of the candidates with the smallest scores of Krum.

    Breakdown point: as Krum's. Source: Blanchard et al. 2017, arXiv:1703.02757.

    Attributes:
      selected: of how many candidates the mean is, at most n - f; None: n - f.
    """

    selected: int | None = None

    def __post_init__(self) -> None:
        if self.selected is not None and self.selected < 1:
            raise UserError(f"MultiKrum.selected is {self.selected}, must be at least 1: None is n - f")

    def check(self, candidates: int, faults: int) -> None:
        if self.selected is not None and self.selected > candidates - faults:
            raise UserError(
                f"MultiKrum.selected is {self.selected}, must be at most {candidates - faults} (n - f): more would have "
                "faulty nodes among them"
            )

    def weights(self, points: Points) -> jax.Array:
        most = points.honest if self.selected is None else jnp.minimum(points.honest, self.selected)
        return points.uniform(ranks(self.scores(points)) < most)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Bulyan(CoordinateRule):
    """Selects n - 2 f candidates by Krum, one after another, then takes a mean around the median of each coordinate.

    A round of Krum looks at those that are left. The mean is of the n - 4 f selected values nearest to their median.

    Breakdown point: n >= 4 f + 3. Source: El Mhamdi et al. 2018, arXiv:1802.07927.
    """

    uses_distances: ClassVar[bool] = True

    def largest_faults(self, candidates: int) -> int:
        return max((candidates - 3) // 4, 0)

    def chosen(self, points: Points) -> jax.Array:
        squared_RR = points.squared_RR

        def select(turn: jax.Array, is_left_R: jax.Array) -> jax.Array:
            both = is_left_R[:, None] & is_left_R[None, :]
            neighbours = jnp.sum(is_left_R, dtype=jnp.int32) - points.faults - 2
            scores_R = _scores(jnp.where(both, squared_RR, jnp.inf), is_left_R, neighbours)
            is_next_R = (ranks(scores_R) < 1) & (turn < points.count - 2 * points.faults)
            return is_left_R & ~is_next_R

        is_left_R = jax.lax.fori_loop(0, points.is_alive_R.size, select, points.is_alive_R)
        return points.is_alive_R & ~is_left_R

    def combine(self, values_RC: jax.Array, chosen_R: jax.Array, faults: jax.Array) -> jax.Array:
        return mean_around_median(values_RC, chosen_R, jnp.sum(chosen_R, dtype=jnp.int32) - 2 * faults)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Monna(DistanceRule):
    """The mean of the n - f candidates that are nearest to one of them, the pivot, which is trusted.

    Breakdown point: f < n / 2, where the pivot is not faulty. If it is masked, the node that Krum would choose takes its
    place. Source: nearest-neighbour averaging of MoNNA, Farhadkhani et al. 2023, arXiv:2209.10931.

    Attributes:
      pivot: index of the trusted node, which aggregates for itself.
    """

    pivot: int = 0

    def __post_init__(self) -> None:
        if self.pivot < 0:
            raise UserError(f"Monna.pivot is {self.pivot}, must be the index of a node: 0 is the first")

    def check(self, candidates: int, faults: int) -> None:
        if self.pivot >= candidates:
            raise UserError(f"Monna.pivot is {self.pivot}, must be below the number of nodes: {candidates}")

    def weights(self, points: Points) -> jax.Array:
        instead = jnp.argmin(Krum(neighbours=Neighbours.MORE).scores(points))
        pivot = jnp.where(points.is_alive_R[self.pivot], self.pivot, instead)
        return points.uniform(ranks(points.squared_RR[pivot]) < points.honest)


def _scores(squared_RR: jax.Array, is_alive_R: jax.Array, neighbours: jax.Array) -> jax.Array:
    """The sum [R] of the squared distances to the nearest others, at least one; infinite for masked candidates."""
    is_self_RR = jnp.eye(is_alive_R.size, dtype=bool)
    rank_RR = ranks(jnp.where(is_self_RR, -1.0, squared_RR))  # each is its own nearest: rank 0
    counts_RR = (rank_RR <= jnp.maximum(neighbours, 1)) & is_alive_R[None, :]
    return jnp.where(is_alive_R, jnp.sum(jnp.where(counts_RR, squared_RR, 0.0), axis=1), jnp.inf)
