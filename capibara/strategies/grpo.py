"""Group relative policy optimisation (GRPO): trains on the model's own answers, compared within the group of a prompt.

There is no value model and no reward model: rewards are functions, such as a check of the answer (`strategies.rewards`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara import sharding
from capibara.config import configurable
from capibara.core import tree
from capibara.core.types import Batch, Params, UserError
from capibara.data.dataset import Dataset
from capibara.data.packing.packing import Packing
from capibara.data.pipeline.loader import Loader, make_loader
from capibara.data.sources.sources import DataFormat
from capibara.inference.engine.engine import EngineConfig
from capibara.inference.engine.placement import footprint
from capibara.inference.engine.placement.own_chips import Where
from capibara.inference.engine.placement.serving_mesh import ServingMesh
from capibara.inference.sampling.sampling import Sampling
from capibara.models.api import Model, Stats
from capibara.objectives.base import DrawnFrom, Metrics, Objective, Totals, log_probabilities
from capibara.objectives.batches import RunParts
from capibara.objectives.loss import Loss, ResidentArrays
from capibara.sharding import RematPolicy
from capibara.strategies.answering import check_records
from capibara.strategies.policy_loss import Variant, advantages, policy_loss
from capibara.strategies.rewards import Reward, check_reward
from capibara.strategies.rollouts import Rollouts

_CHECK_S = 2.0  # seconds in which the records of prompts are checked before anything is compiled
ENTRIES = ("advantages", "drawn", "old", "reference")  # additional entries of a batch of answers, float32 [B, T]


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Grpo(Loss):
    """Trains on the model's own answers to prompts; a batch of the plan has `group` answers to each of its prompts.

    A sample only depends on Trainer.seed, the step and the prompt's row in the batch, not on the number of processes.

    The trained policy is the distribution from which answers are sampled: the model at Sampling.temperature. The engine's
    probabilities differ slightly from those in training (other programs, other dtypes). So each token's loss is weighted by
    its probability in training over that in the engine, up to a cap (truncated importance sampling: Yao et al. 2025, "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training"; TRL's vllm_importance_sampling_correction, verl's
    rollout_is). Metrics of the difference are `engine_difference`, the mean of |ln| of this weight, and
    `importance_capped`, the fraction of tokens at the cap.

    Attributes:
      rewards: functions of (prompt, answer, record) -> a number; in Gin (@exact_answer, ...), without ().
      reward_weights: weights of the rewards in their sum; None: 1 each.
      group: number of answers to a prompt.
      sampling: sampling options of the answers; its seed is ignored. Limits (top_k, ...) and penalties are refused.
      variant: the advantages and the weights of tokens.
      clip_low, clip_high: the ratio of a token's new to old probability is clipped to [1 - clip_low, 1 + clip_high].
      kl: coefficient of the KL divergence from the reference, the initial weights of the run (Schulman's k3 estimator); 0:
        none, and no reference is kept.
      updates: number of steps on the answers of one rollout.
      importance_cap: the largest importance weight of a token; None: no importance weights.
      engine: options of the engine.
      where: whether each process answers its part of the prompts on its own chips, or all processes work together.
      mesh: the mesh of an engine on a process's own chips.
    """

    rewards: tuple[Reward, ...] = dataclasses.field(default=(), repr=False)
    reward_weights: tuple[float, ...] | None = None
    group: int = 8
    sampling: Sampling = Sampling(max_new_tokens=256, temperature=1.0)
    variant: Variant = Variant.GRPO
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: float = 0.0
    updates: int = 1
    importance_cap: float | None = 2.0
    engine: EngineConfig = EngineConfig(slots=16)
    where: Where = Where.AUTO
    mesh: ServingMesh = ServingMesh()

    data_format = DataFormat.PROMPTS
    means = ("kl", "clip_fraction", "ratio", "engine_difference", "importance_capped")

    def __post_init__(self) -> None:
        if not self.rewards:
            raise UserError("Grpo.rewards is empty: name functions, e.g. Grpo.rewards = (@exact_answer,)")
        if self.reward_weights is not None and len(self.reward_weights) != len(self.rewards):
            raise UserError(
                f"Grpo.reward_weights {self.reward_weights} must be as many as Grpo.rewards ({len(self.rewards)})"
            )
        if self.group < 2:
            raise UserError(
                f"Grpo.group is {self.group}, must be at least 2, since answers are compared with each other: try 8"
            )
        if self.updates < 1:
            raise UserError(f"Grpo.updates is {self.updates}, must be at least 1")
        if not 0 < self.clip_low < 1 or not 0 < self.clip_high < float("inf"):
            raise UserError(
                f"Grpo.clip_low ({self.clip_low}) must lie between 0 and 1, and clip_high ({self.clip_high}) be above 0: "
                "try 0.2"
            )
        if not 0 <= self.kl < float("inf"):
            raise UserError(f"Grpo.kl is {self.kl}, must be at least 0 (0: none)")
        if self.importance_cap is not None and not self.importance_cap >= 1:
            raise UserError(f"Grpo.importance_cap is {self.importance_cap}, must be at least 1, or None: try 2.0")
        if not 0 < self.sampling.temperature < float("inf"):
            raise UserError(
                f"Grpo's Sampling.temperature is {self.sampling.temperature}, must be finite and above 0 (at 0 a group has "
                "one answer): try 1.0"
            )
        if self.sampling.beams is not None or self.sampling.num_decodes > 1:
            name = "num_decodes" if self.sampling.beams is None else "beams"
            raise UserError(f"Grpo's Sampling.{name} is set, but GRPO trains on all sampled answers: leave it out")
        for name, nothing in (("top_k", None), ("top_p", None), ("min_p", None), ("repetition_penalty", 1.0)):
            if (value := getattr(self.sampling, name)) != nothing:
                raise UserError(
                    f"Grpo's Sampling.{name} is {value}, but answers must be sampled from all tokens, or some are never "
                    "trained: leave it out, and lower Sampling.temperature instead"
                )

    @property
    def later(self) -> tuple[Callable[..., Any], ...]:
        return self.rewards

    def check(self, dataset: Dataset, batch_size: int) -> None:
        for reward in self.rewards:
            check_reward(reward)
        if self.sampling.thinking_tokens is not None:
            raise UserError(
                "Sampling.thinking_tokens forces tokens that the policy did not choose, which GRPO would reward: leave it "
                "out, or reward short thoughts"
            )
        super().check(dataset, batch_size)
        if dataset.packing is not Packing.NONE:
            raise UserError(f"Dataset.packing ({str(dataset.packing)!r}) must be 'none' with @Grpo(): set it to that")
        if batch_size % self.group:
            raise UserError(
                f"Plan.batch_size ({batch_size}) must be a multiple of Grpo.group ({self.group}): try "
                f"{max(1, round(batch_size / self.group)) * self.group}"
            )
        if self.prompt_length(dataset) < 2:
            raise UserError(
                f"Dataset.length ({dataset.length}) leaves prompts no room beside Sampling.max_new_tokens "
                f"({self.sampling.max_new_tokens}): try {2 * self.sampling.max_new_tokens}"
            )
        pages, size = self.engine.pages, self.engine.page_size
        if pages is not None and pages * size < dataset.length - 1:  # a row's last token is not read
            raise UserError(
                f"EngineConfig.pages ({pages}) of {size} tokens are too few for a row of Dataset.length ({dataset.length}), "
                f"prompt and answer: set EngineConfig.pages = {-(-(dataset.length - 1) // size)} or more"
            )

    @property
    def rows_of_a_prompt(self) -> int:
        return self.group

    def resident_arrays(self, model: Model, dataset: Dataset) -> tuple[ResidentArrays, ...]:
        """The reference, if there is one, and the engine with its copy of the parameters."""
        trained, whole = (model.trained(model.abstract_params), model.trained(model.axes)), model.plain
        reference = [ResidentArrays("reference", tree.byte_count(trained[0]), trained)] if self.kl else []
        size, spread_as = footprint.parameters_bytes(model), (whole.abstract_params, whole.axes)
        # If they do not fit a process's own chips, they are sharded like the trained parameters.
        own = ResidentArrays("engine's parameters", size // (self.mesh.tensor or 1))
        return (
            *reference,
            own if self.where is Where.OWN else ResidentArrays("engine's parameters", size, spread_as),
            ResidentArrays("engine's keys and values", footprint.state_bytes(model, self.engine, dataset.length)),
        )

    def prompt_length(self, dataset: Dataset) -> int:
        """The largest number of tokens of a prompt."""
        return dataset.length - self.sampling.max_new_tokens

    def batch_spec(self, dataset: Dataset, rows: int) -> dict[str, tuple[tuple[int, int], np.dtype]]:
        spec = {key: value for key, value in dataset.batch_spec(rows).items() if key != "numbers"}
        return spec | {key: ((rows, dataset.length), np.dtype(np.float32)) for key in self.entries}

    def open(
        self, dataset: Dataset, *, split: str, batch_size: int, shard_index: int, shard_count: int, epochs: int | None
    ) -> Loader:
        del shard_index, shard_count  # every process reads all prompts
        check_records(self.rewards, dataset, split, _CHECK_S)
        prompts = dataclasses.replace(dataset, length=self.prompt_length(dataset))
        return make_loader(prompts, split=split, batch_size=max(1, batch_size // self.group), epochs=epochs)

    @property
    def entries(self) -> tuple[str, ...]:
        """The additional entries of batches."""
        left_out = {*(() if self.updates > 1 else ("old",)), *(() if self.kl else ("reference",))}
        return tuple(name for name in ENTRIES if name not in left_out)

    def drawn_from(self, model: Model, dataset: Dataset) -> DrawnFrom:
        """The distribution of answers, as arguments of `log_probabilities`: without ids that stand for no token."""
        usable = model.config.vocab_size
        with contextlib.suppress(UserError):  # the planner may run without the tokenizer; a run has read it already
            usable = dataset.get_vocabulary().size
        return {"temperature": self.sampling.temperature, "usable": usable}

    def objective(self, model: Model, dataset: Dataset) -> Objective:
        drawn_from = self.drawn_from(model, dataset)

        def sums(
            params: Params, batch: Batch, remat: RematPolicy | None, step: jax.Array | None
        ) -> tuple[jax.Array, Totals, Stats]:
            batch = sharding.balanced(batch)
            log_p_BT, stats = log_probabilities(model, params, batch, remat, step, **drawn_from)
            loss, totals = self.totals(log_p_BT, batch)
            # The balancing loss of experts is a sum over tokens, the loss a sum over answers.
            loss = loss + model.layer_loss(stats) * (totals.weight / jnp.maximum(totals.tokens, 1.0))
            return loss, jax.lax.stop_gradient(totals), stats

        def metrics(totals: Totals, weight: jax.Array) -> Metrics:
            return totals.means(weight)

        return Objective(sums, metrics)

    def batch_provider(self, run: RunParts) -> Rollouts:
        return Rollouts(run, self)

    def totals(self, log_p_BT: jax.Array, batch: Batch) -> tuple[jax.Array, Totals]:
        """The loss as a sum over answers, and the metrics' sums, as `policy_loss`."""
        return policy_loss(
            log_p_BT, batch, self.variant, self.clip_low, self.clip_high, self.importance_cap, self.kl,
            self.sampling.max_new_tokens,
        )  # fmt: skip

    def advantages(self, rewards: np.ndarray) -> np.ndarray:
        """The advantages of rewards [prompts, group], as `policy_loss.advantages`."""
        return advantages(rewards, self.variant)
