"""Group relative policy optimisation (GRPO) and its family: trains on the model's own answers, compared with each other.

There is no value model and no reward model: rewards are functions, such as a check of the answer (`strategies.rewards`).
"""

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
from capibara.data.pipeline.loader import Loader
from capibara.inference.memory_agent.agent import MemoryAgent
from capibara.models.api import Model, Stats
from capibara.objectives.base import Metrics, Objective, Totals, log_probabilities
from capibara.objectives.batches import RunParts
from capibara.sharding import RematPolicy
from capibara.strategies import readings
from capibara.strategies.answering import prompt_documents
from capibara.strategies.environments.environment import Environment
from capibara.strategies.policy.advantages import Advantages, Baseline, KlIn, RewardScale, normalized_each
from capibara.strategies.policy.answers import RatioLevel, Surrogate
from capibara.strategies.policy.clipped import Clipped
from capibara.strategies.policy.loss import ImportanceMode, PolicyLoss, TokenWeights
from capibara.strategies.rewarded import CHECK_S, RewardedLoss
from capibara.strategies.rollouts import Rollouts


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Grpo(RewardedLoss):
    """Trains on rewarded answers, with advantages over other answers of the rollout.

    The trained policy is the distribution from which answers are sampled: the model at Sampling.temperature. The engine's
    probabilities differ slightly from those in training (other programs, other dtypes). So each token's loss is weighted by
    its probability in training over that in the engine, up to a cap (truncated importance sampling: Yao et al. 2025, "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training"; TRL's vllm_importance_sampling_correction, verl's
    rollout_is). Metrics of the difference are `engine_difference`, the mean of |ln| of this weight, and
    `importance_capped`, the fraction of tokens beyond the bounds.

    Attributes:
      surrogate: the loss of a token: @Clipped(), @Cispo(), @Sapo(), @Gmpo() or @Vespo().
      level: what the ratio of new to old probability is of.
      token_weights: the weight of a token in the mean over a batch.
      baseline: what is subtracted from rewards.
      scale: the divisor of advantages.
      normalize_each: whether each reward is normalised within its group before they are summed.
      kl: coefficient of the KL divergence from the reference, the initial weights of the run; 0: none, and no reference is
        kept.
      kl_in: where the KL divergence counts; in the loss by Schulman's k3 estimator.
      unbiased_kl: whether the divergence in the loss has the ratio as weight (DeepSeek-V3.2, arXiv:2512.02556).
      resample: how often a rollout draws further prompts in the place of those whose answers have equal rewards (DAPO's
        dynamic sampling); what is missing then is trained without signal.
      importance_mode: what is done beyond the bounds of importance weights.
      importance_cap, importance_floor: the bounds; both None: no importance weights.
      environment: answers the model's messages, whose tokens are then not trained; None: an answer is one message. Rewards get the
        model's last message, and the whole dialogue as the record's `dialogue`.
      memory: reads the document of a line chunk by chunk, each in a conversation of its own (MemAgent, Yu et al. 2025,
        arXiv:2507.02259); the answer's advantage is that of all its conversations. Rewards get the memories as the record's
        `memories`. None: a prompt is read at once.
      max_chunks: most chunks of a document, with `memory`: a batch has a row for each, and one for the answer.
      off_policy_limit: an answer with a negative advantage is not trained if its mean of log p in the engine - log p is above
        this (DeepSeek-V3.2, arXiv:2512.02556); None: all are.
    """

    surrogate: Surrogate = Clipped()
    level: RatioLevel = RatioLevel.TOKEN
    token_weights: TokenWeights = TokenWeights.ANSWER
    baseline: Baseline = Baseline.GROUP
    scale: RewardScale = RewardScale.GROUP
    normalize_each: bool = False
    kl: float = 0.0
    kl_in: KlIn = KlIn.LOSS
    unbiased_kl: bool = False
    resample: int = 0
    importance_mode: ImportanceMode = ImportanceMode.TOKEN_TRUNCATE
    importance_cap: float | None = 2.0
    importance_floor: float | None = None
    off_policy_limit: float | None = None
    environment: Environment | None = None
    memory: MemoryAgent | None = None
    max_chunks: int | None = None

    means = (
        *("kl", "clip_fraction", "ratio", "drawn_ratio", "engine_difference"),
        *("importance_capped", "off_policy_fraction"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        compares = self.baseline is not Baseline.NONE or self.scale is RewardScale.GROUP or self.resample
        if (compares or self.normalize_each) and self.group < 2:
            raise UserError(
                f"Grpo.group is {self.group}, must be at least 2, since answers are compared with each other: try 8"
            )
        if self.resample < 0:
            raise UserError(f"Grpo.resample is {self.resample}, must be at least 0 (0: never)")
        if self.off_policy_limit is not None and not 0 < self.off_policy_limit < float("inf"):
            raise UserError(f"Grpo.off_policy_limit is {self.off_policy_limit}, must be above 0, or None: try 0.5")
        self._check_importance()
        self.check_apart(self.importance_cap)
        self._check_levels()
        self._check_memory()

    def _check_memory(self) -> None:
        if (self.memory is None) != (self.max_chunks is None):
            missing, present = ("max_chunks", "memory") if self.max_chunks is None else ("memory", "max_chunks")
            fix = "8" if missing == "max_chunks" else "@MemoryAgent()"
            raise UserError(
                f"Grpo.{present} is set and Grpo.{missing} is not, and both go together: try {missing} = {fix}"
            )
        if self.memory is None:
            return
        if self.max_chunks is not None and self.max_chunks < 1:
            raise UserError(f"Grpo.max_chunks is {self.max_chunks}, must be at least 1: try 8")
        if self.environment is not None:
            raise UserError(
                "Grpo.memory and Grpo.environment are set, and a document is read without one: leave one out"
            )
        if self.kl_in is KlIn.TOKENS:
            raise UserError(
                "Grpo.kl_in is 'tokens', whose rewards end with a conversation, and Grpo.memory has several to an answer: set it "
                "to 'reward' or 'loss'"
            )

    @property
    def conversations(self) -> int:
        """The most conversations of an answer, each a row of a batch."""
        return 1 if self.max_chunks is None else self.max_chunks + 1

    def _check_importance(self) -> None:
        cap, floor = self.importance_cap, self.importance_floor
        if cap is not None and not cap >= 1:
            raise UserError(f"Grpo.importance_cap is {cap}, must be at least 1, or None: try 2.0")
        if floor is not None and not 0 < floor <= 1:
            raise UserError(f"Grpo.importance_floor is {floor}, must be above 0 and at most 1, or None: try 0.5")
        if self.importance_mode.of_sequence and self.surrogate.corrects:
            name = type(self.surrogate).__name__
            raise UserError(
                f"Grpo.importance_mode is {str(self.importance_mode)!r}, and @{name}() takes those of tokens: set it to "
                "'token_truncate' or 'token_mask'"
            )

    def _check_levels(self) -> None:
        if self.level is not RatioLevel.TOKEN:
            if self.surrogate.by_itself:
                name = type(self.surrogate).__name__
                raise UserError(
                    f"Grpo.level is {str(self.level)!r}, and @{name}() makes the ratio of an answer by itself: set it to 'token'"
                )
            if self.kl_in is KlIn.TOKENS:
                raise UserError(
                    f"Grpo.level is {str(self.level)!r}, and Grpo.kl_in = 'tokens' makes an advantage for each token: set "
                    "Grpo.level = 'token'"
                )
        if self.kl_in is not KlIn.LOSS and self.unbiased_kl:
            raise UserError(
                f"Grpo.unbiased_kl is True, and Grpo.kl_in is {str(self.kl_in)!r}: it is of the loss, leave one out"
            )

    def open(
        self, dataset: Dataset, *, split: str, batch_size: int, shard_index: int, shard_count: int, epochs: int | None
    ) -> Loader:
        if self.memory is not None and self.max_chunks is not None:
            documents = prompt_documents(dataset, split)
            readings.check(self.memory, self.max_chunks, dataset, documents, self.sampling, CHECK_S)
        where = dict(shard_index=shard_index, shard_count=shard_count)
        return super().open(dataset, split=split, batch_size=batch_size, epochs=epochs, **where)

    @property
    def entries(self) -> tuple[str, ...]:
        old = ("old",) if self.steps_of_rollout > 1 else ()
        reference = ("reference",) if self.kl and self.kl_in is KlIn.LOSS else ()
        return ("advantages", "drawn", *old, *reference)

    def objective(self, model: Model, dataset: Dataset) -> Objective:
        drawn_from = self.drawn_from(model, dataset)

        def sums(
            params: Params, batch: Batch, remat: RematPolicy | None, step: jax.Array | None
        ) -> tuple[jax.Array, Totals, Stats]:
            batch = sharding.balanced(batch)
            log_p_BT, stats = log_probabilities(model, params, batch, remat, step, **drawn_from)
            loss, totals = self.totals(log_p_BT, batch)
            # The balancing loss of experts is a sum over tokens, the loss a sum over answers or tokens.
            loss = loss + model.layer_loss(stats) * (totals.weight / jnp.maximum(totals.tokens, 1.0))
            return loss, jax.lax.stop_gradient(totals), stats

        def metrics(totals: Totals, weight: jax.Array) -> Metrics:
            return totals.means(weight)

        return Objective(sums, metrics)

    def batch_provider(self, run: RunParts) -> Rollouts:
        return Rollouts(run, self)

    def totals(self, log_p_BT: jax.Array, batch: Batch) -> tuple[jax.Array, Totals]:
        """The loss as a sum, and the metrics' sums, as `PolicyLoss.totals`."""
        return self._loss.totals(log_p_BT, batch)

    @property
    def _loss(self) -> PolicyLoss:
        return PolicyLoss(
            surrogate=self.surrogate,
            level=self.level,
            token_weights=self.token_weights,
            importance_mode=self.importance_mode,
            importance_floor=self.importance_floor,
            importance_cap=self.importance_cap,
            kl=self.kl if self.kl_in is KlIn.LOSS else 0.0,
            unbiased_kl=self.unbiased_kl,
            off_policy_limit=self.off_policy_limit,
            max_tokens=self.sampling.max_new_tokens,
        )

    def shaped(self, rewards_PG: np.ndarray, parts_PGK: np.ndarray) -> np.ndarray:
        """The rewards that advantages are made of, from their weighted sums and those of each function."""
        if not self.normalize_each:
            return rewards_PG
        return normalized_each(parts_PGK, self.reward_weights or (1.0,) * len(self.rewards))

    def estimates(self, rewards_PG: np.ndarray, rows: Mapping[str, np.ndarray], kl: float) -> dict[str, np.ndarray]:
        """The advantages of tokens, as `Advantages.of_tokens`, from what is known of the rows of a rollout."""
        in_reward = self.kl and self.kl_in is not KlIn.LOSS
        kl_BT = rows["old"] - rows["reference"] if in_reward else None
        advantages = Advantages(self.baseline, self.scale, kl, self.kl_in)
        return {"advantages": advantages.of_tokens(rewards_PG, rows["weights"], kl_BT)}
