"""Advantages and returns of tokens by a value function; on the host.

B: answers, T: positions.
"""

from __future__ import annotations

import numpy as np


def token_rewards(
    rewards_B: np.ndarray, weights_BT: np.ndarray, kl_BT: np.ndarray | None, kl: float, whiten: bool
) -> np.ndarray:
    """Rewards of tokens [B, T]: -kl * (log p - log p of the reference) of each, and the answer's at its last one.

    Args:
      rewards_B: rewards of answers.
      weights_BT: 1 for a token of an answer.
      kl_BT: log p - log p of the reference; None: there is none.
      kl: coefficient.
      whiten: whether they are divided by their standard deviation; their mean stays.
    """
    is_token_BT = weights_BT > 0
    token_BT = np.zeros(weights_BT.shape) if kl_BT is None else -kl * np.where(is_token_BT, kl_BT, 0.0)
    rows = np.flatnonzero(is_token_BT.any(axis=1))
    last = weights_BT.shape[1] - 1 - np.argmax(is_token_BT[rows, ::-1], axis=1)
    token_BT[rows, last] += rewards_B[rows]
    if whiten:
        mean = token_BT[is_token_BT].mean()
        token_BT = np.where(is_token_BT, whitened(token_BT, is_token_BT) + mean, 0.0)
    return token_BT


def generalized_advantages(
    rewards_BT: np.ndarray, values_BT: np.ndarray, weights_BT: np.ndarray, gamma: float, gae_lambda: float
) -> np.ndarray:
    """Generalised advantage estimates [B, T] (GAE, Schulman et al. 2015, arXiv:1506.02438); the value after the end is 0.

    The state after a token is that before the answer's next one: what an environment says between them takes no time.

    Args:
      rewards_BT, values_BT: of each token, the value of the state before it.
      weights_BT: 1 for a token of an answer.
      gamma, gae_lambda: the discount, and the decay of later differences.
    """
    advantages_BT, later_B = np.zeros(rewards_BT.shape), np.zeros(len(rewards_BT))
    next_B = np.zeros(len(rewards_BT))
    for t in reversed(range(rewards_BT.shape[1])):
        is_token_B = weights_BT[:, t] > 0
        delta_B = rewards_BT[:, t] + gamma * next_B - values_BT[:, t]
        later_B = np.where(is_token_B, delta_B + gamma * gae_lambda * later_B, later_B)
        next_B = np.where(is_token_B, values_BT[:, t], next_B)
        advantages_BT[:, t] = np.where(is_token_B, later_B, 0.0)
    return advantages_BT


def whitened(values_BT: np.ndarray, is_token_BT: np.ndarray) -> np.ndarray:
    """(values - mean) / standard deviation, over the tokens of a rollout."""
    sample = values_BT[is_token_BT]
    return (values_BT - sample.mean()) / np.sqrt(sample.var(ddof=min(1, len(sample) - 1)) + 1e-8)
