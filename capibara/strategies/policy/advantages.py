"""Advantages of answers, from their rewards; on the host.

P: prompts, G: answers to a prompt, B: rows, P * G of them or as many for each of its conversations, T: positions.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

_EPS = 1e-4  # added to standard deviations, as in GRPO's published code


class Baseline(enum.StrEnum):
    """What is subtracted from the reward of an answer.

    GROUP: the mean of its group (GRPO).
    LEAVE_ONE_OUT: the mean of the other answers of its group (RLOO, Ahmadian et al. 2024, arXiv:2402.14740).
    NONE: nothing.
    """

    GROUP = "group"
    LEAVE_ONE_OUT = "leave_one_out"
    NONE = "none"


class RewardScale(enum.StrEnum):
    """The divisor of advantages.

    GROUP: the standard deviation of the rewards of a group (GRPO).
    BATCH: the standard deviation of the rewards of the rollout (Lite PPO, Liu et al. 2025, arXiv:2508.08221).
    ANSWERS: the mean over answers is subtracted, and the rest divided by their standard deviation (TRL's
      normalize_advantages).
    TOKENS: the same over tokens (REINFORCE++, Hu et al. 2025, arXiv:2501.03262).
    NONE: 1 (Dr. GRPO).
    """

    GROUP = "group"
    BATCH = "batch"
    ANSWERS = "answers"
    TOKENS = "tokens"
    NONE = "none"


class KlIn(enum.StrEnum):
    """Where the divergence from the reference counts.

    LOSS: in the loss of each token (GRPO).
    REWARD: in the reward of the answer, as the sum over its tokens of log p - log p of the reference (RLOO).
    TOKENS: in a reward of each token; the advantage of a token has those of itself and of later tokens (REINFORCE++).
    """

    LOSS = "loss"
    REWARD = "reward"
    TOKENS = "tokens"


@dataclasses.dataclass(frozen=True)
class Advantages:
    """Rewards -> advantages; fields as in `Grpo`."""

    baseline: Baseline
    scale: RewardScale
    kl: float
    kl_in: KlIn

    def of_tokens(self, rewards_PG: np.ndarray, weights_BT: np.ndarray, kl_BT: np.ndarray | None) -> np.ndarray:
        """The advantage of each token, float32 [B, T]; 0 where there is no answer.

        Args:
          rewards_PG: rewards of answers.
          weights_BT: 1 for a token of an answer.
          kl_BT: log p - log p of the reference of each token; None: no part of rewards.
        """
        is_token_BT = weights_BT > 0
        cost_BT = np.zeros(weights_BT.shape) if kl_BT is None else self.kl * np.where(is_token_BT, kl_BT, 0.0)
        if self.kl_in is KlIn.REWARD:
            rewards_PG = rewards_PG - cost_BT.sum(axis=1).reshape(*rewards_PG.shape, -1).sum(axis=2)
        gain_B = np.repeat(self.of_answers(rewards_PG), len(weights_BT) // rewards_PG.size)
        gain_BT = np.where(is_token_BT, gain_B[:, None], 0.0)
        if self.kl_in is KlIn.TOKENS:
            gain_BT = gain_BT - np.cumsum(cost_BT[:, ::-1], axis=1)[:, ::-1]
        if self.scale is RewardScale.TOKENS and is_token_BT.sum() > 1:
            gain_BT = _whitened(gain_BT, gain_BT[is_token_BT])
        return np.where(is_token_BT, gain_BT, 0.0).astype(np.float32)

    def of_answers(self, rewards_PG: np.ndarray) -> np.ndarray:
        """The advantages of answers [P, G]; 0 if all rewards of a group with a baseline are equal."""
        gain_PG = rewards_PG.astype(np.float64)
        if self.baseline is not Baseline.NONE:
            gain_PG = gain_PG - rewards_PG.mean(axis=1, keepdims=True)
            gain_PG[np.ptp(rewards_PG, axis=1) == 0] = 0.0  # instead of rounding errors of the mean
        if self.baseline is Baseline.LEAVE_ONE_OUT:
            gain_PG = gain_PG * (rewards_PG.shape[1] / (rewards_PG.shape[1] - 1))
        match self.scale:
            case RewardScale.GROUP:
                return gain_PG / (rewards_PG.std(axis=1, ddof=1, keepdims=True) + _EPS)
            case RewardScale.BATCH:
                return gain_PG / (rewards_PG.std(ddof=1) + _EPS)
            case RewardScale.ANSWERS:
                return _whitened(gain_PG, gain_PG)
        return gain_PG


def normalized_each(parts_PGK: np.ndarray, weights: tuple[float, ...]) -> np.ndarray:
    """The weighted sum of K rewards, each normalised within its group [P, G] (GDPO, Liu et al. 2026, arXiv:2601.05242)."""
    gain_PGK = parts_PGK - parts_PGK.mean(axis=1, keepdims=True)
    return gain_PGK / (parts_PGK.std(axis=1, ddof=1, keepdims=True) + _EPS) @ np.array(weights)


def overlong_penalty(lengths_PG: np.ndarray, max_tokens: int, margin: int) -> np.ndarray:
    """DAPO's soft punishment of long answers (Yu et al. 2025, arXiv:2503.14476, eq. 13), from 0 down to -1.

    Args:
      lengths_PG: tokens of answers.
      max_tokens: the length at which it is -1.
      margin: tokens before it in which the penalty grows.
    """
    return -np.clip((lengths_PG - (max_tokens - margin)) / margin, 0.0, 1.0)


def _whitened(values: np.ndarray, sample: np.ndarray) -> np.ndarray:
    return (values - sample.mean()) / (sample.std(ddof=1) + _EPS)
