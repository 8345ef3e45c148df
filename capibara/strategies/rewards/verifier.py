"""The interface of verifiers."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar


class Verifier(abc.ABC):
    """A reward with options, a `strategies.rewards.Reward`: in Gin Grpo.rewards = (@MathAnswer(),), with ().

    Attributes:
      concurrent: whether answers are verified beside each other, in threads.
    """

    concurrent: ClassVar[bool] = True

    @abc.abstractmethod
    def __call__(self, prompt: str, answer: str, record: Mapping[str, Any]) -> float:
        """The reward of an answer, as of a `Reward`."""

    @abc.abstractmethod
    def check_record(self, record: Mapping[str, object]) -> None:
        """Raises UserError if no answer to a record can be verified; it must be quick."""
