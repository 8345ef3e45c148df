"""The clipped surrogate of PPO, which GRPO, DAPO, GSPO and RLOO have too."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.strategies.policy.answers import Answers, Surrogate, check_above


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Clipped(Surrogate):
    """min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage) (Schulman et al. 2017, arXiv:1707.06347).

    Attributes:
      low, high: bounds of the ratio; a larger `high` is DAPO's clip-higher (Yu et al. 2025, arXiv:2503.14476). Of "sequence"
        ratios GSPO's paper has 3e-4 and 4e-4.
      ceiling: the largest ratio of a token with a negative advantage, too (two-sided clipping; Prime Intellect 2025,
        arXiv:2505.07291), TRL's delta; None: none.
    """

    low: float = 0.2
    high: float = 0.2
    ceiling: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.low < 1:
            raise UserError(f"Clipped.low is {self.low}, must lie between 0 and 1: try 0.2")
        check_above("Clipped.high", self.high, 0, "0.2")
        if self.ceiling is not None and not 1 + self.high < self.ceiling < float("inf"):
            raise UserError(
                f"Clipped.ceiling is {self.ceiling}, must be finite and above 1 + Clipped.high ({1 + self.high:g}), or None: "
                "try 4.0"
            )

    def gain(self, answers: Answers, ratio_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        advantages_BT, full_BT = answers.advantages_BT, ratio_BT * answers.advantages_BT
        bounded_BT = jnp.clip(ratio_BT, 1 - self.low, 1 + self.high)
        gain_BT = full_BT if self.ceiling is None else jnp.minimum(ratio_BT, self.ceiling) * advantages_BT
        gain_BT = jnp.minimum(gain_BT, bounded_BT * advantages_BT)
        return gain_BT, (gain_BT != full_BT).astype(jnp.float32)
