"""How difficult a text is, from what can be counted in it."""

from __future__ import annotations

import dataclasses
import enum
import math

from capibara.builders.routing.labelling.facts import Facts, nesting
from capibara.config import configurable
from capibara.core.types import UserError

_LINES, _WORDS, _PATTERNS, _NESTING, _ATTEMPTS = 200, 1000, 12, 6, 4  # at which a part is 1


class Level(enum.StrEnum):
    """How difficult a text is."""

    EASY = "easy"
    MEDIUM = "medium"
    HARD = "hard"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Difficulty:
    """The difficulty of a text: the weighted mean of four parts, each from 0 to 1.

    size = log(1 + lines with code) / log(201), of a text without code log(1 + words) / log(1001); patterns = different
    patterns of its code / 12; nesting = levels of indentation or brackets / 6; attempts = failing runs / 4; each at most 1.

    Attributes:
      medium: the least difficulty that is medium.
      hard: the least that is hard.
      size, patterns, nesting, attempts: weights of the parts.
    """

    medium: float = 0.3
    hard: float = 0.55
    size: float = 0.3
    patterns: float = 0.25
    nesting: float = 0.25
    attempts: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.medium <= self.hard <= 1:
            raise UserError(
                f"Difficulty.medium ({self.medium}) and hard ({self.hard}) must be from 0 to 1, in this order: try 0.3 and 0.55"
            )
        weights = (self.size, self.patterns, self.nesting, self.attempts)
        if min(weights) < 0 or sum(weights) <= 0 or not math.isfinite(sum(weights)):
            raise UserError(f"Difficulty's weights {weights} must be at least 0, and one must be positive")

    def of(self, facts: Facts) -> float:
        """The difficulty of a text, from 0 to 1."""
        lines = sum(bool(line.strip()) for code in facts.codes for line in code.text.splitlines())
        if facts.codes:
            size = math.log1p(lines) / math.log1p(_LINES)
        else:
            size = math.log1p(len(facts.text.split())) / math.log1p(_WORDS)
        deepest = max((nesting(code.text) for code in facts.codes), default=0)
        parts = (
            (self.size, size),
            (self.patterns, len(facts.patterns) / _PATTERNS),
            (self.nesting, deepest / _NESTING),
            (self.attempts, facts.attempts / _ATTEMPTS),
        )
        total = sum(weight for weight, _ in parts)
        return round(sum(weight * min(1.0, part) for weight, part in parts) / total, 4)

    def level(self, value: float) -> Level:
        """The level of a difficulty."""
        return Level.HARD if value >= self.hard else Level.MEDIUM if value >= self.medium else Level.EASY
