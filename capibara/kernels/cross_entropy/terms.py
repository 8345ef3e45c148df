"""The sums and terms of a loss (z-loss, label smoothing), and what happens to logits before its softmax (cap, temperature)."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

_HIGHEST_CEILING = 40.0  # exp(-2 * 40) is a normal float32


class LossSums(NamedTuple):
    """Sums over the real tokens of a batch, float32 scalars.

    Attributes:
      nll: negative log-likelihood in nats.
      z: squared log of the softmax normaliser (the z-loss of PaLM, before its coefficient).
      correct: targets that no other token beats.
      weight: sum of the weights.
      smoothing: what label smoothing adds to `nll`; None without.
      tokens: real tokens, where the weights say something else; None: their sum.
      ahead: the sums of modules that predict further tokens, all together; None: there are none.
    """

    nll: jax.Array
    z: jax.Array
    correct: jax.Array
    weight: jax.Array
    smoothing: jax.Array | None = None
    tokens: jax.Array | None = None
    ahead: LossSums | None = None


class Terms(NamedTuple):
    """What a loss has beside the cross entropy.

    Attributes:
      z_loss: coefficient of the squared log normaliser.
      smoothing: share of a target's probability that goes to all other ids in equal parts (Szegedy et al. 2016,
        arXiv:1512.00567); the entropy of that is taken away, so that the least loss is 0.
    """

    z_loss: float = 0.0
    smoothing: float = 0.0

    @property
    def columns(self) -> int:
        """How many sums there are."""
        return 5 if self.smoothing else 4

    def total(self, sums: jax.Array) -> jax.Array:
        """The loss."""
        loss = sums[0] + self.z_loss * sums[1]
        return loss + sums[4] if self.smoothing else loss

    def others(self, V: int) -> float:
        """The probability that each other id is wanted to have."""
        return self.smoothing / max(V - 1, 1)

    def entropy(self, V: int) -> float:
        """Of what the ids are wanted to have, in nats."""
        low = self.others(V)
        return -(1.0 - self.smoothing) * math.log1p(-self.smoothing) - (V - 1) * low * math.log(low + 1e-20)


class Softmax(NamedTuple):
    """What is made of logits in front of a softmax; arguments as of `dispatch.token_log_probabilities`."""

    soft_cap: float | None = None
    temperature: float = 1.0
    usable: int | None = None

    def inputs(self, logits: jax.Array, ids: jax.Array | None = None) -> jax.Array:
        """What the softmax is of, in the shape of the logits; `ids`: of their last dimension; None: 0, 1, 2 ..."""
        if self.soft_cap is not None:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        if self.temperature != 1.0:
            logits = logits / self.temperature
        return logits if self.usable is None else jnp.where(_ids_of(logits, ids) < self.usable, logits, -jnp.inf)

    def gradient(self, inputs: jax.Array, dinputs: jax.Array, ids: jax.Array | None = None) -> jax.Array:
        """By the logits, of that by the softmax's inputs."""
        if self.usable is not None:
            inputs = jnp.where(_ids_of(inputs, ids) < self.usable, inputs, 0.0)  # their gradient is 0 already
        if self.temperature != 1.0:
            inputs, dinputs = inputs * self.temperature, dinputs / self.temperature
        return dinputs if self.soft_cap is None else dinputs * (1.0 - jnp.square(inputs / self.soft_cap))

    @property
    def ceiling(self) -> float | None:
        """What no input exceeds, and none lies so far below that its exponential is no float32; None: nothing is known."""
        if self.soft_cap is None or self.soft_cap / self.temperature > _HIGHEST_CEILING:
            return None
        return self.soft_cap / self.temperature


def _ids_of(logits: jax.Array, ids: jax.Array | None) -> jax.Array:
    """The ids of the last dimension, to compare with each logit."""
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) if ids is None else ids
