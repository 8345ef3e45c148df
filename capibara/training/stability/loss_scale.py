"""Dynamic loss scaling: float16 gradients are multiplied out of the range where they vanish, by as much as they bear.

Source: Micikevicius et al. 2018, arXiv:1710.03740.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from capibara.config import configurable
from capibara.core.types import PyTree, UserError

_SMALLEST, _LARGEST = 2.0**-126, 2.0**126  # float32's, with room to double


class LossScale(NamedTuple):
    """The part of the train state.

    Attributes:
      scale: what the next step's mean loss is multiplied by, float32 scalar.
      good_steps: updates since the scale changed, int32 scalar.
    """

    scale: jax.Array
    good_steps: jax.Array


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScaling:
    """How the scale of a float16 run moves; runs in other dtypes have none.

    An update whose gradients are not all finite is left out: parameters, moments and average stay as they are, and the
    scale halves. The step counts (its batch is used up), but not in the optimizer, whose schedule counts updates.

    Attributes:
      initial: the scale at the start.
      growth_steps: updates without an overflow after which the scale doubles.
      minimum: the scale does not fall below; a run whose updates overflow even there is stopped at its next checkpoint.
    """

    initial: float = 2.0**15
    growth_steps: int = 2000
    minimum: float = 2.0**-10

    def __post_init__(self) -> None:
        if not _SMALLEST <= self.minimum <= self.initial <= _LARGEST:
            raise UserError(
                f"LossScaling.minimum ({self.minimum}) must be at least 2**-126 and at most initial ({self.initial}), and "
                "that at most 2**126: try 0.001 and 32768"
            )
        if not 1 <= self.growth_steps < 2**31:
            raise UserError(f"LossScaling.growth_steps is {self.growth_steps}, must be from 1 to {2**31 - 1}: try 2000")

    def start(self) -> LossScale:
        """Of a new run."""
        return LossScale(jnp.float32(self.initial), jnp.zeros((), jnp.int32))

    def after(self, state: LossScale, finite: jax.Array) -> LossScale:
        """The next step's, after gradients that were all finite (bool scalar) or not."""
        grown = state.good_steps + 1 >= self.growth_steps
        scale = jnp.where(finite, jnp.where(grown, state.scale * 2, state.scale), state.scale / 2)
        good_steps = jnp.where(finite & ~grown, state.good_steps + 1, 0)
        return LossScale(jnp.clip(scale, self.minimum, _LARGEST), good_steps)


def select(made: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """`new` where `made`, else `old`, of the same shapes and dtypes, bit for bit; `made` is replicated over the devices."""
    return jax.tree.map(functools.partial(_either, made), new, old)


def _either(made: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """jnp.where of one leaf, by its bits.

    The TPU compiler lays out both sides of a `select` row by row: a table of which a chip has few columns is filled up
    to 128 of them, and that for weights and moments, old and new.
    """
    if new is old:  # frozen
        return old
    if not jnp.issubdtype(new.dtype, jnp.floating):
        return jnp.where(made, new, old)
    assert new.dtype == old.dtype, (new.dtype, old.dtype)
    bits = jnp.dtype(f"uint{8 * new.dtype.itemsize}")
    mask = jnp.where(made, jnp.array(jnp.iinfo(bits).max, bits), jnp.zeros((), bits))
    new_bits, old_bits = (jax.lax.bitcast_convert_type(x, bits) for x in (new, old))
    return jax.lax.bitcast_convert_type(old_bits ^ ((new_bits ^ old_bits) & mask), new.dtype)
