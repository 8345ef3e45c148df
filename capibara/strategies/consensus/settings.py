"""The fields of consensus training, and what they may be."""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Callable

import jax

from capibara.consensus.aggregation import Aggregation, Mean
from capibara.consensus.compression import Compression
from capibara.consensus.convex import ConvexMerge
from capibara.consensus.voting import Vote as VoteRule
from capibara.core.fields import FilePath
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
    integrated: the weighted mean of these, and of the incremental soup, by ConsensusConfig.merge_shares.
    """

    AGGREGATION = "aggregation"
    CONVEX = "convex"
    INTEGRATED = "integrated"


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
      fragments: parts of the model that have their rounds one after the other, one each `every` / `fragments` steps; 1: the
        whole model has its rounds at once.
      num_nodes: must be Plan.node; None: any.
      voting_strategy: whether nodes vote on the proposed model.
      merge_strategy: what makes one model of the nodes'.
      merge_shares: of "integrated": (name, share) pairs of "aggregation", "convex" and "incremental_soup"; only their ratios
        count. While the soup has no model, its share is the others'.
      lambda_reg, max_iterations: of a convex merge: the coefficient that draws its weights to the mean, and the most steps of
        its search, each of which costs a forward and a backward pass on the rows of the round's last step.
      strategies: what is done besides.
      proximal: of "convexity": mu of FedProx (Li et al. 2020, arXiv:1812.06127). A step takes a node's parameters about
        mu * learning rate of the way back to the agreed model.
      groups, group_every: of "hierarchical": the number of groups, and the steps between two meetings of each.
      frozen: regular expressions, one for each of as many equal groups of consecutive nodes: parameters in whose names they are
        found are not trained by the nodes of that group; an empty one is in none. Empty: all nodes train all.
      nodes_per_round: nodes that have a part in a round, drawn anew for each (client sampling); None: all.
      init_from: the nodes' own initial weights: run folders or open models of the run's architecture, which nodes take in
        turn. The agreed model is Trainer.init_from until the first round. Empty: all nodes begin with it.
      compression: what 8 or 4 bits lose of the outer gradients that nodes send; on one mesh they travel in float32 all the
        same. None: nothing is lost.
    """

    every: int = 50
    fragments: int = 1
    num_nodes: int | None = None
    voting_strategy: VotingStrategy = VotingStrategy.NONE
    merge_strategy: MergeStrategy = MergeStrategy.AGGREGATION
    merge_shares: tuple[tuple[str, float], ...] = (("aggregation", 0.5), ("convex", 0.5))
    lambda_reg: float = 0.0
    max_iterations: int = 8
    strategies: tuple[StrategyName, ...] = ()
    proximal: float = 1.0
    groups: int = 2
    group_every: int = 10
    frozen: tuple[str, ...] = ()
    nodes_per_round: int | None = None
    init_from: tuple[FilePath, ...] = ()
    compression: Compression | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every < 1:
            raise UserError(f"ConsensusConfig.every is {self.every}, must be at least 1: try 50")
        if not 0 < self.proximal < math.inf:
            raise UserError(f"ConsensusConfig.proximal is {self.proximal}, must be above 0 and finite: try 1.0")
        _check_used(self)
        _check_fragments(self)
        _check_frozen(self)
        if self.does(StrategyName.HIERARCHICAL):
            _check_groups(self)
        if self.merge_strategy is MergeStrategy.INTEGRATED:
            _check_shares(self)
        if any(not path.strip() for path in self.init_from):
            raise UserError(
                "ConsensusConfig.init_from has an empty name: leave it out, or name run folders or open models"
            )
        if self.nodes_per_round is not None and self.does(StrategyName.HIERARCHICAL):
            raise UserError(
                "ConsensusConfig.nodes_per_round has no effect with the strategy 'hierarchical', whose groups take the mean of all "
                "their nodes: leave out one of them"
            )
        if self.nodes_per_round is not None and self.aggregation.faults:
            raise UserError(
                f"Aggregation.faults is {self.aggregation.faults}, must be 0 with ConsensusConfig.nodes_per_round: of the nodes "
                "that are drawn any share may lie: leave out one of them"
            )
        if self.votes and self.quality_threshold is None:
            raise UserError(
                "ConsensusConfig.quality_threshold is None, and with voting_strategy = 'byzantine' any finite model would be "
                "approved: try 0.85"
            )
        aggregates = self.merge_strategy is not MergeStrategy.CONVEX and self.share("aggregation") > 0
        if self.merges and self.convex and not aggregates and self.aggregation != Aggregation(rule=Mean()):
            raise UserError(
                f"ConsensusConfig.aggregation has no effect with merge_strategy = '{self.merge_strategy}': leave out one of them"
            )

    @property
    def round_steps(self) -> int:
        return self.every

    @property
    def meets_every(self) -> int:
        """Steps between two rounds, whichever fragment they are of."""
        return self.every // self.fragments

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
        if len(self.init_from) > plan.node:
            raise UserError(
                f"ConsensusConfig.init_from has {len(self.init_from)} models, must be at most Plan.node ({plan.node}): set "
                f"Plan.node = {len(self.init_from)}"
            )
        if self.nodes_per_round is not None and not 1 <= self.nodes_per_round <= plan.node:
            raise UserError(
                f"ConsensusConfig.nodes_per_round is {self.nodes_per_round}, must be from 1 to Plan.node ({plan.node}), or "
                f"None for all: try {max(1, plan.node // 2)}"
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
        """Whether there is a convex merge of the nodes' models."""
        return self.share("convex") > 0

    @property
    def starts(self) -> tuple[str, ...]:
        return self.init_from

    def share(self, name: str) -> float:
        """The share of "aggregation", "convex" or "incremental_soup" in a merged model."""
        if self.merge_strategy is not MergeStrategy.INTEGRATED:
            return float(name == self.merge_strategy)
        return dict(self.merge_shares).get(name, 0.0)

    def vote_rule(self, nodes: int) -> VoteRule:
        """The rule of the vote; raises UserError if so many nodes may not be faulty."""
        return VoteRule(num_nodes=nodes, faulty=self.aggregation.faults or None)

    def voted(self, approved: jax.Array) -> jax.Array:
        """The votes [nodes] that the nodes cast: what they have found. A subclass can play nodes that lie."""
        return approved

    def sent(self, agreed: Params, node_params: Params, number: jax.Array) -> Params:
        """The models [nodes, ...] that the nodes send: their own. A subclass can play nodes that lie.

        Args:
          agreed: the model that the round began with.
          node_params: the nodes' models, [nodes, ...].
          number: the step.
        """
        del agreed, number
        return node_params


_CONVEX = "merge_strategy = 'convex', or a share of 'convex' in merge_shares"
_SHARED = ("aggregation", "convex", "incremental_soup")
# Fields that only count with others: (the field, whether it counts, what would make it count).
_DEPENDENT: tuple[tuple[str, Callable[[Settings], bool], str], ...] = (
    ("proximal", lambda c: c.does(StrategyName.CONVEXITY), "'convexity' in strategies"),
    ("groups", lambda c: c.does(StrategyName.HIERARCHICAL), "'hierarchical' in strategies"),
    ("group_every", lambda c: c.does(StrategyName.HIERARCHICAL), "'hierarchical' in strategies"),
    ("lambda_reg", lambda c: c.merges, _CONVEX),
    ("max_iterations", lambda c: c.merges, _CONVEX),
    (
        "merge_shares",
        lambda c: c.merge_strategy is MergeStrategy.INTEGRATED,
        "merge_strategy = 'integrated'",
    ),
)


def _check_used(config: Settings) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
    for name, counts, why in _DEPENDENT:
        value = getattr(config, name)
        if value != defaults[name] and not counts(config):
            raise UserError(
                f"ConsensusConfig.{name} is {value!r}, and has no effect without {why}: set that, or leave it out"
            )


def _check_fragments(config: Settings) -> None:
    if config.fragments < 1 or config.every % config.fragments:
        fitting = max(n for n in range(1, max(1, min(config.fragments, config.every)) + 1) if config.every % n == 0)
        raise UserError(
            f"ConsensusConfig.fragments is {config.fragments}, must be at least 1 and divide ConsensusConfig.every ({config.every}): "
            f"try {fitting}"
        )
    soups = [
        f"the strategy '{name}'" for name in ("incremental_soup", "hierarchical") if config.does(StrategyName(name))
    ]
    whole_model_options = [
        *soups,
        *([f"merge_strategy = '{config.merge_strategy}'"] * (config.merge_strategy is not MergeStrategy.AGGREGATION)),
    ]
    whole_model_options += [f"voting_strategy = '{config.voting_strategy}'"] * config.votes
    if whole_model_options and config.fragments > 1:
        raise UserError(
            f"ConsensusConfig.fragments is {config.fragments}, and {whole_model_options[0]} needs rounds of the whole model: leave one of them out"
        )


def _check_shares(config: Settings) -> None:
    names = [name for name, _ in config.merge_shares]
    for name, share in config.merge_shares:
        if name not in _SHARED or names.count(name) > 1 or not 0 <= share < math.inf:
            raise UserError(
                f"ConsensusConfig.merge_shares has {name!r}: {share}, must be each of {', '.join(map(repr, _SHARED))} at most once, "
                "with a share of at least 0: try (('aggregation', 0.5), ('convex', 0.5))"
            )
    if not config.share("aggregation") + config.share("convex") > 0:
        raise UserError(
            "ConsensusConfig.merge_shares gives nothing to 'aggregation' and 'convex', so that no node would have a part: try "
            "(('aggregation', 0.5), ('convex', 0.5))"
        )
    if config.share("incremental_soup") and not config.does(StrategyName.INCREMENTAL_SOUP):
        raise UserError(
            "ConsensusConfig.merge_shares has 'incremental_soup', which is not in ConsensusConfig.strategies: add it there"
        )


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


def _check_frozen(config: Settings) -> None:
    for pattern in config.frozen:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(
                f"ConsensusConfig.frozen has {pattern!r}, must be regular expressions ({error}): try ('embed', '')"
            ) from None


def _check_nodes(config: Settings, nodes: int) -> None:
    if config.frozen and nodes % len(config.frozen):
        nearest = max(n for n in range(1, len(config.frozen) + 1) if nodes % n == 0)
        raise UserError(
            f"ConsensusConfig.frozen has {len(config.frozen)} patterns, whose number must divide Plan.node ({nodes}): try {nearest}"
        )
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
