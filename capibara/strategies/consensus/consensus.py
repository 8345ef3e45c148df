"""Consensus training: nodes train apart for some steps, then agree on a model, from which all go on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara.config import configurable
from capibara.core.types import Batch, Params, PyTree, UserError
from capibara.objectives.base import Metrics
from capibara.strategies.consensus.agreement import along, quality_of
from capibara.strategies.consensus.fragments import fragments, meeting_in_turn, parts_of, sent_bytes
from capibara.strategies.consensus.hierarchy import check_frozen, group_means, held
from capibara.strategies.consensus.rounds import Nodes, Verdict, meeting, on_nodes
from capibara.strategies.consensus.settings import Settings, StrategyName
from capibara.training.base.strategy import NodesPrograms, Round, Strategy, StrategyStep, of_all, weight_of


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ConsensusConfig(Settings, Strategy):
    """Nodes that train apart and agree on a model every so many steps. `Settings` has its attributes."""

    def init(self, tx: optax.GradientTransformation, params: Params, nodes: int) -> Nodes:
        check_frozen(self.frozen, params)

        def of_each(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (nodes, *jnp.shape(x))), tree)

        return Nodes(
            params=of_each(params),
            opt_state=of_each(tx.init(params)),
            outer=self._outer(params),
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
                drawn=None if self.nodes_per_round is None else jnp.ones(nodes, bool),
            ),
            soup_size=jnp.zeros((), jnp.int32) if self.averages else None,
        )

    def shardings(self, state: PyTree, params: PyTree, opt_state: PyTree) -> Nodes:
        everywhere: PyTree = NamedSharding(jax.tree.leaves(params)[0].mesh, PartitionSpec())
        of_nodes = jax.tree.map(on_nodes, params)
        place = functools.partial(
            optax.tree.map_params, self.outer.build(), lambda _, spec: spec, transform_non_params=lambda _: everywhere
        )
        if self.fragments == 1:
            outer = place(state.outer, params)
        else:
            where = fragments(
                jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.params), self.fragments
            )
            outer = tuple(map(place, state.outer, parts_of(params, where)))
        return Nodes(
            params=of_nodes,
            opt_state=jax.tree.map(on_nodes, opt_state),
            outer=outer,
            lost=None if state.lost is None else of_nodes,
            losses=everywhere,
            verdict=jax.tree.map(lambda _: everywhere, state.verdict),
            soup_size=None if state.soup_size is None else everywhere,
        )

    def _outer(self, params: Params) -> PyTree:
        """The outer optimizer's state: one for each fragment."""
        if self.fragments == 1:
            return self.outer.init(params)
        return tuple(self.outer.init(part) for part in parts_of(params, fragments(params, self.fragments)))

    def restarted(self, state: PyTree, node: jax.Array, params: Params) -> Nodes:
        updated = jax.tree.map(lambda x, new: x.at[node].set(new.astype(x.dtype)), state.params, params)
        return dataclasses.replace(state, params=updated)

    def step(self, nodes: NodesPrograms, mesh: Mesh, params: PyTree) -> StrategyStep:
        meet = (meeting if self.fragments == 1 else meeting_in_turn)(self, nodes, mesh, params)
        specs = jax.tree.map(lambda of_param: of_param.spec, params)
        in_groups = group_means(mesh, specs, self.groups) if self.does(StrategyName.HIERARCHICAL) else None

        def run(number: jax.Array, agreed: Params, average: Params | None, state: Nodes, batch: Batch) -> Round:
            node_params, opt_state, metrics = nodes.step(state.params, state.opt_state, number, batch)
            if self.does(StrategyName.CONVEXITY):
                node_params = _towards(node_params, agreed, self.proximal * metrics["learning_rate"])
            updated = jnp.isfinite(metrics["loss"]) & (metrics.get("skipped", 0.0) == 0)
            weight = jnp.where(updated, weight_of(metrics), 0.0)
            losses = state.losses + jnp.stack([jnp.nan_to_num(metrics["loss"]) * weight, weight], axis=1)
            due = (number + 1) % self.meets_every == 0
            if in_groups is not None:
                meets = ((number + 1) % self.group_every == 0) & ~due
                has_part = quality_of(losses) >= (self.quality_threshold or 0.0)
                node_params = jax.lax.cond(meets, in_groups, lambda node_params, _: node_params, node_params, has_part)
            if self.frozen:
                node_params = held(self.frozen, state.params, node_params)
            state = dataclasses.replace(state, params=node_params, opt_state=opt_state, losses=losses)
            agreed, average, state = jax.lax.cond(
                due, lambda: meet(agreed, average, state, number, batch), lambda: (agreed, average, state)
            )
            shown = _shown(metrics, state) | {
                "bytes_sent": sent_bytes(agreed, self.fragments, (number + 1) // self.meets_every)
            }
            return Round(agreed, state, of_all(metrics) | shown, average)

        return run

    def remarks(self, step: int, metrics: Mapping[str, float]) -> Iterator[str]:
        if step % self.meets_every:
            return
        nodes = [name.removesuffix("/accepted") for name in metrics if name.endswith("/accepted")]
        for name in nodes:
            if not metrics[f"{name}/accepted"] and metrics.get(f"{name}/drawn", 1.0):
                yield f"step {step}: {name} has no part in the round, {_reason(self, metrics, name)}"
        if self.aggregation.faults and (more := -int(metrics["spare_faults"])) > 0:
            yield f"step {step}: {more} more nodes have no part than Aggregation.faults ({self.aggregation.faults})"
        if not (failures := int(metrics["failed_rounds"])):
            return
        score = metrics["consensus_score"]
        line = f"step {step}: no agreement, consensus score {score:.2f} of {self.consensus_threshold:g}"
        if self.votes:
            line = f"{line}, {int(metrics['votes'])} votes of {self.vote_rule(len(nodes)).quorum}"
        yield f"{line}: the nodes go on from the last agreed {'model' if self.fragments == 1 else 'fragment'}"
        if failures > self.max_retries:
            raise UserError(
                f"the nodes did not agree in {failures} rounds in a row, must be at most ConsensusConfig.max_retries "
                f"({self.max_retries}): lower consensus_threshold or quality_threshold, or the nodes' learning rate"
            )


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


def _towards(params: Params, agreed: Params, strength: jax.Array) -> Params:
    """The proximal step of strength [nodes] / 2 * |own - agreed|^2."""

    def step(x: jax.Array, anchor: jax.Array) -> jax.Array:
        share = along(strength, x).astype(x.dtype)
        return (x + share * anchor) / (1 + share)

    return jax.tree.map(step, params, agreed)


def _shown(metrics: Metrics, state: Nodes) -> dict[str, jax.Array]:
    """The metrics of each node, and of the last round."""
    verdict = state.verdict
    asked = len(verdict.accepted) if verdict.drawn is None else jnp.sum(verdict.drawn)
    result: dict[str, Any] = {"consensus_score": jnp.sum(verdict.accepted) / asked, "failed_rounds": verdict.failures}
    result["spare_faults"] = verdict.spare_faults
    columns = {"loss": metrics["loss"], "quality": verdict.quality, "distance": verdict.distances}
    columns |= {"accepted": verdict.accepted}
    if verdict.approved is not None:
        result["votes"], columns["vote"] = jnp.sum(verdict.approved), verdict.approved
    if verdict.drawn is not None:
        columns["drawn"] = verdict.drawn
    if verdict.weights is not None:
        columns["weight"] = verdict.weights
    if state.soup_size is not None:
        result["soup_size"] = state.soup_size
    for name, values in columns.items():
        result |= {f"node_{n}/{name}": values[n] for n in range(len(values))}
    return {name: value.astype(jnp.float32) for name, value in result.items()}
