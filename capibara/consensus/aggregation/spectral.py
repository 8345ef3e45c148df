"""Rules that look at how far the nodes spread, in any direction or pair: CAF, SMEA and MDA.

SMEA and MDA look at every subset of n - f candidates, which is exact and exponential: CAF is neither. Shape letters as in
points.py; K subsets.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from capibara.config import configurable
from capibara.consensus.aggregation.points import Points, matmul
from capibara.consensus.aggregation.rules import DistanceRule
from capibara.core.types import UserError

_MOST_SUBSETS = 100_000
_BATCH = 512  # subsets at once


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Caf(DistanceRule):
    """Covariance-bound agnostic filter: lowers weights along the direction of the largest variance, again and again.

    It ends when at most n - 2 f of the weight is left, and gives the weighted mean whose largest variance was smallest. Each
    round takes all weight from at least one candidate that had some, so there are at most n rounds, however large an
    outlier is.

    Breakdown point: f < n / 2. Source: Allouah et al. 2025, arXiv:2505.01874.
    """

    def weights(self, points: Points) -> jax.Array:
        gram_RR, least_left = points.gram_RR, points.count - 2 * points.faults

        def lower(_: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            left_R, best_R, least = state
            total = jnp.sum(left_R)
            shares_R = left_R / jnp.where(total > 0, total, 1.0)
            variance, along_R = leading(gram_RR, shares_R)
            is_on, is_better = total > least_left, variance < least
            most = jnp.max(along_R)
            lowered_R = left_R * jnp.where(along_R < most, 1 - along_R / jnp.where(most > 0, most, 1.0), 0.0)
            return (
                jnp.where(is_on & (most > 0), lowered_R, left_R),
                jnp.where(is_on & is_better, shares_R, best_R),
                jnp.where(is_on & is_better, variance, least),
            )

        alive_R = points.is_alive_R.astype(jnp.float32)
        state = (alive_R, alive_R / jnp.maximum(jnp.sum(alive_R), 1.0), jnp.float32(jnp.inf))
        _, best_R, _ = jax.lax.fori_loop(0, alive_R.size, lower, state)
        return points.without_reference(best_R)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubsetRule(DistanceRule):
    """The mean of the subset of n - f candidates that spreads least; of equal ones the one with the smallest variance."""

    @abc.abstractmethod
    def spread(self, points: Points, chosen_R: jax.Array) -> jax.Array:
        """How far a subset spreads, a scalar."""

    def check(self, candidates: int, faults: int) -> None:
        subsets = math.comb(candidates, faults)
        if subsets > _MOST_SUBSETS:
            raise UserError(
                f"{type(self).__name__} would look at {subsets} subsets, those of {candidates - faults} of {candidates} nodes, "
                f"must be at most {_MOST_SUBSETS}: use Caf, or fewer nodes or faults"
            )

    def weights(self, points: Points) -> jax.Array:
        candidates = points.is_alive_R.size
        size = candidates - points.assumed_faults
        subsets_KR = np.zeros((math.comb(candidates, size), candidates), bool)
        for subset_R, chosen in zip(subsets_KR, itertools.combinations(range(candidates), size)):
            subset_R[list(chosen)] = True

        def measure(chosen_R: jax.Array) -> tuple[jax.Array, jax.Array]:
            both = chosen_R[:, None] & chosen_R[None, :]
            variance = jnp.sum(jnp.where(both, points.squared_RR, 0.0))
            is_whole = jnp.all(points.is_alive_R | ~chosen_R)
            return jnp.where(is_whole, self.spread(points, chosen_R), jnp.inf), variance

        spread_K, variance_K = jax.lax.map(measure, jnp.asarray(subsets_KR), batch_size=_BATCH)
        least = jnp.min(spread_K)
        best = jnp.argmin(jnp.where(spread_K == least, variance_K, jnp.inf))
        # More masked than assumed: no subset is whole, and none of those that are left is known to be faulty.
        return points.uniform(jnp.where(jnp.isfinite(least), jnp.asarray(subsets_KR)[best], points.is_alive_R))


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mda(SubsetRule):
    """Minimum diameter averaging: the subset whose two furthest members are nearest to each other.

    Breakdown point: f < n / 2. Source: El Mhamdi et al. 2021, arXiv:1905.03853, after Rousseeuw 1985.
    """

    def spread(self, points: Points, chosen_R: jax.Array) -> jax.Array:
        both = chosen_R[:, None] & chosen_R[None, :]
        return jnp.max(jnp.where(both, points.squared_RR, 0.0))


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Smea(SubsetRule):
    """Smallest maximum eigenvalue averaging: the subset whose largest variance in any direction is smallest.

    Breakdown point: f < n / 2. Source: Allouah et al. 2023, arXiv:2302.04787.
    """

    def spread(self, points: Points, chosen_R: jax.Array) -> jax.Array:
        return leading(points.gram_RR, chosen_R / jnp.sum(chosen_R).astype(jnp.float32))[0]


def leading(gram_RR: jax.Array, shares_R: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest variance of weighted points, and how far each of them lies along its direction.

    The covariance of points x with weights p has the eigenvalues of sqrt(p_i) (x_i - m) (x_j - m) sqrt(p_j), where m is the
    weighted mean: an n x n matrix.

    Args:
      gram_RR: inner products about any centre.
      shares_R: weights that sum to 1.

    Returns:
      The largest eigenvalue, and the squared distances [R] from the mean along its eigenvector, up to a common factor; 0
      for points without weight.
    """
    to_mean_R = matmul(gram_RR, shares_R)
    centred_RR = gram_RR - to_mean_R[:, None] - to_mean_R[None, :] + shares_R @ to_mean_R
    root_R = jnp.sqrt(shares_R)
    kernel_RR = root_R[:, None] * centred_RR * root_R[None, :]
    largest = jnp.max(jnp.abs(kernel_RR))
    scale = jnp.where(largest > 0, largest, 1.0)  # squares of the largest outliers would not be finite
    values_R, vectors_RR = jnp.linalg.eigh(kernel_RR / scale)
    along_R = matmul(centred_RR / scale, root_R * vectors_RR[:, -1])
    along_R = jnp.where(shares_R > 0, along_R, 0.0)
    furthest = jnp.max(jnp.abs(along_R))
    along_R = along_R / jnp.where(furthest > 0, furthest, 1.0)
    return scale * jnp.maximum(values_R[-1], 0.0), jnp.square(along_R)
