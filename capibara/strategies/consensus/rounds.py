"""A round of nodes on one mesh: what they send, how it is aggregated, and the state from which the next round begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara.consensus.compression import Compression
from capibara.core.types import Batch, Params, PyTree
from capibara.sharding import NODE_AXIS
from capibara.strategies.consensus import convex_merge, integrated
from capibara.strategies.consensus import soup as soups
from capibara.strategies.consensus.agreement import Combine, Vote, along, quality_of
from capibara.strategies.consensus.ballots import approvals
from capibara.strategies.consensus.settings import MergeStrategy, Settings, StrategyName
from capibara.training.base.strategy import NodesPrograms
from capibara.training.stability.loss_scale import select


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verdict:
    """The last round, as all nodes saw it.

    Attributes:
      quality: float32 [nodes], as Agreement.quality_threshold defines it; -1 of a node that made no update.
      accepted: bool [nodes], the nodes that had a part in the aggregate.
      distances: float32 [nodes], of the nodes from the aggregate; -1 of those that have no part in it.
      approved: bool [nodes], the nodes that voted for the proposed model; None: there is no vote.
      weights: float32 [nodes], of a convex merge; None: an aggregation made the model.
      failures: int32, failed rounds in a row up to the last one.
      spare_faults: int32, nodes that may be faulty in addition to those that had no part; below 0: more than the rule withstands.
      drawn: bool [nodes], the nodes that were drawn to have a part; None: all.
    """

    quality: jax.Array
    accepted: jax.Array
    distances: jax.Array
    approved: jax.Array | None
    weights: jax.Array | None
    failures: jax.Array
    spare_faults: jax.Array
    drawn: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Nodes:
    """The state of consensus training.

    Attributes:
      params: the nodes' parameters, [nodes, ...].
      opt_state: of each node's optimizer, [nodes, ...].
      outer: the outer optimizer's state.
      lost: what compression has lost of each node's outer gradient, [nodes, ...]; None: it does not compress.
      losses: float32 [nodes, 2], of the updates of the current round: the sum of the loss over real tokens, and their
        number.
      verdict: on the last round.
      soup_size: int32, the models in the incremental soup; None: there is none.
    """

    params: Params
    opt_state: PyTree
    outer: PyTree
    lost: PyTree | None
    losses: jax.Array
    verdict: Verdict
    soup_size: jax.Array | None = None


def meeting(
    config: Settings, nodes: NodesPrograms, mesh: Mesh, params: PyTree
) -> Callable[[Params, Params | None, Nodes, jax.Array, Batch], tuple[Params, Params | None, Nodes]]:
    """Makes (agreed model, soup, nodes, step, batch) -> the next model and soup, and the nodes, which continue from it."""
    specs = jax.tree.map(lambda of_param: of_param.spec, params)
    combine = config.aggregation.sharded(mesh, specs, NODE_AXIS)
    received = None if config.compression is None else _received(config.compression, mesh, specs)

    def meet(
        agreed: Params, soup: Params | None, state: Nodes, number: jax.Array, batch: Batch
    ) -> tuple[Params, Params | None, Nodes]:
        make = _merging(config, nodes, batch, combine, (soup, state.soup_size))
        quality = quality_of(state.losses)
        drawn = _drawn(config, len(quality), number)
        sent, lost = config.sent(agreed, state.params, number), state.lost
        if received is not None:
            sent, lost = received(agreed, sent, lost)
        vote = _vote(config, nodes, batch, len(quality))
        counted = quality if drawn is None else jnp.where(drawn, quality, -1.0)
        expected = config.nodes_per_round or len(quality)
        new = config.settle(make, agreed, sent, state.outer, counted, number, expected, vote)
        node_params = jax.tree.map(lambda x, like: jnp.broadcast_to(x, like.shape), new.params, state.params)
        failures = jnp.where(new.succeeds, 0, state.verdict.failures + 1)
        approved, weights = new.approved if config.votes else None, new.weights if config.merges else None
        # What was lost of a gradient that had no effect would be added to one that has.
        retained = new.accepted & new.succeeds
        lost = jax.tree.map(lambda x: jnp.where(along(retained, x), x, 0.0), lost)
        spare_faults = new.spare_faults
        if drawn is not None:
            lost = jax.tree.map(lambda x, before: jnp.where(along(drawn, x), x, before), lost, state.lost)
            spare_faults += jnp.sum(~drawn)  # they are masked, and are no faults
        verdict = Verdict(quality, new.accepted, new.distances, approved, weights, failures, spare_faults, drawn)
        opt_state, size = jax.tree.map(_finite, state.opt_state), state.soup_size
        if soup is not None and size is not None:
            stirred = soups.stirred(nodes, batch, soup, size, new.params, len(quality))
            soup, size = select(new.succeeds, stirred, (soup, size))
        node_params = jax.lax.with_sharding_constraint(node_params, jax.tree.map(on_nodes, params))
        return (
            new.params,
            soup,
            Nodes(node_params, opt_state, new.outer, lost, jnp.zeros_like(state.losses), verdict, size),
        )

    return meet


def _merging(
    config: Settings,
    nodes: NodesPrograms,
    batch: Batch,
    aggregate: Combine,
    soup: tuple[Params | None, jax.Array | None],
) -> Combine:
    """What makes one model of those that the nodes have sent; `soup`: the incremental soup and the number of its models."""
    if not config.merges and not config.share(StrategyName.INCREMENTAL_SOUP):
        return aggregate
    convex = convex_merge.combining(nodes, batch, config.convex)
    if config.merge_strategy is MergeStrategy.CONVEX:
        return convex
    model, size = soup
    standing = []
    if (share := config.share(StrategyName.INCREMENTAL_SOUP)) and model is not None and size is not None:
        standing = [(jnp.where(size > 0, share, 0.0), model)]
    # A node whose loss is far off is masked by the convex merge, and may be finite.
    merges = {"convex": (config.share("convex"), convex), "aggregation": (config.share("aggregation"), aggregate)}
    return integrated.combining(merges, standing)


def _drawn(config: Settings, count: int, number: jax.Array) -> jax.Array | None:
    """The nodes that participate in a round, bool [nodes], drawn without replacement; None: all."""
    if config.nodes_per_round is None:
        return None
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), number), 1)
    return jax.random.permutation(key, count) < config.nodes_per_round


def _vote(config: Settings, nodes: NodesPrograms, batch: Batch, count: int) -> Vote | None:
    """How nodes vote on a round's proposal."""
    if not config.votes:
        return None

    def approve(proposed: Params, agreed: Params) -> jax.Array:
        return config.voted(approvals(nodes, batch, proposed, agreed, count, config.quality_threshold or 0.0))

    return Vote(approve, config.vote_rule(count).quorum)


def _received(compression: Compression, mesh: Mesh, specs: PyTree) -> Callable[..., tuple[Params, PyTree]]:
    """Makes (agreed, nodes' models, lost) -> (the models in few bits, lost); each shard by itself."""
    nodes = jax.tree.map(lambda spec: PartitionSpec(NODE_AXIS, *spec), specs)

    def local(agreed: Params, node_params: Params, lost: PyTree) -> tuple[Params, PyTree]:
        gradient = jax.tree.map(lambda start, end: start.astype(jnp.float32) - end[0], agreed, node_params)
        sent, lost = compression.encode(gradient, jax.tree.map(lambda x: x[0], lost))
        back = compression.decode(sent, gradient)
        models = jax.tree.map(lambda start, x: (start - x).astype(start.dtype), agreed, back)
        return jax.tree.map(lambda x: x[None], (models, lost))

    return jax.shard_map(local, mesh=mesh, in_specs=(specs, nodes, nodes), out_specs=(nodes, nodes), check_vma=False)


def _finite(x: jax.Array) -> jax.Array:
    """Moments without what is not finite, so that a node that was not accepted can recover."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def on_nodes(of_one: NamedSharding) -> NamedSharding:
    """The sharding of all nodes' arrays [nodes, ...] from that of one node's."""
    return NamedSharding(of_one.mesh, PartitionSpec(NODE_AXIS, *of_one.spec))
