"""Selects agents and bullets."""

from __future__ import annotations

import dataclasses
import enum

from capibara.builders.playbooks.agents import Agent
from capibara.builders.playbooks.bullets import Bullet, domain_name, section_name
from capibara.config import configurable
from capibara.core.types import UserError


class Unknown(enum.StrEnum):
    """What is done with bullets of which no agent is known."""

    KEEP = "keep"
    DROP = "drop"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentFilter:
    """Selects the agents whose playbooks are used; what an agent does not say counts as 0.

    Attributes:
      min_graduation_score: the least graduation score, on the scale of the agents.
      min_interactions: the fewest tasks.
      min_success_rate: the least part of them that succeeded, from 0 to 1.
      domains: an agent must know one of these; empty: any.
      min_expertise: the least skill in one of `domains`, or, if that is empty, in its strongest domain.
      unknown: what is done with bullets of which no agent is known.
    """

    min_graduation_score: float = 0.0
    min_interactions: int = 0
    min_success_rate: float = 0.0
    domains: tuple[str, ...] = ()
    min_expertise: float = 0.0
    unknown: Unknown = Unknown.KEEP

    def __post_init__(self) -> None:
        for name in ("min_graduation_score", "min_interactions", "min_expertise"):
            if not getattr(self, name) >= 0:
                raise UserError(f"AgentFilter.{name} ({getattr(self, name)}) must be at least 0: try 0")
        if not 0 <= self.min_success_rate <= 1:
            raise UserError(f"AgentFilter.min_success_rate ({self.min_success_rate}) must be from 0 to 1: try 0.7")

    def rejects(self, agent: Agent | None) -> str | None:
        """The setting by which the bullets of an agent are not used; None: they are.

        Args:
          agent: the agent; None: it is not known.
        """
        if agent is None:
            return "unknown" if self.unknown is Unknown.DROP else None
        if (agent.graduation_score or 0) < self.min_graduation_score:
            return "min_graduation_score"
        if (agent.interactions or 0) < self.min_interactions:
            return "min_interactions"
        if (agent.success_rate or 0) < self.min_success_rate:
            return "min_success_rate"
        domains = {domain_name(domain) for domain in self.domains}
        skills = [skill for name, skill in agent.expertise.items() if not domains or domain_name(name) in domains]
        if domains and not skills:
            return "domains"
        return "min_expertise" if max(skills, default=0.0) < self.min_expertise else None


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class BulletFilter:
    """Selects bullets, after equal and similar ones are merged.

    Attributes:
      min_votes: the fewest votes, helpful and harmful ones together.
      min_helpful_share: the least part of the votes that is helpful, from 0 to 1; it drops no bullet without votes.
      min_quality: the least quality (see BulletRanking), from 0 to 1; a bullet without votes has 0.
      min_characters: the shortest text.
      max_characters: the longest text.
      sections: sections to keep, such as ("FORMULAS & CALCULATIONS",); empty: all.
    """

    min_votes: int = 0
    min_helpful_share: float = 0.5
    min_quality: float = 0.0
    min_characters: int = 10
    max_characters: int = 8_000
    sections: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("min_helpful_share", "min_quality"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"BulletFilter.{name} ({getattr(self, name)}) must be from 0 to 1: try 0.5")
        for name in ("min_votes", "min_characters"):
            if getattr(self, name) < 0:
                raise UserError(f"BulletFilter.{name} ({getattr(self, name)}) must be at least 0: try 0")
        if self.max_characters < max(1, self.min_characters):
            raise UserError(
                f"BulletFilter.max_characters ({self.max_characters}) must be at least min_characters "
                f"({self.min_characters}): try 8000"
            )

    def rejects(self, bullet: Bullet, quality: float) -> str | None:
        """The setting by which a bullet is not used; None: it is."""
        votes = bullet.helpful + bullet.harmful
        if votes < self.min_votes:
            return "min_votes"
        if votes and bullet.helpful < self.min_helpful_share * votes:
            return "min_helpful_share"
        if quality < self.min_quality:
            return "min_quality"
        if len(bullet.content) < self.min_characters:
            return "min_characters"
        if len(bullet.content) > self.max_characters:
            return "max_characters"
        if self.sections and section_name(bullet.section) not in {section_name(section) for section in self.sections}:
            return "sections"
        return None
