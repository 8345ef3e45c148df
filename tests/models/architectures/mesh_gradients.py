"""Random parameters of a model, and its loss and gradients on a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara import sharding


def random_params(model, seed=0):
    """All parameters random: zero biases and unit scales would hide mistakes."""
    keys = iter(jax.random.split(jax.random.key(seed), max(100, len(jax.tree.leaves(model.abstract_params)))))
    return jax.tree.map(lambda s: jax.random.normal(next(keys), s.shape) * 0.3, model.abstract_params)


def on_mesh(model, batch, plan, devices):
    """A loss of all logits, and its gradients, as the devices of a plan compute them together."""
    mesh = sharding.make_mesh(plan, devices)
    spread = sharding.shardings(mesh, plan.rules, model.axes, model.abstract_params)

    def loss(params, batch):
        with sharding.activate(mesh, plan.rules):
            logits = model.logits(params, sharding.balanced(batch))
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1))

    params = jax.device_put(random_params(model), spread)
    rows = sharding.global_batch(sharding.batch_sharding(mesh, plan.rules), batch)
    return jax.device_get(jax.jit(jax.value_and_grad(loss))(params, rows))
