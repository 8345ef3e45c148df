"""GMPO: the geometric mean of clipped ratios."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from capibara.config import configurable
from capibara.strategies.policy.answers import Answers, Surrogate, check_above


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gmpo(Surrogate):
    """exp(mean of clipped log-ratios) * advantage (Geometric-mean policy optimization, Zhao et al. 2025, arXiv:2507.20673).

    Attributes:
      low, high: a token's log-ratio is clipped to [-low, high], on the side that its advantage pushes to.
    """

    low: float = 0.4
    high: float = 0.4

    by_itself = True

    def __post_init__(self) -> None:
        check_above("Gmpo.low", self.low, 0, "0.4")
        check_above("Gmpo.high", self.high, 0, "0.4")

    def gain(self, answers: Answers, ratio_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        log_ratio_BT = jnp.log(ratio_BT)
        upper_BT, lower_BT = jnp.minimum(log_ratio_BT, self.high), jnp.maximum(log_ratio_BT, -self.low)
        clipped_BT = jnp.where(answers.advantages_BT > 0, upper_BT, lower_BT)
        is_clipped_BT = (clipped_BT != log_ratio_BT).astype(jnp.float32)
        return jnp.exp(answers.means(clipped_BT)) * answers.advantages_BT, is_clipped_BT
