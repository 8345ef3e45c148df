"""Selects executions by time, language, outcome, size and scores."""

from __future__ import annotations

import dataclasses
import enum

from capibara.builders.executions import languages
from capibara.builders.executions.reading import time_of
from capibara.builders.executions.runs import Run
from capibara.config import configurable
from capibara.core.types import UserError


class Outcome(enum.StrEnum):
    """Which executions are kept: all, those that passed, or those that failed."""

    ALL = "all"
    PASSED = "passed"
    FAILED = "failed"


class Undated(enum.StrEnum):
    """What a range of time does with executions without a time."""

    DROP = "drop"
    KEEP = "keep"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutionFilter:
    """Selects executions.

    Pairs of an error and its fix are looked for before `outcome`, `min_success` and `min_quality` are applied; these then
    hold for the fix.

    Attributes:
      languages: languages to keep, such as ("python", "sql"); empty: all, also unknown ones.
      start: the first time, in ISO 8601 ("2026-01-31" or "2026-01-31T12:00:00+01:00"; UTC without a zone); None: any.
      end: the first time that is too late; None: any.
      undated: what `start` and `end` do with executions without a time.
      outcome: passed, failed or all.
      min_quality: the least quality, from 0 to 1.
      min_success: the least success, from 0 to 1.
      min_language_confidence: the least confidence of the language, from 0 to 1.
      max_code_characters: the longest code.
      max_output_characters: the longest output, of all streams and results together.
    """

    languages: tuple[str, ...] = ()
    start: str | None = None
    end: str | None = None
    undated: Undated = Undated.DROP
    outcome: Outcome = Outcome.ALL
    min_quality: float = 0.0
    min_success: float = 0.0
    min_language_confidence: float = 0.0
    max_code_characters: int = 50_000
    max_output_characters: int = 200_000

    def __post_init__(self) -> None:
        for name in ("min_quality", "min_success", "min_language_confidence"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"ExecutionFilter.{name} ({getattr(self, name)}) must lie between 0 and 1: try 0.5")
        for name in ("max_code_characters", "max_output_characters"):
            if getattr(self, name) < 1:
                raise UserError(f"ExecutionFilter.{name} ({getattr(self, name)}) must be positive: try 50000")
        times = [self._time(name) for name in ("start", "end")]
        if None not in times and times[0] >= times[1]:  # type: ignore[operator]  # neither is None here
            raise UserError(f"ExecutionFilter.end ({self.end}) must be later than start ({self.start})")

    def _time(self, name: str) -> float | None:
        text: str | None = getattr(self, name)
        if text is None:
            return None
        if (time_s := time_of(text)) is None:
            raise UserError(f"ExecutionFilter.{name} ({text!r}) must be a time in ISO 8601: try '2026-01-31'")
        return time_s

    def excludes(self, run: Run) -> str | None:
        """The setting by which a run, whatever its outcome, is of no use; None: it is used."""
        execution, language = run.execution, run.language
        if self.languages and language.name not in {languages.canonical(name) for name in self.languages}:
            return "languages"
        if language.confidence < self.min_language_confidence:
            return "min_language_confidence"
        start_s, end_s = self._time("start"), self._time("end")
        if start_s is not None or end_s is not None:
            if execution.time_s is None:
                return "undated" if self.undated is Undated.DROP else None
            if start_s is not None and execution.time_s < start_s:
                return "start"
            if end_s is not None and execution.time_s >= end_s:
                return "end"
        if len(execution.code) > self.max_code_characters:
            return "max_code_characters"
        texts = [
            execution.stdout,
            execution.stderr,
            *(text for result in execution.results for text in result.texts.values()),
        ]
        return "max_output_characters" if sum(map(len, texts)) > self.max_output_characters else None

    def rejects(self, run: Run) -> str | None:
        """The setting by which a run is not kept as an example of its own; None: it is kept."""
        if (reason := self.excludes(run)) is not None:
            return reason
        if self.outcome is not Outcome.ALL and run.execution.passed != (self.outcome is Outcome.PASSED):
            return "outcome"
        if run.scores.success < self.min_success:
            return "min_success"
        return "min_quality" if run.scores.quality < self.min_quality else None
