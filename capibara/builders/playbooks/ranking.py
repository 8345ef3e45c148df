"""Ranks bullets by their quality: the part of helpful votes, with less confidence the fewer votes there are.

The quality is the lower end of Wilson's score interval: Wilson, "Probable Inference, the Law of Succession, and Statistical
Inference" (1927). One helpful vote of one has 0.21, nine of ten have 0.60, 90 of 100 have 0.83.
"""

from __future__ import annotations

import dataclasses
import enum
import math

from capibara.builders.playbooks.agents import Agent
from capibara.builders.playbooks.bullets import GENERAL, Bullet, domain_name
from capibara.config import configurable
from capibara.core.types import UserError


class DomainFrom(enum.StrEnum):
    """What says the domain of a bullet that names none itself.

    AGENT: its agent: the domain that its section is named like, or else the one that the agent knows best.
    SECTION: its section.
    """

    AGENT = "agent"
    SECTION = "section"


def wilson(helpful: int, harmful: int, z: float = 1.96) -> float:
    """The lower end of Wilson's interval of the part of helpful votes, from 0 to 1; 0 without votes.

    Args:
      helpful: helpful votes.
      harmful: harmful votes.
      z: standard deviations of the interval: 1.96 for a confidence of 95%; 0: the part itself.
    """
    votes = helpful + harmful
    if not votes:
        return 0.0
    share, spread = helpful / votes, z * z / votes
    margin = math.sqrt(spread * (share * (1 - share) + spread / 4))
    return max(0.0, (share + spread / 2 - margin) / (1 + spread))


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class BulletRanking:
    """How bullets are ranked, and how many are kept.

    Attributes:
      z: standard deviations of Wilson's interval; the larger, the less a few votes count.
      per_domain: the best bullets of a domain that are kept.
      limits: the same for single domains, such as {"python": 7000}.
      domain_from: what says the domain of a bullet.
    """

    z: float = 1.96
    per_domain: int = 5_000
    limits: dict[str, int] = dataclasses.field(default_factory=dict)
    domain_from: DomainFrom = DomainFrom.AGENT

    def __post_init__(self) -> None:
        if not 0 <= self.z <= 10:
            raise UserError(f"BulletRanking.z ({self.z}) must be from 0 to 10: try 1.96")
        for name, limit in {
            "per_domain": self.per_domain,
            **{f"limits[{k!r}]": v for k, v in self.limits.items()},
        }.items():
            if limit < 1:
                raise UserError(f"BulletRanking.{name} ({limit}) must be at least 1: try 5000")

    def quality(self, helpful: int, harmful: int) -> float:
        """The quality of a bullet, from 0 to 1."""
        return wilson(helpful, harmful, self.z)

    def limit(self, domain: str) -> int:
        """The most bullets of a domain."""
        limits = {domain_name(name): limit for name, limit in self.limits.items()}
        return limits.get(domain, self.per_domain)

    def domain(self, bullet: Bullet, agent: Agent | None) -> str:
        """The domain of a bullet; "general": nothing says it.

        Args:
          bullet: the bullet.
          agent: its agent; None: it is not known.
        """
        if bullet.domain:
            return domain_name(bullet.domain)
        section = domain_name(bullet.section)
        if self.domain_from is DomainFrom.SECTION:
            return section
        if agent is None:
            return GENERAL.lower()
        known = {domain_name(name) for name in agent.expertise}
        return section if section in known else domain_name(agent.strongest() or GENERAL)
