"""When a comparison of two models stops: as soon as a bound that holds at every look says which is better."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from capibara.core import fields
from capibara.core.types import UserError
from capibara.evaluation.statistics.confidence_sequence import Bound, ConfidenceSequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequentialStopping:
    """Stops asking when the difference of two models' scores is known well enough.

    The confidence sequence of the mean difference holds at every look at once, so that looking often makes no false
    difference likelier than alpha. It is of the prompts' source: prompts are asked in a random order.

    Attributes:
      alpha: the probability that the interval leaves out the difference at any look.
      every: prompts between two looks.
      scores: the least and the largest score that an answer can have.
      negligible: also stops when the difference is surely within this of 0; None: never.
      seed: of the order.
    """

    alpha: float = 0.05
    every: int = 8
    scores: tuple[float, float] = (0.0, 1.0)
    negligible: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        fields.check(self)
        if not 0 < self.alpha < 1:
            raise UserError(f"SequentialStopping.alpha is {self.alpha}, must be above 0 and below 1: try 0.05")
        if self.every < 1:
            raise UserError(f"SequentialStopping.every is {self.every}, must be at least 1: try 8")
        if not 0 < self.range < float("inf"):
            raise UserError(
                f"SequentialStopping.scores is {self.scores}, must be a least and a larger number: try (0, 1)"
            )
        if self.negligible is not None and not 0 < self.negligible < self.range:
            raise UserError(
                f"SequentialStopping.negligible is {self.negligible}, must be above 0 and below {self.range:g}, the largest "
                "difference: try 0.05"
            )
        if self.seed < 0:
            raise UserError(f"SequentialStopping.seed is {self.seed}, must be at least 0")

    @property
    def range(self) -> float:
        """The largest difference of two scores."""
        return self.scores[1] - self.scores[0]

    def sequence(self) -> ConfidenceSequence:
        """The confidence sequence of the differences."""
        return ConfidenceSequence(self.range, self.alpha)

    def checked(self, scores: Sequence[float]) -> Sequence[float]:
        """The scores; raises UserError if one is beyond the limits."""
        for value in scores:
            if not self.scores[0] <= value <= self.scores[1]:
                raise UserError(
                    f"a score is {value:g}, must be from {self.scores[0]:g} to {self.scores[1]:g}, by which the bound is made: "
                    "set SequentialStopping.scores"
                )
        return scores

    def reason(self, bound: Bound) -> Reason | None:
        """Why to stop; None: another look is needed."""
        if bound.low > 0 or bound.high < 0:
            return Reason.DIFFERENT
        if self.negligible is not None and -self.negligible < bound.low and bound.high < self.negligible:
            return Reason.NEGLIGIBLE
        return None


class Reason(enum.StrEnum):
    """Why a comparison stopped: a model is better, the difference is negligible, or every prompt was asked."""

    DIFFERENT = "different"
    NEGLIGIBLE = "negligible"
    ALL_ASKED = "all asked"


@dataclasses.dataclass(frozen=True)
class Stopped:
    """How a comparison stopped.

    Attributes:
      reason: why.
      asked: prompts that both models answered.
      prompts: those that there were.
      alpha: of the bound.
      bound: of the mean difference.
    """

    reason: Reason
    asked: int
    prompts: int
    alpha: float
    bound: Bound

    @property
    def saved(self) -> int:
        """Answers of both models that were not needed."""
        return 2 * (self.prompts - self.asked)

    def __str__(self) -> str:
        return (
            f"{1 - self.alpha:.0%} at every look from {self.bound.low:+.4g} to {self.bound.high:+.4g}, p = {self.bound.p_value:.3g}; "
            f"stopped after {self.asked} of {self.prompts} prompts ({self.reason}), {self.saved} answers saved"
        )
