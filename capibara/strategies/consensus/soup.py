"""The incremental soup of a run's agreed models: the mean of those that make it better.

As the greedy soup of Wortsman et al. 2022 (arXiv:2203.05482), in the order in which the models come, with two models in
memory. `consensus.soups` has the same for models that are there from the beginning.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara.core.types import Batch, Params
from capibara.strategies.consensus.agreement import on_each
from capibara.training.base.strategy import NodesPrograms
from capibara.training.stability.loss_scale import select


def stirred(
    nodes: NodesPrograms, batch: Batch, soup: Params, size: jax.Array, agreed: Params, count: int
) -> tuple[Params, jax.Array]:
    """The soup and the number of its models, with the agreed model if that does not raise its loss (traceable).

    Args:
      nodes: the loss of nodes on their rows.
      batch: the rows; the loss is the mean over those of all nodes.
      soup: the mean of `size` models; of none, the first model comes in whatever its loss.
      size: int32.
      agreed: the model that may come in.
      count: the number of nodes.
    """

    def sums(model: Params) -> jax.Array:
        return nodes.loss(on_each(model, count), batch)

    with_it = jax.tree.map(lambda old, new: old + ((new - old) / (size + 1)).astype(old.dtype), soup, agreed)
    old, new = sums(soup), sums(with_it)
    counted = jnp.isfinite(old).all(axis=1, keepdims=True)  # rows that are broken say nothing of a model
    (before, _), (after, _) = (jnp.sum(jnp.where(counted, x, 0.0), axis=0) for x in (old, new))
    # Of the same rows and tokens, so that sums compare as means do.
    is_better = jnp.isfinite(after) & ((size == 0) | ~(after > before))
    return select(is_better, (with_it, size + 1), (soup, size))
