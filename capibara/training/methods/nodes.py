"""Nodes of one mesh that train apart and come together by rounds (`Trainer.strategy`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from capibara import sharding
from capibara.core import tree
from capibara.core.types import Batch, Params, PyTree, UserError
from capibara.data.sources.sources import CombinedSource, Rows
from capibara.models.api import Model
from capibara.objectives.base import Metrics, Normalization, Objective, of_cross_entropy
from capibara.sharding import Plan
from capibara.training.base.gradient import accumulate
from capibara.training.base.options import InitWith, RunOptions
from capibara.training.base.state import OptStatePart, Step, TrainState
from capibara.training.base.strategy import NodesPrograms, Strategy
from capibara.training.methods.hooks import Hooks
from capibara.training.methods.method import Method, OwnWeights, StepParts, check_rounds
from capibara.training.stability.anomalies import OnSpike


@dataclasses.dataclass(frozen=True)
class Nodes(Method):
    """Each node makes its own updates; the strategy makes one model of theirs.

    Attributes:
      strategy: brings the nodes together.
    """

    field: ClassVar[str] = "strategy"
    has_nodes: ClassVar[bool] = True

    strategy: Strategy

    @property
    def configured(self) -> object:
        return self.strategy

    def unsupported(self, options: RunOptions) -> Mapping[str, bool]:
        return {
            "Trainer.ema_decay": options.ema_decay is not None,
            "Trainer.loss": options.loss is not None,
            "Trainer.loss_normalization": options.loss_normalization is not Normalization.TOKENS,
            "Trainer.init_with = 'state'": options.init_with is InitWith.STATE,
            "Anomalies.skip_nonfinite = False": not options.anomalies.skip_nonfinite,
            "Anomalies.on_spike": options.anomalies.on_spike is not OnSpike.OFF,
            f"{type(options.model).__name__}.dtype = 'float16'": options.model.dtype == "float16",
            "Plan.stage": options.plan.axes["stage"] != 1,
        }

    def check(self, options: RunOptions) -> None:
        super().check(options)
        self._check_own_weights(options)
        self.strategy.check(options.plan)
        source, nodes, name = options.dataset.source, options.plan.node, type(self.strategy).__name__
        if isinstance(source, CombinedSource) and source.rows is Rows.APART and nodes % len(source.sources):
            raise UserError(
                f"CombinedSource.sources has {len(source.sources)} sources with rows = 'apart', whose number must divide Plan.node "
                f"({nodes}), so that each node has one: set Plan.node = {len(source.sources)}"
            )
        every = self.strategy.round_steps
        check_rounds(options, every, name)
        if options.evaluation.patience is not None and options.evaluation.every % every:
            raise UserError(
                f"Evaluation.every ({options.evaluation.every}) must be a multiple of the {every} steps of a round "
                f"(@{name}()) with Evaluation.patience: between rounds the model does not change: try {every}"
            )

    def _check_own_weights(self, options: RunOptions) -> None:
        """Raises UserError if nodes have initial weights of their own that would have no effect."""
        name, paths = self.own_weights
        if not paths:
            return
        if options.init_from is None:
            raise UserError(
                f"{name} is set and Trainer.init_from is None: set that to the model from which the others were made, or to the "
                f"first of them ({paths[0]!r})"
            )
        if options.model.lora is not None:
            raise UserError(
                f"{name} is not supported with adapters: leave it out, or set {type(options.model).__name__}.lora = None"
            )

    @property
    def averages(self) -> bool:
        return self.strategy.averages

    def opt_part(self, plan: Plan) -> OptStatePart | None:
        def init(tx: optax.GradientTransformation, trained: Params) -> PyTree:
            return self.strategy.init(tx, trained, plan.node)

        return OptStatePart(init, self.strategy.shardings)

    @property
    def own_weights(self) -> OwnWeights:
        return OwnWeights(f"{type(self.strategy).__name__}.init_from", self.strategy.starts)

    def with_own_weights(
        self, plan: Plan, state: TrainState, loads: Sequence[Callable[[], Params]], shardings: TrainState
    ) -> TrainState:
        """The nodes take the models in turn."""
        if not loads:
            return state
        started, nodes = self.restarted(shardings), state.opt_state
        for index, load in enumerate(loads):
            params = load()
            for node in range(index, plan.node, len(loads)):
                nodes = started(nodes, jnp.int32(node), params)
            del params  # before the next one comes
        return dataclasses.replace(state, opt_state=nodes)

    def restarted(self, shardings: TrainState) -> Callable[[PyTree, jax.Array, Params], PyTree]:
        """A jitted function (nodes, index of a node, trained parameters) -> the nodes, of which one begins with these."""
        return jax.jit(self.strategy.restarted, donate_argnums=0, out_shardings=shardings.opt_state)

    def step(self, parts: StepParts, update: Step) -> Step:
        loss = make_node_loss(parts.model, parts.plan, parts.mesh, parts.objective)
        return make_nodes_step(update, loss, parts.model, self.strategy, parts.shardings)

    def hooks(self, options: RunOptions, trained: Params, status: Callable[[str], None]) -> Hooks:
        del trained, status
        return _NodesHooks(options, self.strategy)


class _NodesHooks(Hooks):
    """Passes on what the strategy says of the steps."""

    def __init__(self, options: RunOptions, strategy: Strategy):
        super().__init__(options)
        self._strategy = strategy

    def remarks(self, step: int, metrics: Mapping[str, float]) -> Iterator[str]:
        return self._strategy.remarks(step, metrics)


class NodeLoss(NamedTuple):
    """The loss of one node on its rows, without dropout; each of (trained parameters, frozen ones, batch).

    Attributes:
      sums: float32 [2], the loss summed over the rows, and its weight.
      gradient: the gradient of that sum, and the sums.
    """

    sums: Callable[[Params, Params, Batch], jax.Array]
    gradient: Callable[[Params, Params, Batch], tuple[Params, jax.Array]]


def make_node_loss(model: Model, plan: Plan, mesh: Mesh, objective: Objective | None = None) -> NodeLoss:
    """Makes the loss of a node, which votes or merges by it.

    Args:
      model: the model.
      plan: accumulation, remat and rules.
      mesh: the mesh of the activations.
      objective: the objective; None: the cross entropy.
    """
    objective = of_cross_entropy(model, 0.0) if objective is None else objective
    pipeline = plan.pipeline(mesh)

    def loss_of(trained: Params, frozen: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        loss, sums, _ = objective.checked_sums(tree.joined(trained, frozen), batch, plan.remat_policy, None)
        return loss, jnp.stack([jax.lax.stop_gradient(loss), sums.weight]).astype(jnp.float32)

    def sums(trained: Params, frozen: Params, batch: Batch) -> jax.Array:
        with sharding.activate(mesh, plan.rules, pipeline):
            result = accumulate(lambda p, micro: ((), loss_of(p, frozen, micro)[1]), trained, batch, plan.micro_batches)
        return result[1]

    def gradient(trained: Params, frozen: Params, batch: Batch) -> tuple[Params, jax.Array]:
        grad = jax.grad(lambda p, micro: loss_of(p, frozen, micro), has_aux=True)
        with sharding.activate(mesh, plan.rules, pipeline):
            return accumulate(grad, trained, batch, plan.micro_batches)

    return NodeLoss(sums, gradient)


def make_nodes_step(
    step: Step,
    loss: NodeLoss,
    model: Model,
    strategy: Strategy,
    shardings: TrainState,
) -> Step:
    """The train step of a run whose nodes train apart, from the step of one of them by itself.

    Args:
      step: as `make_train_step` makes it, without a moving average; it is run on each node's rows.
      loss: as `make_node_loss` makes it.
      model: the model.
      strategy: brings the nodes together.
      shardings: of the run's state.
    """
    of_params = shardings.params
    mesh = jax.tree.leaves(of_params)[0].mesh
    nodes, everywhere = PartitionSpec(sharding.NODE_AXIS), PartitionSpec()

    def on_node(trained: Params, opt_state: PyTree, frozen: Params, number: jax.Array, batch: Batch) -> PyTree:
        item, opt_state = jax.tree.map(lambda x: x[0], (trained, opt_state))
        new, metrics = step(TrainState(number, tree.joined(item, frozen), opt_state, None), batch)
        return jax.tree.map(lambda x: x[None], (model.trained(new.params), new.opt_state, metrics))

    def of_node(call: Callable[..., PyTree]) -> Callable[[Params, Params, Batch], PyTree]:
        def on_node(trained: Params, frozen: Params, batch: Batch) -> PyTree:
            return jax.tree.map(lambda x: x[None], call(jax.tree.map(lambda x: x[0], trained), frozen, batch))

        return by_node(on_node, nodes, everywhere, nodes)

    def by_node(call: Callable[..., PyTree], *specs: PartitionSpec) -> Callable[..., PyTree]:
        axes = sharding.manual_axes(mesh)
        return jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=nodes, axis_names=axes, check_vma=False)

    nodes_step = by_node(on_node, nodes, nodes, everywhere, everywhere, nodes)
    nodes_loss, nodes_gradient = of_node(loss.sums), of_node(loss.gradient)

    def run(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        frozen = model.frozen(state.params)
        programs = NodesPrograms(
            step=lambda trained, opt_state, number, batch: nodes_step(trained, opt_state, frozen, number, batch),
            loss=lambda trained, batch: nodes_loss(trained, frozen, batch),
            gradient=lambda trained, batch: nodes_gradient(trained, frozen, batch),
        )
        created = strategy.step(programs, mesh, model.trained(of_params))
        new = created(state.step, model.trained(state.params), state.ema, state.opt_state, dict(batch))
        return TrainState(state.step + 1, tree.joined(new.params, frozen), new.state, new.average), new.metrics

    return run
