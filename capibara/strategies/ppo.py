"""Proximal policy optimisation (PPO): trains on the model's own answers, with a value head that predicts their rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from capibara import sharding
from capibara.config import configurable
from capibara.core.types import Batch, Params, UserError
from capibara.data.dataset import Dataset
from capibara.models.api import Model, Stats, TransformerConfig
from capibara.objectives.base import Metrics, Objective, Totals, log_probabilities_of, values_of
from capibara.objectives.batches import RunParts
from capibara.sharding import RematPolicy
from capibara.strategies.environments.environment import Environment
from capibara.strategies.policy.advantages import KlIn
from capibara.strategies.policy.answers import RatioLevel
from capibara.strategies.policy.clipped import Clipped
from capibara.strategies.policy.loss import ImportanceMode, PolicyLoss, TokenWeights
from capibara.strategies.policy.returns import generalized_advantages, token_rewards, whitened
from capibara.strategies.rewarded import RewardedLoss
from capibara.strategies.rollouts import Rollouts


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ppo(RewardedLoss):
    """Trains the policy and a value head on the same hidden states (Schulman et al. 2017, arXiv:1707.06347).

    As for language models in Ziegler et al. 2019 (arXiv:1909.08593) and Huang et al. 2024 (arXiv:2403.17031): the reward of an
    answer is that of its last token, the divergence from the reference a cost of each token, advantages are normalised over
    the tokens of a rollout. Needs `DecoderConfig.value_head`.

    Attributes:
      kl: coefficient of the KL divergence from the reference, the initial weights of the run; 0: none, and no reference is
        kept.
      clip: bounds of the ratio.
      value_clip: a value is clipped to so much from that at the rollout, and the larger loss counts; None: it is not.
      value_weight: coefficient of the values' loss, half of the squared error.
      gamma, gae_lambda: discount, and decay of generalised advantage estimation.
      whiten_rewards: whether rewards of tokens are divided by their standard deviation over a rollout.
      kl_target: nats an answer that the coefficient of the divergence is controlled for (Ziegler et al. 2019, section 2.2);
        None: `kl` is fixed.
      kl_horizon: answers in which the controller corrects by its error.
      importance_cap, environment: as in `Grpo`; what an environment says has no value, reward or cost.
    """

    group: int = 1
    kl: float = 0.05
    clip: Clipped = Clipped()
    value_clip: float | None = 0.2
    value_weight: float = 0.1
    gamma: float = 1.0
    gae_lambda: float = 0.95
    whiten_rewards: bool = False
    kl_target: float | None = None
    kl_horizon: int = 10_000
    importance_cap: float | None = 2.0
    environment: Environment | None = None

    reads_values = True
    resample = 0
    memory = None
    max_chunks = None
    kl_in = KlIn.TOKENS
    means = (
        *("clip_fraction", "ratio", "drawn_ratio", "engine_difference", "importance_capped"),
        *("policy_loss", "value_loss", "value_clip_fraction"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, fix in (("gamma", "1.0"), ("gae_lambda", "0.95")):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise UserError(f"Ppo.{name} is {value}, must be from 0 to 1: try {fix}")
        if self.value_clip is not None and not 0 < self.value_clip < float("inf"):
            raise UserError(f"Ppo.value_clip is {self.value_clip}, must be above 0, or None: try 0.2")
        if not 0 < self.value_weight < float("inf"):
            raise UserError(f"Ppo.value_weight is {self.value_weight}, must be above 0: try 0.1")
        if self.kl_target is not None and not (0 < self.kl_target < float("inf") and self.kl):
            raise UserError(
                f"Ppo.kl_target is {self.kl_target} and Ppo.kl is {self.kl}, both must be above 0, or kl_target None: try 6.0 and "
                "0.05"
            )
        if self.kl_horizon < 1:
            raise UserError(f"Ppo.kl_horizon is {self.kl_horizon}, must be at least 1: try 10000")
        if self.importance_cap is not None and not self.importance_cap >= 1:
            raise UserError(f"Ppo.importance_cap is {self.importance_cap}, must be at least 1, or None: try 2.0")
        self.check_apart(self.importance_cap)

    def check_model(self, model: TransformerConfig) -> None:
        super().check_model(model)
        if not model.value_head:
            name = type(model).__name__
            raise UserError(f"Trainer.loss is @Ppo(), and {name}.value_head is False: set it to True")

    @property
    def entries(self) -> tuple[str, ...]:
        return ("advantages", "drawn", "old", "values", "returns")

    def objective(self, model: Model, dataset: Dataset) -> Objective:
        drawn_from = self.drawn_from(model, dataset)

        def sums(
            params: Params, batch: Batch, remat: RematPolicy | None, step: jax.Array | None
        ) -> tuple[jax.Array, Totals, Stats]:
            batch = sharding.balanced(batch)
            options = () if remat is None else (remat, step)
            hidden, stats = model.hidden(params, batch, *options)
            log_p_BT = log_probabilities_of(model, params, hidden, batch, **drawn_from)
            loss, totals = self.totals(log_p_BT, values_of(model, params, hidden), batch)
            return loss + model.layer_loss(stats), jax.lax.stop_gradient(totals), stats

        def metrics(totals: Totals, weight: jax.Array) -> Metrics:
            return totals.means(weight)

        return Objective(sums, metrics)

    def batch_provider(self, run: RunParts) -> Rollouts:
        return Rollouts(run, self)

    def totals(self, log_p_BT: jax.Array, values_BT: jax.Array, batch: Batch) -> tuple[jax.Array, Totals]:
        """The loss as a sum over tokens, and the metrics' sums.

        Args:
          log_p_BT: log-probability of every target.
          values_BT: value before every target.
          batch: as for `PolicyLoss.totals`, with `values` of the rollout and `returns`.
        """
        policy = PolicyLoss(
            surrogate=self.clip,
            level=RatioLevel.TOKEN,
            token_weights=TokenWeights.BATCH,
            importance_mode=ImportanceMode.TOKEN_TRUNCATE,
            importance_floor=None,
            importance_cap=self.importance_cap,
            kl=0.0,
            unbiased_kl=False,
            off_policy_limit=None,
            max_tokens=self.sampling.max_new_tokens,
        )
        policy_loss, totals = policy.totals(log_p_BT, batch)
        error_BT, is_clipped_BT = jnp.square(values_BT - batch["returns"]), jnp.zeros_like(values_BT)
        if self.value_clip is not None:
            before_BT = batch["values"]
            bounded_BT = jnp.clip(values_BT, before_BT - self.value_clip, before_BT + self.value_clip)
            bounded_error_BT = jnp.square(bounded_BT - batch["returns"])
            is_clipped_BT = (bounded_error_BT > error_BT).astype(jnp.float32)
            error_BT = jnp.maximum(error_BT, bounded_error_BT)
        value_loss = 0.5 * jnp.sum(error_BT * batch["weights"])
        loss = policy_loss + self.value_weight * value_loss
        further = {
            "loss": loss,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "value_clip_fraction": jnp.sum(is_clipped_BT * batch["weights"]),
        }
        return loss, totals._replace(values=totals.values | further)

    def estimates(self, rewards_PG: np.ndarray, rows: Mapping[str, np.ndarray], kl: float) -> dict[str, np.ndarray]:
        """Advantages and returns of tokens, from what is known of the rows of a rollout; `kl`: the current coefficient."""
        weights_BT, is_token_BT = rows["weights"], rows["weights"] > 0
        kl_BT = rows["old"] - rows["reference"] if self.kl else None
        rewards_BT = token_rewards(rewards_PG.reshape(-1), weights_BT, kl_BT, kl, self.whiten_rewards)
        advantages_BT = generalized_advantages(rewards_BT, rows["values"], weights_BT, self.gamma, self.gae_lambda)
        returns_BT = np.where(is_token_BT, advantages_BT + rows["values"], 0.0)
        normalized_BT = np.where(is_token_BT, whitened(advantages_BT, is_token_BT), 0.0)
        return {"advantages": normalized_BT.astype(np.float32), "returns": returns_BT.astype(np.float32)}

    def next_kl(self, kl: float, divergence: float, answers: int) -> float:
        if self.kl_target is None:
            return kl
        error = min(max(divergence / self.kl_target - 1, -0.2), 0.2)
        return kl * (1 + error * answers / self.kl_horizon)
