"""The vote of nodes on one mesh: each evaluates the model that a round proposes on its own rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara.core.types import Batch, Params
from capibara.strategies.consensus.agreement import on_each
from capibara.training.base.strategy import NodesPrograms


def approvals(
    nodes: NodesPrograms, batch: Batch, proposed: Params, agreed: Params, count: int, threshold: float
) -> jax.Array:
    """Whether each node approves a model, bool [nodes], traceable.

    Its score is the perplexity of the agreed model on the node's rows over that of the proposed one, at most 1.

    Args:
      nodes: the loss of nodes on their rows.
      batch: the rows.
      proposed, agreed: the two models.
      count: the number of nodes.
      threshold: the least score with which a node approves; a loss that is not finite is never approved.
    """

    def losses(model: Params) -> jax.Array:
        sums = nodes.loss(on_each(model, count), batch)
        return sums[:, 0] / jnp.maximum(sums[:, 1], 1.0)

    new, old = losses(proposed), losses(agreed)
    score = jnp.exp(jnp.minimum(jnp.where(jnp.isfinite(old), old, jnp.inf) - new, 0.0))
    return jnp.isfinite(new) & (score >= threshold)
