"""The fields of consensus training, and what they may be."""

from __future__ import annotations

import dataclasses
import enum
import math

import jax

from capibara.consensus.aggregation import Aggregation, Mean
from capibara.consensus.compression import Compression
from capibara.consensus.convex import ConvexMerge
from capibara.consensus.voting import Vote as VoteRule
from capibara.core.types import Params, UserError
from capibara.sharding import Plan
from capibara.strategies.consensus.agreement import Agreement

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Agreement):
    """The attributes of ConsensusConfig.

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


def _check_groups(config: Settings) -> None:
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


def _check_nodes(config: Settings, nodes: int) -> None:
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
