"""How the models of several nodes become the next one: the mathematics of a round, on a mesh and across jobs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from capibara.consensus.aggregation import Aggregation, Mean, Report
from capibara.consensus.outer import OuterOptimizer, OuterSgd
from capibara.core.types import Params, PyTree, UserError
from capibara.training.stability.loss_scale import select

# (models [nodes, ...], the agreed model, a random key or None) -> (their aggregate, the report)
Combine = Callable[[Params, Params, jax.Array | None], tuple[Params, Report]]


class Vote(NamedTuple):
    """How nodes vote on the model that a round proposes.

    Attributes:
      approve: (the proposed model, the agreed one) -> bool [nodes].
      quorum: the approvals that it needs.
    """

    approve: Callable[[Params, Params], jax.Array]
    quorum: int


class Settled(NamedTuple):
    """The outcome of a round.

    Attributes:
      params: the agreed model from which all nodes go on.
      outer: the outer optimizer's state.
      succeeds: bool, whether the round counts; if not, `params` and `outer` are those that it began with.
      score: float32, the consensus score.
      accepted: bool [nodes], the nodes that had a part in the aggregate.
      distances: float32 [nodes], of the nodes from the aggregate; -1 of those that have no part in it.
      spare_faults: int32, nodes that may be faulty besides those that had no part; below 0: more than the rule withstands.
      approved: bool [nodes], the nodes that voted for the proposed model; all where there is no vote.
      weights: float32 [nodes], of the nodes in the aggregate; None of a rule that looks at each coordinate by itself.
    """

    params: Params
    outer: PyTree
    succeeds: jax.Array
    score: jax.Array
    accepted: jax.Array
    distances: jax.Array
    spare_faults: jax.Array
    approved: jax.Array
    weights: jax.Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """How nodes agree on a model at the end of a round.

    A node is accepted if its quality reaches the threshold and the aggregation does not mask it. The consensus score is the
    share of accepted nodes. If it is below its threshold the round fails, and the agreed model stays.

    Attributes:
      aggregation: how the nodes' models become one.
      outer: what is done with it; OuterSgd(learning_rate=0.7, momentum=0.9) is DiLoCo's.
      quality_threshold: the least quality of an accepted node, from 0 to 1: the perplexity of the median node over its own,
        in training since the last round, at most 1. None: any.
      consensus_threshold: the least consensus score of a round, above 0 and at most 1.
      max_retries: training ends if more rounds than that fail in a row.
      seed: of the random keys of pre-aggregations, and of the draw of nodes.
    """

    aggregation: Aggregation = Aggregation(rule=Mean())
    outer: OuterOptimizer = OuterSgd()
    quality_threshold: float | None = None
    consensus_threshold: float = 0.5
    max_retries: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.quality_threshold is not None and not 0 <= self.quality_threshold <= 1:
            raise UserError(
                f"{name}.quality_threshold is {self.quality_threshold}, must be from 0 to 1, or None: try 0.85"
            )
        if not 0 < self.consensus_threshold <= 1:
            raise UserError(
                f"{name}.consensus_threshold is {self.consensus_threshold}, must be above 0 and at most 1: try 0.75"
            )
        if self.max_retries < 0:
            raise UserError(f"{name}.max_retries is {self.max_retries}, must be at least 0: try 3")

    def settle(
        self,
        combine: Combine,
        agreed: PyTree,
        sent: PyTree,
        outer: PyTree,
        quality: jax.Array,
        number: jax.Array | int,
        expected: int,
        vote: Vote | None = None,
    ) -> Settled:
        """The outcome of a round (traceable).

        Args:
          combine: the aggregation of `sent`.
          agreed: the model that the round began with.
          sent: the nodes' models, [nodes, ...].
          outer: the outer optimizer's state.
          quality: float32 [nodes], as `quality_of` makes it.
          number: of the round or step, from which the random key is made.
          expected: nodes of which the score is a share.
          vote: on the proposed model; None: the score decides alone.
        """
        good = quality >= (self.quality_threshold or 0.0)
        # What is not finite has no part in an aggregate.
        sent = jax.tree.map(lambda x: jnp.where(along(good, x), x, jnp.nan), sent)
        key = jax.random.fold_in(jax.random.key(self.seed), number) if self.aggregation.uses_key else None
        aggregate, report = combine(sent, agreed, key)
        accepted = ~report.is_masked
        score = jnp.sum(accepted) / expected
        after = self.outer.step(agreed, aggregate, outer)
        approved = jnp.ones_like(good) if vote is None else vote.approve(after[0], agreed)
        succeeds = score >= self.consensus_threshold
        if vote is not None:
            succeeds &= jnp.sum(approved) >= vote.quorum
        new, outer = select(succeeds, after, (agreed, outer))
        # A checkpoint takes finite numbers only.
        distances = jnp.where(accepted, jnp.minimum(report.distances, jnp.finfo(jnp.float32).max), -1.0)
        return Settled(new, outer, succeeds, score, accepted, distances, report.spare_faults, approved, report.weights)


def quality_of(losses: jax.Array) -> jax.Array:
    """The quality of each node [nodes], as Agreement.quality_threshold defines it; -1 of a node that made no update.

    Args:
      losses: float32 [nodes, 2], the sum of the loss over real tokens since the last round, and their number.
    """
    measured = losses[:, 1] > 0
    loss = jnp.where(measured, losses[:, 0] / jnp.maximum(losses[:, 1], 1.0), jnp.nan)
    return jnp.where(measured, jnp.exp(jnp.minimum(jnp.nanmedian(loss) - loss, 0.0)), -1.0)


def along(good: jax.Array, x: jax.Array) -> jax.Array:
    """A value of each node [nodes], shaped so that it broadcasts to its arrays [nodes, ...]."""
    return good.reshape(-1, *[1] * (x.ndim - 1))


def distances_from(model: Params, models: Params, is_masked: jax.Array) -> jax.Array:
    """The distances of nodes' models [nodes, ...] from a model, float32 [nodes]; infinite for those that are masked."""
    squares = [
        jnp.sum(jnp.square((x - m).astype(jnp.float32)), axis=tuple(range(1, x.ndim)))
        for x, m in zip(jax.tree.leaves(models), jax.tree.leaves(model), strict=True)
    ]
    return jnp.where(is_masked, jnp.inf, jnp.sqrt(sum(squares, start=jnp.zeros(len(is_masked)))))


def on_each(model: Params, count: int) -> Params:
    """A model on each of the nodes, [nodes, ...]."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), model)
