"""Consensus training: nodes train apart for some steps, then agree on a model, which all go on from.

With an outer optimizer with momentum this is DiLoCo (Douillard et al. 2023, arXiv:2311.08105); with a robust aggregation
some nodes may send anything at all. docs/consensus.md says what each field does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara.config import configurable
from capibara.consensus.aggregation import Aggregation, Mean
from capibara.consensus.compression import Compression
from capibara.consensus.outer import OuterOptimizer, OuterSgd
from capibara.core.types import Batch, Params, PyTree, UserError
from capibara.sharding import NODE_AXIS, Plan
from capibara.training.strategy import NodesStep, Round, Strategy, StrategyStep, weighted


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Nodes:
    """What consensus training carries from step to step.

    Attributes:
      params: the nodes' parameters, [nodes, ...].
      opt_state: of each node's optimizer, [nodes, ...].
      outer: the outer optimizer's state.
      lost: what compression has lost of each node's outer gradient, [nodes, ...]; None: it does not compress.
      masked: bool [nodes], the nodes that the last round masked.
      distances: float32 [nodes], of the nodes from the last round's aggregate.
    """

    params: Params
    opt_state: PyTree
    outer: PyTree
    lost: PyTree | None
    masked: jax.Array
    distances: jax.Array


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Consensus(Strategy):
    """Nodes that train apart and agree on a model every so many steps.

    Attributes:
      every: steps between two rounds, H; the run's last checkpoint holds the model of the last round.
      aggregation: how the nodes' models become one.
      outer: what is done with it; OuterSgd(learning_rate=0.7, momentum=0.9) is DiLoCo's.
      compression: of the outer gradients that nodes send; None: float32.
      seed: of the random keys of pre-aggregations.
    """

    every: int = 50
    aggregation: Aggregation = Aggregation(rule=Mean())
    outer: OuterOptimizer = OuterSgd()
    compression: Compression | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UserError(f"Consensus.every is {self.every}, must be at least 1: try 50")

    def check(self, plan: Plan) -> None:
        if plan.node < 2:
            raise UserError(f"Plan.node is {plan.node}, must be at least 2 for Trainer.strategy (@Consensus()): try 4")
        self.aggregation.check(plan.node)

    def init(self, tx: optax.GradientTransformation, params: Params, nodes: int) -> Nodes:
        def of_each(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (nodes, *jnp.shape(x))), tree)

        return Nodes(
            params=of_each(params),
            opt_state=of_each(tx.init(params)),
            outer=self.outer.init(params),
            lost=None if self.compression is None else of_each(self.compression.init(params)),
            masked=jnp.zeros(nodes, bool),
            distances=jnp.zeros(nodes, jnp.float32),
        )

    def shardings(self, state: PyTree, params: PyTree, opt_state: PyTree) -> Nodes:
        mesh: Mesh = jax.tree.leaves(params)[0].mesh
        everywhere: Any = NamedSharding(mesh, PartitionSpec())
        of_nodes = jax.tree.map(_of_nodes, params)
        return Nodes(
            params=of_nodes,
            opt_state=jax.tree.map(_of_nodes, opt_state),
            outer=optax.tree.map_params(
                self.outer.build(),
                lambda _, of_param: of_param,
                state.outer,
                params,
                transform_non_params=lambda _: everywhere,
            ),
            lost=None if state.lost is None else of_nodes,
            masked=everywhere,
            distances=everywhere,
        )

    def step(self, nodes_step: NodesStep, mesh: Mesh, params: PyTree) -> StrategyStep:
        specs = jax.tree.map(lambda of_param: of_param.spec, params)
        combine = self.aggregation.sharded(mesh, specs, NODE_AXIS)
        received = self._received(mesh, specs)

        def meet(agreed: Params, state: Nodes, number: jax.Array) -> tuple[Params, Nodes]:
            """A round: the next model, and the nodes that begin from it."""
            sent, lost = state.params, state.lost
            if self.compression is not None:
                sent, lost = received(agreed, sent, lost)
            key = jax.random.fold_in(jax.random.key(self.seed), number) if self.aggregation.uses_key else None
            aggregate, report = combine(sent, agreed, key)
            new, outer = self.outer.step(agreed, aggregate, state.outer)
            own = jax.tree.map(lambda x, like: jnp.broadcast_to(x, like.shape), new, state.params)
            own = jax.lax.with_sharding_constraint(own, jax.tree.map(_of_nodes, params))
            return new, Nodes(own, state.opt_state, outer, lost, report.is_masked, report.distances)

        def run(number: jax.Array, agreed: Params, state: Nodes, batch: Batch) -> Round:
            own, opt_state, metrics = nodes_step(state.params, state.opt_state, number, batch)
            state = dataclasses.replace(state, params=own, opt_state=opt_state)
            is_due = (number + 1) % self.every == 0
            agreed, state = jax.lax.cond(is_due, lambda: meet(agreed, state, number), lambda: (agreed, state))
            return Round(agreed, state, weighted(metrics) | _shown(metrics, state))

        return run

    def _received(self, mesh: Mesh, specs: PyTree) -> Callable[..., tuple[Params, PyTree]]:
        """Makes (agreed, nodes' models, lost) -> (their models as others receive them, lost); each shard by itself."""
        compression, nodes = self.compression, jax.tree.map(lambda spec: PartitionSpec(NODE_AXIS, *spec), specs)

        def local(agreed: Params, own: Params, lost: PyTree) -> tuple[Params, PyTree]:
            assert compression is not None
            gradient = jax.tree.map(lambda start, end: (start - end[0]).astype(jnp.float32), agreed, own)
            sent, lost = compression.encode(gradient, jax.tree.map(lambda x: x[0], lost))
            back = compression.decode(sent, gradient)
            models = jax.tree.map(lambda start, x: (start - x).astype(start.dtype), agreed, back)
            return jax.tree.map(lambda x: x[None], (models, lost))

        return jax.shard_map(
            local, mesh=mesh, in_specs=(specs, nodes, nodes), out_specs=(nodes, nodes), check_vma=False
        )


def _of_nodes(of_one: NamedSharding) -> NamedSharding:
    return NamedSharding(of_one.mesh, PartitionSpec(NODE_AXIS, *of_one.spec))


def _shown(metrics: Any, state: Nodes) -> dict[str, jax.Array]:
    """The metrics of each node, and of the last round."""
    nodes = range(len(state.distances))
    found = {f"node_{n}/loss": metrics["loss"][n] for n in nodes}
    found |= {f"node_{n}/distance": state.distances[n] for n in nodes}
    return found | {"masked_nodes": jnp.sum(state.masked).astype(jnp.float32)}
