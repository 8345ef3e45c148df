"""Direct preference optimisation (DPO): prefers chosen to rejected answers, relative to a reference model."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from capibara.config import configurable
from capibara.core.types import Batch, UserError
from capibara.objectives.base import Totals
from capibara.objectives.pairs import Pairs, answer_sums
from capibara.objectives.reference import ReferenceLoss


class Kind(enum.StrEnum):
    """The loss of a pair, as a function of the log ratios c = log(pi / ref)(chosen) and r = log(pi / ref)(rejected).

    Those of the margin h = c - r:

    SIGMOID: -log sigmoid(beta * h), DPO (Rafailov et al. 2023, arXiv:2305.18290).
    SIGMOID_NORM: the same with means over the tokens in the place of sums (Tulu 3, Lambert et al. 2024, arXiv:2411.15124).
    HINGE: max(0, 1 - beta * h) (SLiC, Zhao et al. 2023, arXiv:2305.10425).
    IPO: (h - 1 / (2 * beta))**2, which bounds the margin also for deterministic preferences (Azar et al. 2023,
      arXiv:2310.12036). As in the paper, h is of sums over the tokens of an answer.
    IPO_MEAN: the same with means over the tokens, independent of their number: TRL's "ipo".
    ROBUST: as SIGMOID, but with label smoothing it is an unbiased estimate of the loss on pairs without flipped labels
      (Chowdhury et al. 2024, arXiv:2403.00409).
    EXO_PAIR: the reverse KL divergence of the model's preference from the labels', whose smoothing must be above 0 (Ji et
      al. 2024, arXiv:2402.00856).
    DISCOPOP: the logistic and the exponential loss, mixed by the margin (Lu et al. 2024, arXiv:2406.08414).
    AOT: as SIGMOID, but the model's margins and the reference's are sorted over the micro-batch before they are compared
      (Melnyk et al. 2024, arXiv:2406.05882).
    AOT_UNPAIRED: as AOT, with sorted log ratios of chosen and of rejected answers.

    Those of each answer by itself:

    NCA_PAIR: noise contrastive alignment (Chen et al. 2024, arXiv:2402.05369).
    BCO_PAIR: binary classification of answers, without a shift of rewards (Jung et al. 2024, arXiv:2404.04656).
    SPPO_HARD: self-play preference optimisation with the win rates 1 and 0 (Wu et al. 2024, arXiv:2405.00675).
    APO_ZERO, APO_DOWN: anchored preference optimisation, where chosen answers are better than the model's, and where they
      are worse (D'Oosterlinck et al. 2024, arXiv:2408.06266).
    """

    SIGMOID = "sigmoid"
    SIGMOID_NORM = "sigmoid_norm"
    HINGE = "hinge"
    IPO = "ipo"
    IPO_MEAN = "ipo_mean"
    ROBUST = "robust"
    EXO_PAIR = "exo_pair"
    DISCOPOP = "discopop"
    AOT = "aot"
    AOT_UNPAIRED = "aot_unpaired"
    NCA_PAIR = "nca_pair"
    BCO_PAIR = "bco_pair"
    SPPO_HARD = "sppo_hard"
    APO_ZERO = "apo_zero"
    APO_DOWN = "apo_down"


class Divergence(enum.StrEnum):
    """The divergence from the reference, which the loss bounds: f'(pi / ref) takes the place of a log ratio.

    f-DPO, Wang et al. 2023, arXiv:2309.16240.
    """

    REVERSE_KL = "reverse_kl"
    FORWARD_KL = "forward_kl"
    JS = "js_divergence"
    ALPHA = "alpha_divergence"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dpo(ReferenceLoss):
    """Trains on preference pairs; the reference model has the initial weights of the run.

    Attributes:
      kind: the loss of a pair.
      beta: strength of the constraint to the reference; with a larger one the model stays closer.
      label_smoothing: assumed fraction of pairs with flipped labels: the loss of the swapped pair is added with this
        weight (cDPO, Mitchell 2023), or subtracted by "robust". Of "exo_pair" it is the label of the rejected answer.
        (TRL's "sigmoid", "hinge" and "ipo" ignore label_smoothing.)
      sft_weight: coefficient of the chosen answer's negative log-likelihood per token (Pang et al. 2024,
        arXiv:2404.19733); 0: none.
      divergence: for the kinds of the margin without "aot" and "aot_unpaired".
      alpha: of the alpha divergence.
      discopop_tau: temperature of the mixture of "discopop".
    """

    kind: Kind = Kind.SIGMOID
    beta: float = 0.1
    label_smoothing: float = 0.0
    sft_weight: float = 0.0
    divergence: Divergence = Divergence.REVERSE_KL
    alpha: float = 0.5
    discopop_tau: float = 0.05

    means = (
        *("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy"),
        *("log_prob_chosen", "log_prob_rejected", "log_ratio", "nll_chosen"),
    )

    def __post_init__(self) -> None:
        if not 0 < self.beta < float("inf"):
            raise UserError(f"Dpo.beta is {self.beta}, must be above 0: try 0.1")
        if not 0 <= self.label_smoothing < 0.5:
            raise UserError(f"Dpo.label_smoothing is {self.label_smoothing}, must be from 0 to below 0.5: try 0.1")
        if self.sft_weight < 0:
            raise UserError(f"Dpo.sft_weight is {self.sft_weight}, must be at least 0 (0: none)")
        if not 0 < self.discopop_tau < float("inf"):
            raise UserError(f"Dpo.discopop_tau is {self.discopop_tau}, must be above 0: try 0.05")
        if not math.isfinite(self.alpha):
            raise UserError(f"Dpo.alpha is {self.alpha}, must be finite: try 0.5")
        if self.kind is Kind.EXO_PAIR and not self.label_smoothing:
            raise UserError("Dpo.label_smoothing is 0, and must be above 0 for Dpo.kind 'exo_pair': try 1e-3")
        if self.label_smoothing and self.kind not in _SMOOTHED | {Kind.EXO_PAIR}:
            raise UserError(
                f"Dpo.label_smoothing is {self.label_smoothing}, and Dpo.kind {str(self.kind)!r} has none: set it to 0"
            )
        if self.divergence is not Divergence.REVERSE_KL and (self.kind in _OF_RATIOS or self.kind in _SORTED):
            raise UserError(
                f"Dpo.divergence is {str(self.divergence)!r}, and Dpo.kind {str(self.kind)!r} is of 'reverse_kl' alone: "
                "leave it out, or set Dpo.kind = 'sigmoid'"
            )

    def totals(self, log_p_BT: jax.Array, batch: Batch, pairs: int) -> tuple[jax.Array, Totals]:
        answers = Pairs.of(log_p_BT, batch, pairs)
        reference_BK2 = answer_sums(batch["reference"], batch["segment_ids"], pairs)
        ratio_BK2 = answers.log_p_BK2 - reference_BK2
        gain_BK = ratio_BK2[..., 0] - ratio_BK2[..., 1]
        nll_BK = -answers.means(answers.log_p_BK2)[..., 0]
        return answers.totals(
            {
                "loss": self._loss(answers, ratio_BK2, reference_BK2) + self.sft_weight * nll_BK,
                "reward_chosen": self.beta * ratio_BK2[..., 0],
                "reward_rejected": self.beta * ratio_BK2[..., 1],
                "reward_margin": self.beta * gain_BK,
                "reward_accuracy": (gain_BK > 0).astype(jnp.float32),
                "log_prob_chosen": answers.log_p_BK2[..., 0],
                "log_prob_rejected": answers.log_p_BK2[..., 1],
                "log_ratio": jnp.sum(ratio_BK2, -1) / jnp.maximum(jnp.sum(answers.tokens_BK2, -1), 1.0),
                "nll_chosen": nll_BK,
            }
        )

    def _loss(self, answers: Pairs, ratio_BK2: jax.Array, reference_BK2: jax.Array) -> jax.Array:
        if self.kind in _OF_RATIOS:
            return _OF_RATIOS[self.kind](self, ratio_BK2[..., 0], ratio_BK2[..., 1])
        margin_BK, of_margin = self._margin(answers, ratio_BK2, reference_BK2), _OF_MARGIN[self.kind]
        if self.kind not in _SMOOTHED or not self.label_smoothing:
            return of_margin(self, margin_BK)
        straight, swapped = 1 - self.label_smoothing, self.label_smoothing
        if self.kind is Kind.ROBUST:
            straight, swapped = (share / (1 - 2 * self.label_smoothing) for share in (straight, -swapped))
        return straight * of_margin(self, margin_BK) + swapped * of_margin(self, -margin_BK)

    def _margin(self, answers: Pairs, ratio_BK2: jax.Array, reference_BK2: jax.Array) -> jax.Array:
        if self.kind in _SORTED:
            left_BK, right_BK = ratio_BK2[..., 0], ratio_BK2[..., 1]
            if self.kind is Kind.AOT:
                left_BK = answers.log_p_BK2[..., 0] - answers.log_p_BK2[..., 1]
                right_BK = reference_BK2[..., 0] - reference_BK2[..., 1]
            return _sorted(left_BK, answers.is_pair_BK) - _sorted(right_BK, answers.is_pair_BK)
        score_BK2 = self._scores(ratio_BK2)
        if self.kind in (Kind.IPO_MEAN, Kind.SIGMOID_NORM):
            score_BK2 = answers.means(score_BK2)
        return score_BK2[..., 0] - score_BK2[..., 1]

    def _scores(self, ratio_BK2: jax.Array) -> jax.Array:
        """f'(pi / ref) of the divergence."""
        match self.divergence:
            case Divergence.FORWARD_KL:
                return 1 - jnp.exp(-ratio_BK2)
            case Divergence.JS:
                return math.log(2) + jax.nn.log_sigmoid(ratio_BK2)
            case Divergence.ALPHA if abs(self.alpha - 1) >= 1e-6:
                power = self.alpha - 1
                # exp overflows float32 above 88.
                return (jnp.exp(jnp.minimum(power * ratio_BK2, 80.0)) - 1) / power
        return ratio_BK2


def _logistic(dpo: Dpo, margin: jax.Array) -> jax.Array:
    return -jax.nn.log_sigmoid(dpo.beta * margin)


def _hinge(dpo: Dpo, margin: jax.Array) -> jax.Array:
    return jax.nn.relu(1 - dpo.beta * margin)


def _squared(dpo: Dpo, margin: jax.Array) -> jax.Array:
    return jnp.square(margin - 1 / (2 * dpo.beta))


def _exo_pair(dpo: Dpo, margin: jax.Array) -> jax.Array:
    reward, smoothing = dpo.beta * margin, dpo.label_smoothing
    chosen = jax.nn.sigmoid(reward) * (jax.nn.log_sigmoid(reward) - math.log1p(-smoothing))
    return chosen + jax.nn.sigmoid(-reward) * (jax.nn.log_sigmoid(-reward) - math.log(smoothing))


def _discopop(dpo: Dpo, margin: jax.Array) -> jax.Array:
    reward = dpo.beta * margin
    share = jax.nn.sigmoid(reward / dpo.discopop_tau)
    return -jax.nn.log_sigmoid(reward) * (1 - share) + jnp.exp(-reward) * share


def _nca_pair(dpo: Dpo, chosen: jax.Array, rejected: jax.Array) -> jax.Array:
    log_sigmoid = jax.nn.log_sigmoid
    both = log_sigmoid(-dpo.beta * chosen) + log_sigmoid(-dpo.beta * rejected)
    return -log_sigmoid(dpo.beta * chosen) - 0.5 * both


def _bco_pair(dpo: Dpo, chosen: jax.Array, rejected: jax.Array) -> jax.Array:
    return -jax.nn.log_sigmoid(dpo.beta * chosen) - jax.nn.log_sigmoid(-dpo.beta * rejected)


def _sppo_hard(dpo: Dpo, chosen: jax.Array, rejected: jax.Array) -> jax.Array:
    return jnp.square(chosen - 0.5 / dpo.beta) + jnp.square(rejected + 0.5 / dpo.beta)


def _apo_zero(dpo: Dpo, chosen: jax.Array, rejected: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(-dpo.beta * chosen) + jax.nn.sigmoid(dpo.beta * rejected)


def _apo_down(dpo: Dpo, chosen: jax.Array, rejected: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(dpo.beta * chosen) + jax.nn.sigmoid(dpo.beta * (rejected - chosen))


_OF_MARGIN: dict[Kind, Callable[[Dpo, jax.Array], jax.Array]] = {
    **dict.fromkeys((Kind.SIGMOID, Kind.SIGMOID_NORM, Kind.ROBUST, Kind.AOT, Kind.AOT_UNPAIRED), _logistic),
    **dict.fromkeys((Kind.IPO, Kind.IPO_MEAN), _squared),
    Kind.HINGE: _hinge,
    Kind.EXO_PAIR: _exo_pair,
    Kind.DISCOPOP: _discopop,
}
_OF_RATIOS: dict[Kind, Callable[[Dpo, jax.Array, jax.Array], jax.Array]] = {
    Kind.NCA_PAIR: _nca_pair,
    Kind.BCO_PAIR: _bco_pair,
    Kind.SPPO_HARD: _sppo_hard,
    Kind.APO_ZERO: _apo_zero,
    Kind.APO_DOWN: _apo_down,
}
_SORTED = {Kind.AOT, Kind.AOT_UNPAIRED}
_SMOOTHED = _OF_MARGIN.keys() - {Kind.EXO_PAIR, Kind.DISCOPOP}


def _sorted(values_BK: jax.Array, is_pair_BK: jax.Array) -> jax.Array:
    """The values of pairs in ascending order, at the positions of pairs."""
    is_pair = is_pair_BK.reshape(-1) > 0
    ascending = jnp.sort(jnp.where(is_pair, values_BK.reshape(-1), jnp.inf))
    rank = jnp.where(is_pair, jnp.cumsum(is_pair) - 1, 0)
    return jnp.where(is_pair, ascending[rank], 0.0).reshape(values_BK.shape)
