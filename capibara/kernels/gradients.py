"""When gradients come out of the backward pass."""

from __future__ import annotations

import jax

from capibara import sharding


def gradients_together(x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
    """Its arguments; on TPU their gradients come out together: none goes on before all of them are there.

    Around a part of a layer it makes the backward pass finish the part's weight gradients before it enters the part
    below. The TPU's scheduler would leave them for later, to have something to do beside collectives, and keep all that
    they are made of: for an MLP three arrays [B, T, F].
    """
    return _gradients_together((x, *weights)) if sharding.platform() == "tpu" else (x, *weights)


@jax.custom_vjp
def _gradients_together(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return arrays


_gradients_together.defvjp(
    lambda arrays: (arrays, None), lambda _, gradients: (jax.lax.optimization_barrier(gradients),)
)
