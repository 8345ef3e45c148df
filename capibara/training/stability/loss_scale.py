"""Dynamic loss scaling: keeps float16 gradients from underflow with the largest scale that does not overflow.

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

_SMALLEST, _LARGEST = 2.0**-126, 2.0**126  # float32's range, with room to double


class LossScale(NamedTuple):
    """The loss scale in the train state.

    Attributes:
      scale: factor of the next step's mean loss, float32 scalar.
      good_steps: updates since the scale changed, int32 scalar.
    """

    scale: jax.Array
    good_steps: jax.Array


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScaling:
    """Options of the loss scale of a float16 run; not used with other dtypes.

    An update whose gradients are not all finite is skipped: parameters, moments and average stay as they are, and the scale
    halves. The step counts (its batch is consumed), but not for the optimizer, whose schedule counts updates.

    Attributes:
      initial: the initial scale.
      growth_steps: updates without an overflow after which the scale doubles.
      minimum: the smallest scale; a run whose updates overflow even with it ends at its next checkpoint.
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
        """The loss scale of a new run."""
        return LossScale(jnp.float32(self.initial), jnp.zeros((), jnp.int32))

    def after(self, state: LossScale, finite: jax.Array) -> LossScale:
        """The next step's loss scale; `finite`: whether all gradients were finite (bool scalar)."""
        grown = state.good_steps + 1 >= self.growth_steps
        scale = jnp.where(finite, jnp.where(grown, state.scale * 2, state.scale), state.scale / 2)
        good_steps = jnp.where(finite & ~grown, state.good_steps + 1, 0)
        return LossScale(jnp.clip(scale, self.minimum, _LARGEST), good_steps)


def select(is_finite: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """`new` if `is_finite` (a replicated bool scalar), otherwise `old`, bit for bit; both have the same shapes and dtypes."""
    return jax.tree.map(functools.partial(_either, is_finite), new, old)


def _either(is_finite: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """jnp.where for one leaf, on its bits.

    The TPU compiler uses a row-major layout for both sides of a `select`: a table with few columns on a chip is padded to
    128 columns, for weights and moments, old and new.
    """
    if new is old:  # frozen
        return old
    if not jnp.issubdtype(new.dtype, jnp.floating):
        return jnp.where(is_finite, new, old)
    assert new.dtype == old.dtype, (new.dtype, old.dtype)
    bits = jnp.dtype(f"uint{8 * new.dtype.itemsize}")
    mask = jnp.where(is_finite, jnp.array(jnp.iinfo(bits).max, bits), jnp.zeros((), bits))
    new_bits, old_bits = (jax.lax.bitcast_convert_type(x, bits) for x in (new, old))
    return jax.lax.bitcast_convert_type(old_bits ^ ((new_bits ^ old_bits) & mask), new.dtype)
