"""Makes conversations for fine-tuning of bullets: what `capibara.data.chat` reads. Nothing is said that no bullet says."""

from __future__ import annotations

import collections
import dataclasses
import enum
import hashlib
import re
from collections.abc import Iterator, Sequence

from capibara.builders.playbooks.bullets import GENERAL, Bullet
from capibara.builders.playbooks.statistics import Ranked
from capibara.builders.redaction.redact import Json
from capibara.config import configurable
from capibara.core.types import UserError

# "When a query is slow, add an index" -> "What should I do when a query is slow?"; the comma ends the condition.
_CONDITION = re.compile(
    r"(?P<word>when|whenever|if|before|after|while|for|to|in case of)\s+(?P<rest>[^,.:;!?()\[\]`\n]{8,120}),\s+\S",
    re.IGNORECASE,
)
_CODE = re.compile(r"(?<!`)`(?P<code>[^`\n]{2,60})`(?!`)")
_WORD = re.compile(r"[^\W\d_]{4,}")
_TITLE = re.compile(r"\*\*(?P<title>[^*\n]{4,80}?)[.:]?\*\*[.:]?\s*(?=\S)")  # "**Use indices**: they ..."
_QUESTIONS = {
    "condition": ("What should I do {}?", "What do you advise {}?", "{}: what should I do?"),
    "to": ("How do I {}?", "What is a good way to {}?", "I want to {}. What do you advise?"),
    "title": ("{}: what should I know?", "Explain: {}", "What is your advice on this: {}?"),
    "section": (
        "Give me your advice on {}.",
        "What should I know about {}?",
        "List your advice, the best first, on {}.",
    ),
}
_PLACEHOLDER = re.compile(r"<(?:SECRET|PERSONAL):[^<>]*>")
_MOST_MERGED = 8  # bullets in a conversation about merging
_MERGE = "Merge these entries of a playbook into one, and add up their votes."


class ChatKind(enum.StrEnum):
    """What a conversation is about.

    ADVICE: a condition, an aim or a title that a bullet begins with, or a name of code in it -> the bullet.
    SECTION: a section of a domain's playbook, and for all but its best bullets a word of each -> several of its bullets.
    MERGE: similar bullets with their votes -> the one that they were merged into.
    """

    ADVICE = "advice"
    SECTION = "section"
    MERGE = "merge"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class PlaybookChats:
    """Which conversations are made.

    Attributes:
      kinds: what they are about.
      per_domain: the most conversations of a domain; those of the best bullets are kept.
      min_quality: the least quality of a bullet (see BulletRanking), from 0 to 1.
      bullets: the most bullets in a conversation about a section.
      max_characters: the longest conversation.
    """

    kinds: tuple[ChatKind, ...] = tuple(ChatKind)
    per_domain: int = 7_000
    min_quality: float = 0.0
    bullets: int = 5
    max_characters: int = 20_000

    def __post_init__(self) -> None:
        for name in ("per_domain", "bullets", "max_characters"):
            if getattr(self, name) < 1:
                raise UserError(f"PlaybookChats.{name} ({getattr(self, name)}) must be at least 1: try 5")
        if not 0 <= self.min_quality <= 1:
            raise UserError(f"PlaybookChats.min_quality ({self.min_quality}) must be from 0 to 1: try 0.3")


def of_domain(ranked: Sequence[Ranked], settings: PlaybookChats) -> Iterator[dict[str, Json]]:
    """The conversations of a domain's bullets.

    Args:
      ranked: the bullets, the best first.
      settings: which conversations are made.
    """
    count, seen = 0, set[str]()
    for chat in _all(ranked, settings):
        key = str(chat["messages"])
        if chat["kind"] not in settings.kinds or len(key) > settings.max_characters or key in seen:
            continue
        if count == settings.per_domain:
            return
        seen.add(key)
        count += 1
        yield chat


def _all(ranked: Sequence[Ranked], settings: PlaybookChats) -> Iterator[dict[str, Json]]:
    """All conversations; one about a section comes when its last bullet does."""
    ranked = [entry for entry in ranked if entry.quality >= settings.min_quality]
    frequency = collections.Counter(word for entry in ranked for word in _words(entry.bullet))
    groups: dict[str, list[Ranked]] = collections.defaultdict(list)
    started: set[str] = set()
    for item in ranked:
        if (asked := question(item.bullet)) is not None:
            yield _chat(ChatKind.ADVICE, [item], asked, item.bullet.content)
        if 2 <= len(item.texts) <= _MOST_MERGED:
            yield _merge(item)
        group = groups[item.bullet.section]
        group.append(item)
        if len(group) == settings.bullets:
            yield _section(group, frequency if item.bullet.section in started else None)
            started.add(item.bullet.section)
            group.clear()
    for section, group in sorted(groups.items()):
        if group:
            yield _section(group, frequency if section in started else None)


def _words(bullet: Bullet) -> set[str]:
    return {word.lower() for word in _WORD.findall(_PLACEHOLDER.sub(" ", bullet.content))}


def question(bullet: Bullet) -> str | None:
    """What a user would ask to get this advice, in the bullet's own words; None: it does not say."""
    if (result := _TITLE.match(bullet.content)) is not None:
        return _chosen("title", bullet.content).format(result["title"].strip())
    if (result := _CONDITION.match(bullet.content)) is None:
        code = _CODE.search(bullet.content)
        return None if code is None else _chosen("title", bullet.content).format(f"`{code['code'].strip()}`")
    word, rest = result["word"].lower(), result["rest"].strip()
    if word == "to":
        return _chosen("to", bullet.content).format(rest)
    text = _chosen("condition", bullet.content).format(f"{word} {rest}")
    return text[0].upper() + text[1:]


def _section(group: Sequence[Ranked], frequency: collections.Counter[str] | None) -> dict[str, Json]:
    """About a section; with the rarest word of each bullet, if `frequency` counts the bullets that have a word."""
    first = group[0]
    section, domain = first.bullet.section.lower(), first.domain.replace("_", " ")
    topic = section if first.domain == GENERAL.lower() else f"{section} ({domain})"
    topic = domain if first.bullet.section == GENERAL else topic
    topic = "general matters" if topic == GENERAL.lower() else topic
    if frequency is not None:
        words = [
            min(result, key=lambda word: (frequency[word], -len(word), word))
            for item in group
            if (result := _words(item.bullet))
        ]
        topic += f": {', '.join(dict.fromkeys(words))}" if words else ""
    question = _chosen("section", "\n".join(item.bullet.content for item in group)).format(topic)
    if len(group) == 1:
        return _chat(ChatKind.SECTION, group, question, first.bullet.content)
    listed = "\n".join(f"{i}. " + item.bullet.content.replace("\n", "\n   ") for i, item in enumerate(group, 1))
    return _chat(ChatKind.SECTION, group, question, listed)


def _merge(ranked: Ranked) -> dict[str, Json]:
    question = "\n\n".join([_MERGE, *(_with_votes(text) for text in ranked.texts)])
    return _chat(ChatKind.MERGE, [ranked], question, _with_votes(ranked.bullet))


def _with_votes(bullet: Bullet) -> str:
    return f"helpful={bullet.helpful} harmful={bullet.harmful} :: {bullet.content}"


def _chat(kind: ChatKind, group: Sequence[Ranked], question: str, answer: str) -> dict[str, Json]:
    messages: list[Json] = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {
        "messages": messages,
        "kind": str(kind),
        "domain": group[0].domain,
        "section": group[0].bullet.section,
        "quality": round(min(item.quality for item in group), 6),
        "bullets": [item.bullet.id for item in group],
    }


def _chosen(kind: str, key: str) -> str:
    """One of the questions of a kind, the same for the same text."""
    options = _QUESTIONS[kind]
    digest = hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=8).digest()
    return options[int.from_bytes(digest, "little") % len(options)]
