"""Pre-aggregation: what makes candidates of the nodes before a rule sees them.

Each is a matrix whose rows, which sum to 1, mix new candidates from the points, so that any number of them and a distance
rule together are still one weighted sum of the nodes. Shape letters as in points.py.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from capibara.config import configurable
from capibara.consensus.aggregation.points import Points, ranks
from capibara.consensus.aggregation.rules import check_positive, minority
from capibara.core.types import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreAggregation(abc.ABC):
    """Makes candidates of other candidates.

    Attributes:
      uses_distances: whether it has to know the distances between points.
      uses_key: whether it draws random numbers.
    """

    uses_distances: ClassVar[bool] = True
    uses_key: ClassVar[bool] = False

    def candidates(self, before: int) -> int:
        """How many there are afterwards."""
        return before

    def largest_faults(self, before: int) -> int:
        """The largest f that it withstands; any minority, which is left to the rule after it."""
        return minority(before)

    @abc.abstractmethod
    def mixing(self, points: Points, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """The rows [R, P] of the new candidates, and which of them are not masked: bool [R]."""


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Nnm(PreAggregation):
    """Nearest neighbour mixing: each candidate becomes the mean of the n - f nearest to it, itself among them.

    With it a rule withstands nodes whose data differ. Breakdown point: f < n / 2, and the rule's own. Source: Allouah et
    al. 2023, arXiv:2302.01772.
    """

    def mixing(self, points: Points, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        is_near_RR = (ranks(points.squared_RR) < points.honest) & points.is_alive_R[None, :]
        rows_RR = is_near_RR / jnp.maximum(points.honest, 1).astype(jnp.float32)
        return jnp.pad(rows_RR, ((0, 0), (0, 1))), points.is_alive_R


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucketing(PreAggregation):
    """Means of buckets of s candidates, chosen at random in each round; the last bucket has what is left.

    Candidates are fewer and more alike then, and as many may be faulty as before: a rule withstands the f that it
    withstands among ceil(n / s). Source: Karimireddy et al. 2022, arXiv:2006.09365.

    Attributes:
      size: s, candidates in a bucket.
    """

    uses_distances: ClassVar[bool] = False
    uses_key: ClassVar[bool] = True

    size: int = 2

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"Bucketing.size is {self.size}, must be at least 1: 1 mixes nothing")

    def candidates(self, before: int) -> int:
        return -(-before // self.size)

    def mixing(self, points: Points, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        assert key is not None
        candidates = points.is_alive_R.size
        drawn_R = jax.random.uniform(key, (candidates,))
        bucket_R = ranks(jnp.where(points.is_alive_R, drawn_R, 2.0)) // self.size  # masked ones come last
        is_in_BR = (bucket_R[None, :] == jnp.arange(self.candidates(candidates))[:, None]) & points.is_alive_R[None, :]
        sizes_B1 = jnp.sum(is_in_BR, axis=1, keepdims=True)
        rows_BR = is_in_BR / jnp.maximum(sizes_B1, 1).astype(jnp.float32)
        return jnp.pad(rows_BR, ((0, 0), (0, 1))), sizes_B1[:, 0] > 0


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Clipping(PreAggregation):
    """Brings candidates that are further than a radius from the reference to that distance.

    Breakdown point: the rule's.

    Attributes:
      radius: in units of the aggregated vectors' norm.
    """

    radius: float

    def __post_init__(self) -> None:
        check_positive("Clipping", "radius", self.radius)

    def mixing(self, points: Points, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        return _towards_reference(points, jnp.float32(self.radius)), points.is_alive_R


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Arc(PreAggregation):
    """Adaptive robust clipping: the k candidates furthest from the reference come to the distance of the next.

    k = floor(2 f (n - f) / n). Breakdown point: the rule's. Source: Allouah et al. 2025, arXiv:2405.14432.
    """

    def mixing(self, points: Points, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        distance_R = points.from_reference_R
        clipped = 2 * points.faults * points.honest // jnp.maximum(points.count, 1)
        is_next_R = ranks(jnp.where(points.is_alive_R, -distance_R, jnp.inf)) == clipped
        return _towards_reference(points, jnp.sum(jnp.where(is_next_R, distance_R, 0.0))), points.is_alive_R


def _towards_reference(points: Points, radius: jax.Array) -> jax.Array:
    """Rows [R, P] that bring the candidates within a radius of the reference."""
    distance_R = points.from_reference_R
    share_R = jnp.where(distance_R > radius, radius / jnp.where(distance_R > 0, distance_R, 1.0), 1.0)
    return jnp.concatenate([jnp.diag(share_R), (1 - share_R)[:, None]], axis=1)
