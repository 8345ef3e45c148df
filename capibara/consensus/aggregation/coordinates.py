"""Rules that look at one coordinate at a time: median, trimmed mean, mean around the median.

All of them sort n values a coordinate. Shape letters as in points.py.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from capibara.config import configurable
from capibara.consensus.aggregation.rules import CoordinateRule


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordinateMedian(CoordinateRule):
    """The median of each coordinate; of an even number of values the mean of the middle two.

    Breakdown point: f < n / 2. Source: Yin et al. 2018, arXiv:1803.01498.
    """

    def combine(self, values_RC: jax.Array, chosen_R: jax.Array, faults: jax.Array) -> jax.Array:
        return median(values_RC, chosen_R)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrimmedMean(CoordinateRule):
    """The mean of each coordinate without its f largest and its f smallest values.

    Breakdown point: f < n / 2. Source: Yin et al. 2018, arXiv:1803.01498.
    """

    def combine(self, values_RC: jax.Array, chosen_R: jax.Array, faults: jax.Array) -> jax.Array:
        count = jnp.sum(chosen_R, dtype=jnp.int32)
        return _mean_between(_sorted(values_RC, chosen_R), faults, count - faults)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Meamed(CoordinateRule):
    """The mean of the n - f values of each coordinate that are nearest to its median.

    Breakdown point: f < n / 2. Source: Xie et al. 2018, arXiv:1802.10116.
    """

    def combine(self, values_RC: jax.Array, chosen_R: jax.Array, faults: jax.Array) -> jax.Array:
        return mean_around_median(values_RC, chosen_R, jnp.sum(chosen_R, dtype=jnp.int32) - faults)


def median(values_RC: jax.Array, chosen_R: jax.Array) -> jax.Array:
    """The median [C] of the chosen values of each coordinate; 0 if none is chosen."""
    sorted_RC, count = _sorted(values_RC, chosen_R), jnp.sum(chosen_R, dtype=jnp.int32)
    low, high = (
        jax.lax.dynamic_index_in_dim(sorted_RC, jnp.maximum(at, 0), keepdims=False)
        for at in ((count - 1) // 2, count // 2)
    )
    # Halved first: the sum of two large values may not be finite.
    return jnp.where(count % 2 == 1, low, jnp.where(count > 0, 0.5 * low + 0.5 * high, 0.0))


def mean_around_median(values_RC: jax.Array, chosen_R: jax.Array, retained: jax.Array) -> jax.Array:
    """The mean [C] of the `retained` chosen values that are nearest to the median of each coordinate.

    Of two values that are equally far the smaller is nearer, whichever node sent it.
    """
    gap_RC = jnp.where(chosen_R[:, None], jnp.abs(values_RC - median(values_RC, chosen_R)), jnp.inf)
    _, nearest_RC = jax.lax.sort((gap_RC, values_RC), dimension=0, num_keys=2)
    return _mean_between(nearest_RC, jnp.int32(0), retained)


def _sorted(values_RC: jax.Array, chosen_R: jax.Array) -> jax.Array:
    """The values of each coordinate in ascending order, those that are not chosen at the end as infinite ones."""
    return jnp.sort(jnp.where(chosen_R[:, None], values_RC, jnp.inf), axis=0)


def _mean_between(values_RC: jax.Array, start: jax.Array, stop: jax.Array) -> jax.Array:
    """The mean [C] of rows start to stop; 0 if there is none."""
    row_R1 = jax.lax.broadcasted_iota(jnp.int32, (values_RC.shape[0], 1), 0)
    share = 1.0 / jnp.maximum(stop - start, 1).astype(jnp.float32)
    return jnp.sum(jnp.where((row_R1 >= start) & (row_R1 < stop), values_RC * share, 0.0), axis=0)
