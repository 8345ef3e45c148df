"""Best of n: the sample with the highest reward."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence

from capibara.config import configurable
from capibara.core.fields import FilePath
from capibara.core.types import UserError
from capibara.inference.thinking.self_consistency import MOST_SAMPLES, samples_of
from capibara.inference.thinking.strategy import Answer, Ask, Rate, Scores, Strategy


class StepScores(enum.StrEnum):
    """How the scores of a solution's steps become one reward.

    PRODUCT: the logarithm of the probability that all steps are right; MIN: the lowest score; LAST: that of the last step.
    """

    PRODUCT = "product"
    MIN = "min"
    LAST = "last"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class BestOfN(Strategy):
    """Draws samples and takes the one with the highest reward (Cobbe et al. 2021, arXiv:2110.14168; of steps, Lightman et al. 2023).

    Attributes:
      reward: a run folder of a reward model or a process reward model, or a folder of transformers with one.
      samples: how many texts are drawn; 1: one text.
      steps: how the scores of steps become one, with a process reward model.
    """

    reward: FilePath
    samples: int = 8
    steps: StepScores = StepScores.PRODUCT

    def __post_init__(self) -> None:
        if not self.reward:
            raise UserError("BestOfN.reward is empty: name the folder of a reward model")
        if not 1 <= self.samples <= MOST_SAMPLES:
            raise UserError(f"BestOfN.samples is {self.samples}, must be from 1 to {MOST_SAMPLES}: try 8")

    @property
    def draws_samples(self) -> bool:
        return self.samples > 1

    @property
    def reward_folder(self) -> str | None:
        return self.reward

    def answers(self, texts: Sequence[str], ask: Ask, rate: Rate | None) -> list[Answer]:
        assert rate is not None, "whoever uses the strategy opens its reward model"
        answers = []
        for number, draws in enumerate(samples_of(self.samples, texts, ask)):
            rewards = [self._reward(scores) for scores in rate(number, [draw.answer for draw in draws])]
            best = max(range(len(draws)), key=rewards.__getitem__)  # the first of equal ones
            tokens = sum(draw.tokens for draw in draws)
            about = {"rewards": [None if math.isinf(reward) else reward for reward in rewards]}
            answers.append(Answer(draws[best].text, len(draws), tokens, about))
        return answers

    def _reward(self, scores: Scores) -> float:
        """One number for the scores of an answer; -inf if it has no steps."""
        if isinstance(scores, float):
            return scores
        if not scores:
            return -math.inf
        match self.steps:
            case StepScores.MIN:
                return min(scores)
            case StepScores.LAST:
                return scores[-1]
            case StepScores.PRODUCT:
                return -sum(max(-score, 0.0) + math.log1p(math.exp(-abs(score))) for score in scores)
