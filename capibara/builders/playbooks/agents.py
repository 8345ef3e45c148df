"""An agent: how far it has learned, how often it succeeds, and what it knows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from capibara.builders.redaction.redact import Json

_NAMES = ("agent_id", "agent_name", "agent", "name", "id")
_FIELDS = {
    "graduation_score": ("graduation_score",),
    "interactions": ("interactions", "total_interactions", "num_interactions"),
    "success_rate": ("success_rate",),
}
_EXPERTISE = "domain_expertise"
_MOST_DOMAINS = 1000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Agent:
    """An agent whose playbook is read.

    Attributes:
      name: its identifier.
      graduation_score: how far it has learned, on the user's scale; None: not known.
      interactions: how many tasks it has done; None: not known.
      success_rate: the part of them that succeeded, from 0 to 1; None: not known.
      expertise: its skill by domain, on the user's scale.
      playbook: the name of its playbook's file; None: the file is named like the agent, or the record has it.
      line: of its file, or its item of a list, from 1.
    """

    name: str
    graduation_score: float | None = None
    interactions: int | None = None
    success_rate: float | None = None
    expertise: Mapping[str, float] = dataclasses.field(default_factory=dict)
    playbook: str | None = None
    line: int = 0

    def strongest(self) -> str | None:
        """The domain that it knows best; None: it names none."""
        return min(self.expertise, key=lambda name: (-self.expertise[name], name), default=None)


def is_agent(value: Mapping[str, Json]) -> bool:
    """Whether a JSON object describes an agent."""
    return _EXPERTISE in value or any(key in value for keys in _FIELDS.values() for key in keys)


def name_of(value: Mapping[str, Json]) -> str | None:
    """The agent that a JSON object names; None: none."""
    for key in _NAMES:
        if isinstance(result := value.get(key), str) and result.strip():
            return result.strip()
        if isinstance(result, int) and not isinstance(result, bool):
            return str(result)
    return None


def read(value: Mapping[str, Json], line: int, name: str | None = None) -> Agent:
    """The agent of a JSON object.

    Args:
      value: the object.
      line: where it is.
      name: its name, if the object has none.

    Raises:
      ValueError: a field has another form; the message has no value, which may be a secret.
    """
    name = name_of(value) or name
    if name is None:
        raise ValueError("an agent without agent_id or name")
    interactions = _number(value, "interactions")
    rate = _number(value, "success_rate")
    if rate is not None and rate > 1:
        raise ValueError("an agent whose success_rate is not from 0 to 1")
    if interactions is not None and interactions != int(interactions):
        raise ValueError("an agent whose interactions are no whole number")
    file = next((value[key] for key in ("playbook_file", "playbook_path", "playbook") if value.get(key)), None)
    return Agent(
        name=name,
        graduation_score=_number(value, "graduation_score"),
        interactions=None if interactions is None else int(interactions),
        success_rate=rate,
        expertise=_expertise(value.get(_EXPERTISE)),
        playbook=file if isinstance(file, str) and is_file_name(file) else None,
        line=line,
    )


def is_file_name(text: str) -> bool:
    """Whether the value of "playbook" is the name of a file, not the playbook itself."""
    return "\n" not in text and "::" not in text and not text.lstrip().startswith(("#", "[")) and len(text) < 1024


def _number(value: Mapping[str, Json], field: str) -> float | None:
    result = next((value[key] for key in _FIELDS[field] if value.get(key) is not None), None)
    if result is None:
        return None
    if not _is_number(result):
        raise ValueError(f"an agent whose {field} is no number of 0 or more")
    assert isinstance(result, (int, float))
    return float(result)


def _is_number(value: Json) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 <= value < 1e15 and math.isfinite(value)


def _expertise(value: Json) -> dict[str, float]:
    """Skill by domain: of an object, a list of names, or one name."""
    if value is None:
        return {}
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list):
        value = {name: 1 for name in value if isinstance(name, str)} if _are_texts(value) else None
    if not isinstance(value, dict) or not all(map(_is_number, value.values())):
        raise ValueError("an agent whose domain_expertise is not {domain: number}, or a list of domains")
    if len(value) > _MOST_DOMAINS:
        raise ValueError(f"an agent with more than {_MOST_DOMAINS:,} domains")
    return {name: float(skill) for name, skill in value.items() if isinstance(skill, (int, float))}


def _are_texts(values: list[Json]) -> bool:
    return all(isinstance(value, str) for value in values)
