"""Dropout (Srivastava et al. 2014) where T5X has it: embeddings, attention probabilities, branches, MLPs, final states.

All positions of a row share one mask: its shape is that of the activation without the time axis. Masks depend on the
train step and the batch's tokens, so that a repeated step, or one recomputed in the backward pass, has the same masks.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Site(enum.IntEnum):
    """Where dropout is applied, in a layer or in a stack; each site has its own key."""

    EMBEDDING = 0
    PROBABILITIES = 1
    ATTENTION = 2
    CROSS_PROBABILITIES = 3
    CROSS_ATTENTION = 4
    MLP_INNER = 5
    MLP = 6
    FINAL = 7
    LAYERS = 8
    ENCODER = 9


class Dropout(NamedTuple):
    """The dropout of a layer or a stack.

    Attributes:
      rate: share of the entries that are set to 0; the others are divided by 1 - rate.
      key: PRNG key of the layer or stack.
    """

    rate: float
    key: jax.Array

    def at(self, number: jax.Array | int) -> Dropout:
        """The dropout of one layer or part."""
        return Dropout(self.rate, jax.random.fold_in(self.key, number))

    def __call__(self, x: jax.Array, site: Site, shared: int | None = -2) -> jax.Array:
        """Applies dropout to `x`.

        Args:
          x: an activation.
          site: where it is.
          shared: the dimension along which entries share a mask; None: every entry has its own.
        """
        shape = list(x.shape)
        if shared is not None:
            shape[shared] = 1
        retained = jax.random.bernoulli(jax.random.fold_in(self.key, site), 1.0 - self.rate, shape)
        return jnp.where(retained, x / (1.0 - self.rate), jnp.zeros((), x.dtype)).astype(x.dtype)


def of_step(rate: float, step: jax.Array | None, tokens: jax.Array) -> Dropout | None:
    """The dropout of a train step; None without a step (evaluation, generation) or with rate 0.

    Args:
      rate: from the configuration.
      step: the train step, or None.
      tokens: the batch's tokens: micro-batches of one step get different masks.
    """
    if not rate or step is None:
        return None
    number = jnp.sum(
        tokens.astype(jnp.uint32) * jnp.arange(1, tokens.shape[-1] + 1, dtype=jnp.uint32), dtype=jnp.uint32
    )
    return Dropout(rate, jax.random.fold_in(jax.random.fold_in(jax.random.key(0), step), number))


def apply(drop: Dropout | None, x: jax.Array, site: Site) -> jax.Array:
    """Applies dropout if there is any."""
    return x if drop is None else drop(x, site)
