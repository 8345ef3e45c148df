"""The loss of a run without `Trainer.loss`: the cross entropy of texts."""

from __future__ import annotations

import dataclasses
import math

from capibara.core.types import UserError
from capibara.data.pipeline.loader import Dataset
from capibara.data.sources.sources import DataFormat
from capibara.models.api import Model
from capibara.objectives.base import Normalization, Objective, of_cross_entropy
from capibara.objectives.loss import CrossEntropyOptions, Loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossEntropy(Loss):
    """The cross entropy of the targets; its options are fields of Trainer, as in T5X.

    Attributes:
      z_loss, label_smoothing, loss_normalization: as in Trainer.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    loss_normalization: Normalization | float = Normalization.TOKENS
    predicts_ahead = True

    def __post_init__(self) -> None:
        if not 0 <= self.z_loss < math.inf:
            raise UserError(f"Trainer.z_loss is {self.z_loss}, must be finite and at least 0: try 1e-4")
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"Trainer.label_smoothing is {self.label_smoothing}, must be from 0 to below 1: try 0.1")
        number = None if isinstance(self.loss_normalization, Normalization) else self.loss_normalization
        if number is not None and not 0 < number < math.inf:
            raise UserError(f"Trainer.loss_normalization is {number}, must be finite and above 0, or 'tokens'")

    def check_options(self, options: CrossEntropyOptions, unigram_batches: int) -> None:
        del options, unigram_batches  # it has them all

    def check(self, dataset: Dataset, batch_size: int) -> None:
        del batch_size
        if (result := dataset.data_format) is not self.data_format:
            losses = {
                DataFormat.PREFERENCES: "@Dpo()",
                DataFormat.UNPAIRED: "@Kto()",
                DataFormat.PROMPTS: "@Grpo()",
                DataFormat.STEPS: "@ProcessReward()",
            }[result]
            raise UserError(f"Dataset.source holds {result} and Trainer.loss is None: set Trainer.loss = {losses}")

    def objective(self, model: Model, dataset: Dataset) -> Objective:
        del dataset
        return of_cross_entropy(model, self.z_loss, self.label_smoothing, self.loss_normalization)
