"""Odds ratio preference optimisation (ORPO): fine-tuning on chosen answers that also lowers the odds of rejected ones."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from capibara.config import configurable
from capibara.core.types import Batch, UserError
from capibara.objectives.base import Totals
from capibara.objectives.pairs import PairLoss, Pairs, answer_sums

_LARGEST_LOG_P = -1e-7  # of an answer, per token: at 0 the odds are infinite


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Orpo(PairLoss):
    """Trains on preference pairs without a reference model (Hong et al. 2024, arXiv:2403.07691).

    The loss is the negative log-likelihood of chosen conversations, prompt included, per token of the micro-batch as in
    TRL, minus beta * log sigmoid of the log odds ratio of chosen and rejected answer, whose probabilities are per token.

    Attributes:
      beta: coefficient of the odds ratio, lambda in the paper.
    """

    beta: float = 0.1

    means = (
        *("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy"),
        *("log_prob_chosen", "log_prob_rejected", "log_odds_ratio", "nll_chosen"),
    )

    def __post_init__(self) -> None:
        if not 0 <= self.beta < math.inf:
            raise UserError(f"Orpo.beta is {self.beta}, must be finite and at least 0: try 0.1")

    def totals(self, log_p_BT: jax.Array, batch: Batch, pairs: int) -> tuple[jax.Array, Totals]:
        answers, segments_BT = Pairs.of(log_p_BT, batch, pairs), batch["segment_ids"]
        log_p_BK2 = answers.means(answers.log_p_BK2)
        log_odds_BK2 = _log_odds(jnp.where(answers.tokens_BK2 > 0, log_p_BK2, -1.0))
        ratio_BK = log_odds_BK2[..., 0] - log_odds_BK2[..., 1]
        whole_BK, tokens_BK = (answer_sums(x, segments_BT, pairs)[..., 0] for x in (log_p_BT, jnp.ones_like(log_p_BT)))
        nll_BK = -answers.token_mean(whole_BK, tokens_BK)
        margin_BK = log_p_BK2[..., 0] - log_p_BK2[..., 1]
        return answers.totals(
            {
                "loss": nll_BK - self.beta * jax.nn.log_sigmoid(ratio_BK),
                "reward_chosen": self.beta * log_p_BK2[..., 0],
                "reward_rejected": self.beta * log_p_BK2[..., 1],
                "reward_margin": self.beta * margin_BK,
                "reward_accuracy": (margin_BK > 0).astype(jnp.float32),
                "log_prob_chosen": log_p_BK2[..., 0],
                "log_prob_rejected": log_p_BK2[..., 1],
                "log_odds_ratio": ratio_BK,
                "nll_chosen": nll_BK,
            }
        )


def _log_odds(log_p: jax.Array) -> jax.Array:
    """log(p / (1 - p))."""
    log_p = jnp.minimum(log_p, _LARGEST_LOG_P)
    return log_p - jnp.log(-jnp.expm1(log_p))
