"""The interface of `Grpo.rewards`, and what is checked before a run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

from capibara.core.types import UserError
from capibara.strategies.rewards.functions import exact_answer, matches_pattern, numeric_answer
from capibara.strategies.rewards.verifier import Verifier


class Reward(Protocol):
    """The interface of a reward in `Grpo.rewards`; see examples/extend/my_reward.py."""

    def __call__(self, prompt: str, answer: str, record: Mapping[str, Any]) -> float:
        """The reward of an answer, a finite number.

        Args:
          prompt: the prompt as the chat template renders it.
          answer: the model's answer.
          record: the record of the prompt in the data.
        """


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
            f"Grpo.rewards has {name}, which does not take (prompt, answer, record): define it so, for one answer"
        )
    if inspect.unwrap(reward) is inspect.unwrap(matches_pattern):
        reward("", "", {})


def check_record(reward: Reward, record: Mapping[str, object]) -> None:
    """Raises UserError if a ready reward or a verifier cannot judge answers to the prompt of a record."""
    if isinstance(reward, Verifier):
        reward.check_record(record)
    elif inspect.unwrap(reward) in map(inspect.unwrap, (exact_answer, numeric_answer)):
        reward("", "", record)
