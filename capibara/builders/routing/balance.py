"""How many texts of each domain are kept, and which: chosen by a seeded hash."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping

from capibara.builders.routing.splits import NAMES
from capibara.config import configurable
from capibara.core.types import UserError


class BalanceMethod(enum.StrEnum):
    """How domains get their shares.

    CAP: large domains lose texts; none is repeated.
    OVERSAMPLE: small domains are repeated, up to `max_repeats` times; none loses texts.
    NONE: all texts are kept, once.
    """

    CAP = "cap"
    OVERSAMPLE = "oversample"
    NONE = "none"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Balance:
    """How domains are balanced.

    Attributes:
      method: whether large domains lose texts or small ones are repeated.
      temperature: a domain's share is proportional to its number of texts to the power of 1 / temperature, as for the
        languages of mT5 (Xue et al. 2021); 1: as they are; None: equal shares.
      per_domain: the most texts of a domain in a split; None: no limit.
      max_repeats: how often a text may be there with "oversample".
      splits: the splits that are balanced.
      seed: chooses other texts, and their order.
    """

    method: BalanceMethod = BalanceMethod.CAP
    temperature: float | None = None
    per_domain: int | None = None
    max_repeats: int = 10
    splits: tuple[str, ...] = ("train",)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature is not None and not 1 <= self.temperature < math.inf:
            raise UserError(
                f"Balance.temperature ({self.temperature}) must be at least 1: try 3.0, or None: equal shares"
            )
        if self.max_repeats < 1 or (self.per_domain is not None and self.per_domain < 1):
            raise UserError(
                f"Balance.max_repeats ({self.max_repeats}) and per_domain ({self.per_domain}) must be at least 1: try 10"
            )
        for name in self.splits:
            if name not in NAMES:
                raise UserError(f"Balance.splits: {name!r} is no split: known are {', '.join(NAMES)}")

    def targets(self, counts: Mapping[str, int], split: str) -> dict[str, int]:
        """How many texts of each domain a split gets, repetitions included.

        Args:
          counts: texts of each domain in the split.
          split: its name.
        """
        result = dict(counts)
        if split in self.splits and self.method is not BalanceMethod.NONE:
            power = 0.0 if self.temperature is None else 1 / self.temperature
            weights = {name: count**power for name, count in counts.items() if count}
            of_each = [counts[name] / weight for name, weight in weights.items()]
            if self.method is BalanceMethod.CAP:
                scale = min(of_each, default=0.0)
                result |= {name: min(counts[name], round(scale * weight)) for name, weight in weights.items()}
            else:
                scale = max(of_each, default=0.0)
                result |= {
                    name: min(counts[name] * self.max_repeats, max(counts[name], round(scale * weight)))
                    for name, weight in weights.items()
                }
        most = math.inf if self.per_domain is None or split not in self.splits else self.per_domain
        return {name: int(min(count, most)) for name, count in result.items()}
