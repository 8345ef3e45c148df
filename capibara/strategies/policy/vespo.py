"""VESPO: a smooth weight of the whole answer's ratio."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from capibara.config import configurable
from capibara.strategies.policy.answers import Answers, Surrogate, check_above

_LOWEST, _HIGHEST = math.log(1e-8), 20.0  # of log-ratios, as published


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Vespo(Surrogate):
    """e**s * w**k * e**(-s * w) * advantage * log p, whose weight has no gradient (arXiv:2602.10693).

    w is the answer's ratio of probabilities, a product over its tokens that includes the importance weight of the engine.

    Attributes:
      power_positive, decay_positive: k and s of tokens with an advantage of at least 0.
      power_negative, decay_negative: of the others.
    """

    power_positive: float = 2.0
    decay_positive: float = 3.0
    power_negative: float = 3.0
    decay_negative: float = 2.0

    by_itself = True
    corrects = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_above(f"Vespo.{field.name}", getattr(self, field.name), 0, str(field.default))

    def gain(self, answers: Answers, ratio_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        log_ratio_BT = jnp.clip(answers.log_ratio_BT, -_HIGHEST, _HIGHEST)
        log_importance_BT = jnp.clip(jnp.log(answers.importance_BT), _LOWEST, _HIGHEST)
        log_w_B1 = jnp.clip(answers.sums(log_ratio_BT) + answers.sums(log_importance_BT), _LOWEST, _HIGHEST)
        is_positive_BT = answers.advantages_BT >= 0
        power_BT = jnp.where(is_positive_BT, self.power_positive, self.power_negative)
        decay_BT = jnp.where(is_positive_BT, self.decay_positive, self.decay_negative)
        weight_BT = jax.lax.stop_gradient(jnp.exp(decay_BT + power_BT * log_w_B1 - decay_BT * jnp.exp(log_w_B1)))
        return weight_BT * answers.advantages_BT * answers.log_p_BT, jnp.zeros_like(weight_BT)
