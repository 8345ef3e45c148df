"""SAPO: a soft gate in the place of clipping."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from capibara.config import configurable
from capibara.strategies.policy.answers import Answers, Surrogate, check_above


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sapo(Surrogate):
    """4 / t * sigmoid(t * (ratio - 1)) * advantage (Soft adaptive policy optimization, Gao et al. 2025, arXiv:2511.20347).

    Attributes:
      temperature_positive, temperature_negative: t of tokens with an advantage above 0, and of the others.
    """

    temperature_positive: float = 1.0
    temperature_negative: float = 1.05

    def __post_init__(self) -> None:
        check_above("Sapo.temperature_positive", self.temperature_positive, 0, "1.0")
        check_above("Sapo.temperature_negative", self.temperature_negative, 0, "1.05")

    def gain(self, answers: Answers, ratio_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        t_BT = jnp.where(answers.advantages_BT > 0, self.temperature_positive, self.temperature_negative)
        gate_BT = jax.nn.sigmoid(t_BT * (ratio_BT - 1)) * 4 / t_BT
        return gate_BT * answers.advantages_BT, jnp.zeros_like(gate_BT)
