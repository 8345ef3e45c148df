"""Verifiable rewards: functions of (prompt, answer, record) for Grpo.rewards.

    Grpo.rewards = (@exact_answer, @matches_pattern)
    matches_pattern.pattern = r"<think>.*</think>.+"

A reward of your own is such a function, decorated with `capibara.config.configurable`, in a module that the Gin file
imports.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from typing import Any, Protocol

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.strategies.numbers import last_number


class Reward(Protocol):
    """The interface of a reward in `Grpo.rewards`; see examples/extend/my_reward.py."""

    def __call__(self, prompt: str, answer: str, record: Mapping[str, Any]) -> float:
        """The reward of an answer, a finite number.

        Args:
          prompt: the prompt as the chat template renders it.
          answer: the model's answer.
          record: the record of the prompt in the data.
        """


@configurable
def exact_answer(
    prompt: str, answer: str, record: Mapping[str, Any], *, field: str = "answer", pattern: str | None = None
) -> float:
    """1 if the answer equals the record's, ignoring case and white space; otherwise 0.

    Args:
      prompt, answer, record: as in `Reward`.
      field: field of the record with the right answer.
      pattern: regular expression that finds the answer in the model's text (its first group, if it has one); None: the
        whole text.
    """
    del prompt
    text = answer if pattern is None else found(pattern, answer)
    return float(text is not None and _plain(text) == _plain(str(_of(record, field))))


@configurable
def numeric_answer(
    prompt: str,
    answer: str,
    record: Mapping[str, Any],
    *,
    field: str = "answer",
    pattern: str | None = None,
    tolerance: float = 1e-6,
    absolute: float = 0.0,
) -> float:
    """1 if the last number of the answer equals the last number of the record's answer, otherwise 0.

    `strategies.numbers` has the ways to write a number. An answer that has two readings, such as 1,5, is wrong; a record's is
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
    text = answer if pattern is None else found(pattern, answer) or ""
    number, expected = last_number(text), last_number(str(_of(record, field)))
    if expected is None:
        raise UserError(
            f"numeric_answer.field ({field!r}) of a record is {str(record[field])[:100]!r}: it must hold a number that has one "
            "reading, such as 1234.5 or 3/4"
        )
    return float(number is not None and math.isclose(number, expected, rel_tol=tolerance, abs_tol=absolute))


@configurable
def matches_pattern(prompt: str, answer: str, record: Mapping[str, Any], *, pattern: str | None = None) -> float:
    """1 if the whole answer matches a regular expression (. is any character), otherwise 0."""
    del prompt, record
    if pattern is None:
        raise UserError(
            'matches_pattern.pattern has no value: set it, e.g. matches_pattern.pattern = "<think>.*</think>.+"'
        )
    return float(_compiled(pattern).fullmatch(answer.strip()) is not None)


def check_reward(reward: object) -> None:
    """Raises UserError unless it accepts a prompt, an answer and a record, and its patterns are valid."""
    name = getattr(reward, "__name__", repr(reward))
    if not callable(reward):
        raise UserError(f"Grpo.rewards has {reward!r}, must have functions, in Gin (@exact_answer, ...) without ()")
    kinds = inspect.Parameter
    try:
        parameters = inspect.signature(inspect.unwrap(reward)).parameters.values()
    except (TypeError, ValueError):
        return  # its signature is unknown
    positional = [
        parameter for parameter in parameters if parameter.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    needed = [item for item in positional if item.default is kinds.empty]
    if len(needed) > 3 or (
        len(positional) < 3 and not any(parameter.kind is kinds.VAR_POSITIONAL for parameter in parameters)
    ):
        raise UserError(
            f"Grpo.rewards has {name}, which does not take (prompt, answer, record): name a reward function"
        )
    if inspect.unwrap(reward) is inspect.unwrap(matches_pattern):
        reward("", "", {})


def check_record(reward: Reward, record: Mapping[str, Any]) -> None:
    """Raises UserError if a ready reward cannot judge answers to the prompt of a record."""
    if inspect.unwrap(reward) in map(inspect.unwrap, (exact_answer, numeric_answer)):
        reward("", "", record)


def found(pattern: str, text: str) -> str | None:
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


def _of(record: Mapping[str, Any], field: str) -> Any:
    if field not in record:
        raise UserError(f"a record has no field {field!r} (it has: {', '.join(record)}): set the reward's field")
    return record[field]


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()
