"""Rewards that are functions of (prompt, answer, record), for Grpo.rewards.

    Grpo.rewards = (@exact_answer, @matches_pattern)
    matches_pattern.pattern = r"<think>.*</think>.+"

A reward of your own is such a function, decorated with `capibara.config.configurable`, in a module that the Gin file
imports.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.strategies.rewards.numbers import last_number


@configurable
def exact_answer(
    prompt: str, answer: str, record: Mapping[str, object], *, field: str = "answer", pattern: str | None = None
) -> float:
    """1 if the answer equals the record's, ignoring case and white space; otherwise 0.

    Args:
      prompt, answer, record: as in `Reward`.
      field: field of the record with the right answer.
      pattern: regular expression that finds the answer in the model's text (its first group, if it has one); None: the
        whole text.
    """
    del prompt
    text = answer if pattern is None else extracted(pattern, answer)
    return float(text is not None and _plain(text) == _plain(str(_of(record, field))))


@configurable
def numeric_answer(
    prompt: str,
    answer: str,
    record: Mapping[str, object],
    *,
    field: str = "answer",
    pattern: str | None = None,
    tolerance: float = 1e-6,
    absolute: float = 0.0,
) -> float:
    """1 if the last number of the answer equals the last number of the record's answer, otherwise 0.

    `numbers` has the ways to write a number. An answer that has two readings, such as 1,5, is wrong; a record's is
    refused.

    Args:
      prompt, answer, record, field, pattern: as in `exact_answer`.
      tolerance: the largest difference as a share of the larger number, as `rel_tol` of math.isclose.
      absolute: the largest difference that is always allowed, as its `abs_tol`; with 0, only 0 equals 0.
    """
    del prompt
    for name, value in (("tolerance", tolerance), ("absolute", absolute)):
        if not 0 <= value < math.inf:
            raise UserError(f"numeric_answer.{name} is {value}, must be finite and at least 0: try 1e-6")
    text = answer if pattern is None else extracted(pattern, answer) or ""
    number, expected = last_number(text), last_number(str(_of(record, field)))
    if expected is None:
        raise UserError(
            f"numeric_answer.field ({field!r}) of a record is {str(record[field])[:100]!r}: it must hold a number that has one "
            "reading, such as 1234.5 or 3/4"
        )
    return float(number is not None and math.isclose(number, expected, rel_tol=tolerance, abs_tol=absolute))


@configurable
def matches_pattern(prompt: str, answer: str, record: Mapping[str, object], *, pattern: str | None = None) -> float:
    """1 if the whole answer matches a regular expression (. is any character), otherwise 0."""
    del prompt, record
    if pattern is None:
        raise UserError(
            'matches_pattern.pattern has no value: set it, e.g. matches_pattern.pattern = "<think>.*</think>.+"'
        )
    return float(_compiled(pattern).fullmatch(answer.strip()) is not None)


def extracted(pattern: str, text: str) -> str | None:
    """The last match of a pattern in a text, or its first group if it has one."""
    matches = list(_compiled(pattern).finditer(text))
    if not matches:
        return None
    return matches[-1][1] if matches[-1].re.groups else matches[-1][0]


def _compiled(pattern: str) -> re.Pattern:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(f"the reward's pattern {pattern!r} is no regular expression ({error}): mend it") from None


def _of(record: Mapping[str, object], field: str) -> Any:
    if field not in record:
        raise UserError(f"a record has no field {field!r} (it has: {', '.join(record)}): set the reward's field")
    return record[field]


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()
