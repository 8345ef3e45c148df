"""Online DPO: trains on pairs of the model's own answers, which rewards rank."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.data.dataset import Dataset
from capibara.models.api import Model
from capibara.objectives.base import DrawnFrom, Objective
from capibara.objectives.batches import RunParts
from capibara.objectives.preference import Dpo
from capibara.strategies.answering import Answer
from capibara.strategies.policy.advantages import KlIn
from capibara.strategies.rewarded import RewardedLoss
from capibara.strategies.rollouts import Rollouts
from capibara.strategies.rows import pair_rows


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class OnlineDpo(RewardedLoss):
    """Trains on the best against the worst of a prompt's answers (Guo et al. 2024, arXiv:2402.04792).

    A row of a batch has both, as with a file of pairs: Dataset.length has room for the prompt twice, and its answers. Of equal
    rewards the first answer is chosen and the last one rejected, as in TRL's OnlineDPOTrainer. Log probabilities are at
    temperature 1, whatever Sampling.temperature is: a pair needs not be the policy's own, and so has no importance weights.

    Attributes:
      preference: the loss of a pair, against the initial weights of the run.
      resample: how often a rollout draws further prompts in the place of those whose answers have equal rewards; what is missing
        then is trained as drawn.
    """

    group: int = 2
    preference: Dpo = Dpo()
    resample: int = 0

    environment = None
    memory = None
    max_chunks = None
    kl_in = KlIn.LOSS
    means = Dpo.means

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group < 2:
            raise UserError(f"OnlineDpo.group is {self.group}, must be at least 2, of which two are a pair: try 2")
        if self.resample < 0:
            raise UserError(f"OnlineDpo.resample is {self.resample}, must be at least 0 (0: never)")
        self.check_apart(importance_cap=math.inf)  # it needs no weights

    @property
    def kl(self) -> float:
        return self.preference.beta

    @property
    def rows_of_a_prompt(self) -> int:
        return 1

    @property
    def entries(self) -> tuple[str, ...]:
        return ("reference",)

    def drawing(self, dataset: Dataset) -> Dataset:
        return dataclasses.replace(dataset, length=dataset.length // 2)

    def objective(self, model: Model, dataset: Dataset) -> Objective:
        return self.preference.objective(model, dataset)

    def batch_provider(self, run: RunParts) -> Rollouts:
        return Rollouts(run, self)

    def drawn_from(self, model: Model, dataset: Dataset) -> DrawnFrom:
        """The distribution of the reference's log probabilities, which is that of `Dpo`."""
        del model, dataset
        return {"temperature": 1.0, "usable": None}

    def rows(
        self, groups: Sequence[Sequence[Answer]], rewards_PG: np.ndarray, dataset: Dataset
    ) -> dict[str, np.ndarray]:
        """A row of each prompt: its best answer, and its worst one."""
        best, last = rewards_PG.argmax(axis=1), rewards_PG.shape[1] - 1
        worst = last - rewards_PG[:, ::-1].argmin(axis=1)
        pairs = [(group[i], group[j]) for group, i, j in zip(groups, best, worst, strict=True)]
        return pair_rows(pairs, dataset, self.mask_truncated)

    def estimates(self, rewards_PG: np.ndarray, rows: Mapping[str, np.ndarray], kl: float) -> dict[str, np.ndarray]:
        """Nothing: a pair has its reference alone."""
        del rewards_PG, rows, kl
        return {}
