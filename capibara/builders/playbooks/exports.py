"""The JSON forms of playbooks: what ACE tools export, bullets one a line, and agents with their playbooks.

{"skills": {ID: BULLET}} or {"bullets": ...}     agentic-context-engine; also a list of bullets
{"playbook": {SECTION: [BULLET]}}                exports by section; also {"sections": ...}, or without the outer key
{ID: BULLET}                                     with "counter": {"helpful", "harmful"}
{"playbook": TEXT}                               the text form; also {"content": TEXT, "next_global_id": N}
BULLET                                           {"id", "section", "content", "helpful", "harmful", "domain", "agent"}
{"agent_id", "graduation_score", ...}            an agent, also with a playbook in it; {"agents": [AGENT]}
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from capibara.builders.files.problems import Kind, Problems
from capibara.builders.files.reading import Line, Record
from capibara.builders.playbooks import agents
from capibara.builders.playbooks.agents import Agent
from capibara.builders.playbooks.bullets import (
    GENERAL,
    MOST_CHARACTERS,
    MOST_VOTES,
    Bullet,
    identifier,
    normalised,
    one_line,
)
from capibara.builders.playbooks.text import Parser
from capibara.builders.redaction.redact import Json

_CONTENT, _IDS = ("content", "text"), ("id", "bullet_id", "skill_id", "name")
_COUNTERS = ("counter", "metadata", "votes")  # objects within a bullet that may have its votes
_LISTS = ("skills", "bullets")
_CONTAINERS = frozenset({*_LISTS, "sections", "playbook", "next_global_id"})
_AGENTS = ("agent", "agent_id", "agent_name")  # names of an agent in what is no agent itself
_ABOUT = frozenset({"metadata", "stats", "version"})  # of an export, not of a section


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Context:
    """What is known of the bullets within a JSON object."""

    agent: str | None = None
    domain: str | None = None
    section: str = ""


class Export:
    """Reads the bullets and agents of a JSON record.

    Args:
      record: the record.
      problems: counts what has another form, with file and line.
      counts: gets the number of bullets that are marked as invalid, and of lines outside bullets.
    """

    def __init__(self, record: Record, problems: Problems, counts: Counter[str]):
        self._record = record
        self._problems = problems
        self._counts = counts
        self._number = 0  # of bullets so far, for messages
        self._entries: list[Bullet | Agent] = []

    def read(self) -> list[Bullet | Agent]:
        """The bullets and agents, in their order."""
        if not self._object(self._record.value, _Context()):
            self._malformed("no playbook, bullet or agent")
        return self._entries

    def _object(self, value: dict[str, Json], context: _Context) -> bool:
        """Reads an object; returns whether it has a known form."""
        if _is_bullet(value) and not _CONTAINERS & value.keys():
            self._bullets([value], context)
            return True
        context = dataclasses.replace(context, domain=_text(value.get("domain")) or context.domain)
        if is_known := agents.is_agent(value):
            context = self._agent(value, context)
        elif name := next((name for key in _AGENTS if (name := _text(value.get(key)))), None):
            context = dataclasses.replace(context, agent=name)
        if isinstance(inner := value.get("agents"), (list, dict)):
            self._agents(inner, context)
            is_known = True
        listed = [item for key in _LISTS if isinstance(item := value.get(key), (list, dict))]
        for item in listed:
            self._bullets(item, context)
        sections, playbook = value.get("sections"), value.get("playbook")
        if isinstance(sections, dict) and not listed:
            self._sections(sections, context)
        if isinstance(playbook, str) and not agents.is_file_name(playbook):
            self._parsed(playbook, context)
        elif isinstance(playbook, list):
            self._bullets(playbook, context)
        elif isinstance(playbook, dict):
            if playbook and not self._object(playbook, context):
                self._malformed("a playbook of another form")
        elif playbook is not None and not isinstance(playbook, str):
            self._malformed("a playbook of another form")
        elif not is_known and not listed and not isinstance(sections, dict):
            return self._plain(value, context)
        return True

    def _agent(self, value: dict[str, Json], context: _Context) -> _Context:
        """Reads an agent; returns the context of its playbook."""
        try:
            agent = agents.read(value, self._record.number, context.agent)
        except ValueError as error:
            self._malformed(str(error))
            return dataclasses.replace(context, agent=agents.name_of(value) or context.agent)
        self._entries.append(agent)
        return dataclasses.replace(context, agent=agent.name)

    def _agents(self, value: list[Json] | dict[str, Json], context: _Context) -> None:
        """Reads a list of agents, or an object of agents by name."""
        pairs: list[tuple[str | None, Json]] = [(None, entry) for entry in value]
        if isinstance(value, dict):
            pairs = list(value.items())
        for name, item in pairs:
            if not isinstance(item, dict) or not self._object(item, dataclasses.replace(context, agent=name)):
                self._malformed("an agent that is no object with graduation_score, interactions, success_rate, ...")

    def _plain(self, value: dict[str, Json], context: _Context) -> bool:
        """Reads an object without a key that says what it is; returns whether it has a known form."""
        if "next_global_id" in value and isinstance(text := value.get("content"), str):
            self._parsed(text, context)
            return True
        rest = {name: item for name, item in value.items() if name not in _ABOUT}
        if rest and all(map(_is_bullet, rest.values())):
            self._bullets(rest, context)
            return True
        lists = [item for item in rest.values() if isinstance(item, list)]
        inside = [bullet for item in lists for bullet in item]
        if lists and all(map(_is_bullet, inside)) and (not inside or any(map(_has_votes, inside))):
            self._sections(rest, context)
            return True
        return False

    def _sections(self, sections: dict[str, Json], context: _Context) -> None:
        for name, inside in sections.items():
            if isinstance(inside, (list, dict)):
                self._bullets(inside, dataclasses.replace(context, section=name))

    def _parsed(self, text: str, context: _Context) -> None:
        parser = Parser(self._problems)
        lines = (Line(self._record.path, self._record.number, line) for line in text.split("\n"))
        for bullet in parser.parse(lines):
            self._entries.append(dataclasses.replace(bullet, domain=context.domain, agent=context.agent))
        self._counts["lines outside bullets"] += parser.outside

    def _bullets(self, value: list[Json] | dict[str, Json], context: _Context) -> None:
        """Reads a list of bullets, or an object of bullets by identifier."""
        pairs = list(value.items()) if isinstance(value, dict) else [("", entry) for entry in value]
        for name, item in pairs:
            self._number += 1
            if not isinstance(item, dict):
                self._malformed(f"bullet {self._number} is no object")
            elif item.get("status") == "invalid":
                self._counts["bullets marked invalid"] += 1
            else:
                try:
                    self._entries.append(self._bullet(item, name, context))
                except ValueError as error:
                    self._malformed(f"bullet {self._number} {error}")

    def _bullet(self, value: Mapping[str, Json], name: str, context: _Context) -> Bullet:
        content = next((result for key in _CONTENT if isinstance(result := value.get(key), str)), "")
        if len(content) > MOST_CHARACTERS:
            raise ValueError(f"has more than {MOST_CHARACTERS:,} characters")
        if not (content := normalised(content)):
            raise ValueError("has no text in content")
        return Bullet(
            id=identifier(_id_of(value) or name),
            section=one_line(_text(value.get("section")) or context.section) or GENERAL,
            content=content,
            helpful=_votes(value, "helpful"),
            harmful=_votes(value, "harmful"),
            domain=_text(value.get("domain")) or context.domain,
            agent=_text(value.get("agent")) or _text(value.get("agent_id")) or context.agent,
            line=self._record.number,
        )

    def _malformed(self, message: str) -> None:
        self._problems.add(self._record.path, self._record.number, Kind.MALFORMED, message)


def _text(value: Json) -> str | None:
    return value.strip() or None if isinstance(value, str) else None


def _id_of(value: Mapping[str, Json]) -> str:
    """The identifier of a bullet; "": it has none."""
    result = next((value[key] for key in _IDS if isinstance(value.get(key), (str, int))), "")
    return "" if isinstance(result, bool) else str(result)


def _is_bullet(value: Json) -> bool:
    if not isinstance(value, dict) or not any(isinstance(value.get(key), str) for key in _CONTENT):
        return False
    return _has_votes(value) or _id_of(value) != ""


def _has_votes(value: Json) -> bool:
    if not isinstance(value, dict):
        return False
    return any(name in item for item in _with_counters(value) for name in ("helpful", "harmful", "helpful_count"))


def _with_counters(value: Mapping[str, Json]) -> list[Mapping[str, Json]]:
    return [value, *(item for key in _COUNTERS if isinstance(item := value.get(key), dict))]


def _votes(value: Mapping[str, Json], name: str) -> int:
    """The number of votes, 0 if the bullet has none.

    Raises:
      ValueError: it is no number of votes.
    """
    for item in _with_counters(value):
        for key in (name, f"{name}_count"):
            result = item.get(key)
            if result is None:
                continue
            if isinstance(result, float) and result.is_integer():
                result = int(result)
            if isinstance(result, bool) or not isinstance(result, int) or not 0 <= result <= MOST_VOTES:
                raise ValueError(f"has in {key} no whole number from 0 to {MOST_VOTES:,}")
            return result
    return 0
