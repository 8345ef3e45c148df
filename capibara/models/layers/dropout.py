"""Dropout (Srivastava et al. 2014) at T5X's places: embeddings, attention's probabilities, branches, MLPs, final states.

One mask is for all places of a row: it has the shape of an activation without time. Masks depend on the train step and on
the batch's tokens, so that a step that is made again, or recomputed in its backward pass, has the same.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Site(enum.IntEnum):
    """Where in a layer, or in a stack; each has a key of its own."""

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
    """What is dropped in a program.

    Attributes:
      rate: share of the entries that become 0; the others are divided by what is left.
      key: of the layer, or of the stack.
    """

    rate: float
    key: jax.Array

    def at(self, number: jax.Array | int) -> Dropout:
        """Of one layer or part."""
        return Dropout(self.rate, jax.random.fold_in(self.key, number))

    def __call__(self, x: jax.Array, site: Site, shared: int | None = -2) -> jax.Array:
        """`x` with some entries 0.

        Args:
          x: an activation.
          site: where it is.
          shared: the dimension whose entries have a mask in common; None: none.
        """
        shape = list(x.shape)
        if shared is not None:
            shape[shared] = 1
        kept = jax.random.bernoulli(jax.random.fold_in(self.key, site), 1.0 - self.rate, shape)
        return jnp.where(kept, x / (1.0 - self.rate), jnp.zeros((), x.dtype)).astype(x.dtype)


def of_step(rate: float, step: jax.Array | None, tokens: jax.Array) -> Dropout | None:
    """What is dropped of a batch in a train step; None: nothing, as wherever there is no step: evaluation, generation.

    Args:
      rate: of the configuration.
      step: the train step, or None.
      tokens: of the batch: micro-batches of one step have other masks each.
    """
    if not rate or step is None:
        return None
    number = jnp.sum(
        tokens.astype(jnp.uint32) * jnp.arange(1, tokens.shape[-1] + 1, dtype=jnp.uint32), dtype=jnp.uint32
    )
    return Dropout(rate, jax.random.fold_in(jax.random.fold_in(jax.random.key(0), step), number))


def apply(drop: Dropout | None, x: jax.Array, site: Site) -> jax.Array:
    """`x` after dropout, where there is some."""
    return x if drop is None else drop(x, site)
