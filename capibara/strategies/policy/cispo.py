"""CISPO: clipped weights of the log-probability in the place of clipped tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from capibara.config import configurable
from capibara.strategies.policy.answers import Answers, Surrogate, check_above


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cispo(Surrogate):
    """min(ratio, cap) * advantage * log p, whose weight has no gradient (MiniMax 2025, arXiv:2506.13585).

    Attributes:
      cap: the largest weight, TRL's epsilon_high of "cispo".
    """

    cap: float = 5.0

    def __post_init__(self) -> None:
        check_above("Cispo.cap", self.cap, 1, "5.0")

    def gain(self, answers: Answers, ratio_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        weight_BT = jax.lax.stop_gradient(jnp.minimum(ratio_BT, self.cap))
        return weight_BT * answers.advantages_BT * answers.log_p_BT, (ratio_BT > self.cap).astype(jnp.float32)
