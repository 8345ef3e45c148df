"""Kahneman-Tversky optimisation (KTO): prefers desirable to undesirable answers, which need not be pairs."""

from __future__ import annotations

import dataclasses
import enum
import math

import jax
import jax.numpy as jnp

from capibara.config import configurable
from capibara.core.types import Batch, UserError
from capibara.data.chat.answers import UnpairedJsonlSource
from capibara.data.dataset import Dataset
from capibara.data.sources.sources import DataFormat
from capibara.objectives.base import Metrics, Totals
from capibara.objectives.pairs import Pairs, answer_sums
from capibara.objectives.reference import ReferenceLoss


class KtoKind(enum.StrEnum):
    """The loss of an answer, as a function of its reward r = beta * log(pi / ref).

    KTO: 1 - sigmoid(r - z) of a desirable answer, 1 - sigmoid(z - r) of an undesirable one (Ethayarajh et al. 2024,
      arXiv:2402.01306). z is beta times the KL divergence of the model from the reference: the mean log(pi / ref) of
      mismatched answers in the micro-batch, at least 0, without gradient.
    APO_ZERO_UNPAIRED: the same with z = 0 (D'Oosterlinck et al. 2024, arXiv:2408.06266).
    BCO: -log sigmoid(r - d) of a desirable answer, -log sigmoid(d - r) of an undesirable one (Jung et al. 2024,
      arXiv:2404.04656). d is the mean reward in the micro-batch, without gradient; the paper averages it over steps, too.
    """

    KTO = "kto"
    APO_ZERO_UNPAIRED = "apo_zero_unpaired"
    BCO = "bco"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Kto(ReferenceLoss):
    """Trains on answers that are desirable or not; the reference model has the initial weights of the run.

    Attributes:
      kind: the loss of an answer.
      beta: strength of the constraint to the reference; with a larger one the model stays closer.
      desirable_weight, undesirable_weight: of the losses; with d and u answers of each the paper has desirable_weight * d
        between 1 and 4/3 of undesirable_weight * u.
    """

    kind: KtoKind = KtoKind.KTO
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    data_format = DataFormat.UNPAIRED
    means = ("reward_desirable", "reward_undesirable", "reward_margin", "desirable", "kl", "log_prob")

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise UserError(f"Kto.beta is {self.beta}, must be above 0: try 0.1")
        for name in ("desirable_weight", "undesirable_weight"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise UserError(f"Kto.{name} is {value}, must be finite and at least 0: try 1.0")

    def check(self, dataset: Dataset, batch_size: int) -> None:
        super().check(dataset, batch_size)
        source, needs = dataset.source, self.kind not in (KtoKind.APO_ZERO_UNPAIRED, KtoKind.BCO)
        if isinstance(source, UnpairedJsonlSource) and source.mismatched is not needs:
            raise UserError(
                f"UnpairedJsonlSource.mismatched is {source.mismatched}, and Kto.kind {str(self.kind)!r} "
                f"{'needs mismatched answers' if needs else 'does not read mismatched answers'}: set it to {needs}"
            )

    def totals(self, log_p_BT: jax.Array, batch: Batch, pairs: int) -> tuple[jax.Array, Totals]:
        answers, segments_BT = Pairs.of(log_p_BT, batch, pairs), batch["segment_ids"]
        is_answer_BK = (answers.tokens_BK2[..., 0] > 0).astype(jnp.float32)
        answers = answers._replace(is_pair_BK=is_answer_BK)
        ratio_BK2 = answers.log_p_BK2 - answer_sums(batch["reference"], segments_BT, pairs)
        desirable_BK = answer_sums(batch["labels"], segments_BT, pairs)[..., 0]
        mean_2 = jnp.einsum("bkc,bk->c", ratio_BK2, is_answer_BK) / jnp.maximum(jnp.sum(is_answer_BK), 1.0)
        kl = jnp.maximum(jax.lax.stop_gradient(mean_2[1]), 0.0) if self.kind is KtoKind.KTO else jnp.zeros(())
        shift = jax.lax.stop_gradient(mean_2[0]) if self.kind is KtoKind.BCO else kl
        sign_BK, reward_BK = 2 * desirable_BK - 1, self.beta * ratio_BK2[..., 0]
        gain_BK = sign_BK * (reward_BK - self.beta * shift)
        of_gain = -jax.nn.log_sigmoid(gain_BK) if self.kind is KtoKind.BCO else jax.nn.sigmoid(-gain_BK)
        loss_BK = jnp.where(desirable_BK > 0, self.desirable_weight, self.undesirable_weight) * of_gain
        return answers.totals(
            {
                "loss": loss_BK,
                "reward_desirable": reward_BK * desirable_BK,
                "reward_undesirable": reward_BK * (1 - desirable_BK),
                "desirable": desirable_BK,
                "kl": jnp.broadcast_to(kl, loss_BK.shape),
                "log_prob": answers.log_p_BK2[..., 0],
            }
        )

    def metrics(self, totals: Totals, weight: jax.Array) -> Metrics:
        """As of pairs; a mean reward is that of the answers with its label, 0 if there are none; the margin their difference."""
        count = totals.values["desirable"]
        sums = {"reward_desirable": count, "reward_undesirable": totals.weight - count}
        rewards = {name: totals.values[name] / jnp.maximum(answers, 1.0) for name, answers in sums.items()}
        margin = rewards["reward_desirable"] - rewards["reward_undesirable"]
        return super().metrics(totals, weight) | rewards | {"reward_margin": margin}
