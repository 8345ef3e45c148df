"""The interface of `Grpo.environment` and `Ppo.environment`."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from capibara.core.types import UserError
from capibara.data.chat.formats import Message


class Episode(abc.ABC):
    """An environment in one dialogue."""

    @abc.abstractmethod
    def step(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The answers to the dialogue's last message, which is the model's.

        Args:
          messages: the dialogue, each {"role", "content"}; the model's may have "tool_calls".

        Returns:
          A list of messages of "tool" or "user", each {"role", "content"}, of JSON values; empty: the dialogue is over.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment(abc.ABC):
    """Configuration of an environment.

    Attributes:
      turns: the largest number of messages of the model in a dialogue.
      answers_calls: whether it answers calls alone, so that the chat template must write them.
      concurrent: whether the episodes of a turn are stepped beside each other, in threads.
    """

    turns: int = 4

    answers_calls: ClassVar[bool] = False
    concurrent: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise UserError(f"{type(self).__name__}.turns is {self.turns}, must be at least 1: try 4")

    @abc.abstractmethod
    def begin(self, record: Mapping[str, object]) -> Episode:
        """A new dialogue about a record of the data; of several processes one calls it."""
