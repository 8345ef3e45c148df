"""Scores of executions, from 0 to 1: whether it did what it should, and how good an example it is."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from capibara.builders.executions.languages import Detected
from capibara.builders.executions.patterns import Patterns
from capibara.builders.executions.reading import Execution, Form

# The parts of the quality, and their weights.
WEIGHTS = {
    "syntax": 0.25,
    "outcome": 0.20,
    "size": 0.15,
    "structure": 0.15,
    "language": 0.10,
    "evidence": 0.10,
    "comments": 0.05,
}
_FEWEST_LINES, _MOST_LINES = 5, 200  # code of this length is neither a fragment nor a whole program
_PATTERNS = 6  # different ones that a rich example has
_COMMENT = re.compile(r"\s*(?:#|//|--|/?\*)")
_TRACEBACK = "Traceback (most recent call last)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores from 0 to 1.

    Attributes:
      success: see `success_of`.
      quality: the weighted mean of `parts`, by WEIGHTS.
      parts: by name.
    """

    success: float
    quality: float
    parts: Mapping[str, float]


def of(execution: Execution, language: Detected, patterns: Patterns, error_share: float | None) -> Scores:
    """The scores of an execution.

    The parts of its quality are
      syntax: 1 - 5 * (the share of the code that does not parse), at least 0; 0.5 where there is no grammar
      outcome: its success
      size: n / 5 for n < 5 lines with code, 1 up to 200 lines, then 200 / n
      structure: the number of its patterns / 6, at most 1; 0.5 where there is no grammar
      language: the confidence of the language
      evidence: 1 if there is a result, output or an error with a name; else 0
      comments: 1 if it has comments or docstrings; else 0

    Args:
      execution: the execution.
      language: the language of its code.
      patterns: what it uses.
      error_share: the part of the code that does not parse; None: there is no grammar.
    """
    lines = [line for line in execution.code.split("\n") if line.strip()]
    count = sum(_COMMENT.match(line) is None for line in lines)
    failure = execution.failure
    has_evidence = has_output(execution) or (failure is not None and bool(failure.name))
    has_comments = count < len(lines) or bool({"docstring", "comment"} & patterns.counts.keys())
    success = success_of(execution)
    parts = {
        "syntax": 0.5 if error_share is None else max(0.0, 1 - 5 * error_share),
        "outcome": success,
        "size": min(1.0, count / _FEWEST_LINES, _MOST_LINES / max(1, count)),
        "structure": 0.5 if error_share is None else min(1.0, len(patterns.counts) / _PATTERNS),
        "language": language.confidence,
        "evidence": float(has_evidence),
        "comments": float(has_comments),
    }
    quality = sum(WEIGHTS[name] * part for name, part in parts.items())
    return Scores(
        success=round(success, 4),
        quality=round(quality, 4),
        parts={name: round(part, 4) for name, part in parts.items()},
    )


def success_of(execution: Execution) -> float:
    """Whether an execution did what it should, as far as its log shows.

    0 with an error or an exit code that is not 0. Else 1, less 0.4 if it printed a traceback, or 0.1 if it printed to
    stderr, less 0.1 if it showed nothing at all (a command's exit code and a session's text show that it worked).
    """
    if not execution.passed:
        return 0.0
    success = 1.0
    if _TRACEBACK in execution.stderr or _TRACEBACK in execution.stdout:
        success -= 0.4
    elif execution.stderr.strip():
        success -= 0.1
    if not has_output(execution) and execution.exit_code is None and execution.form is not Form.SESSION:
        success -= 0.1
    return success


def has_output(execution: Execution) -> bool:
    """Whether an execution displayed or printed something."""
    return bool(execution.results or execution.stdout.strip() or execution.stderr.strip())
