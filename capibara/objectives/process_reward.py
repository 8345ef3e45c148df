"""Process reward models: score each step of a solution, by whether it is right."""

from __future__ import annotations

import dataclasses

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
from capibara.sharding import RematPolicy


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessReward(Loss):
    """Trains a model that scores steps (`DecoderConfig.head` is "score") on solutions with labelled steps.

    The score s of a step is read at the last token of its separator; its loss is the cross entropy of its label and sigmoid(s)
    (Lightman et al. 2023, arXiv:2305.20050; Uesato et al. 2022, arXiv:2211.14275), and a batch's the mean over its steps. It is
    that of a token classification with two labels and the logits (0, s).
    """

    data_format = DataFormat.STEPS
    means = ("step_accuracy", "right_score", "wrong_score")

    def check_model(self, model: TransformerConfig) -> None:
        if model.head is not Head.SCORE:
            name = type(model).__name__
            raise UserError(
                f"Trainer.loss is @ProcessReward(), and {name}.head is {str(model.head)!r}: set it to 'score'"
            )

    def objective(self, model: Model, dataset: Dataset) -> Objective:
        del dataset

        def sums(
            params: Params, batch: Batch, remat: RematPolicy | None, step: jax.Array | None
        ) -> tuple[jax.Array, Totals, Stats]:
            batch = sharding.balanced(batch)
            hidden_BTD, stats = model.hidden(params, batch, *(() if remat is None else (remat, step)))
            with jax.named_scope("loss"):
                score_BT = jnp.einsum(
                    "btd,d->bt", hidden_BTD, model.head(params)[0], preferred_element_type=jnp.float32
                )
                loss, totals = self.totals(score_BT, batch)
            loss = loss + model.layer_loss(stats) * (totals.weight / jnp.maximum(totals.tokens, 1.0))
            return loss, jax.lax.stop_gradient(totals), stats

        def metrics(totals: Totals, weight: jax.Array) -> Metrics:
            means = totals.means(weight) | {"steps": totals.weight}
            right, wrong = means.pop("right"), means.pop("wrong")
            means["right_score"] = means["right_score"] / jnp.maximum(right, 1e-9)
            return means | {"wrong_score": means["wrong_score"] / jnp.maximum(wrong, 1e-9)}

        return Objective(sums, metrics)

    def totals(self, score_BT: jax.Array, batch: Batch) -> tuple[jax.Array, Totals]:
        """The loss as a sum over steps, and the metrics' sums.

        Args:
          score_BT: score after every input.
          batch: `weights` are 1 where a step ends, and `labels` there 1 if it is right.
        """
        weights_BT, label_BT = batch["weights"], batch["labels"]
        values = {
            "loss": jax.nn.softplus(score_BT) - label_BT * score_BT,
            "step_accuracy": ((score_BT > 0) == (label_BT > 0)).astype(jnp.float32),
            "right_score": score_BT * label_BT,
            "wrong_score": score_BT * (1 - label_BT),
            "right": label_BT,
            "wrong": 1 - label_BT,
        }
        sums = {name: jnp.sum(value * weights_BT) for name, value in values.items()}
        tokens = jnp.sum((batch["segment_ids"] > 0).astype(jnp.float32))
        return sums["loss"], Totals(sums, jnp.sum(weights_BT), tokens)
