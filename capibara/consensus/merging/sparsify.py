"""Which values of an offset from the base are kept, and by how much the rest makes up for the others."""

from __future__ import annotations

import enum

import numpy as np

from capibara.consensus.merging.method import Array


class Rescale(enum.StrEnum):
    """How kept values make up for the dropped ones."""

    NONE = "none"
    NORM = "norm"  # to the sum of magnitudes that the tensor had
    PROBABILITY = "probability"  # divided by their probability to be kept: unbiased


def keep_largest(offset: Array, density: float) -> Array:
    """The share `density` of the values that are largest in magnitude, at least one; zeros elsewhere."""
    count = offset.size
    retained = max(1, int(density * count))
    if density >= 1 or retained >= count:
        return offset
    return _between(offset, count - retained, count)


def keep_middle(offset: Array, density: float, outliers: float) -> Array:
    """The share `density` of the values below the share `outliers` of the largest ones in magnitude.

    Fewer outliers are dropped where `density` would not be reached otherwise.
    """
    if density >= 1:
        return offset
    count = offset.size
    retained = int(density * count)
    first = max(0, count - retained - int(outliers * count))
    return _between(offset, first, first + retained)


def _between(offset: Array, first: int, end: int) -> Array:
    """The values whose rank by magnitude, smallest first, is in [first, end); zeros elsewhere."""
    if end <= first:
        return np.zeros_like(offset)
    sizes = np.abs(offset.reshape(-1))
    ordered = np.partition(sizes, sorted({first, end - 1}))
    lower, upper = ordered[first], ordered[end - 1]
    mask = (sizes >= lower) & (sizes <= upper)
    # Of values of the same magnitude as many are dropped as it takes.
    below, above = first - np.count_nonzero(sizes < lower), np.count_nonzero(sizes <= upper) - end
    mask[np.flatnonzero(sizes == lower)[:below]] = False
    mask[np.flatnonzero(sizes == upper)[::-1][:above]] = False
    return offset * mask.reshape(offset.shape)


def keep_random(
    offset: Array, probability: Array | float, draw: np.random.Generator, rescale: Rescale, least: float = 0.0
) -> Array:
    """Each value with its own probability; zeros elsewhere. Draws one uniform number for each value; `least` as in `rescaled`."""
    mask = draw.random(offset.shape, dtype=np.float32) < probability
    if rescale is Rescale.PROBABILITY:
        return np.divide(offset, probability, out=np.zeros_like(offset), where=mask, casting="same_kind")
    return rescaled(offset, offset * mask, rescale, least)


def probabilities(offset: Array, density: float, spread: float) -> Array:
    """For each value the probability to be kept: by its rank in its row, from `density` - `spread` to + `spread`.

    The largest magnitude of a row has the highest. The mean is `density`.
    """
    rows = offset.reshape(1, -1) if offset.ndim < 2 else offset
    order = np.argsort(np.abs(rows), axis=1, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.arange(rows.shape[1]).reshape(1, -1, *[1] * (rows.ndim - 2)), axis=1)
    share = ranks / (rows.shape[1] - 1) if rows.shape[1] > 1 else np.full(rows.shape, 0.5)
    return (density - spread + share * 2 * spread).astype(np.float32).reshape(offset.shape)


def rescaled(offset: Array, retained: Array, rescale: Rescale, least: float = 0.0) -> Array:
    """Kept values with the sum of magnitudes of the whole offset, for Rescale.NORM; unchanged otherwise.

    A sum of magnitudes that is 0 or less than `least` is not scaled.
    """
    if rescale is not Rescale.NORM:
        return retained
    before, after = (float(np.abs(x).sum(dtype=np.float64)) for x in (offset, retained))
    return retained if after == 0 or min(before, after) < least else np.float32(before / after) * retained
