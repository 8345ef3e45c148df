"""Statistics of the bullets of a domain: how many there were, what became of them, and how good the kept ones are."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from capibara.builders.playbooks.bullets import Bullet
from capibara.builders.redaction.redact import Json

_SHARES = (0.1, 0.5, 0.9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranked:
    """A bullet that stands for all that were merged into it.

    Attributes:
      bullet: its best text, with the votes of all.
      quality: of these votes, from 0 to 1.
      domain: its domain.
      sources: the file and line of each bullet that was merged, the best first.
      agents: the agents that they come from, sorted.
      texts: its own text and those that were merged into it, each with its own votes, sorted by text.
    """

    bullet: Bullet
    quality: float
    domain: str
    sources: tuple[str, ...]
    agents: tuple[str, ...] = ()
    texts: tuple[Bullet, ...] = ()

    def as_json(self) -> dict[str, Json]:
        """The record of bullets/, which the builder reads, too."""
        return {
            "id": self.bullet.id,
            "domain": self.domain,
            "section": self.bullet.section,
            "content": self.bullet.content,
            "helpful": self.bullet.helpful,
            "harmful": self.bullet.harmful,
            "quality": round(self.quality, 6),
            "sources": list(self.sources),
            "agents": list(self.agents),
        }


class DomainStatistics:
    """Counts of one domain.

    Attributes:
      read: bullets that were read, of agents that are used.
      merged: of them, those that were merged into another.
      excluded: by setting, those that a filter dropped or that were beyond the limit.
      conversations: by kind.
    """

    def __init__(self) -> None:
        self.read = 0
        self.merged = 0
        self.excluded: collections.Counter[str] = collections.Counter()
        self.conversations: collections.Counter[str] = collections.Counter()

    def as_json(self, ranked: Sequence[Ranked]) -> dict[str, Json]:
        """The statistics, with those of the bullets that are kept."""
        qualities = sorted(entry.quality for entry in ranked)
        sections: dict[str, list[Ranked]] = collections.defaultdict(list)
        for item in ranked:
            sections[item.bullet.section].append(item)
        return {
            "read": self.read,
            "merged": self.merged,
            "excluded": dict(sorted(self.excluded.items())),
            "kept": len(ranked),
            **_votes(ranked),
            "without_votes": sum(entry.bullet.helpful + entry.bullet.harmful == 0 for entry in ranked),
            "quality": {
                "mean": round(sum(qualities) / max(1, len(qualities)), 6),
                **{f"p{round(100 * share)}": _quantile(qualities, share) for share in _SHARES},
            },
            "agents": len({agent for entry in ranked for agent in entry.agents}),
            "sections": {name: {"kept": len(inside), **_votes(inside)} for name, inside in sorted(sections.items())},
            "conversations": dict(sorted(self.conversations.items())),
        }


def _votes(ranked: Sequence[Ranked]) -> dict[str, Json]:
    return {name: sum(getattr(item.bullet, name) for item in ranked) for name in ("helpful", "harmful")}


def _quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that is at least as large as a share of the sorted values; None: there are none."""
    return round(values[min(len(values) - 1, int(share * len(values)))], 6) if values else None
