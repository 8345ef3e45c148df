"""What losses on a model's own answers share: how answers are generated and rewarded, and the batches made of them."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from capibara.core import tree
from capibara.core.types import UserError
from capibara.data.dataset import Dataset
from capibara.data.packing.packing import Packing
from capibara.data.pipeline.loader import Loader, make_loader
from capibara.data.sources.sources import DataFormat
from capibara.inference.sampling.sampling import Sampling
from capibara.models.api import Model
from capibara.objectives.base import DrawnFrom
from capibara.objectives.loss import ResidentArrays, Rollout
from capibara.strategies import dialogues
from capibara.strategies.answering import Answer, check_records
from capibara.strategies.environments.environment import Environment
from capibara.strategies.policy.advantages import overlong_penalty
from capibara.strategies.rewards.reward import Reward, check_reward
from capibara.strategies.rollout_loss import RolloutLoss
from capibara.strategies.rows import answer_rows

CHECK_S = 2.0  # seconds in which the records of prompts are checked before anything is compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardedLoss(RolloutLoss):
    """Trains on the model's own answers to prompts; a batch of the plan has `group` answers to each of its prompts.

    A sample only depends on Trainer.seed, the step and the prompt's row in the batch, not on the number of processes.

    Attributes:
      rewards: functions of (prompt, answer, record) -> a number; in Gin (@exact_answer, ...), without ().
      reward_weights: weights of the rewards in their sum; None: 1 each.
      group: number of answers to a prompt.
      sampling: sampling options of the answers; its seed is ignored. Limits (top_k, ...) and penalties are refused.
      overlong_tokens: answers that come within so many tokens of Sampling.max_new_tokens lose up to 1 of their reward (DAPO's
        soft punishment); None: none do.
      missing_end_penalty: what answers that were cut off lose of their reward; None: nothing.
      mask_truncated: whether answers that were cut off are not trained.
    """

    rewards: tuple[Reward, ...] = dataclasses.field(default=(), repr=False)
    reward_weights: tuple[float, ...] | None = None
    group: int = 8
    sampling: Sampling = Sampling(max_new_tokens=256, temperature=1.0)
    overlong_tokens: int | None = None
    missing_end_penalty: float | None = None
    mask_truncated: bool = False

    data_format = DataFormat.PROMPTS

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not self.rewards:
            raise UserError(f"{name}.rewards is empty: name functions, e.g. {name}.rewards = (@exact_answer,)")
        if self.reward_weights is not None and len(self.reward_weights) != len(self.rewards):
            raise UserError(
                f"{name}.reward_weights {self.reward_weights} must be as many as {name}.rewards ({len(self.rewards)})"
            )
        for field in ("group", "updates", "mini_batches"):
            if (value := getattr(self, field)) < 1:
                raise UserError(f"{name}.{field} is {value}, must be at least 1")
        if not 0 <= self.kl < float("inf"):
            raise UserError(f"{name}.kl is {self.kl}, must be at least 0 (0: none)")
        if self.overlong_tokens is not None and not 0 < self.overlong_tokens <= self.sampling.max_new_tokens:
            raise UserError(
                f"{name}.overlong_tokens is {self.overlong_tokens}, must be from 1 to Sampling.max_new_tokens "
                f"({self.sampling.max_new_tokens}), or None: try {max(1, self.sampling.max_new_tokens // 5)}"
            )
        if self.missing_end_penalty is not None and not 0 < self.missing_end_penalty < float("inf"):
            raise UserError(
                f"{name}.missing_end_penalty is {self.missing_end_penalty}, must be above 0, or None: try 1.0"
            )
        _check_sampling(name, self.sampling)

    @property
    def later(self) -> tuple[Callable[..., Any], ...]:
        return self.rewards

    def check(self, dataset: Dataset, batch_size: int) -> None:
        name = type(self).__name__
        for reward in self.rewards:
            check_reward(reward)
        if self.sampling.thinking_tokens is not None:
            raise UserError(
                f"Sampling.thinking_tokens forces tokens that the policy did not choose, which {name} would reward: leave it "
                "out, or reward short thoughts"
            )
        super().check(dataset, batch_size)
        if dataset.packing is not Packing.NONE:
            raise UserError(f"Dataset.packing ({str(dataset.packing)!r}) must be 'none' with @{name}(): set it to that")
        if batch_size % (rows := self.rows_of_a_prompt):
            of_each = "" if self.conversations == 1 else f" times {self.conversations} conversations of an answer"
            raise UserError(
                f"Plan.batch_size ({batch_size}) must be a multiple of {name}.group ({self.group}){of_each}: try "
                f"{max(1, round(batch_size / rows)) * rows}"
            )
        length = self.drawing(dataset).length
        if self.prompt_length(dataset) < 2:
            raise UserError(
                f"Dataset.length ({dataset.length}) leaves prompts no room beside Sampling.max_new_tokens "
                f"({self.sampling.max_new_tokens}): try {2 * self.sampling.max_new_tokens * (dataset.length // length)}"
            )
        pages, size = self.engine.pages, self.engine.page_size
        if pages is not None and pages * size < length - 1:  # a row's last token is not read
            raise UserError(
                f"EngineConfig.pages ({pages}) of {size} tokens are too few for a row of Dataset.length ({dataset.length}), "
                f"prompt and answer: set EngineConfig.pages = {-(-(length - 1) // size)} or more"
            )

    @property
    def conversations(self) -> int:
        """The most conversations of an answer, each a row of a batch."""
        return 1

    @property
    def rows_of_a_prompt(self) -> int:
        return self.group * self.conversations

    @property
    @abc.abstractmethod
    def kl(self) -> float:
        """Coefficient of the KL divergence from the reference, the initial weights of the run; 0: none is kept."""

    @property
    @abc.abstractmethod
    def environment(self) -> Environment | None:
        """Answers the model's messages; None: an answer is one message."""

    @property
    @abc.abstractmethod
    def entries(self) -> tuple[str, ...]:
        """The entries of batches that the loss adds to tokens and weights, float32 [B, T]."""

    def resident_arrays(self, model: Model, dataset: Dataset) -> tuple[ResidentArrays, ...]:
        """The reference, if there is one, and the engine with its copy of the parameters."""
        trained = (model.trained(model.abstract_params), model.trained(model.axes))
        reference = [ResidentArrays("reference", tree.byte_count(trained[0]), trained)] if self.kl else []
        return (*reference, *super().resident_arrays(model, dataset))

    def prompt_length(self, dataset: Dataset) -> int:
        """The largest number of tokens of a prompt."""
        return self.drawing(dataset).length - self.sampling.max_new_tokens

    def rollout(self, dataset: Dataset, batch_size: int) -> Rollout | None:
        prompts = batch_size // self.rows_of_a_prompt * self.mini_batches
        answers, new_tokens = prompts * self.group * self.conversations, self.sampling.max_new_tokens
        return self.drawn(answers, self.prompt_length(dataset), new_tokens) if self.rollout_devices else None

    def batch_spec(self, dataset: Dataset, rows: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        spec = {key: value for key, value in dataset.batch_spec(rows).items() if key != "numbers"}
        return spec | {key: ((rows, dataset.length), np.dtype(np.float32)) for key in self.entries}

    def open(
        self, dataset: Dataset, *, split: str, batch_size: int, shard_index: int, shard_count: int, epochs: int | None
    ) -> Loader:
        del shard_index, shard_count  # every process reads all prompts
        if self.environment is not None:
            dialogues.check(self.environment, dataset, f"{type(self).__name__}.environment")
        check_records(self.rewards, dataset, split, CHECK_S)
        prompts = dataclasses.replace(dataset, length=self.prompt_length(dataset))
        count = max(1, batch_size // self.rows_of_a_prompt) * (self.mini_batches if split == "train" else 1)
        return make_loader(prompts, split=split, batch_size=count, epochs=epochs)

    def drawn_from(self, model: Model, dataset: Dataset) -> DrawnFrom:
        """The distribution of answers, as arguments of `log_probabilities`: without ids that stand for no token."""
        usable = model.config.vocab_size
        with contextlib.suppress(UserError):  # the planner may run without the tokenizer; a run has read it already
            usable = dataset.get_vocabulary().size
        return {"temperature": self.sampling.temperature, "usable": usable}

    def next_kl(self, kl: float, divergence: float, answers: int) -> float:
        """The coefficient of the divergence in the next rollout.

        Args:
          kl: in this one.
          divergence: from the reference, in nats an answer.
          answers: of this rollout.
        """
        del divergence, answers
        return kl

    def shaped(self, rewards_PG: np.ndarray, parts_PGK: np.ndarray) -> np.ndarray:
        """The rewards that answers are compared by, from their weighted sums and those of each function."""
        del parts_PGK
        return rewards_PG

    def penalties(self, lengths_PG: np.ndarray, truncated_PG: np.ndarray) -> dict[str, np.ndarray]:
        """What is added to the rewards of answers [P, G] for their lengths and missing ends, by the metric of its mean."""
        result = {}
        if self.overlong_tokens is not None:
            result["overlong_penalty"] = overlong_penalty(
                lengths_PG, self.sampling.max_new_tokens, self.overlong_tokens
            )
        if self.missing_end_penalty is not None:
            result["missing_end_penalty"] = -self.missing_end_penalty * truncated_PG
        return result

    def rows(
        self, groups: Sequence[Sequence[Answer]], rewards_PG: np.ndarray, dataset: Dataset
    ) -> dict[str, np.ndarray]:
        """The rows of a rollout.

        Args:
          groups: the answers to each prompt.
          rewards_PG: what they are compared by.
          dataset: the data of the run.
        """
        del rewards_PG
        answers = [answer for group in groups for answer in group]
        return answer_rows(answers, dataset, self.mask_truncated, self.conversations)


def _check_sampling(name: str, sampling: Sampling) -> None:
    """Raises UserError if answers would not be drawn from all tokens by chance."""
    if not 0 < sampling.temperature < float("inf"):
        raise UserError(
            f"{name}'s Sampling.temperature is {sampling.temperature}, must be finite and above 0 (at 0 a group has "
            "one answer): try 1.0"
        )
    if sampling.beams is not None or sampling.num_decodes > 1:
        field = "num_decodes" if sampling.beams is None else "beams"
        raise UserError(f"{name}'s Sampling.{field} is set, but it trains on all sampled answers: leave it out")
    for field, nothing in (("top_k", None), ("top_p", None), ("min_p", None), ("repetition_penalty", 1.0)):
        if (value := getattr(sampling, field)) != nothing:
            raise UserError(
                f"{name}'s Sampling.{field} is {value}, but answers must be sampled from all tokens, or some are never "
                "trained: leave it out, and lower Sampling.temperature instead"
            )
