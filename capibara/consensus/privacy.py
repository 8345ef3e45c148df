"""Differential privacy: what each unit adds to a sum is clipped, the sum gets noise, and a ledger counts what that has cost.

A unit is a node of a group with all its data (user-level privacy as in McMahan et al. 2018, arXiv:1710.06963), or a document
(example-level privacy, DP-SGD of Abadi et al. 2016, arXiv:1607.00133). The ledger is dp-accounting's
(github.com/google/differential-privacy).
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from capibara.config import configurable
from capibara.core import extras
from capibara.core.types import Params, PyTree, UserError

if TYPE_CHECKING:
    from dp_accounting import PrivacyAccountant

MOST_RELEASES = 1 << 20  # beyond which `releases_within` does not look


class Accounting(enum.StrEnum):
    """How epsilon is computed, from the loosest to the tightest.

    MOMENTS: Renyi divergences with the conversion of Abadi et al. 2016 (arXiv:1607.00133), the moments accountant.
    RDP: the same divergences with the conversion of Canonne et al. 2020 (arXiv:2004.00010).
    PLD: the distribution of the privacy loss, composed numerically (Koskela et al. 2020, arXiv:1906.03049).
    """

    MOMENTS = "moments"
    RDP = "rdp"
    PLD = "pld"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Privacy:
    """What is promised: how little one unit changes the distribution of the models that come out.

    A unit is a node with its data for `Coordinator.privacy`, and a document for `Trainer.privacy`.

    Attributes:
      clip_norm: the largest norm of a unit's update or gradient; longer ones are scaled down.
      noise_multiplier: the noise's standard deviation in the sum over units, over `clip_norm`.
      delta: the probability with which the promise may fail; below one over the number of units.
      budget: the largest epsilon; training ends before it is exceeded. None: it is only reported.
      accounting: how epsilon is computed.
    """

    clip_norm: float
    noise_multiplier: float
    delta: float = 1e-5
    budget: float | None = None
    accounting: Accounting = Accounting.PLD

    def __post_init__(self) -> None:
        for name in ("clip_norm", "noise_multiplier"):
            if not 1e-9 <= getattr(self, name) <= 1e9:
                raise UserError(f"Privacy.{name} is {getattr(self, name)}, must be from 1e-9 to 1e9: try 1.0")
        if not 0 < self.delta < 1:
            raise UserError(f"Privacy.delta is {self.delta}, must be between 0 and 1: try 1e-5")
        if self.budget is not None and not 0 < self.budget < math.inf:
            raise UserError(f"Privacy.budget is {self.budget}, must be above 0 and finite, or None: try 8.0")

    def epsilon(self, releases: int, sampling: float = 1.0) -> float:
        """What so many noisy means have cost.

        Args:
          releases: the number of those in which a unit has a part.
          sampling: the probability with which each unit has a part in one, drawn anew for each; 1: all always have.
        """
        return epsilon(self.noise_multiplier, sampling, releases, self.delta, self.accounting)

    def releases_within(self, sampling: float = 1.0, noun: str = "round") -> int:
        """The largest number of noisy means that the budget allows.

        Args:
          sampling: as for `epsilon`.
          noun: what they are, for the error.

        Raises:
          UserError: it does not allow the first.
        """
        if self.budget is None:
            return MOST_RELEASES
        budget = self.budget
        if (first := self.epsilon(1, sampling)) > budget:
            raise UserError(
                f"Privacy.budget is {budget:g}, and the first {noun} costs epsilon {first:.3g}: raise it, or "
                f"noise_multiplier ({self.noise_multiplier:g})"
            )
        most = 1
        while most < MOST_RELEASES and self.epsilon(2 * most, sampling) <= budget:
            most *= 2
        low, high = most, 2 * most
        while most < MOST_RELEASES and high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.epsilon(middle, sampling) <= budget else (low, middle)
        return low

    def noisy_mean(self, start: Params, models: PyTree, nodes: int, key: jax.Array) -> Params:
        """The start plus the sum of the clipped updates over `nodes`, with noise (traceable).

        An update that is not finite counts as zero. The divisor is fixed: if it were the number of updates, the mean would
        reveal it.

        Args:
          start: the model that the nodes began with, arrays [...].
          models: theirs, float arrays [n, ...].
          nodes: of the group, whether or not all have a model among these.
          key: secret, and new for each mean.
        """
        updates = jax.tree.map(lambda x, started: x.astype(jnp.float32) - started.astype(jnp.float32), models, start)
        squares = [jnp.sum(jnp.square(x), axis=tuple(range(1, x.ndim))) for x in jax.tree.leaves(updates)]
        norms = jnp.sqrt(sum(squares[1:], squares[0]))
        scales = jnp.where(jnp.isfinite(norms), jnp.minimum(1.0, self.clip_norm / jnp.maximum(norms, 1e-30)), 0.0)
        keys = jax.tree.unflatten(jax.tree.structure(start), list(jax.random.split(key, len(squares))))

        def mean(start: jax.Array, update: jax.Array, local: jax.Array) -> jax.Array:
            weights = scales.reshape(-1, *[1] * (update.ndim - 1))
            total = jnp.sum(jnp.where(weights > 0, update * weights, 0.0), axis=0)
            noise = self.noise_multiplier * self.clip_norm * normal(local, start.shape)
            return (start.astype(jnp.float32) + (total + noise) / nodes).astype(start.dtype)

        return jax.tree.map(mean, start, updates, keys)

    def warning(
        self, units: int, params: int, nouns: tuple[str, str, str] = ("round", "update", "nodes")
    ) -> str | None:
        """A line if the noise drowns the largest possible mean update; None: it does not.

        Args:
          units: in a mean.
          params: parameters that are trained.
          nouns: the mean, what is added up in it, and the units.
        """
        noise = self.noise_multiplier * self.clip_norm * math.sqrt(params) / units
        if noise <= self.clip_norm:
            return None
        needed = math.ceil(self.noise_multiplier * math.sqrt(params))
        mean, part, noun = nouns
        return (
            f"the noise of a {mean} has the norm {noise:.3g}, {noise / self.clip_norm:.3g} times the largest {part}'s "
            f"({self.clip_norm:g}): with {units} {noun} and {params:,} parameters it drowns what they learn; with {needed:,} "
            f"{noun} it would be as large, and adapters have fewer parameters"
        )


def normal(key: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Normal noise, float32, for a mechanism that counts on its tails (traceable).

    One draw of float32 ends at 5.4 standard deviations, where a sum would tell data apart. The sum of four ends at 10.8.
    """
    total = jnp.zeros(tuple(shape))
    for item in jax.random.split(key, 4):  # one by one: an array of four would be the largest of the program
        total += jax.random.normal(item, tuple(shape))
    return total / 2


def epsilon(
    noise_multiplier: float, sampling: float, releases: int, delta: float, accounting: Accounting = Accounting.PLD
) -> float:
    """The epsilon of Gaussian mechanisms, each on a Poisson sample, for neighbours that differ in one unit.

    Args:
      noise_multiplier: the noise's standard deviation over the sensitivity.
      sampling: the probability with which a unit is in a sample.
      releases: the number of mechanisms.
      delta: the probability with which the promise may fail.
      accounting: how it is computed.

    Returns:
      0 without a release, infinity if delta or the noise is 0.

    Raises:
      UserError: an argument is out of its range.
    """
    ranges = {"noise_multiplier": (noise_multiplier, math.inf), "sampling": (sampling, 1.0), "delta": (delta, 1.0)}
    for name, (value, most) in ranges.items():
        if not 0 <= value <= most or value == math.inf:
            raise UserError(
                f"{name} is {value}, must be at least 0 and {'finite' if most == math.inf else 'at most 1'}"
            )
    if releases < 0 or releases != int(releases):
        raise UserError(f"releases is {releases}, must be an integer of at least 0")
    if accounting not in [*Accounting]:
        raise UserError(f"accounting is {accounting!r}, must be one of {', '.join(Accounting)}: try 'pld'")
    if not releases or not sampling or delta == 1:
        return 0.0
    if not delta or not noise_multiplier:
        return math.inf
    accounting = Accounting(accounting)
    extras.require("dp_accounting", extra="privacy", why="the cost of differential privacy")
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    accountant: PrivacyAccountant
    if sampling == 1:
        together = noise_multiplier / math.sqrt(releases)  # without sampling they are one Gaussian mechanism
        if accounting is Accounting.PLD:
            return _of_gaussian(together, delta)
        accountant = RdpAccountant()
        accountant.compose(GaussianDpEvent(together))
    else:
        accountant = PLDAccountant() if accounting is Accounting.PLD else RdpAccountant()
        accountant.compose(PoissonSampledDpEvent(sampling, GaussianDpEvent(noise_multiplier)), releases)
    if accounting is not Accounting.MOMENTS:
        return float(accountant.get_epsilon(delta))
    orders, divergences = np.asarray(accountant.orders, np.float64), np.asarray(accountant.rdp, np.float64)
    return float(np.min(divergences + math.log(1 / delta) / (orders - 1)))


def _of_gaussian(noise_multiplier: float, delta: float) -> float:
    """The exact epsilon of a Gaussian mechanism, from above: the delta of an epsilon has a closed form, which falls."""
    from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

    delta_of = GaussianPrivacyLoss(noise_multiplier).get_delta_for_epsilon
    if delta_of(0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while delta_of(high) > delta:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > delta else (low, middle)
    return high
