"""The train step: a pure function of (state, batch), jitted once and donated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from capibara import optim
from capibara.core import tree
from capibara.core.types import Batch
from capibara.models.api import Model
from capibara.objectives.base import Metrics, Objective, of_cross_entropy
from capibara.sharding import Plan
from capibara.training.base.gradient import Gradient, make_gradient
from capibara.training.base.state import Step, TrainState
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
    ema_decay: float | None = None,
    loss_scaling: LossScaling | None = None,
    anomalies: Anomalies | None = None,
    objective: Objective | None = None,
    gradient: Gradient | None = None,
) -> Step:
    """Makes the train step of a run, not jitted.

    Args:
      model: the model; `trained` selects its trained parameters.
      tx: optax chain for the trained parameters, including clipping.
      schedule: updates made -> learning rate, for the metrics.
      plan: accumulation, remat and rules.
      mesh: the mesh of the activations.
      ema_decay: decay of the parameters' moving average, min(ema_decay, (1 + n) / (10 + n)) after n updates; None: none is kept.
      loss_scaling: for float16: scales the loss, and skips updates whose gradients are not all finite.
      anomalies: which other updates are skipped; None: none.
      objective: the objective; None: the cross entropy.
      gradient: its gradient; None: the mean over the batch.
    """
    objective = of_cross_entropy(model, 0.0) if objective is None else objective
    gradient = make_gradient(objective, plan, mesh) if gradient is None else gradient

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        trained, frozen = model.trained(state.params), model.frozen(state.params)
        scale = None if loss_scaling is None else _required(state.loss_scale).scale / batch["targets"].size
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
        return _settled(state, new, metrics, anomalies or Anomalies(skip_nonfinite=False), loss_scaling)

    return step


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
        loss_scale = scaling.after(_required(old.loss_scale), finite)
        metrics |= {"loss_scale": _required(old.loss_scale).scale}
    if anomalies.keep_losses:
        window = _required(old.losses)
        spike, reported = anomalies.spike(window, metrics["loss"])
        guards.append(~spike)
        good = finite & ~spike & (metrics["tokens"] > 0)
        losses = anomalies.after(window, metrics["loss"], good)
        metrics |= reported
    if not guards:
        return new, metrics
    created = functools.reduce(jnp.logical_and, guards)
    params, opt_state, ema = (
        select(created, getattr(new, name), getattr(old, name)) for name in ("params", "opt_state", "ema")
    )
    settled = TrainState(new.step, params, opt_state, ema, loss_scale, losses)
    return settled, metrics | {"skipped": 1.0 - created.astype(jnp.float32)}


def _required(part: _T | None) -> _T:
    assert part is not None, "a state has what its run's step needs"
    return part
