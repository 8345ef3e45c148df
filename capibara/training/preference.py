"""Direct preference optimisation: of two answers the chosen one is to gain on the rejected one, against a reference."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara import sharding
from capibara.config import configurable
from capibara.core.types import Batch, Params, UserError
from capibara.data.dataset import Dataset
from capibara.data.sources.sources import Holds
from capibara.models.api import Model
from capibara.objectives.base import Loss, Metrics, Objective, Totals, log_probabilities
from capibara.sharding import RematPolicy
from capibara.training.reference import ReferenceTables, answer_sums


class Kind(enum.StrEnum):
    """How the gain h = log(pi / ref)(chosen) - log(pi / ref)(rejected) becomes a loss.

    SIGMOID: -log sigmoid(beta * h), DPO (Rafailov et al. 2023, arXiv:2305.18290).
    HINGE: max(0, 1 - beta * h) (SLiC, Zhao et al. 2023, arXiv:2305.10425).
    IPO: (h - 1 / (2 * beta))**2, which a preference that is certain does not drive on for ever (Azar et al. 2023,
      arXiv:2310.12036). As the paper writes it, of sums over the tokens of an answer.
    IPO_MEAN: the same of means over the tokens, so that it does not grow with their number: what TRL calls "ipo".
    ROBUST: as SIGMOID, but with label smoothing the loss has the mean that it would have if none of the pairs were the
      wrong way round (Chowdhury et al. 2024, arXiv:2403.00409).
    """

    SIGMOID = "sigmoid"
    HINGE = "hinge"
    IPO = "ipo"
    IPO_MEAN = "ipo_mean"
    ROBUST = "robust"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dpo(Loss):
    """Trains on preference pairs; the reference is what the run begins from.

    Attributes:
      kind: what the loss is.
      beta: how dear it is to leave the reference; the larger, the nearer the model stays.
      label_smoothing: the share of pairs that may be the wrong way round: as much of the loss is of the pair turned
        (cDPO, Mitchell 2023), of any kind but "robust", which takes it away. (TRL's "sigmoid", "hinge" and "ipo" do
        without, whatever its label_smoothing is.)
      sft_weight: coefficient of the chosen answer's negative log-likelihood a token (Pang et al. 2024, arXiv:2404.19733);
        0: none.
    """

    kind: Kind = Kind.SIGMOID
    beta: float = 0.1
    label_smoothing: float = 0.0
    sft_weight: float = 0.0

    means = (
        *("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy"),
        *("log_prob_chosen", "log_prob_rejected", "log_ratio", "nll_chosen"),
    )

    def __post_init__(self):
        if not 0 < self.beta < float("inf"):
            raise UserError(f"Dpo.beta is {self.beta}, must be above 0: try 0.1")
        if not 0 <= self.label_smoothing < 0.5:
            raise UserError(f"Dpo.label_smoothing is {self.label_smoothing}, must be from 0 to below 0.5: try 0.1")
        if self.sft_weight < 0:
            raise UserError(f"Dpo.sft_weight is {self.sft_weight}, must be at least 0 (0: none)")

    def check(self, trainer: Any) -> None:
        if trainer.dataset.holds is not Holds.PREFERENCES:
            raise UserError(
                f"Trainer.loss (@Dpo()) is for preference pairs, and Dataset.source holds {trainer.dataset.holds}: set "
                "Dataset.source = @PreferenceJsonlSource(), or leave Trainer.loss out"
            )

    def batch_spec(self, dataset: Dataset, rows: int) -> dict[str, tuple[tuple[int, int], np.dtype]]:
        spec = dataset.batch_spec(rows)
        return {("reference" if key == "numbers" else key): value for key, value in spec.items()} | {
            "reference": ((rows, dataset.length), np.dtype(np.float32))
        }

    def objective(self, model: Model, dataset: Dataset) -> Objective:
        def sums(params: Params, batch: Batch, remat: RematPolicy | None, step: jax.Array | None):
            batch = sharding.balanced(batch)
            log_p_BT, stats = log_probabilities(model, params, batch, remat, step)
            loss, totals = self.totals(log_p_BT, batch, dataset.most_pairs)
            # What balances experts is a sum over tokens, and the loss one over pairs.
            loss = loss + model.layer_loss(stats) * (totals.weight / jnp.maximum(totals.tokens, 1.0))
            return loss, jax.lax.stop_gradient(totals), stats

        def metrics(totals: Totals, weight: jax.Array) -> Metrics:
            return totals.means(weight) | {"pairs": totals.weight}

        return Objective(sums, metrics)

    def supply(self, run: Any) -> ReferenceTables:
        return ReferenceTables(run, self.objective(run.model, run.trainer.dataset))

    def totals(self, log_p_BT: jax.Array, batch: Batch, pairs: int) -> tuple[jax.Array, Totals]:
        """The loss as a sum over pairs, and the metrics' sums.

        Args:
          log_p_BT: log-probability of every target.
          batch: with the entry `reference`, whose sum over an answer is the answer's log-probability there.
          pairs: most pairs in a row.
        """
        weights_BT, segments_BT = batch["weights"], batch["segment_ids"]
        log_p_BK2, reference_BK2, tokens_BK2 = (
            answer_sums(x, segments_BT, pairs) for x in (log_p_BT * weights_BT, batch["reference"], weights_BT)
        )
        is_pair_BK = (jnp.min(tokens_BK2, axis=-1) > 0).astype(jnp.float32)
        ratio_BK2 = log_p_BK2 - reference_BK2
        gain_BK = ratio_BK2[..., 0] - ratio_BK2[..., 1]
        means_BK2 = ratio_BK2 / jnp.maximum(tokens_BK2, 1.0)
        of_loss_BK = means_BK2[..., 0] - means_BK2[..., 1] if self.kind is Kind.IPO_MEAN else gain_BK
        straight, turned = self._shares()
        nll_BK = -log_p_BK2[..., 0] / jnp.maximum(tokens_BK2[..., 0], 1.0)
        loss_BK = straight * self._loss(of_loss_BK) + self.sft_weight * nll_BK
        if turned:
            loss_BK = loss_BK + turned * self._loss(-of_loss_BK)
        values = {
            "loss": loss_BK,
            "reward_chosen": self.beta * ratio_BK2[..., 0],
            "reward_rejected": self.beta * ratio_BK2[..., 1],
            "reward_margin": self.beta * gain_BK,
            "reward_accuracy": (gain_BK > 0).astype(jnp.float32),
            "log_prob_chosen": log_p_BK2[..., 0],
            "log_prob_rejected": log_p_BK2[..., 1],
            "log_ratio": jnp.sum(ratio_BK2, axis=-1) / jnp.maximum(jnp.sum(tokens_BK2, axis=-1), 1.0),
            "nll_chosen": nll_BK,
        }
        summed = {name: jnp.sum(value * is_pair_BK) for name, value in values.items()}
        return summed["loss"], Totals(summed, jnp.sum(is_pair_BK), jnp.sum(tokens_BK2))

    def _shares(self) -> tuple[float, float]:
        """What the loss of a pair as it is counts, and that of the pair turned."""
        turned = self.label_smoothing
        if self.kind is Kind.ROBUST:
            return (1 - turned) / (1 - 2 * turned), -turned / (1 - 2 * turned)
        return 1 - turned, turned

    def _loss(self, gain: jax.Array) -> jax.Array:
        match self.kind:
            case Kind.HINGE:
                return jax.nn.relu(1 - self.beta * gain)
            case Kind.IPO | Kind.IPO_MEAN:
                return jnp.square(gain - 1 / (2 * self.beta))
        return -jax.nn.log_sigmoid(self.beta * gain)
