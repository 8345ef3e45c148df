"""A loss: tokens that the model predicts well count less (focal loss, Lin et al. 2017, arXiv:1708.02002).

cd examples/extend && python -m capibara.train --gin_file=my_loss.gin --emulate=2
"""

import dataclasses

import jax
import jax.numpy as jnp

from capibara import sharding
from capibara.config import configurable
from capibara.objectives.base import Objective, Totals, log_probabilities
from capibara.objectives.loss import Loss


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class FocalLoss(Loss):
    """The sum of -(1 - p) ** gamma * ln p over the targets, p the probability of each.

    Attributes:
      gamma: 0 is the cross entropy.
    """

    gamma: float = 2.0

    means = ("nll",)  # a log has the mean of these over its steps

    def objective(self, model, dataset):
        def sums(params, batch, remat, step):
            batch = sharding.balanced(batch)
            log_p_BT, stats = log_probabilities(model, params, batch, remat, step)
            weights_BT = batch["weights"]
            loss = -jnp.sum(weights_BT * (1 - jnp.exp(log_p_BT)) ** self.gamma * log_p_BT)
            values = {"loss": loss, "nll": -jnp.sum(weights_BT * log_p_BT)}
            totals = Totals(values, weight=jnp.sum(weights_BT), tokens=jnp.sum(weights_BT))
            # What is differentiated is a sum; the step divides by the weight, over all devices and micro-batches.
            return loss + model.layer_loss(stats), jax.lax.stop_gradient(totals), stats

        return Objective(sums, lambda totals, weight: totals.means(weight))
