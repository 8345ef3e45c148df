"""Convex merging of nodes' models on one mesh: weights on the simplex for which the loss of the merged model is small.

The loss is that of all nodes' rows of a batch. In weight space it is not convex: what is found is no worse than where the
search begins, and a local optimum at best. `consensus.convex` has the same for models in host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from capibara.consensus.aggregation import Report
from capibara.consensus.convex import ConvexMerge
from capibara.core.types import Batch, Params
from capibara.strategies.consensus.agreement import Combine, along, distances_from, on_each
from capibara.training.base.strategy import NodesPrograms

_JUDGES = 3  # other nodes on whose rows a node's model is evaluated; the median of them counts
# A model is far off if its loss is above the median by so many times what the median is above the least, and by more than
# so much of the median.
_FAR, _FAR_SHARE = 10.0, 0.1
_SHRINK, _GROW, _SMALLEST = 0.5, 2.0, 1e-3  # of a step


class _Search(NamedTuple):
    """Weights [nodes] with the regularised loss of their merged model, its gradient [nodes], and the next step's length."""

    weights: jax.Array
    value: jax.Array
    gradient: jax.Array
    step: jax.Array
    evaluations: jax.Array
    ended: jax.Array


def combining(nodes: NodesPrograms, batch: Batch, config: ConvexMerge) -> Combine:
    """Makes the aggregation of a round: (models [nodes, ...], agreed model, key) -> (merged model, report), traceable.

    The search begins with the mean of all nodes, or with that of those whose loss on other nodes' rows is not far above the
    median, whichever is better; then it makes steps of exponentiated gradients (Kivinen & Warmuth 1997), and keeps those
    that lower the loss. Rows on which the agreed model's loss is not finite do not count.

    Args:
      nodes: the loss of nodes on their rows.
      batch: the rows.
      config: the regularisation and the number of steps.
    """

    def combine(sent: Params, agreed: Params, key: jax.Array | None) -> tuple[Params, Report]:
        del key
        finite, counted = _finite_nodes(sent), counted_rows(nodes, agreed, batch, len(jax.tree.leaves(sent)[0]))
        models = jax.tree.map(lambda x, start: jnp.where(along(finite, x), x, start), sent, agreed)

        def measured(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
            everywhere = jax.tree.map(lambda m, x: jnp.broadcast_to(m.astype(x.dtype), x.shape), mixed(weights), models)
            gradients, sums = nodes.gradient(everywhere, batch)
            sums = jnp.where(counted[:, None], sums, 0.0)
            count = jnp.maximum(jnp.sum(sums[:, 1]), 1.0)
            towards = jax.tree.map(
                lambda g: jnp.sum(jnp.where(along(counted, g), g, 0.0).astype(jnp.float32), axis=0) / count, gradients
            )
            slopes = jax.tree.map(lambda x, g: jnp.sum(x * g, axis=tuple(range(1, x.ndim))), models, towards)
            off = weights - 1 / len(weights)
            strength = config.lambda_reg * len(weights)
            value = jnp.sum(sums[:, 0]) / count + strength / 2 * jnp.sum(jnp.square(off))
            return value, sum(jax.tree.leaves(slopes), start=strength * off)

        def mixed(weights: jax.Array) -> Params:
            return jax.tree.map(lambda x: jnp.sum(along(weights, x) * x.astype(jnp.float32), axis=0), models)

        plausible = finite & _is_plausible(_judged(nodes, models, batch, counted), finite)
        starts = [_mean_of(finite), _mean_of(plausible)]
        result = [_Search(start, *measured(start), jnp.float32(1), jnp.int32(0), jnp.bool_(False)) for start in starts]
        best = jax.tree.map(lambda *x: jnp.where(_less(result[1].value, result[0].value), x[1], x[0]), *result)
        best = jax.lax.while_loop(
            lambda now: ~now.ended & (now.evaluations < config.max_iterations),
            lambda now: _next(now, measured, config.tolerance),
            best,
        )
        succeeds = jnp.isfinite(best.value)
        weights = jnp.where(succeeds, best.weights, 0.0)
        merged = jax.tree.map(lambda new, old: jnp.where(succeeds, new, old).astype(old.dtype), mixed(weights), agreed)
        is_masked = ~(plausible & succeeds)
        distances = distances_from(merged, models, is_masked)
        spare = -jnp.sum(is_masked).astype(jnp.int32)
        return merged, Report(is_masked=is_masked, spare_faults=spare, distances=distances, weights=weights)

    return combine


def _next(now: _Search, measured: Callable[[jax.Array], tuple[jax.Array, jax.Array]], tolerance: float) -> _Search:
    """The search after one more step, which counts if it lowers the loss."""
    has_weight = now.weights > 0
    gradient = jnp.where(has_weight, now.gradient, 0.0)  # that of a model without weight may be infinite
    centred = jnp.where(has_weight, gradient - jnp.sum(now.weights * gradient), 0.0)
    moved = now.weights * jnp.exp(-now.step * centred / jnp.maximum(jnp.max(jnp.abs(centred)), 1e-30))
    weights = moved / jnp.maximum(jnp.sum(moved), 1e-30)
    value, gradient = measured(weights)
    is_better = _less(value, now.value)
    taken = _Search(weights, value, gradient, now.step * _GROW, now.evaluations + 1, ~(now.value - value > tolerance))
    step = now.step * _SHRINK
    retained = now._replace(
        step=step, evaluations=now.evaluations + 1, ended=(step < _SMALLEST) | ~jnp.isfinite(now.value)
    )
    return jax.tree.map(lambda a, b: jnp.where(is_better, a, b), taken, retained)


def counted_rows(nodes: NodesPrograms, model: Params, batch: Batch, count: int) -> jax.Array:
    """The nodes on whose rows a model's loss is finite, bool [nodes]: rows that are broken say nothing of any model."""
    return jnp.isfinite(nodes.loss(on_each(model, count), batch)).all(axis=1)


def _judged(nodes: NodesPrograms, models: Params, batch: Batch, counted: jax.Array) -> jax.Array:
    """The median loss of each node's model on the rows of some others [nodes]; infinite if it is not finite."""
    count = len(counted)
    shifts = range(1, min(_JUDGES, count - 1) + 1)
    # Rows travel, which are smaller than models; a static shift is a permutation of neighbours.
    rows = {
        name: jnp.stack([jnp.roll(x, by * (len(x) // count), axis=0) for by in shifts]) for name, x in batch.items()
    }
    sums = jax.lax.map(lambda of_others: nodes.loss(models, of_others), rows)
    losses = sums[..., 0] / jnp.maximum(sums[..., 1], 1.0)
    known = jnp.stack([jnp.roll(counted, by) for by in shifts])
    losses = jnp.where(jnp.isfinite(losses), losses, jnp.inf)
    # The lower median of those who count: an interpolated one would mix infinity in.
    ordered = jnp.sort(jnp.where(known, losses, jnp.nan), axis=0)  # NaN comes last
    middle = jnp.maximum((jnp.sum(known, axis=0) - 1) // 2, 0)
    result = jnp.take_along_axis(ordered, middle[None], axis=0)[0]
    return jnp.where(jnp.isnan(result), jnp.inf, result)


def _is_plausible(losses: jax.Array, finite: jax.Array) -> jax.Array:
    """Whether a model's loss [nodes] is not far above the median of the finite ones."""
    known = jnp.where(finite & jnp.isfinite(losses), losses, jnp.nan)
    middle = jnp.nanmedian(known)
    return known <= middle + jnp.maximum(_FAR * (middle - jnp.nanmin(known)), _FAR_SHARE * jnp.abs(middle))


def _finite_nodes(models: Params) -> jax.Array:
    result = [jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim))) for x in jax.tree.leaves(models)]
    return jnp.all(jnp.stack(result), axis=0)


def _mean_of(chosen: jax.Array) -> jax.Array:
    return chosen / jnp.maximum(jnp.sum(chosen), 1)


def _less(value: jax.Array, than: jax.Array) -> jax.Array:
    """Whether a loss is finite, and below another one, which may be NaN."""
    return jnp.isfinite(value) & ~(value >= than)
