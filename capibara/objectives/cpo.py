"""Contrastive preference optimisation (CPO), SimPO and AlphaPO: preferences without a reference model."""

from __future__ import annotations

import dataclasses
import enum
import math

import jax
import jax.numpy as jnp

from capibara.config import configurable
from capibara.core.types import Batch, UserError
from capibara.objectives.base import Totals
from capibara.objectives.pairs import PairLoss, Pairs


class CpoKind(enum.StrEnum):
    """The loss of a pair, as a function of the margin h between the rewards of chosen and rejected answer.

    SIGMOID: -log sigmoid(beta * h) (CPO, Xu et al. 2024, arXiv:2401.08417).
    HINGE: max(0, 1 - beta * h).
    IPO: (h - 1 / (2 * beta))**2, of log-probabilities per token.
    SIMPO: -log sigmoid(beta * h - gamma), of log-probabilities per token (SimPO, Meng et al. 2024, arXiv:2405.14734).
    """

    SIGMOID = "sigmoid"
    HINGE = "hinge"
    IPO = "ipo"
    SIMPO = "simpo"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cpo(PairLoss):
    """Trains on preference pairs without a reference model.

    Attributes:
      kind: the loss of a pair.
      beta: scale of the rewards.
      label_smoothing: assumed fraction of pairs with flipped labels: the loss of the swapped pair is added with this weight.
        (TRL's "hinge" and "ipo" ignore label_smoothing.)
      nll_weight: coefficient of the chosen answers' negative log-likelihood per token of the micro-batch, TRL's
        cpo_alpha; 0: none, as in SimPO.
      gamma: target margin of "simpo".
      alpha: a reward is (1 - p**-alpha) / alpha of an answer's probability p (AlphaPO, Gupta et al. 2025,
        arXiv:2501.03884); 0: log p.
    """

    kind: CpoKind = CpoKind.SIGMOID
    beta: float = 0.1
    label_smoothing: float = 0.0
    nll_weight: float = 1.0
    gamma: float = 0.5
    alpha: float = 0.0

    means = (
        *("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy"),
        *("log_prob_chosen", "log_prob_rejected", "nll_chosen"),
    )

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise UserError(f"Cpo.beta is {self.beta}, must be above 0: try 0.1")
        if not 0 <= self.label_smoothing < 0.5:
            raise UserError(f"Cpo.label_smoothing is {self.label_smoothing}, must be from 0 to below 0.5: try 0.1")
        for name in ("nll_weight", "gamma"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise UserError(f"Cpo.{name} is {value}, must be finite and at least 0 (0: none)")
        if not math.isfinite(self.alpha):
            raise UserError(f"Cpo.alpha is {self.alpha}, must be finite (0: log-probabilities)")

    def totals(self, log_p_BT: jax.Array, batch: Batch, pairs: int) -> tuple[jax.Array, Totals]:
        answers = Pairs.of(log_p_BT, batch, pairs)
        per_token = self.kind in (CpoKind.IPO, CpoKind.SIMPO)
        log_p_BK2 = answers.means(answers.log_p_BK2) if per_token else answers.log_p_BK2
        reward_BK2 = log_p_BK2
        if self.alpha:  # exp overflows float32 above 88
            reward_BK2 = -jnp.expm1(jnp.minimum(-self.alpha * log_p_BK2, 80.0)) / self.alpha
        margin_BK = reward_BK2[..., 0] - reward_BK2[..., 1]
        nll_BK = -answers.token_mean(answers.log_p_BK2[..., 0], answers.tokens_BK2[..., 0])
        straight, swapped = 1 - self.label_smoothing, self.label_smoothing
        shifted_BK = margin_BK - self.gamma / self.beta if self.kind is CpoKind.SIMPO else margin_BK
        loss_BK = straight * self._loss(shifted_BK) + swapped * self._loss(-shifted_BK)
        return answers.totals(
            {
                "loss": loss_BK + self.nll_weight * nll_BK,
                "reward_chosen": self.beta * reward_BK2[..., 0],
                "reward_rejected": self.beta * reward_BK2[..., 1],
                "reward_margin": self.beta * margin_BK,
                "reward_accuracy": (margin_BK > 0).astype(jnp.float32),
                "log_prob_chosen": log_p_BK2[..., 0],
                "log_prob_rejected": log_p_BK2[..., 1],
                "nll_chosen": nll_BK,
            }
        )

    def _loss(self, margin: jax.Array) -> jax.Array:
        match self.kind:
            case CpoKind.HINGE:
                return jax.nn.relu(1 - self.beta * margin)
            case CpoKind.IPO:
                return jnp.square(margin - 1 / (2 * self.beta))
        return -jax.nn.log_sigmoid(self.beta * margin)
