"""Consensus training: nodes train apart for some steps, then agree on a model, from which all go on.

With an outer optimizer with momentum this is DiLoCo (Douillard et al. 2023, arXiv:2311.08105); with a robust aggregation
some nodes may send anything at all. docs/consensus.md says what each field does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara.config import configurable
from capibara.consensus.compression import Compression
from capibara.core.types import Batch, Params, PyTree, UserError
from capibara.objectives.base import Metrics
from capibara.sharding import NODE_AXIS, Plan
from capibara.strategies.agreement import Agreement, along, quality_of
from capibara.training.strategy import NodesStep, Round, Strategy, StrategyStep, of_all, weight_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verdict:
    """The last round, as all nodes saw it.

    Attributes:
      quality: float32 [nodes], as Agreement.quality_threshold defines it; -1 of a node that made no update.
      accepted: bool [nodes], the nodes that had a part in the aggregate.
      distances: float32 [nodes], of the nodes from the aggregate; -1 of those that have no part in it.
      failures: int32, failed rounds in a row up to the last one.
      spare_faults: int32, nodes that may be faulty besides those that had no part; below 0: more than the rule withstands.
    """

    quality: jax.Array
    accepted: jax.Array
    distances: jax.Array
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
    """

    params: Params
    opt_state: PyTree
    outer: PyTree
    lost: PyTree | None
    losses: jax.Array
    verdict: Verdict


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ConsensusConfig(Agreement, Strategy):
    """Nodes that train apart and agree on a model every so many steps.

    In a round a node is accepted if it made an update since the last one, its quality reaches the threshold and the
    aggregation does not mask it. All nodes go on from the agreed model, those too that were not accepted. `Agreement` has
    the other attributes.

    Attributes:
      every: steps between two rounds, H; the run's steps are a multiple of it.
      compression: what 8 or 4 bits lose of the outer gradients that nodes send; on one mesh they travel in float32 all the
        same. None: nothing is lost.
    """

    every: int = 50
    compression: Compression | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every < 1:
            raise UserError(f"ConsensusConfig.every is {self.every}, must be at least 1: try 50")

    @property
    def round_steps(self) -> int:
        return self.every

    def check(self, plan: Plan) -> None:
        if plan.node < 2:
            raise UserError(
                f"Plan.node is {plan.node}, must be at least 2 for Trainer.strategy (@{type(self).__name__}()): try 4"
            )
        self.aggregation.check(plan.node)

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
                failures=jnp.zeros((), jnp.int32),
                spare_faults=jnp.asarray(self.aggregation.faults, jnp.int32),
            ),
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
        )

    def step(self, nodes_step: NodesStep, mesh: Mesh, params: PyTree) -> StrategyStep:
        meet = self._round(mesh, params)

        def run(number: jax.Array, agreed: Params, state: Nodes, batch: Batch) -> Round:
            own, opt_state, metrics = nodes_step(state.params, state.opt_state, number, batch)
            updated = jnp.isfinite(metrics["loss"]) & (metrics.get("skipped", 0.0) == 0)
            weight = jnp.where(updated, weight_of(metrics), 0.0)
            losses = state.losses + jnp.stack([jnp.nan_to_num(metrics["loss"]) * weight, weight], axis=1)
            state = dataclasses.replace(state, params=own, opt_state=opt_state, losses=losses)
            due = (number + 1) % self.every == 0
            agreed, state = jax.lax.cond(due, lambda: meet(agreed, state, number), lambda: (agreed, state))
            return Round(agreed, state, of_all(metrics) | _shown(metrics, state.verdict))

        return run

    def _round(self, mesh: Mesh, params: PyTree) -> Callable[[Params, Nodes, jax.Array], tuple[Params, Nodes]]:
        """Makes (agreed model, nodes, step) -> the next agreed model, and the nodes, which go on from it."""
        specs = jax.tree.map(lambda of_param: of_param.spec, params)
        combine, received = self.aggregation.sharded(mesh, specs, NODE_AXIS), self._received(mesh, specs)

        def meet(agreed: Params, state: Nodes, number: jax.Array) -> tuple[Params, Nodes]:
            quality = quality_of(state.losses)
            sent, lost = self.sent(agreed, state.params, number), state.lost
            if lost is not None:
                sent, lost = received(agreed, sent, lost)
            new = self.settle(combine, agreed, sent, state.outer, quality, number, len(quality))
            own = jax.tree.map(lambda x, like: jnp.broadcast_to(x, like.shape), new.params, state.params)
            failures = jnp.where(new.succeeds, 0, state.verdict.failures + 1)
            verdict = Verdict(quality, new.accepted, new.distances, failures, new.spare_faults)
            # What was lost of a gradient that had no effect would be added to one that has.
            kept = new.accepted & new.succeeds
            lost = jax.tree.map(lambda x: jnp.where(along(kept, x), x, 0.0), lost)
            opt_state = jax.tree.map(_finite, state.opt_state)
            return new.params, Nodes(
                jax.lax.with_sharding_constraint(own, jax.tree.map(_of_nodes, params)),
                opt_state,
                new.outer,
                lost,
                jnp.zeros_like(state.losses),
                verdict,
            )

        return meet

    def _received(self, mesh: Mesh, specs: PyTree) -> Callable[..., tuple[Params, PyTree]]:
        """Makes (agreed, nodes' models, lost) -> (what few bits leave of the models, lost); each shard by itself."""
        nodes = jax.tree.map(lambda spec: PartitionSpec(NODE_AXIS, *spec), specs)

        def local(agreed: Params, own: Params, lost: PyTree) -> tuple[Params, PyTree]:
            compression = self.compression
            assert compression is not None
            gradient = jax.tree.map(lambda start, end: start.astype(jnp.float32) - end[0], agreed, own)
            sent, lost = compression.encode(gradient, jax.tree.map(lambda x: x[0], lost))
            back = compression.decode(sent, gradient)
            models = jax.tree.map(lambda start, x: (start - x).astype(start.dtype), agreed, back)
            return jax.tree.map(lambda x: x[None], (models, lost))

        return jax.shard_map(
            local, mesh=mesh, in_specs=(specs, nodes, nodes), out_specs=(nodes, nodes), check_vma=False
        )

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
                yield f"step {step}: {name} has no part in the round, {self._reason(metrics, name)}"
        if self.aggregation.faults and (more := -int(metrics["spare_faults"])) > 0:
            yield f"step {step}: {more} more nodes have no part than Aggregation.faults ({self.aggregation.faults})"
        if not (failures := int(metrics["failed_rounds"])):
            return
        score = metrics["consensus_score"]
        line = f"step {step}: no agreement, consensus score {score:.2f} of {self.consensus_threshold:g}"
        yield f"{line}: the nodes go on from the last agreed model"
        if failures > self.max_retries:
            raise UserError(
                f"the nodes did not agree in {failures} rounds in a row, must be at most ConsensusConfig.max_retries "
                f"({self.max_retries}): lower consensus_threshold or quality_threshold, or the nodes' learning rate"
            )

    def _reason(self, metrics: Mapping[str, float], name: str) -> str:
        quality = metrics[f"{name}/quality"]
        if quality < 0:
            return "it made no update: its loss or gradients were never finite"
        if self.quality_threshold is not None and quality < self.quality_threshold:
            return f"its quality {quality:.2f} is below {self.quality_threshold:g}"
        return "its parameters are not finite, or too far from all others"


def _finite(x: jax.Array) -> jax.Array:
    """Moments without what is not finite, so that a node that was not accepted can recover."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _of_nodes(of_one: NamedSharding) -> NamedSharding:
    return NamedSharding(of_one.mesh, PartitionSpec(NODE_AXIS, *of_one.spec))


def _shown(metrics: Metrics, verdict: Verdict) -> dict[str, jax.Array]:
    """The metrics of each node, and of the last round."""
    found: dict[str, Any] = {"consensus_score": jnp.mean(verdict.accepted), "failed_rounds": verdict.failures}
    found["spare_faults"] = verdict.spare_faults
    columns = {"loss": metrics["loss"], "quality": verdict.quality, "distance": verdict.distances}
    columns |= {"accepted": verdict.accepted}
    for name, values in columns.items():
        found |= {f"node_{n}/{name}": values[n] for n in range(len(values))}
    return {name: value.astype(jnp.float32) for name, value in found.items()}
