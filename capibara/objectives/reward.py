"""Reward models: score answers, higher for the chosen one of a pair."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from capibara import sharding
from capibara.config import configurable
from capibara.core.types import Batch, Params, UserError
from capibara.data.dataset import Dataset
from capibara.data.sources.sources import DataFormat
from capibara.models.api import Head, Model, Stats, TransformerConfig
from capibara.objectives.base import Metrics, Objective, Totals
from capibara.objectives.loss import Loss
from capibara.objectives.pairs import Pairs, answer_sums
from capibara.sharding import RematPolicy


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Reward(Loss):
    """Trains a model that scores answers (`DecoderConfig.head` is "score") on preference pairs.

    The score s of an answer is read at its last token; the loss of a pair is -log sigmoid(s(chosen) - s(rejected) - margin)
    (Bradley and Terry 1952; margins: Touvron et al. 2023, arXiv:2307.09288).

    Attributes:
      centering: coefficient of (s(chosen) + s(rejected))**2, which keeps scores around 0 (Eisenstein et al. 2023,
        arXiv:2312.09244), TRL's center_rewards_coefficient; 0: none.
    """

    centering: float = 0.0

    data_format = DataFormat.PREFERENCES
    means = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")

    def __post_init__(self) -> None:
        if not 0 <= self.centering < math.inf:
            raise UserError(f"Reward.centering is {self.centering}, must be finite and at least 0: try 0.01")

    def check(self, dataset: Dataset, batch_size: int) -> None:
        super().check(dataset, batch_size)
        if not dataset.scores_answers:
            raise UserError("Trainer.loss is @Reward(), and PreferenceJsonlSource.scored is False: set it to True")

    def check_model(self, model: TransformerConfig) -> None:
        if model.head is not Head.SCORE:
            name = type(model).__name__
            raise UserError(f"Trainer.loss is @Reward(), and {name}.head is {str(model.head)!r}: set it to 'score'")

    def objective(self, model: Model, dataset: Dataset) -> Objective:
        def sums(
            params: Params, batch: Batch, remat: RematPolicy, step: jax.Array | None
        ) -> tuple[jax.Array, Totals, Stats]:
            batch = sharding.balanced(batch)
            hidden_BTD, stats = model.hidden(params, batch, remat, step)
            with jax.named_scope("loss"):
                score_BT = jnp.einsum(
                    "btd,d->bt", hidden_BTD, model.head(params)[0], preferred_element_type=jnp.float32
                )
                loss, totals = self.totals(score_BT, batch, dataset.most_pairs)
            loss = loss + model.layer_loss(stats) * (totals.weight / jnp.maximum(totals.tokens, 1.0))
            return loss, jax.lax.stop_gradient(totals), stats

        def metrics(totals: Totals, weight: jax.Array) -> Metrics:
            return totals.means(weight) | {"pairs": totals.weight}

        return Objective(sums, metrics)

    def totals(self, score_BT: jax.Array, batch: Batch, pairs: int) -> tuple[jax.Array, Totals]:
        """The loss as a sum over pairs, and the metrics' sums.

        Args:
          score_BT: score after every input.
          batch: its inputs have the last token of every answer.
          pairs: the largest number of pairs in a row.
        """
        answers, segments_BT = Pairs.of(jnp.zeros_like(score_BT), batch, pairs), batch["segment_ids"]
        # By positions, not by neighbours: rows with a context axis are not in order.
        position_BT = batch["positions"].astype(jnp.float32)
        count_BK2 = answer_sums(jnp.ones_like(score_BT), segments_BT, pairs)
        at_BTK = segments_BT[..., None] == jnp.arange(1, 2 * pairs + 1)
        is_last_BTK = at_BTK & (position_BT[..., None] == count_BK2.reshape(len(score_BT), 1, -1) - 1)
        score_BK2 = jnp.sum(jnp.where(is_last_BTK, score_BT[..., None], 0.0), 1).reshape(count_BK2.shape)
        margin_BK = score_BK2[..., 0] - score_BK2[..., 1]
        wanted_BK = answer_sums(batch["labels"], segments_BT, pairs)[..., 0]
        loss_BK = -jax.nn.log_sigmoid(margin_BK - wanted_BK) + self.centering * jnp.square(jnp.sum(score_BK2, -1))
        return answers.totals(
            {
                "loss": loss_BK,
                "reward_chosen": score_BK2[..., 0],
                "reward_rejected": score_BK2[..., 1],
                "reward_margin": margin_BK,
                "reward_accuracy": (margin_BK > 0).astype(jnp.float32),
            }
        )
