"""Fewer points for a chart: the lowest and the highest of each stretch, so that spikes stay; smoothing before that."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np


@dataclasses.dataclass(frozen=True)
class Thinned:
    """Points of a line.

    Attributes:
      x, y: float64 [m], all finite.
      indices: int64 [m], which points of the line these are.
      is_exact: whether these are all of its points.
    """

    x: np.ndarray
    y: np.ndarray
    indices: np.ndarray
    is_exact: bool


def thinned(x: np.ndarray, y: np.ndarray, points: int) -> Thinned:
    """At most about `points` points of a line.

    Args:
      x, y: [n], finite.
      points: the most that are wanted, at least 4.
    """
    count = len(x)
    if count <= points:
        return Thinned(x, y, np.arange(count), True)
    stretches = max(1, points // 2 - 1)  # the first and the last point are kept, too
    length = -(-count // stretches)
    whole = count // length * length
    low = y[:whole].reshape(-1, length).argmin(axis=1)
    high = y[:whole].reshape(-1, length).argmax(axis=1)
    begins = np.arange(0, whole, length)
    chosen = [begins + low, begins + high, [0, count - 1]]
    if whole < count:
        chosen.append([whole + int(y[whole:].argmin()), whole + int(y[whole:].argmax())])
    indices = np.unique(np.concatenate(chosen).astype(np.int64))
    return Thinned(x[indices], y[indices], indices, False)


def smoothed(y: np.ndarray, weight: float) -> np.ndarray:
    """The exponential moving average of finite values [n], corrected for its start; `weight` of the past, 0 to below 1."""
    if not len(y) or weight <= 0:
        return y
    share = 1.0 - weight
    sums = list(itertools.accumulate(y.tolist(), lambda sum_, value: weight * sum_ + share * value, initial=0.0))[1:]
    return np.array(sums) / -np.expm1(np.log(weight) * np.arange(1, len(y) + 1))


def averaged(values: np.ndarray, stretches: int) -> tuple[np.ndarray, np.ndarray]:
    """Means over stretches of rows, for a heat map.

    Args:
      values: [n, columns]; what is not finite does not count.
      stretches: the most rows of the result.

    Returns:
      The index of each stretch's last row [m], and its means [m, columns]; NaN where nothing was finite.
    """
    count = len(values)
    length = max(1, -(-count // max(1, stretches)))
    begins = np.arange(0, count, length)
    if not count:
        return begins, values
    finite = np.isfinite(values)
    sums = np.add.reduceat(np.where(finite, values, 0.0), begins, axis=0)
    counts = np.add.reduceat(finite, begins, axis=0, dtype=np.int64)
    means = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
    return np.append(begins[1:], count) - 1, means
