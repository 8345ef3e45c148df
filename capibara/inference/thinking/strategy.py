"""What a thinking strategy is: it asks for texts, as often as it needs, and chooses an answer."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.inference.sampling.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Draft:
    """A text that a strategy asks for.

    Attributes:
      number: the index of its prompt.
      text: what the model is asked.
      sample: is added to the seed.
    """

    number: int
    text: str
    sample: int = 0


@dataclasses.dataclass(frozen=True)
class Draw:
    """A text that the model has generated.

    Attributes:
      text: all of it.
      tokens: how many it has.
      tags: the opening and the closing tag of a thought.
    """

    text: str
    tokens: int
    tags: tuple[str, str]

    @property
    def answer(self) -> str:
        """The text after its thought, without white space around it; empty if the thought has not ended."""
        opening, closing = self.tags
        _, _, rest = self.text.rpartition(closing)
        return "" if opening in rest else rest.strip()


@dataclasses.dataclass(frozen=True)
class Answer:
    """The text that a strategy has chosen.

    Attributes:
      text: it.
      texts: how many were generated for it.
      tokens: how many all of them have.
      about: how it was chosen, as JSON values: the votes, scores or earlier answers.
    """

    text: str
    texts: int
    tokens: int
    about: Mapping[str, Any]


Ask = Callable[[Sequence[Draft]], Sequence[Draw]]  # a text for each draft, in their order
Scores = float | Sequence[float]  # of an answer as a whole, or of each of its steps
Rate = Callable[[int, Sequence[str]], Sequence[Scores]]  # (number of a prompt, answers) -> scores of each


@dataclasses.dataclass(frozen=True)
class Strategy(abc.ABC):
    """How several texts of a model become one answer."""

    @abc.abstractmethod
    def answers(self, texts: Sequence[str], ask: Ask, rate: Rate | None) -> list[Answer]:
        """The answers to prompts, which are asked together."""

    @property
    def draws_samples(self) -> bool:
        """Whether it asks a prompt several times, which needs texts that differ."""
        return True

    @property
    def reward_folder(self) -> str | None:
        """The path of the reward model that it needs; None: none."""
        return None

    def check(self, sampling: Sampling) -> None:
        """Raises UserError if texts of this sampling cannot be used."""
        name = type(self).__name__
        if sampling.beams is not None:
            raise UserError(f"Sampling.beams is set, and {name} draws texts: leave one out")
        if sampling.num_decodes > 1:
            raise UserError(
                f"Sampling.num_decodes is {sampling.num_decodes}, and {name} chooses among texts itself: set it to 1"
            )
        if self.draws_samples and sampling.temperature == 0:
            raise UserError(
                f"Sampling.temperature is 0, and {name} needs texts that differ: set it above 0, such as 0.8"
            )

    def described(self) -> dict[str, Any]:
        """Its name and options, as JSON values."""
        return {"strategy": type(self).__name__, **dataclasses.asdict(self)}


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Thinking:
    """How `infer` answers a prompt.

    Attributes:
      strategy: SelfConsistency, BestOfN or Rounds; None: one text.
    """

    strategy: Strategy | None = None

    def checked(self, sampling: Sampling, single: str | None) -> Strategy | None:
        """The strategy, for texts of this sampling.

        Args:
          sampling: of the texts.
          single: what has no strategies, for the error; None: it has.

        Raises:
          UserError: the strategy cannot be used.
        """
        if self.strategy is None:
            return None
        if single is not None:
            raise UserError(
                f"Thinking.strategy is @{type(self.strategy).__name__}(), and {single} has none: leave it out"
            )
        self.strategy.check(sampling)
        return self.strategy
