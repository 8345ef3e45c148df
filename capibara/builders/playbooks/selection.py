"""From the bullets of a domain to those that are kept: merged, filtered, ranked, numbered."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Sequence

from capibara.builders.playbooks import merging
from capibara.builders.playbooks.bullets import MOST_VOTES, Bullet
from capibara.builders.playbooks.filters import BulletFilter
from capibara.builders.playbooks.merging import BulletMerging
from capibara.builders.playbooks.ranking import BulletRanking
from capibara.builders.playbooks.statistics import DomainStatistics, Ranked

_PREFIX = "bul"  # of the identifiers of sections without Latin letters


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A bullet of an agent that is used.

    Attributes:
      bullet: the bullet, redacted.
      source: its file and line.
      agent: its agent's name; None: it is not known.
      standing: the agent's graduation score and success rate, which decide between equal bullets.
    """

    bullet: Bullet
    source: str
    agent: str | None = None
    standing: tuple[float, float] = (0.0, 0.0)


def select(
    entries: Sequence[Entry], domain: str, merge: BulletMerging, keep: BulletFilter, ranking: BulletRanking
) -> tuple[list[Ranked], DomainStatistics]:
    """The bullets of a domain that are kept, the best first, and statistics.

    The result does not depend on the order of the entries.

    Args:
      entries: the bullets of the domain.
      domain: the domain.
      merge: what counts as similar.
      keep: which bullets are kept.
      ranking: how they are ranked, and how many are kept.

    Raises:
      UserError: rensa is not installed.
    """
    about = DomainStatistics()
    about.read = len(entries)
    groups = _groups(entries, merge, ranking)
    about.merged = len(entries) - len(groups)
    result = []
    for group in groups:
        item = _ranked(group, domain, ranking)
        if (reason := keep.rejects(item.bullet, item.quality)) is not None:
            about.excluded[reason] += 1
        else:
            result.append((item, group[0]))
    result.sort(key=lambda pair: _order(dataclasses.replace(pair[1], bullet=pair[0].bullet), ranking))
    limit = ranking.limit(domain)
    if len(result) > limit:
        about.excluded["per_domain"] = len(result) - limit
    return [_numbered(entry, number) for number, (entry, _) in enumerate(result[:limit], 1)], about


def playbook_order(ranked: Sequence[Ranked]) -> list[Bullet]:
    """The bullets by section, the section with the best one first; in a section the best first."""
    sections: dict[str, list[Bullet]] = collections.defaultdict(list)
    for item in ranked:
        sections[item.bullet.section].append(item.bullet)
    return [bullet for inside in sections.values() for bullet in inside]


def _groups(entries: Sequence[Entry], merge: BulletMerging, ranking: BulletRanking) -> list[list[Entry]]:
    """The entries that are merged, the best of each group first."""
    ordered = sorted(entries, key=lambda entry: _order(entry, ranking))
    groups: dict[int, list[Entry]] = collections.defaultdict(list)
    for item, leader in zip(ordered, merging.leaders([entry.bullet.content for entry in ordered], merge).tolist()):
        groups[leader].append(item)
    return list(groups.values())


def _order(entry: Entry, ranking: BulletRanking) -> tuple[object, ...]:
    """Sorts the best first."""
    bullet, (graduation, success) = entry.bullet, entry.standing
    quality = ranking.quality(bullet.helpful, bullet.harmful)
    # Without helpful votes all have the same quality: fewer harmful ones are better.
    return (
        -quality,
        -bullet.helpful,
        bullet.harmful,
        -graduation,
        -success,
        bullet.content,
        bullet.section,
        entry.source,
    )


def _ranked(group: Sequence[Entry], domain: str, ranking: BulletRanking) -> Ranked:
    helpful = min(MOST_VOTES, sum(item.bullet.helpful for item in group))
    harmful = min(MOST_VOTES, sum(item.bullet.harmful for item in group))
    texts = sorted((item.bullet for item in group), key=lambda item: (item.content, item.helpful, item.harmful))
    return Ranked(
        bullet=dataclasses.replace(group[0].bullet, helpful=helpful, harmful=harmful),
        quality=ranking.quality(helpful, harmful),
        domain=domain,
        sources=tuple(item.source for item in group),
        agents=tuple(sorted({item.agent for item in group if item.agent is not None})),
        texts=tuple(texts) if len(group) > 1 else (),
    )


def _numbered(ranked: Ranked, rank: int) -> Ranked:
    """With an identifier as ACE makes them: three letters of its section, and its rank."""
    letters = re.sub(r"[^a-z]", "", ranked.bullet.section.lower())[:3]
    name = f"{letters if len(letters) == 3 else _PREFIX}-{rank:05d}"
    return dataclasses.replace(ranked, bullet=dataclasses.replace(ranked.bullet, id=name))
