"""The train state and its shardings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara import optim, sharding
from capibara.core import tree
from capibara.core.types import Batch, Params, PyTree
from capibara.models.api import Model
from capibara.objectives.base import Metrics
from capibara.training.stability.anomalies import Anomalies, LossWindow
from capibara.training.stability.loss_scale import LossScale, LossScaling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The arrays of a run that a step changes and a checkpoint saves.

    Attributes:
      step: number of completed steps, int32 scalar.
      params: parameters; trained ones are float32.
      opt_state: state of the optax chain for the trained parameters, or what the run's method has in its place.
      ema: exponential moving average of the trained parameters; None: none is kept.
      loss_scale: the loss scale of a float16 run, otherwise None.
      losses: the window of losses of a run that looks for spikes, otherwise None.
    """

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    ema: Params | None
    loss_scale: LossScale | None = None
    losses: LossWindow | None = None

    @property
    def eval_params(self) -> Params:
        """The parameters for evaluation, sampling and export: the moving average if there is one."""
        if self.ema is None or tree.path_names(self.ema) == tree.path_names(self.params):
            return self.params if self.ema is None else self.ema
        return tree.joined(self.ema, self.params)

    def with_params(self, trained: Params, step: int) -> TrainState:
        """The state with other trained parameters, and with its moments.

        If they are those of another step the schedule goes to it, and they are the moving average.
        """
        state = dataclasses.replace(self, params=tree.joined(trained, self.params))
        if step == int(self.step):
            return state
        at = jax.device_put(np.int32(step), self.step.sharding)

        def moved(part: PyTree) -> PyTree:
            if not isinstance(part, optax.ScaleByScheduleState):
                return part
            return part._replace(count=jax.device_put(part.count.dtype.type(step), part.count.sharding))

        opt_state = jax.tree.map(moved, self.opt_state, is_leaf=lambda x: isinstance(x, optax.ScaleByScheduleState))
        ema = None if self.ema is None else jax.tree.map(lambda new, old: jnp.array(new, old.dtype), trained, self.ema)
        return dataclasses.replace(state, step=at, opt_state=opt_state, ema=ema)

    def parts(self) -> dict[str, Any]:
        """The parts of the state by their names in a checkpoint."""
        parts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("loss_scale", "losses"):
            if parts[name] is None:
                del parts[name]  # older checkpoints do not have this part
        return parts


# (state, batch) -> (the state after the step, its metrics).
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


class OptStatePart(NamedTuple):
    """What a training method keeps in the place of the optimizer's state.

    Attributes:
      init: (optimizer, trained parameters) -> the state before the first step (traceable).
      shardings: (its shapes; the shardings of the trained parameters, and of the optimizer's own state) -> its shardings.
    """

    init: Callable[[optax.GradientTransformation, Params], PyTree]
    shardings: Callable[[PyTree, PyTree, PyTree], PyTree]


def init_state(
    model: Model,
    tx: optax.GradientTransformation,
    key: jax.Array,
    *,
    ema: bool,
    loss_scaling: LossScaling | None = None,
    anomalies: Anomalies | None = None,
    opt_part: OptStatePart | None = None,
    pretrained: Params | None = None,
) -> TrainState:
    """A new state (traceable: jit it with the shardings of `state_shardings`).

    Args:
      model, tx, key: the model, its optimizer, and the seed of random initial weights.
      ema: whether it has a moving average of the trained parameters.
      loss_scaling, anomalies: of the run; None: it has no such part.
      opt_part: what the training method keeps in the place of the optimizer's state; None: that state.
      pretrained: pretrained parameters of the model, and of its adapters if there are any; None: random initial weights.
    """
    params = model.init(key) if pretrained is None else _initial(model, pretrained, key)
    trained = model.trained(params)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=tx.init(trained) if opt_part is None else opt_part.init(tx, trained),
        ema=jax.tree.map(jnp.copy, trained) if ema else None,
        loss_scale=None if loss_scaling is None else loss_scaling.start(),
        losses=None if anomalies is None else anomalies.start(),
    )


def _initial(model: Model, pretrained: Params, key: jax.Array) -> Params:
    of_adapter = lambda name: model.config.lora is not None and "_lora/" in name  # noqa: E731
    params = model.adapt(tree.part(pretrained, lambda name: not of_adapter(name)), key)
    return tree.joined(tree.part(pretrained, of_adapter), params)


def state_shardings(
    model: Model,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    rules: sharding.Rules,
    *,
    ema: bool,
    loss_scaling: LossScaling | None = None,
    anomalies: Anomalies | None = None,
    opt_part: OptStatePart | None = None,
) -> TrainState:
    """The NamedSharding of every leaf; optimizer moments are sharded like their parameters.

    Raises:
      UserError: a dimension does not divide over its mesh axes.
    """
    params = sharding.shardings(mesh, rules, model.axes, model.abstract_params)
    trained = model.trained(model.abstract_params)
    opt_axes = optim.state_axes(tx, trained, model.trained(model.axes))
    opt_shapes = jax.eval_shape(tx.init, trained)

    def of_moment(leaf: jax.ShapeDtypeStruct, axes: tuple[str | None, ...]) -> NamedSharding:
        return _fitting(NamedSharding(mesh, rules.spec(axes)), leaf)

    everywhere: PyTree = NamedSharding(mesh, PartitionSpec())
    opt_state = jax.tree.map(of_moment, opt_shapes, opt_axes)
    if opt_part is not None:
        shapes = jax.eval_shape(lambda trained: opt_part.init(tx, trained), trained)
        opt_state = opt_part.shardings(shapes, model.trained(params), opt_state)
    return TrainState(
        step=everywhere,
        params=params,
        opt_state=opt_state,
        ema=model.trained(params) if ema else None,
        loss_scale=None if loss_scaling is None else LossScale(everywhere, everywhere),
        losses=None if anomalies is None or not anomalies.keep_losses else LossWindow(everywhere, everywhere),
    )


def abstract_state(
    model: Model,
    tx: optax.GradientTransformation,
    shardings: TrainState,
    *,
    ema: bool,
    loss_scaling: LossScaling | None = None,
    anomalies: Anomalies | None = None,
    opt_part: OptStatePart | None = None,
) -> TrainState:
    """Shapes, dtypes and shardings of the state, for ahead-of-time compilation and for restoring."""

    def new() -> TrainState:
        key = jax.random.key(0)
        return init_state(model, tx, key, ema=ema, loss_scaling=loss_scaling, anomalies=anomalies, opt_part=opt_part)

    return with_shardings(jax.eval_shape(new), shardings)


def with_new_window(state: TrainState, target: TrainState, anomalies: Anomalies) -> TrainState:
    """A restored state, with an empty window of losses if `target` has one that the checkpoint lacks."""
    if state.losses is not None or target.losses is None:
        return state
    put = jax.tree.map(lambda new, like: jax.device_put(new, like.sharding), anomalies.start(), target.losses)
    return dataclasses.replace(state, losses=put)


def _fitting(of_axes: NamedSharding, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
    """The sharding, replicated in dimensions that do not divide: 8-bit moments may have too few scales for an axis."""
    names = [None if name is None else (name,) if isinstance(name, str) else name for name in of_axes.spec]
    shards = [math.prod(of_axes.mesh.shape[axis] for axis in name or ()) for name in names]
    fits = (n if leaf.shape[i] % shards[i] == 0 else None for i, n in enumerate(of_axes.spec))
    return NamedSharding(of_axes.mesh, PartitionSpec(*fits))


def with_shardings(shapes: PyTree, shardings: PyTree) -> PyTree:
    """The ShapeDtypeStructs of `shapes` with these shardings."""
    return jax.tree.map(lambda s, n: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=n), shapes, shardings)
