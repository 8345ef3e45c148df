"""Confidence sequences of a mean of bounded values: intervals that all hold together, however often one looks."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

_MEANS = 2001  # candidates of the mean, from the least to the largest; the one in the middle is 0
_LARGEST_BET = 0.5  # share of the capital that one value can lose; the paper has 1/2 or 3/4


@dataclasses.dataclass(frozen=True)
class Bound:
    """What is known of a mean after some values.

    Attributes:
      low, high: the interval, which has the mean of all looks with probability 1 - alpha.
      p_value: of the mean 0, valid at every look.
    """

    low: float
    high: float
    p_value: float


class ConfidenceSequence:
    """The hedged capital confidence sequence of a mean, by betting.

    For each candidate of the mean a gambler bets on and against larger values; the capital is a martingale if the candidate
    is the mean, and so exceeds 1 / alpha at any time with probability at most alpha (Ville). A candidate whose capital did is
    left out for good. Waudby-Smith and Ramdas 2023, arXiv:2010.09686: the hedged capital with equal shares and predictable
    plug-in bets. It holds for values of any distribution within the limits, if each has the same mean given those before.

    Args:
      largest: values are from -largest to largest.
      alpha: the probability that some interval does not have the mean.
    """

    def __init__(self, largest: float, alpha: float):
        self._most, self._alpha = largest, alpha
        self._means = np.linspace(0.0, 1.0, _MEANS)
        self._log_capital = np.zeros((2, _MEANS))  # of bets on larger and on smaller values
        self._largest = np.zeros(_MEANS)  # of the logarithms of a candidate's capital so far
        self._count, self._sum, self._squares = 0, 0.5, 0.25  # the paper's priors of mean and variance

    def add(self, value: float) -> None:
        """One more value."""
        assert abs(value) <= self._most, f"{value} is not within {self._most} of 0"
        share = (value / self._most + 1) / 2
        self._count += 1
        variance = self._squares / self._count
        bet = math.sqrt(2 * math.log(2 / self._alpha) / (variance * self._count * math.log(self._count + 1)))
        with np.errstate(divide="ignore"):
            on = np.minimum(bet, _LARGEST_BET / self._means)
            against = np.minimum(bet, _LARGEST_BET / (1 - self._means))
        gain = share - self._means
        self._log_capital += np.log1p(np.stack([on * gain, -against * gain]))
        self._largest = np.maximum(self._largest, self._log_capital.max(0) - math.log(2))
        self._sum += share
        mean = self._sum / (self._count + 1)
        self._squares += (share - mean) ** 2

    @property
    def bound(self) -> Bound:
        """The interval of all values so far, within those of every look before."""
        (at,) = np.nonzero(self._largest < -math.log(self._alpha))
        values = self._most * (2 * self._means - 1)
        # Widened by a candidate, as the ends of the interval lie between two.
        ends = (values[max(at[0] - 1, 0)], values[min(at[-1] + 1, _MEANS - 1)]) if len(at) else (values[0], values[-1])
        return Bound(float(ends[0]), float(ends[1]), min(1.0, math.exp(-self._largest[_MEANS // 2])))
