"""The gradient of a step: of the objective, summed over micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from capibara import sharding
from capibara.core import tree
from capibara.core.types import Batch, Params, PyTree
from capibara.models.api import Stats
from capibara.objectives.base import Metrics, Objective
from capibara.sharding import Plan

_Sum = TypeVar("_Sum")

# (trained parameters, frozen ones, batch, step, scale of the loss or None) -> (the mean gradient, the objective's sums, the
# layers' statistics, metrics).
Gradient = Callable[[Params, Params, Batch, jax.Array, jax.Array | None], tuple[Params, PyTree, Stats, Metrics]]


def make_gradient(objective: Objective, plan: Plan, mesh: Mesh) -> Gradient:
    """Makes the gradient of a step.

    Args:
      objective: the objective; its sum is divided by its weight, or by its own divisor.
      plan: accumulation, remat and rules.
      mesh: the mesh of the activations.
    """
    pipeline, loss_sum = plan.pipeline(mesh), _differentiated(objective, plan)

    def gradient(
        trained: Params, frozen: Params, batch: Batch, step: jax.Array, scale: jax.Array | None
    ) -> tuple[Params, PyTree, Stats, Metrics]:
        with sharding.activate(mesh, plan.rules, pipeline):
            grad = jax.grad(lambda p, micro: loss_sum(tree.joined(p, frozen), micro, step, scale), has_aux=True)
            grads, (sums, stats) = accumulate(grad, trained, batch, plan.micro_batches)
        weight = jnp.maximum(sums.weight, 1.0)
        divisor = weight if objective.divisor is None else objective.divisor(weight, batch)
        divisor = divisor if scale is None else divisor * scale
        return jax.tree.map(lambda g: g / divisor, grads), sums, stats, {}

    return gradient


def _differentiated(objective: Objective, plan: Plan) -> Callable[..., tuple[jax.Array, tuple[PyTree, Stats]]]:
    """Makes (params, batch, step, scale or None) -> (the loss times `scale`, (the objective's sums, layer stats))."""

    def loss_sum(
        params: Params, batch: Batch, step: jax.Array, scale: jax.Array | None
    ) -> tuple[jax.Array, tuple[PyTree, Stats]]:
        loss, sums, stats = objective.checked_sums(params, batch, plan.remat_policy, step)
        return loss if scale is None else loss * scale, (sums, jax.lax.stop_gradient(stats))

    return loss_sum


def accumulate(
    grad: Callable[[Params, Batch], tuple[_Sum, PyTree]], params: Params, batch: Batch, micro_batches: int
) -> tuple[_Sum, PyTree]:
    """Sums gradients and losses over micro-batches, so that every real token has the same weight.

    Row r is in micro-batch r % micro_batches, so that rows stay on their devices.
    """
    if micro_batches == 1:
        return grad(params, batch)
    split = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, micro_batches, *x.shape[1:]), 1, 0), dict(batch))

    def add(total: tuple[_Sum, PyTree], micro: Batch) -> tuple[tuple[_Sum, PyTree], None]:
        return jax.tree.map(jnp.add, total, grad(params, micro)), None

    zeros = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype),
        jax.eval_shape(grad, params, jax.tree.map(lambda x: x[0], split)),
    )
    return jax.lax.scan(add, zeros, split)[0]
