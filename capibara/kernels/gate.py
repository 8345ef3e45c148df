"""The gated product of an MLP: activation(gate) * up."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from capibara import sharding

Activation = Callable[[jax.Array], jax.Array]


def gated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """`activation(gate) * up`.

    XLA's CPU back end would compute and save intermediate results one by one, each in a pass over memory; on CPU this
    saves only the two inputs for the backward pass.

    Args:
      activation: applied to each value; must be hashable, equal ones share a program.
      gate, up: of the same shape and dtype.
    """
    return _cpu_gated(activation, gate, up) if sharding.platform() == "cpu" else reference(activation, gate, up)


def reference(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """The plain formula."""
    return activation(gate) * up


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cpu_gated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    return activation(gate) * up


def _cpu_gated_forward(
    activation: Activation, gate: jax.Array, up: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _cpu_gated(activation, gate, up), (gate, up)


def _cpu_gated_backward(
    activation: Activation, kept: tuple[jax.Array, jax.Array], upstream: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # Without the first barrier XLA would notice what both passes compute, and save it; without the second it would
    # write and reread what both gradients compute, which takes longer than computing it twice.
    gate, up = jax.lax.optimization_barrier(kept)
    _, pull = jax.vjp(lambda gate: activation(gate) * up, gate)
    (of_gate,) = pull(upstream)
    return of_gate, upstream * activation(jax.lax.optimization_barrier(gate))


_cpu_gated.defvjp(_cpu_gated_forward, _cpu_gated_backward)
