"""Consensus training: nodes train apart for some steps, then agree on a model, from which all go on.

With an outer optimizer with momentum this is DiLoCo (Douillard et al. 2023, arXiv:2311.08105); with a robust aggregation
some nodes may send anything at all. docs/consensus.md says what each field does.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara.config import configurable
from capibara.consensus.aggregation import Aggregation, Mean
from capibara.consensus.compression import Compression
from capibara.consensus.convex import ConvexMerge
from capibara.consensus.voting import Vote as VoteRule
from capibara.core.types import Batch, Params, PyTree, UserError
from capibara.objectives.base import Metrics
from capibara.sharding import NODE_AXIS, Plan
from capibara.strategies import convex_merge
from capibara.strategies import soup as soups
from capibara.strategies.agreement import Agreement, Vote, along, quality_of
from capibara.strategies.ballots import approvals
from capibara.strategies.hierarchy import group_means
from capibara.training.stability.loss_scale import select
from capibara.training.strategy import NodesPrograms, Round, Strategy, StrategyStep, of_all, weight_of

_LEAST_GAIN = 1e-3  # of a step of a convex merge's search, in nats a token


class VotingStrategy(enum.StrEnum):
    """Whether nodes vote on the model that a round proposes.

    none: they do not.
    byzantine: each evaluates it on its own rows. If f of n nodes may lie, more than (n + f) / 2 must approve, which is
      2f + 1 of n = 3f + 1: any two such majorities share an honest node.
    """

    NONE = "none"
    BYZANTINE = "byzantine"


class MergeStrategy(enum.StrEnum):
    """What makes one model of the nodes' models.

    aggregation: ConsensusConfig.aggregation.
    convex: weights on the simplex for which the merged model's loss on all nodes' rows is small.
    """

    AGGREGATION = "aggregation"
    CONVEX = "convex"


class StrategyName(enum.StrEnum):
    """What consensus training does besides rounds.

    hierarchical: between two rounds the nodes of a group take the mean of its models, every `group_every` steps.
    convexity: each update is followed by a proximal step towards the agreed model. With SGD that is the proximal gradient
      method for the loss and `proximal` / 2 times the squared distance, which is convex where `proximal` is large enough.
    incremental_soup: the model that is evaluated and exported is the mean of those agreed models that make it better.
    """

    HIERARCHICAL = "hierarchical"
    CONVEXITY = "convexity"
    INCREMENTAL_SOUP = "incremental_soup"


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
      spare_faults: int32, nodes that may be faulty besides those that had no part; below 0: more than the rule withstands.
    """

    quality: jax.Array
    accepted: jax.Array
    distances: jax.Array
    approved: jax.Array | None
    weights: jax.Array | None
    failures: jax.Array
    spare_faults: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Nodes:
    """What consensus training carries from step to step.

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


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ConsensusConfig(Agreement, Strategy):
    """Nodes that train apart and agree on a model every so many steps.

    In a round a node is accepted if it made an update since the last one, its quality reaches the threshold and the
    aggregation does not mask it. All nodes go on from the agreed model, those too that were not accepted. `Agreement` has
    the other attributes.

    In a vote each node scores the proposed model on its own rows of the round's last step: exp(loss of the agreed model -
    loss of the proposed one), at most 1. It approves if the score reaches `quality_threshold`. With less than a quorum of
    approvals the round fails.

    Attributes:
      every: steps between two rounds, H; the run's steps are a multiple of it.
      num_nodes: must be Plan.node; None: any.
      voting_strategy: whether nodes vote on the proposed model.
      merge_strategy: what makes one model of the nodes'.
      lambda_reg, max_iterations: of a convex merge: the coefficient that draws its weights to the mean, and the most steps of
        its search, each of which costs a forward and a backward pass on the rows of the round's last step.
      strategies: what is done besides.
      proximal: of "convexity": mu of FedProx (Li et al. 2020, arXiv:1812.06127). A step takes a node's parameters about
        mu * learning rate of the way back to the agreed model.
      groups, group_every: of "hierarchical": the number of groups, and the steps between two meetings of each.
      compression: what 8 or 4 bits lose of the outer gradients that nodes send; on one mesh they travel in float32 all the
        same. None: nothing is lost.
    """

    every: int = 50
    num_nodes: int | None = None
    voting_strategy: VotingStrategy = VotingStrategy.NONE
    merge_strategy: MergeStrategy = MergeStrategy.AGGREGATION
    lambda_reg: float = 0.0
    max_iterations: int = 8
    strategies: tuple[StrategyName, ...] = ()
    proximal: float = 1.0
    groups: int = 2
    group_every: int = 10
    compression: Compression | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every < 1:
            raise UserError(f"ConsensusConfig.every is {self.every}, must be at least 1: try 50")
        if not 0 < self.proximal < math.inf:
            raise UserError(f"ConsensusConfig.proximal is {self.proximal}, must be above 0 and finite: try 1.0")
        if self.does(StrategyName.HIERARCHICAL):
            _check_groups(self)
        if self.votes and self.quality_threshold is None:
            raise UserError(
                "ConsensusConfig.quality_threshold is None, and with voting_strategy = 'byzantine' any finite model would be "
                "approved: try 0.85"
            )
        if self.merges and self.convex and self.aggregation != Aggregation(rule=Mean()):
            raise UserError(
                "ConsensusConfig.aggregation has no effect with merge_strategy = 'convex': leave out one of them"
            )

    @property
    def round_steps(self) -> int:
        return self.every

    @property
    def averages(self) -> bool:
        return self.does(StrategyName.INCREMENTAL_SOUP)

    def does(self, name: StrategyName) -> bool:
        """Whether a strategy is asked for."""
        return name in self.strategies

    def check(self, plan: Plan) -> None:
        if plan.node < 2:
            raise UserError(
                f"Plan.node is {plan.node}, must be at least 2 for Trainer.strategy (@{type(self).__name__}()): try 4"
            )
        if self.num_nodes not in (None, plan.node):
            raise UserError(
                f"ConsensusConfig.num_nodes is {self.num_nodes}, must be Plan.node ({plan.node}): set both alike"
            )
        self.aggregation.check(plan.node)
        _check_nodes(self, plan.node)

    @property
    def votes(self) -> bool:
        """Whether nodes vote."""
        return self.voting_strategy is not VotingStrategy.NONE

    @property
    def convex(self) -> ConvexMerge:
        """How the weights of a convex merge are found; raises UserError for fields out of their range."""
        return ConvexMerge(lambda_reg=self.lambda_reg, max_iterations=self.max_iterations, tolerance=_LEAST_GAIN)

    @property
    def merges(self) -> bool:
        """Whether the nodes' models are merged convexly."""
        return self.merge_strategy is MergeStrategy.CONVEX

    def vote_rule(self, nodes: int) -> VoteRule:
        """The rule of the vote; raises UserError if so many nodes may not be faulty."""
        return VoteRule(num_nodes=nodes, faulty=self.aggregation.faults or None)

    def init(self, tx: optax.GradientTransformation, params: Params, nodes: int) -> Nodes:
        def of_each(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (nodes, *jnp.shape(x))), tree)

        return Nodes(
            params=of_each(params),
            opt_state=of_each(tx.init(params)),
            outer=self.outer.init(params),
            lost=None if self.compression is None else of_each(self.compression.init(params)),
            losses=jnp.zeros((nodes, 2)),
            verdict=Verdict(
                quality=jnp.ones(nodes),
                accepted=jnp.ones(nodes, bool),
                distances=jnp.zeros(nodes),
                approved=jnp.ones(nodes, bool) if self.votes else None,
                weights=jnp.full(nodes, 1 / nodes) if self.merges else None,
                failures=jnp.zeros((), jnp.int32),
                spare_faults=jnp.asarray(self.aggregation.faults, jnp.int32),
            ),
            soup_size=jnp.zeros((), jnp.int32) if self.averages else None,
        )

    def shardings(self, state: PyTree, params: PyTree, opt_state: PyTree) -> Nodes:
        everywhere: PyTree = NamedSharding(jax.tree.leaves(params)[0].mesh, PartitionSpec())
        of_nodes = jax.tree.map(_of_nodes, params)
        outer = optax.tree.map_params(
            self.outer.build(), lambda _, own: own, state.outer, params, transform_non_params=lambda _: everywhere
        )
        return Nodes(
            params=of_nodes,
            opt_state=jax.tree.map(_of_nodes, opt_state),
            outer=outer,
            lost=None if state.lost is None else of_nodes,
            losses=everywhere,
            verdict=jax.tree.map(lambda _: everywhere, state.verdict),
            soup_size=None if state.soup_size is None else everywhere,
        )

    def step(self, nodes: NodesPrograms, mesh: Mesh, params: PyTree) -> StrategyStep:
        meet, specs = meeting(self, nodes, mesh, params), jax.tree.map(lambda of_param: of_param.spec, params)
        in_groups = group_means(mesh, specs, self.groups) if self.does(StrategyName.HIERARCHICAL) else None

        def run(number: jax.Array, agreed: Params, average: Params | None, state: Nodes, batch: Batch) -> Round:
            own, opt_state, metrics = nodes.step(state.params, state.opt_state, number, batch)
            if self.does(StrategyName.CONVEXITY):
                own = _towards(own, agreed, self.proximal * metrics["learning_rate"])
            updated = jnp.isfinite(metrics["loss"]) & (metrics.get("skipped", 0.0) == 0)
            weight = jnp.where(updated, weight_of(metrics), 0.0)
            losses = state.losses + jnp.stack([jnp.nan_to_num(metrics["loss"]) * weight, weight], axis=1)
            due = (number + 1) % self.every == 0
            if in_groups is not None:
                meets = ((number + 1) % self.group_every == 0) & ~due
                has_part = quality_of(losses) >= (self.quality_threshold or 0.0)
                own = jax.lax.cond(meets, in_groups, lambda own, _: own, own, has_part)
            state = dataclasses.replace(state, params=own, opt_state=opt_state, losses=losses)
            now = agreed, average, state
            agreed, average, state = jax.lax.cond(due, lambda: meet(*now, number, batch), lambda: now)
            return Round(agreed, state, of_all(metrics) | _shown(metrics, state), average)

        return run

    def voted(self, approved: jax.Array) -> jax.Array:
        """The votes [nodes] that the nodes cast: what they have found. A subclass can play nodes that lie."""
        return approved

    def sent(self, agreed: Params, own: Params, number: jax.Array) -> Params:
        """The models [nodes, ...] that the nodes send: their own. A subclass can play nodes that lie.

        Args:
          agreed: the model that the round began with.
          own: the nodes' models, [nodes, ...].
          number: the step.
        """
        del agreed, number
        return own

    def remarks(self, step: int, metrics: Mapping[str, float]) -> Iterator[str]:
        if step % self.every:
            return
        nodes = [name.removesuffix("/accepted") for name in metrics if name.endswith("/accepted")]
        for name in nodes:
            if not metrics[f"{name}/accepted"]:
                yield f"step {step}: {name} has no part in the round, {_reason(self, metrics, name)}"
        if self.aggregation.faults and (more := -int(metrics["spare_faults"])) > 0:
            yield f"step {step}: {more} more nodes have no part than Aggregation.faults ({self.aggregation.faults})"
        if not (failures := int(metrics["failed_rounds"])):
            return
        score = metrics["consensus_score"]
        line = f"step {step}: no agreement, consensus score {score:.2f} of {self.consensus_threshold:g}"
        if self.votes:
            line = f"{line}, {int(metrics['votes'])} votes of {self.vote_rule(len(nodes)).quorum}"
        yield f"{line}: the nodes go on from the last agreed model"
        if failures > self.max_retries:
            raise UserError(
                f"the nodes did not agree in {failures} rounds in a row, must be at most ConsensusConfig.max_retries "
                f"({self.max_retries}): lower consensus_threshold or quality_threshold, or the nodes' learning rate"
            )


def _check_groups(config: ConsensusConfig) -> None:
    if config.groups < 2:
        raise UserError(f"ConsensusConfig.groups is {config.groups}, must be at least 2: try 2")
    if config.every < 2:
        raise UserError(f"ConsensusConfig.every is {config.every}, must be at least 2 for 'hierarchical': try 50")
    if not 1 <= config.group_every < config.every or config.every % config.group_every:
        fitting = max(n for n in range(1, config.every // 2 + 1) if config.every % n == 0)
        raise UserError(
            f"ConsensusConfig.group_every is {config.group_every}, must divide ConsensusConfig.every ({config.every}) and be less: "
            f"try {fitting}"
        )
    if config.aggregation.faults:
        raise UserError(
            f"Aggregation.faults is {config.aggregation.faults}, must be 0 with the strategy 'hierarchical': a node that lies "
            "spoils the mean of its group: leave out one of them"
        )


def _check_nodes(config: ConsensusConfig, nodes: int) -> None:
    if config.does(StrategyName.HIERARCHICAL) and (nodes % config.groups or nodes < 2 * config.groups):
        fitting = next((n for n in range(2, nodes // 2 + 1) if nodes % n == 0), None)
        raise UserError(
            f"ConsensusConfig.groups is {config.groups}, must divide Plan.node ({nodes}) into groups of two or more: "
            + (f"set Plan.node = {2 * config.groups}" if fitting is None else f"try {fitting}")
        )
    least = max(4, 3 * config.aggregation.faults + 1)
    if config.votes and nodes < least:
        raise UserError(
            f"Plan.node is {nodes}, must be at least {least} for a vote with Aggregation.faults = "
            f"{config.aggregation.faults} (n >= 3f + 1, and at least one may lie): set Plan.node = {least}"
        )


def meeting(
    config: ConsensusConfig, nodes: NodesPrograms, mesh: Mesh, params: PyTree
) -> Callable[[Params, Params | None, Nodes, jax.Array, Batch], tuple[Params, Params | None, Nodes]]:
    """Makes (agreed model, soup, nodes, step, batch) -> the next model and soup, and the nodes, which go on from it."""
    specs = jax.tree.map(lambda of_param: of_param.spec, params)
    combine = config.aggregation.sharded(mesh, specs, NODE_AXIS)
    received = None if config.compression is None else _received(config.compression, mesh, specs)

    def meet(
        agreed: Params, soup: Params | None, state: Nodes, number: jax.Array, batch: Batch
    ) -> tuple[Params, Params | None, Nodes]:
        make = convex_merge.combining(nodes, batch, config.convex) if config.merges else combine
        quality = quality_of(state.losses)
        sent, lost = config.sent(agreed, state.params, number), state.lost
        if received is not None:
            sent, lost = received(agreed, sent, lost)
        vote = _vote(config, nodes, batch, len(quality))
        new = config.settle(make, agreed, sent, state.outer, quality, number, len(quality), vote)
        own = jax.tree.map(lambda x, like: jnp.broadcast_to(x, like.shape), new.params, state.params)
        failures = jnp.where(new.succeeds, 0, state.verdict.failures + 1)
        approved, weights = new.approved if config.votes else None, new.weights if config.merges else None
        verdict = Verdict(quality, new.accepted, new.distances, approved, weights, failures, new.spare_faults)
        # What was lost of a gradient that had no effect would be added to one that has.
        kept = new.accepted & new.succeeds
        lost = jax.tree.map(lambda x: jnp.where(along(kept, x), x, 0.0), lost)
        opt_state, size = jax.tree.map(_finite, state.opt_state), state.soup_size
        if soup is not None and size is not None:
            stirred = soups.stirred(nodes, batch, soup, size, new.params, len(quality))
            soup, size = select(new.succeeds, stirred, (soup, size))
        own = jax.lax.with_sharding_constraint(own, jax.tree.map(_of_nodes, params))
        return new.params, soup, Nodes(own, opt_state, new.outer, lost, jnp.zeros_like(state.losses), verdict, size)

    return meet


def _vote(config: ConsensusConfig, nodes: NodesPrograms, batch: Batch, count: int) -> Vote | None:
    """How nodes vote on a round's proposal."""
    if not config.votes:
        return None

    def approve(proposed: Params, agreed: Params) -> jax.Array:
        return config.voted(approvals(nodes, batch, proposed, agreed, count, config.quality_threshold or 0.0))

    return Vote(approve, config.vote_rule(count).quorum)


def _received(compression: Compression, mesh: Mesh, specs: PyTree) -> Callable[..., tuple[Params, PyTree]]:
    """Makes (agreed, nodes' models, lost) -> (what few bits leave of the models, lost); each shard by itself."""
    nodes = jax.tree.map(lambda spec: PartitionSpec(NODE_AXIS, *spec), specs)

    def local(agreed: Params, own: Params, lost: PyTree) -> tuple[Params, PyTree]:
        gradient = jax.tree.map(lambda start, end: start.astype(jnp.float32) - end[0], agreed, own)
        sent, lost = compression.encode(gradient, jax.tree.map(lambda x: x[0], lost))
        back = compression.decode(sent, gradient)
        models = jax.tree.map(lambda start, x: (start - x).astype(start.dtype), agreed, back)
        return jax.tree.map(lambda x: x[None], (models, lost))

    return jax.shard_map(local, mesh=mesh, in_specs=(specs, nodes, nodes), out_specs=(nodes, nodes), check_vma=False)


def _finite(x: jax.Array) -> jax.Array:
    """Moments without what is not finite, so that a node that was not accepted can recover."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _reason(config: ConsensusConfig, metrics: Mapping[str, float], name: str) -> str:
    """Why a node has no part in a round."""
    quality = metrics[f"{name}/quality"]
    if quality < 0:
        return "it made no update: its loss or gradients were never finite"
    if config.quality_threshold is not None and quality < config.quality_threshold:
        return f"its quality {quality:.2f} is below {config.quality_threshold:g}"
    if config.merges:
        return "its parameters are not finite, or their loss on others' rows is far above the median"
    return "its parameters are not finite, or too far from all others"


def _towards(own: Params, agreed: Params, strength: jax.Array) -> Params:
    """The proximal step of strength [nodes] / 2 * |own - agreed|^2."""

    def step(x: jax.Array, anchor: jax.Array) -> jax.Array:
        share = along(strength, x).astype(x.dtype)
        return (x + share * anchor) / (1 + share)

    return jax.tree.map(step, own, agreed)


def _of_nodes(of_one: NamedSharding) -> NamedSharding:
    return NamedSharding(of_one.mesh, PartitionSpec(NODE_AXIS, *of_one.spec))


def _shown(metrics: Metrics, state: Nodes) -> dict[str, jax.Array]:
    """The metrics of each node, and of the last round."""
    verdict = state.verdict
    found: dict[str, Any] = {"consensus_score": jnp.mean(verdict.accepted), "failed_rounds": verdict.failures}
    found["spare_faults"] = verdict.spare_faults
    columns = {"loss": metrics["loss"], "quality": verdict.quality, "distance": verdict.distances}
    columns |= {"accepted": verdict.accepted}
    if verdict.approved is not None:
        found["votes"], columns["vote"] = jnp.sum(verdict.approved), verdict.approved
    if verdict.weights is not None:
        columns["weight"] = verdict.weights
    if state.soup_size is not None:
        found["soup_size"] = state.soup_size
    for name, values in columns.items():
        found |= {f"node_{n}/{name}": values[n] for n in range(len(values))}
    return {name: value.astype(jnp.float32) for name, value in found.items()}
