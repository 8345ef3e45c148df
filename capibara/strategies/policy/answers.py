"""What surrogates read of a batch of answers, and the interface of surrogates.

B: answers, T: positions, 1: a value of a whole answer.
"""

from __future__ import annotations

import abc
import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp

from capibara.core.types import UserError


class RatioLevel(enum.StrEnum):
    """What the ratio of new to old probability is of.

    TOKEN: each token.
    SEQUENCE: the answer, as the geometric mean over its tokens (GSPO, Zheng et al. 2025, arXiv:2507.18071).
    SEQUENCE_TOKEN: the value of "sequence" with the gradient of each token (GSPO-token, the same paper).
    SEQUENCE_SUM: the answer, as the product over its tokens (RLOO, Ahmadian et al. 2024, arXiv:2402.14740).
    """

    TOKEN = "token"
    SEQUENCE = "sequence"
    SEQUENCE_TOKEN = "sequence_token"
    SEQUENCE_SUM = "sequence_sum"


class Answers(NamedTuple):
    """A batch of answers, float32; log-probabilities and their differences are 0 where `weights` is.

    Attributes:
      weights_BT: 1 for a token of an answer.
      advantages_BT: of each token.
      log_p_BT: log-probability of each token.
      old_BT: the same of the policy that wrote it.
      importance_BT: probability of a token, or [B, 1] of an answer, under the policy that wrote it, over that in the engine;
        bounded.
    """

    weights_BT: jax.Array
    advantages_BT: jax.Array
    log_p_BT: jax.Array
    old_BT: jax.Array
    importance_BT: jax.Array

    @property
    def log_ratio_BT(self) -> jax.Array:
        return self.log_p_BT - self.old_BT

    def sums(self, values_BT: jax.Array) -> jax.Array:
        """Sums over the tokens of each answer, [B, 1]."""
        return jnp.sum(values_BT * self.weights_BT, axis=1, keepdims=True)

    def means(self, values_BT: jax.Array) -> jax.Array:
        """Means over the tokens of each answer, [B, 1]."""
        return self.sums(values_BT) / jnp.maximum(jnp.sum(self.weights_BT, axis=1, keepdims=True), 1.0)

    def ratio(self, level: RatioLevel) -> jax.Array:
        """The ratio of new to old probability, [B, T], or [B, 1] of whole answers."""
        match level:
            case RatioLevel.TOKEN:
                return jnp.exp(self.log_ratio_BT)
            case RatioLevel.SEQUENCE:
                return jnp.exp(self.means(self.log_ratio_BT))
            case RatioLevel.SEQUENCE_SUM:
                return jnp.exp(self.sums(self.log_ratio_BT))
            case RatioLevel.SEQUENCE_TOKEN:
                value_B1 = jax.lax.stop_gradient(self.means(self.log_ratio_BT))
                return jnp.exp(value_B1 + self.log_p_BT - jax.lax.stop_gradient(self.log_p_BT))


class Surrogate(abc.ABC):
    """What is maximised of each token: a function of the ratio of new to old probability, and of the advantage.

    Attributes:
      by_itself: whether it takes tokens' ratios and makes one of the answer by itself.
      corrects: whether its value includes the importance weights of the engine.
    """

    by_itself: bool = False
    corrects: bool = False

    @abc.abstractmethod
    def gain(self, answers: Answers, ratio_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The value that is maximised, and whether it was clipped (1 or 0), [B, T].

        Args:
          answers: the answers.
          ratio_BT: the ratio at the level of the loss, [B, T] or [B, 1].
        """


def check_above(name: str, value: float, bound: float, fix: str) -> None:
    """Raises UserError unless an option is finite and above a bound."""
    if not bound < value < float("inf"):
        raise UserError(f"{name} is {value}, must be finite and above {bound:g}: try {fix}")
