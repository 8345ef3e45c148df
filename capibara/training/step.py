"""The train step: a pure function of (state, batch), jitted once and donated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from capibara import optim, sharding
from capibara.core import tree
from capibara.core.types import Batch, Params, PyTree
from capibara.models.api import Model, Stats
from capibara.objectives.base import Metrics, Objective, of_cross_entropy
from capibara.sharding import Plan
from capibara.training.base.state import TrainState
from capibara.training.base.strategy import NodesPrograms, Strategy
from capibara.training.privacy.gradient import PrivateGradient
from capibara.training.stability.anomalies import Anomalies
from capibara.training.stability.loss_scale import LossScaling, select

_T = TypeVar("_T")


def make_train_step(
    model: Model,
    tx: optax.GradientTransformation,
    schedule: Callable[[jax.Array], jax.Array],
    plan: Plan,
    mesh: Mesh,
    *,
    z_loss: float = 0.0,
    ema_decay: float | None = None,
    loss_scaling: LossScaling | None = None,
    anomalies: Anomalies | None = None,
    objective: Objective | None = None,
    private: PrivateGradient | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Makes the train step of a run, not jitted.

    Args:
      model: the model; `trained` selects its trained parameters.
      tx: optax chain for the trained parameters, including clipping.
      schedule: updates made -> learning rate, for the metrics.
      plan: accumulation, remat and rules.
      mesh: the mesh of the activations.
      z_loss: coefficient of the squared log normaliser (PaLM uses 1e-4).
      ema_decay: decay of the parameters' moving average, min(ema_decay, (1 + n) / (10 + n)) after n updates; None: none is kept.
      loss_scaling: for float16: scales the loss, and skips updates whose gradients are not all finite.
      anomalies: which other updates are skipped; None: none.
      objective: the objective; None: the cross entropy.
      private: the gradient of the objective with differential privacy; None: without.
    """
    objective = of_cross_entropy(model, z_loss) if objective is None else objective
    gradient = _gradient(objective, plan, mesh) if private is None else private

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        trained, frozen = model.trained(state.params), model.frozen(state.params)
        scale = None if loss_scaling is None else _kept(state.loss_scale).scale / batch["targets"].size
        grads, sums, stats, more = gradient(trained, frozen, batch, state.step, scale)
        with jax.named_scope("optimizer"):
            updates, opt_state = tx.update(grads, state.opt_state, trained)
            trained = optax.apply_updates(trained, updates)
        ema, count = None, optim.updates_made(state.opt_state, state.step)
        if ema_decay is not None:
            # A lower decay in early steps: otherwise the average is mostly initial weights for 1 / (1 - decay) steps.
            decay = jnp.minimum(ema_decay, (1.0 + count) / (10.0 + count))
            ema = optax.incremental_update(trained, state.ema, 1.0 - decay)
        metrics = {
            **objective.checked_metrics(sums, jnp.maximum(sums.weight, 1.0)),
            **more,
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": jnp.asarray(schedule(count), jnp.float32),
            **model.layer_metrics(stats),
        }
        params = tree.joined(trained, frozen)
        new = TrainState(step=state.step + 1, params=params, opt_state=opt_state, ema=ema)
        new, metrics = _settled(state, new, metrics, anomalies or Anomalies(skip_nonfinite=False), loss_scaling)
        if private is not None:  # after the decision to skip, which must not tell of one document
            metrics["loss"] = jnp.where((more["broken_rows"] > 0) & (metrics["tokens"] == 0), jnp.nan, metrics["loss"])
        return new, metrics

    return step


def _gradient(objective: Objective, plan: Plan, mesh: Mesh) -> Callable[..., tuple[Params, PyTree, Stats, Metrics]]:
    """Makes the gradient of a step, as a PrivateGradient; its scale is that of the loss, or None."""
    pipeline, loss_sum = plan.pipeline(mesh), _differentiated(objective, plan)

    def gradient(
        trained: Params, frozen: Params, batch: Batch, step: jax.Array, scale: jax.Array | None
    ) -> tuple[Params, PyTree, Stats, Metrics]:
        with sharding.activate(mesh, plan.rules, pipeline):
            grad = jax.grad(lambda p, micro: loss_sum(tree.joined(p, frozen), micro, step, scale), has_aux=True)
            grads, (sums, stats) = accumulate(grad, trained, batch, plan.micro_batches)
        weight = jnp.maximum(sums.weight, 1.0)
        divisor = weight if objective.divisor is None else objective.divisor(weight, batch)
        divisor = divisor if scale is None else divisor * scale
        return jax.tree.map(lambda g: g / divisor, grads), sums, stats, {}

    return gradient


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
            found = accumulate(lambda p, micro: ((), loss_of(p, frozen, micro)[1]), trained, batch, plan.micro_batches)
        return found[1]

    def gradient(trained: Params, frozen: Params, batch: Batch) -> tuple[Params, jax.Array]:
        grad = jax.grad(lambda p, micro: loss_of(p, frozen, micro), has_aux=True)
        with sharding.activate(mesh, plan.rules, pipeline):
            return accumulate(grad, trained, batch, plan.micro_batches)

    return NodeLoss(sums, gradient)


def make_nodes_step(
    step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]],
    loss: NodeLoss,
    model: Model,
    strategy: Strategy,
    shardings: TrainState,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
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
        one, opt_state = jax.tree.map(lambda x: x[0], (trained, opt_state))
        new, metrics = step(TrainState(number, tree.joined(one, frozen), opt_state, None), batch)
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
        made = strategy.step(programs, mesh, model.trained(of_params))
        new = made(state.step, model.trained(state.params), state.ema, state.opt_state, dict(batch))
        return TrainState(state.step + 1, tree.joined(new.params, frozen), new.state, new.average), new.metrics

    return run


def _differentiated(objective: Objective, plan: Plan) -> Callable[..., tuple[jax.Array, tuple[PyTree, Stats]]]:
    """Makes (params, batch, step, scale or None) -> (the loss times `scale`, (the objective's sums, layer stats))."""

    def loss_sum(
        params: Params, batch: Batch, step: jax.Array, scale: jax.Array | None
    ) -> tuple[jax.Array, tuple[PyTree, Stats]]:
        loss, sums, stats = objective.checked_sums(params, batch, plan.remat_policy, step)
        return loss if scale is None else loss * scale, (sums, jax.lax.stop_gradient(stats))

    return loss_sum


def _settled(
    old: TrainState, new: TrainState, metrics: Metrics, anomalies: Anomalies, scaling: LossScaling | None
) -> tuple[TrainState, Metrics]:
    """The new state, or the old one with the next step number if the update is skipped; with new loss scale and window.

    Each device decides from replicated scalars, so all decide the same.
    """
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    guards: list[jax.Array] = []
    loss_scale, losses = None, None
    if anomalies.skip_nonfinite or scaling is not None:
        guards.append(finite)
    if scaling is not None:
        loss_scale = scaling.after(_kept(old.loss_scale), finite)
        metrics |= {"loss_scale": _kept(old.loss_scale).scale}
    if anomalies.keep_losses:
        window = _kept(old.losses)
        spike, told = anomalies.spike(window, metrics["loss"])
        guards.append(~spike)
        good = finite & ~spike & (metrics["tokens"] > 0)
        losses = anomalies.after(window, metrics["loss"], good)
        metrics |= told
    if not guards:
        return new, metrics
    made = functools.reduce(jnp.logical_and, guards)
    params, opt_state, ema = (
        select(made, getattr(new, name), getattr(old, name)) for name in ("params", "opt_state", "ema")
    )
    settled = TrainState(new.step, params, opt_state, ema, loss_scale, losses)
    return settled, metrics | {"skipped": 1.0 - made.astype(jnp.float32)}


def _kept(part: _T | None) -> _T:
    assert part is not None, "a state has what its run's step needs"
    return part


def accumulate(
    grad: Callable[[Params, Batch], tuple[Params, PyTree]], params: Params, batch: Batch, micro_batches: int
) -> tuple[Params, PyTree]:
    """Sums gradients and losses over micro-batches, so that every real token has the same weight.

    Row r is in micro-batch r % micro_batches, so that rows stay on their devices.
    """
    if micro_batches == 1:
        return grad(params, batch)
    split = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, micro_batches, *x.shape[1:]), 1, 0), dict(batch))

    def add(total: tuple[Params, PyTree], micro: Mapping[str, jax.Array]) -> tuple[tuple[Params, PyTree], None]:
        return jax.tree.map(jnp.add, total, grad(params, micro)), None

    zeros = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype),
        jax.eval_shape(grad, params, jax.tree.map(lambda x: x[0], split)),
    )
    return jax.lax.scan(add, zeros, split)[0]
