"""The policy loss of a batch of answers, as a sum, and its metrics."""

from __future__ import annotations

import dataclasses
import enum
import math

import jax
import jax.numpy as jnp

from capibara.core.types import Batch
from capibara.objectives.base import Totals
from capibara.strategies.policy.answers import Answers, RatioLevel, Surrogate


class TokenWeights(enum.StrEnum):
    """The weight of a token in the mean over a batch.

    ANSWER: each answer, or each of its conversations, counts the same, and each of its tokens (GRPO, Shao et al. 2024, arXiv:2402.03300).
    MICRO_BATCH: each token of a micro-batch counts the same, and each micro-batch (TRL's "bnpo").
    BATCH: each token of the batch counts the same (DAPO, Yu et al. 2025, arXiv:2503.14476).
    MAX_LENGTH: 1 / Sampling.max_new_tokens (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).
    SUM: 1, so that long answers count more (LUSPO, arXiv:2602.05261).
    """

    ANSWER = "answer"
    MICRO_BATCH = "micro_batch"
    BATCH = "batch"
    MAX_LENGTH = "max_length"
    SUM = "sum"


class ImportanceMode(enum.StrEnum):
    """What is done with importance weights beyond their bounds, of each token or of the product over an answer.

    Truncated ones are set to the bound (TIS), masked ones to 0 (MIS).
    """

    TOKEN_TRUNCATE = "token_truncate"
    TOKEN_MASK = "token_mask"
    SEQUENCE_TRUNCATE = "sequence_truncate"
    SEQUENCE_MASK = "sequence_mask"

    @property
    def of_sequence(self) -> bool:
        return self in (ImportanceMode.SEQUENCE_TRUNCATE, ImportanceMode.SEQUENCE_MASK)

    @property
    def masks(self) -> bool:
        return self in (ImportanceMode.TOKEN_MASK, ImportanceMode.SEQUENCE_MASK)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The loss of answers as a function of their log-probabilities; fields as in `Grpo`.

    Attributes:
      surrogate, level, token_weights: the value that is maximised, of which ratio, and its mean.
      importance_mode, importance_floor, importance_cap: the importance weights of the engine.
      kl, unbiased_kl: coefficient of the divergence from `reference`; whether it has the ratio as weight.
      off_policy_limit: the largest divergence of an answer with a negative advantage.
      max_tokens: the largest number of tokens of an answer.
    """

    surrogate: Surrogate
    level: RatioLevel
    token_weights: TokenWeights
    importance_mode: ImportanceMode
    importance_floor: float | None
    importance_cap: float | None
    kl: float
    unbiased_kl: bool
    off_policy_limit: float | None
    max_tokens: int

    def totals(self, log_p_BT: jax.Array, batch: Batch) -> tuple[jax.Array, Totals]:
        """The loss as a sum over answers, or tokens with TokenWeights.BATCH, and the metrics' sums.

        Args:
          log_p_BT: log-probability of every target.
          batch: rows of one answer each, with `advantages` and log-probabilities: `drawn`, of the engine; `old`, of the model
            that generated the answers, if it is not the current one; `reference`, if `kl` is not 0.
        """
        is_token_BT = batch["weights"] > 0
        log_p_BT = jnp.where(is_token_BT, log_p_BT, 0.0)
        old_BT = jnp.where(is_token_BT, batch["old"], 0.0) if "old" in batch else jax.lax.stop_gradient(log_p_BT)
        drawn_BT = jnp.where(is_token_BT, batch["drawn"], 0.0)
        answers = Answers(batch["weights"], batch["advantages"], log_p_BT, old_BT, jnp.ones_like(log_p_BT))
        importance_BT, is_beyond_BT = self._importance(answers, drawn_BT)
        answers = answers._replace(importance_BT=importance_BT)
        ratio_BT = answers.ratio(self.level)
        gain_BT, is_clipped_BT = self.surrogate.gain(answers, ratio_BT)
        if not self.surrogate.corrects:
            gain_BT = gain_BT * importance_BT
        of_tokens = {
            "clip_fraction": is_clipped_BT,
            "ratio": ratio_BT,
            "drawn_ratio": jnp.exp(jax.lax.stop_gradient(log_p_BT) - drawn_BT),
            "engine_difference": jnp.abs(old_BT - drawn_BT),
            "importance_capped": is_beyond_BT,
        }
        if self.off_policy_limit is not None:
            is_far_B1 = answers.means(drawn_BT - jax.lax.stop_gradient(log_p_BT)) > self.off_policy_limit
            is_left_out_BT = is_far_B1 & (answers.advantages_BT < 0)
            gain_BT = jnp.where(is_left_out_BT, 0.0, gain_BT)
            of_tokens["off_policy_fraction"] = is_left_out_BT.astype(jnp.float32)
        loss_BT = -gain_BT
        if self.kl:
            further_BT = jnp.where(is_token_BT, batch["reference"] - log_p_BT, 0.0)
            of_tokens["kl"] = jnp.exp(further_BT) - further_BT - 1
            loss_BT = loss_BT + self.kl * of_tokens["kl"] * (ratio_BT if self.unbiased_kl else 1.0)
        return self._totals(answers, loss_BT, of_tokens, jnp.max(batch["segment_ids"], axis=1, keepdims=True) > 0)

    def _importance(self, answers: Answers, drawn_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The bounded importance weights, and which were beyond their bounds (1 or 0)."""
        if self.importance_cap is None and self.importance_floor is None:
            return jnp.ones_like(drawn_BT), jnp.zeros_like(drawn_BT)
        apart_BT = answers.old_BT - drawn_BT
        weight_BT = jnp.exp(answers.sums(apart_BT) if self.importance_mode.of_sequence else apart_BT)
        floor = 0.0 if self.importance_floor is None else self.importance_floor
        cap = math.inf if self.importance_cap is None else self.importance_cap
        is_beyond_BT = (weight_BT < floor) | (weight_BT > cap)
        bounded_BT = jnp.where(
            is_beyond_BT, 0.0 if self.importance_mode.masks else jnp.clip(weight_BT, floor, cap), weight_BT
        )
        return bounded_BT, is_beyond_BT.astype(jnp.float32)

    def _totals(
        self, answers: Answers, loss_BT: jax.Array, of_tokens: dict[str, jax.Array], is_answer_B1: jax.Array
    ) -> tuple[jax.Array, Totals]:
        weights_BT = answers.weights_BT
        tokens_B1 = jnp.sum(weights_BT, axis=1, keepdims=True)
        tokens, count = jnp.sum(weights_BT), jnp.sum(is_answer_B1.astype(jnp.float32))
        mean_BT, weight = weights_BT / jnp.maximum(tokens_B1, 1.0), count
        match self.token_weights:
            case TokenWeights.ANSWER:
                share_BT = mean_BT
            case TokenWeights.MICRO_BATCH:
                share_BT = weights_BT * (count / jnp.maximum(tokens, 1.0))
            case TokenWeights.BATCH:
                share_BT, weight = weights_BT, tokens
            case TokenWeights.MAX_LENGTH:
                share_BT = weights_BT / self.max_tokens
            case TokenWeights.SUM:
                share_BT = weights_BT
        loss = jnp.sum(loss_BT * share_BT)
        # The metrics are means over answers that are trained, whatever the loss is a mean of.
        scale = weight / jnp.maximum(jnp.sum((tokens_B1 > 0).astype(jnp.float32)), 1.0)
        values = {name: jnp.sum(value * mean_BT) * scale for name, value in of_tokens.items()}
        return loss, Totals({"loss": loss} | values, weight, tokens)
