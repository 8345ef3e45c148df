"""Rewards that can be verified: functions of (prompt, answer, record) that Grpo.rewards names.

    Grpo.rewards = (@exact_answer, @matches_pattern)
    matches_pattern.pattern = r"<think>.*</think>.+"

One of your own is such a function with `capibara.config.configurable` before it, in a module that the Gin file imports.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from typing import Any, Protocol

from capibara.config import configurable
from capibara.core.types import UserError


class Reward(Protocol):
    """What `Grpo.rewards` takes: examples/extend/my_reward.py is one."""

    def __call__(self, prompt: str, answer: str, record: Mapping[str, Any]) -> float:
        """How good an answer is; finite.

        Args:
          prompt: what the model was asked, as the chat template writes it.
          answer: what it said.
          record: the line of the data.
        """


@configurable
def exact_answer(
    prompt: str, answer: str, record: Mapping[str, Any], *, field: str = "answer", pattern: str | None = None
) -> float:
    """1 where the answer is the record's, but for case and white space; else 0.

    Args:
      prompt, answer, record: what was asked, what the model said, the line of the data.
      field: of the record, its answer.
      pattern: regular expression that finds the answer in what was said, its first group where it has one; None: all
        that was said.
    """
    del prompt
    said = answer if pattern is None else found(pattern, answer)
    return float(said is not None and _plain(said) == _plain(str(_of(record, field))))


@configurable
def numeric_answer(
    prompt: str,
    answer: str,
    record: Mapping[str, Any],
    *,
    field: str = "answer",
    pattern: str | None = None,
    tolerance: float = 1e-6,
) -> float:
    """1 where the last number of the answer is the last one of the record's, else 0.

    Args:
      prompt, answer, record, field, pattern: as of `exact_answer`.
      tolerance: of the difference, as a share of the wanted number.
    """
    del prompt
    said = answer if pattern is None else found(pattern, answer) or ""
    number, wanted = _last_number(said), _last_number(str(_of(record, field)))
    if wanted is None:
        raise UserError(f"numeric_answer.field ({field!r}) of a record is {record[field]!r}: it must hold a number")
    return float(number is not None and math.isclose(number, wanted, rel_tol=tolerance, abs_tol=tolerance))


@configurable
def matches_pattern(prompt: str, answer: str, record: Mapping[str, Any], *, pattern: str | None = None) -> float:
    """1 where the whole answer has the form of a regular expression (. is any character), else 0."""
    del prompt, record
    if pattern is None:
        raise UserError(
            'matches_pattern.pattern has no value: set it, e.g. matches_pattern.pattern = "<think>.*</think>.+"'
        )
    return float(_compiled(pattern).fullmatch(answer.strip()) is not None)


def check_reward(reward: object) -> None:
    """Raises UserError unless it can be called with a prompt, an answer and a record, and its patterns are some."""
    name = getattr(reward, "__name__", repr(reward))
    if not callable(reward):
        raise UserError(f"Grpo.rewards has {reward!r}, must have functions, in Gin (@exact_answer, ...) without ()")
    kinds = inspect.Parameter
    try:
        given = inspect.signature(inspect.unwrap(reward)).parameters.values()
    except (TypeError, ValueError):
        return  # nothing is known of it
    places = [one for one in given if one.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    needed = [one for one in places if one.default is kinds.empty]
    if len(needed) > 3 or (len(places) < 3 and not any(one.kind is kinds.VAR_POSITIONAL for one in given)):
        raise UserError(
            f"Grpo.rewards has {name}, which does not take (prompt, answer, record): name a reward function"
        )
    if inspect.unwrap(reward) is inspect.unwrap(matches_pattern):
        reward("", "", {})


def found(pattern: str, text: str) -> str | None:
    """What a pattern finds last in a text: its first group where it has one."""
    matches = list(_compiled(pattern).finditer(text))
    if not matches:
        return None
    return matches[-1][1] if matches[-1].re.groups else matches[-1][0]


def _compiled(pattern: str) -> re.Pattern:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(f"the reward's pattern {pattern!r} is no regular expression ({error}): mend it") from None


def _of(record: Mapping[str, Any], field: str) -> Any:
    if field not in record:
        raise UserError(f"a record has no field {field!r} (it has: {', '.join(record)}): set the reward's field")
    return record[field]


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def _last_number(text: str) -> float | None:
    numbers = re.findall(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", text)
    return float(numbers[-1].replace(",", "")) if numbers else None
