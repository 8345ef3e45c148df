"""Advantages of answers within the group of a prompt, and the clipped policy loss."""

from __future__ import annotations

import enum
import math

import jax
import jax.numpy as jnp
import numpy as np

from capibara.core.types import Batch
from capibara.objectives.base import Totals


class Variant(enum.StrEnum):
    """The advantage of an answer and the weights of its tokens.

    GRPO: (reward - mean of the group) / standard deviation of the group; the loss is averaged over the tokens of an answer
      (Shao et al. 2024, arXiv:2402.03300).
    DR_GRPO: reward - mean of the group; all tokens have the same weight, without the biases to easy prompts and to long
      wrong answers (Liu et al. 2025, arXiv:2503.20783).
    """

    GRPO = "grpo"
    DR_GRPO = "dr_grpo"


def policy_loss(
    log_p_BT: jax.Array,
    batch: Batch,
    variant: Variant,
    clip_low: float,
    clip_high: float,
    importance_cap: float | None,
    kl: float,
    max_tokens: int,
) -> tuple[jax.Array, Totals]:
    """The loss as a sum over answers, and the metrics' sums.

    Args:
      log_p_BT: log-probability of every target.
      batch: rows of one answer each, with `advantages` and log-probabilities: `drawn`, of the engine; `old`, of the model
        that generated the answers, if it is not the current one; `reference`, if `kl` is not 0.
      variant: the weights of tokens.
      clip_low, clip_high, importance_cap, kl: as in `Grpo`.
      max_tokens: the largest number of tokens of an answer.
    """
    weights_BT, advantages_BT = batch["weights"], batch["advantages"]
    tokens_B1 = jnp.sum(weights_BT, axis=1, keepdims=True)
    old_BT = batch["old"] if "old" in batch else jax.lax.stop_gradient(log_p_BT)
    ratio_BT = jnp.exp(jnp.where(weights_BT > 0, log_p_BT - old_BT, 0.0))
    clipped_BT = jnp.clip(ratio_BT, 1 - clip_low, 1 + clip_high)
    gain_BT = jnp.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    is_clipped_BT = (gain_BT < ratio_BT * advantages_BT).astype(jnp.float32)
    apart_BT = jnp.where(weights_BT > 0, old_BT - batch["drawn"], 0.0)
    importance_BT = jnp.exp(apart_BT)
    cap = math.inf if importance_cap is None else importance_cap
    if importance_cap is not None:
        gain_BT = gain_BT * jnp.minimum(importance_BT, cap)
    loss_BT, kl_BT = -gain_BT, jnp.zeros_like(gain_BT)
    if kl:
        further_BT = jnp.where(weights_BT > 0, batch["reference"] - log_p_BT, 0.0)
        kl_BT = jnp.exp(further_BT) - further_BT - 1
        loss_BT = loss_BT + kl * kl_BT
    mean_BT = weights_BT / jnp.maximum(tokens_B1, 1.0)
    share_BT = mean_BT if variant is Variant.GRPO else weights_BT / max_tokens
    loss = jnp.sum(loss_BT * share_BT)
    of_tokens = {
        "clip_fraction": is_clipped_BT,
        "ratio": ratio_BT,
        "engine_difference": jnp.abs(apart_BT),
        "importance_capped": (importance_BT > cap).astype(jnp.float32),
    }
    values = {"loss": loss} | {name: jnp.sum(value * mean_BT) for name, value in of_tokens.items()}
    if kl:
        values["kl"] = jnp.sum(kl_BT * mean_BT)
    answers = jnp.sum((tokens_B1 > 0).astype(jnp.float32))
    return loss, Totals(values, answers, jnp.sum(weights_BT))


def advantages(rewards: np.ndarray, variant: Variant) -> np.ndarray:
    """The advantages of rewards [prompts, group], float32; 0 if all rewards of a group are equal."""
    gain = rewards - rewards.mean(axis=1, keepdims=True)
    gain[np.ptp(rewards, axis=1) == 0] = 0.0  # instead of rounding errors of the mean
    if variant is Variant.GRPO:
        gain = gain / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-4)
    return gain.astype(np.float32)
