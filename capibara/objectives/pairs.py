"""What the losses on pairs of answers share: sums over answers, and a loss as a sum over pairs.

B: rows, T: positions, K: pairs of a row, 2: chosen and rejected answer.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from capibara import sharding
from capibara.core.types import Batch, Params, UserError
from capibara.data.dataset import Dataset
from capibara.data.sources.sources import DataFormat
from capibara.models.api import Model, Stats
from capibara.objectives.base import Metrics, Objective, Totals, log_probabilities
from capibara.objectives.loss import Loss
from capibara.sharding import RematPolicy


class Pairs(NamedTuple):
    """The answers of a batch, float32.

    Attributes:
      log_p_BK2: log-probability of each answer, a sum over its tokens.
      tokens_BK2: number of its tokens.
      is_pair_BK: 1 for a pair, 0 for padding.
    """

    log_p_BK2: jax.Array
    tokens_BK2: jax.Array
    is_pair_BK: jax.Array

    @classmethod
    def of(cls, log_p_BT: jax.Array, batch: Batch, count: int) -> Pairs:
        """Sums the log-probabilities of targets over answers; `count` is the largest number of pairs in a row."""
        weights_BT, segments_BT = batch["weights"], batch["segment_ids"]
        log_p_BK2, tokens_BK2 = (answer_sums(x, segments_BT, count) for x in (log_p_BT * weights_BT, weights_BT))
        return cls(log_p_BK2, tokens_BK2, (jnp.min(tokens_BK2, axis=-1) > 0).astype(jnp.float32))

    def means(self, values_BK2: jax.Array) -> jax.Array:
        """Values per token of their answer."""
        return values_BK2 / jnp.maximum(self.tokens_BK2, 1.0)

    def token_mean(self, values_BK: jax.Array, tokens_BK: jax.Array) -> jax.Array:
        """Scales sums over tokens so that their mean over pairs is the mean over all tokens of the micro-batch."""
        return values_BK * (jnp.sum(self.is_pair_BK) / jnp.maximum(jnp.sum(tokens_BK * self.is_pair_BK), 1.0))

    def totals(self, values: Mapping[str, jax.Array]) -> tuple[jax.Array, Totals]:
        """The sum over pairs of `loss`, and of all values [B, K]."""
        sums = {name: jnp.sum(value * self.is_pair_BK) for name, value in values.items()}
        return sums["loss"], Totals(sums, jnp.sum(self.is_pair_BK), jnp.sum(self.tokens_BK2))


class PairLoss(Loss):
    """A loss of pairs as a function of their log-probabilities; its mean over pairs is minimised."""

    data_format = DataFormat.PREFERENCES

    def check(self, dataset: Dataset, batch_size: int) -> None:
        super().check(dataset, batch_size)
        if dataset.scores_answers:
            raise UserError(
                f"PreferenceJsonlSource.scored is True, for @Reward(), and Trainer.loss is @{type(self).__name__}(): set it to "
                "False"
            )

    @abc.abstractmethod
    def totals(self, log_p_BT: jax.Array, batch: Batch, pairs: int) -> tuple[jax.Array, Totals]:
        """The loss as a sum over pairs, and the metrics' sums.

        Args:
          log_p_BT: log-probability of every target.
          batch: the batch.
          pairs: the largest number of pairs in a row.
        """

    def objective(self, model: Model, dataset: Dataset) -> Objective:
        def sums(
            params: Params, batch: Batch, remat: RematPolicy | None, step: jax.Array | None
        ) -> tuple[jax.Array, Totals, Stats]:
            batch = sharding.balanced(batch)
            log_p_BT, stats = log_probabilities(model, params, batch, remat, step)
            loss, totals = self.totals(log_p_BT, batch, dataset.most_pairs)
            # The balancing loss of experts is a sum over tokens, the loss a sum over pairs.
            loss = loss + model.layer_loss(stats) * (totals.weight / jnp.maximum(totals.tokens, 1.0))
            return loss, jax.lax.stop_gradient(totals), stats

        return Objective(sums, self.metrics)

    def metrics(self, totals: Totals, weight: jax.Array) -> Metrics:
        """The means of the values, and the numbers of tokens and of pairs."""
        return totals.means(weight) | {"pairs": totals.weight}


def answer_sums(values_BT: jax.Array, segment_ids_BT: jax.Array, pairs: int) -> jax.Array:
    """Sums over each answer of a row, [B, pairs, 2]: chosen and rejected."""
    is_in = segment_ids_BT[..., None] == jnp.arange(1, 2 * pairs + 1, dtype=segment_ids_BT.dtype)
    sums = jnp.sum(jnp.where(is_in, values_BT[..., None], jnp.zeros((), values_BT.dtype)), axis=1)
    return sums.reshape(len(values_BT), pairs, 2)
