"""Aggregation: rules and what comes before them, as one configuration."""

from __future__ import annotations

import dataclasses

import jax
from jax.sharding import Mesh

from capibara.config import configurable
from capibara.consensus.aggregation import combining, sharded, trees
from capibara.consensus.aggregation.blocks import Stacked
from capibara.consensus.aggregation.iterative import GeometricMedian
from capibara.consensus.aggregation.krum import Monna
from capibara.consensus.aggregation.mixing import Bucketing, PreAggregation
from capibara.consensus.aggregation.report import Report
from capibara.consensus.aggregation.rules import Rule
from capibara.core.types import PyTree, UserError


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Aggregation:
    """How the trees of n nodes become one, whatever up to `faults` of them hold.

    A node with a value that is not finite is masked: it has no part in the result, counts as one of the faults, and the
    report names it. The result is finite whatever the nodes hold.

    Attributes:
      rule: the robust mean.
      before: pre-aggregations, in their order.
      faults: f, how many nodes may hold anything.
    """

    rule: Rule = GeometricMedian()
    before: tuple[PreAggregation, ...] = ()
    faults: int = 0

    def __post_init__(self) -> None:
        if self.faults < 0:
            raise UserError(f"Aggregation.faults is {self.faults}, must not be negative: 0 trusts every node")
        if isinstance(self.rule, Monna) and any(isinstance(each, Bucketing) for each in self.before):
            raise UserError("Aggregation.before has Bucketing, whose buckets are no nodes for Monna.pivot: use Nnm")

    @property
    def uses_key(self) -> bool:
        """Whether each round needs a random key that no node can foresee."""
        return any(each.uses_key for each in self.before)

    def largest_faults(self, nodes: int) -> int:
        """The breakdown point: the largest f of n nodes that the rule withstands after the pre-aggregations."""
        largest = nodes
        for each in self.before:
            largest = min(largest, each.largest_faults(nodes))
            nodes = each.candidates(nodes)
        return min(largest, self.rule.largest_faults(nodes))

    def check(self, nodes: int) -> None:
        """Raises UserError where the rule does not withstand so many faults, or cannot work on so many nodes."""
        largest = self.largest_faults(nodes)
        names = " after ".join(type(each).__name__ for each in (self.rule, *reversed(self.before)))
        if self.faults > largest:
            raise UserError(
                f"Aggregation.faults is {self.faults}, must be at most {largest} of {nodes} nodes for {names}: lower it, add "
                "nodes, or take a rule with a higher breakdown point (docs/consensus.md)"
            )
        candidates = nodes
        for each in self.before:
            candidates = each.candidates(candidates)
        self.rule.check(candidates, self.faults)

    def __call__(
        self, stacked: PyTree, reference: PyTree | None = None, key: jax.Array | None = None
    ) -> tuple[PyTree, Report]:
        """Aggregates trees that are stacked in one; it can be jitted.

        Args:
          stacked: floating-point arrays [n, ...], as `stack` makes them.
          reference: a tree of arrays [...] from which distances are clipped and CenteredClipping begins, such as the last
            aggregate; it must be finite. None: zero.
          key: random, new in each round; only pre-aggregations that draw need it (`uses_key`).

        Returns:
          A tree of arrays [...] with the nodes' dtypes, and the report.

        Raises:
          UserError: `faults` is beyond the breakdown point; leaves that cannot be aggregated; no key where one is needed.
        """
        nodes = trees.check_stacked(stacked)
        leaves, structure = jax.tree.flatten(stacked)
        values = combining.Values(
            layout=Stacked(nodes),
            leaves=[leaf.reshape(nodes, -1) for leaf in leaves],
            references=[leaf.reshape(-1) for leaf in trees.references(stacked, reference)],
            axes=[()] * len(leaves),
        )
        combined, report = self._combine(values, key)
        whole = [new.reshape(leaf.shape[1:]) for new, leaf in zip(combined, leaves)]
        return jax.tree.unflatten(structure, whole), report

    def sharded(self, mesh: Mesh, specs: PyTree, axis: str = "node") -> sharded.ShardedAggregation:
        """The same aggregation where each device along a mesh axis has the values of its node alone.

        Each device combines a part of the coordinates and then gets the others' results. What is exchanged is at any time a
        block of a leaf: no device ever holds a second copy of its shard, let alone the shards of n nodes.

        Args:
          mesh: has `axis`, with one position for each node; leaves may be sharded over its other axes.
          specs: a tree of the PartitionSpecs of one node's arrays [...].
          axis: name of the nodes' axis.

        Returns:
          (stacked, reference, key) -> (tree, report), as `__call__`, to be jitted. `stacked` has arrays [n, ...] with the
          specs P(axis, *spec); the reference and the result have `specs`, equal on all nodes.

        Raises:
          UserError: `faults` is beyond the breakdown point; the mesh has no such axis, or a spec has it.
        """
        self.check(mesh.shape.get(axis, 1))
        return sharded.make(self._combine, mesh, specs, axis)

    def _combine(self, values: combining.Values, key: jax.Array | None) -> tuple[list[jax.Array], Report]:
        self.check(values.layout.nodes)
        if self.uses_key and key is None:
            raise UserError(
                "Aggregation.before has Bucketing, which needs a key: give a new jax.random.key in each round"
            )
        return combining.combine(values, self.rule, self.before, self.faults, key)
