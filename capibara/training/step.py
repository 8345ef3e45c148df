"""The train step: a pure function of (state, batch), jitted once and donated."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from capibara.models.api import Model
from capibara.sharding import Plan, activate
from capibara.training.losses import LossSums, cross_entropy
from capibara.training.state import TrainState
from capibara.types import Batch, Params

Metrics = dict[str, jax.Array]


def make_train_step(
    model: Model,
    tx: optax.GradientTransformation,
    schedule: Callable[[jax.Array], jax.Array],
    plan: Plan,
    mesh: Mesh,
    *,
    z_loss: float = 0.0,
    ema_decay: float | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step of a run, still to be jitted.

    Args:
      model: gives hidden states and head.
      tx: optax chain, clipping included.
      schedule: step -> learning rate, for the metrics.
      plan: accumulation, remat and rules.
      mesh: where activations are constrained to.
      z_loss: coefficient of the squared log normaliser (PaLM uses 1e-4).
      ema_decay: decay of the parameters' moving average, min(ema_decay, (1 + step) / (10 + step)); None: none is kept.
    """

    def loss_sum(params: Params, batch: Batch) -> tuple[jax.Array, LossSums]:
        hidden = model.hidden(params, batch, plan.remat)
        return cross_entropy(hidden, model.head(params), batch["targets"], batch["weights"], z_loss=z_loss)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        with activate(mesh, plan.rules):
            grads, sums = accumulate(jax.grad(loss_sum, has_aux=True), state.params, batch, plan.accumulation)
        tokens = jnp.maximum(sums.weight, 1.0)
        grads = jax.tree.map(lambda g: g / tokens, grads)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = None
        if ema_decay is not None:
            # A young average forgets faster, else it is mostly the initial parameters for 1 / (1 - decay) steps.
            decay = jnp.minimum(ema_decay, (1.0 + state.step) / (10.0 + state.step))
            ema = optax.incremental_update(params, state.ema, 1.0 - decay)
        metrics = {
            "loss": sums.nll / tokens,
            "z_loss": z_loss * sums.z / tokens,
            "token_accuracy": sums.correct / tokens,
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
            "tokens": sums.weight,
        }
        return TrainState(step=state.step + 1, params=params, opt_state=opt_state, ema=ema), metrics

    return step


def accumulate(
    grad: Callable[[Params, Batch], tuple[Params, LossSums]], params: Params, batch: Batch, micro_batches: int
) -> tuple[Params, LossSums]:
    """Sums gradients and losses over micro-batches, so that each real token weighs the same wherever it lies.

    Row r goes to micro-batch r % micro_batches: each device keeps the rows that it has.
    """
    if micro_batches == 1:
        return grad(params, batch)
    split = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, micro_batches, *x.shape[1:]), 1, 0), dict(batch))

    def add(total: tuple[Params, LossSums], micro: Mapping[str, jax.Array]) -> tuple[tuple[Params, LossSums], None]:
        return jax.tree.map(jnp.add, total, grad(params, micro)), None

    zeros = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype),
        jax.eval_shape(grad, params, jax.tree.map(lambda x: x[0], split)),
    )
    return jax.lax.scan(add, zeros, split)[0]
