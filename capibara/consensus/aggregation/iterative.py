"""Rules that move a point step by step: geometric median and centred clipping, both in inner products alone.

Shape letters as in points.py.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from capibara.config import configurable
from capibara.consensus.aggregation.points import Points
from capibara.consensus.aggregation.rules import DistanceRule, check_positive
from capibara.core.types import UserError

_LEAST = float(jnp.finfo(jnp.float32).tiny)  # distances between equal points


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class GeometricMedian(DistanceRule):
    """The point with the smallest sum of distances to the candidates, by smoothed Weiszfeld iterations.

    Breakdown point: f < n / 2. Source: RFA, Pillutla et al. 2022, arXiv:1912.13445. The iterations begin at the coordinate
    median rather than at the mean, which an outlier of any size would have moved.

    Attributes:
      iterations: steps; each costs n x n operations, whatever the size of the model.
      smoothing: a distance below this share of the median distance from the coordinate median counts as that share; the
        paper has an absolute bound.
    """

    iterations: int = 64
    smoothing: float = 1e-6

    def __post_init__(self) -> None:
        _check_iterations("GeometricMedian", self.iterations)
        check_positive("GeometricMedian", "smoothing", self.smoothing)

    def weights(self, points: Points) -> jax.Array:
        from_start_P = jnp.diag(points.gram_PP)  # the centre of the Gram matrix is the coordinate median
        ordered_R = jnp.sort(jnp.where(points.is_alive_R, from_start_P[:-1], jnp.inf))
        # Not the mean or the largest, which one outlier decides. 0: most candidates are equal, and are the result.
        least = jnp.maximum(self.smoothing * jnp.sqrt(ordered_R[jnp.maximum(points.count - 1, 0) // 2]), _LEAST)

        def weigh(squared_P: jax.Array) -> jax.Array:
            inverse_R = jnp.where(points.is_alive_R, least / jnp.maximum(jnp.sqrt(squared_P[:-1]), least), 0.0)
            return points.without_reference(inverse_R / jnp.where(points.count > 0, jnp.sum(inverse_R), 1.0))

        start_P = weigh(from_start_P)
        return jax.lax.fori_loop(1, self.iterations, lambda _, w: weigh(points.squared_from(w)), start_P)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class CenteredClipping(DistanceRule):
    """Moves from the reference by the mean of the differences to the candidates, each clipped to a radius.

    Breakdown point: f < n / 2, as f nodes move the result by at most f / n of the radius a step; the paper's proof of
    convergence is for f <= n / 10. Source: Karimireddy et al. 2021, arXiv:2012.10333. The reference is the last
    aggregate (or zero, for updates that are not far from it).

    Attributes:
      radius: the largest difference that counts whole, in units of the aggregated vectors' norm.
      iterations: steps; one is enough near the reference.
    """

    radius: float = 10.0
    iterations: int = 3

    def __post_init__(self) -> None:
        _check_iterations("CenteredClipping", self.iterations)
        check_positive("CenteredClipping", "radius", self.radius)

    def weights(self, points: Points) -> jax.Array:
        each = points.is_alive_R / jnp.maximum(points.count, 1).astype(jnp.float32)

        def step(_: jax.Array, weights_P: jax.Array) -> jax.Array:
            distance_R = jnp.sqrt(points.squared_from(weights_P)[:-1])
            moved_R = each * (self.radius / jnp.maximum(distance_R, self.radius))
            return weights_P * (1 - jnp.sum(moved_R)) + points.without_reference(moved_R)

        reference_P = jnp.zeros_like(points.gram_PP[-1]).at[-1].set(1.0)
        return jax.lax.fori_loop(0, self.iterations, step, reference_P)


def _check_iterations(owner: str, value: int) -> None:
    if value < 1:
        raise UserError(f"{owner}.iterations is {value}, must be at least 1")
