"""The product in the middle of a gated MLP: activation(gate) * up."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from capibara import sharding

Activation = Callable[[jax.Array], jax.Array]


def gated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """`activation(gate) * up`.

    XLA's CPU back end would make and keep its parts one by one, each in a pass over memory; there the two alone are
    kept for the backward pass.

    Args:
      activation: of each number; equal ones are one program, so it must be hashable.
      gate, up: of the same shape and dtype.
    """
    return _cpu_gated(activation, gate, up) if sharding.platform() == "cpu" else reference(activation, gate, up)


def reference(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """The plain formula."""
    return activation(gate) * up


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cpu_gated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    return activation(gate) * up


def _cpu_gated_forward(activation: Activation, gate: jax.Array, up: jax.Array):
    return _cpu_gated(activation, gate, up), (gate, up)


def _cpu_gated_backward(activation: Activation, kept, upstream: jax.Array):
    # Without the first barrier XLA would find what both passes compute, and keep that; without the second what both
    # gradients compute would be written and read again, which takes longer than to compute it twice.
    gate, up = jax.lax.optimization_barrier(kept)
    _, pull = jax.vjp(lambda gate: activation(gate) * up, gate)
    return *pull(upstream), upstream * activation(jax.lax.optimization_barrier(gate))


_cpu_gated.defvjp(_cpu_gated_forward, _cpu_gated_backward)
