"""Controls when the backward pass computes gradients."""

from __future__ import annotations

import jax

from capibara import sharding


def gradients_together(x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
    """Returns its arguments; on TPU, none of their gradients is used before all of them are computed.

    Around a part of a layer this makes the backward pass finish the part's weight gradients before it enters the part
    below. The TPU's scheduler would postpone them, to have work to overlap with collectives, and keep all their operands
    alive: for an MLP three arrays [B, T, F].
    """
    return _gradients_together((x, *weights)) if sharding.platform() == "tpu" else (x, *weights)


@jax.custom_vjp
def _gradients_together(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return arrays


_gradients_together.defvjp(
    lambda arrays: (arrays, None), lambda _, gradients: (jax.lax.optimization_barrier(gradients),)
)
