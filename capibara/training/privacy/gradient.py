"""DP-SGD (Abadi et al. 2016, arXiv:1607.00133): the gradient of each document is clipped, and their mean gets noise.

Each document has a row of its own in one step of each pass. So a pass is one Gaussian mechanism, and the promise counts
passes; documents are not sampled at random, which would have to stay secret to hide anything.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara import sharding
from capibara.consensus.privacy import Privacy, normal
from capibara.core import tree
from capibara.core.types import Batch, Params, PyTree
from capibara.models.api import Stats
from capibara.multihost import hosts
from capibara.objectives.base import Metrics, Objective
from capibara.sharding import Plan
from capibara.training.base.gradient import Gradient

NOISE_KEY = "noise_key"  # of a batch: the secret of this start's noise, uint32 [2]


class Summed(NamedTuple):
    """Sums over rows, without those whose loss or gradient is not finite.

    Attributes:
      grads: of the clipped gradients, float32.
      sums: of the objective's.
      stats: of the layers' statistics.
      clipped: rows whose gradient was scaled down.
      broken: rows that are skipped.
    """

    grads: Params
    sums: PyTree
    stats: Stats
    clipped: jax.Array
    broken: jax.Array


def make_private_gradient(objective: Objective, plan: Plan, mesh: Mesh, privacy: Privacy) -> Gradient:
    """Makes the gradient of a step; its batches also have a `NOISE_KEY`.

    Each device group takes its rows one by one and holds all trained parameters and their gradient in float32.

    Args:
      objective: the objective; its sum over a row is divided by the row's weight.
      plan: remat and rules.
      mesh: the mesh of the activations.
      privacy: clips, and adds noise.
    """
    rows = sharding.batch_axes(mesh.shape, plan.rules)
    inner = plan.rules.without(rows)

    of_row = _of_row(objective, plan, privacy)

    def of_rows(trained: Params, frozen: Params, batch: Batch, step: jax.Array) -> Summed:
        each = jax.tree.map(lambda x: x[:, None], dict(batch))

        def add(total: Summed, row: Batch) -> tuple[Summed, None]:
            return jax.tree.map(jnp.add, total, of_row(trained, frozen, row, step)), None

        shapes = jax.eval_shape(of_row, trained, frozen, jax.tree.map(lambda x: x[0], each), step)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return jax.lax.psum(jax.lax.scan(add, zeros, each)[0], rows)

    everywhere = PartitionSpec()
    summed = jax.shard_map(
        of_rows,
        mesh=mesh,
        in_specs=(everywhere, everywhere, sharding.batch_sharding(mesh, plan.rules).spec, everywhere),
        out_specs=everywhere,
        axis_names=sharding.manual_axes(mesh, rows),
        check_vma=False,
    )

    def gradient(
        trained: Params, frozen: Params, batch: Batch, step: jax.Array, scale: jax.Array | None
    ) -> tuple[Params, PyTree, Stats, Metrics]:
        assert scale is None, "Trainer does not allow float16 with privacy"
        documents = {name: value for name, value in batch.items() if name != NOISE_KEY}
        count = documents["targets"].shape[0]
        with sharding.activate(mesh, inner, independent=rows):
            result = summed(trained, frozen, documents, step)
        secret = jax.random.wrap_key_data(batch[NOISE_KEY], impl="threefry2x32")
        with jax.named_scope("noise"):
            grads = _noisy(result.grads, privacy, count, jax.random.fold_in(secret, step))
        grads = jax.tree.map(lambda g, x: g.astype(x.dtype), grads, trained)
        metrics = {"clipped_share": result.clipped / count, "broken_rows": result.broken}
        return grads, result.sums, result.stats, metrics

    return gradient


def _of_row(objective: Objective, plan: Plan, privacy: Privacy) -> Callable[..., Summed]:
    """Makes (trained parameters, frozen ones, a batch of one row, step) -> what that row adds."""

    def of_row(trained: Params, frozen: Params, row: Batch, step: jax.Array) -> Summed:
        def loss_of(params: Params) -> tuple[jax.Array, tuple[PyTree, Stats]]:
            loss, sums, stats = objective.checked_sums(tree.joined(params, frozen), row, plan.remat_policy, step)
            return loss / jnp.maximum(sums.weight, 1.0), (sums, stats)

        (loss, (sums, stats)), grads = jax.value_and_grad(loss_of, has_aux=True)(trained)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        norm = optax.tree.norm(grads)
        good = jnp.isfinite(loss) & jnp.isfinite(norm)
        scale = jnp.minimum(1.0, privacy.clip_norm / jnp.maximum(norm, 1e-30))
        grads = jax.tree.map(lambda g: jnp.where(good, g * scale, 0.0), grads)
        sums, stats = jax.tree.map(lambda x: jnp.where(good, x, jnp.zeros_like(x)), (sums, stats))
        return Summed(grads, sums, stats, (good & (scale < 1)).astype(jnp.float32), (~good).astype(jnp.float32))

    return of_row


def _noisy(total: Params, privacy: Privacy, count: int, key: jax.Array) -> Params:
    """The sum of clipped gradients with noise, divided by the rows of a batch; how many are padding is not revealed."""
    leaves, structure = jax.tree.flatten(total)
    deviation = privacy.noise_multiplier * privacy.clip_norm
    noise = [deviation * normal(jax.random.fold_in(key, at), x.shape) for at, x in enumerate(leaves)]
    return jax.tree.unflatten(structure, [(x + n) / count for x, n in zip(leaves, noise, strict=True)])


def noise_key(mesh: Mesh) -> jax.Array:
    """A new secret for the noise, on all devices: process 0 draws it from the operating system. It is in no file."""
    drawn = hosts.of_first(lambda: [secrets.randbits(32) for _ in range(2)])
    key = np.array(drawn, np.uint32)
    return jax.make_array_from_callback(key.shape, key_sharding(mesh), lambda index: key[index])


def key_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a `NOISE_KEY`."""
    return NamedSharding(mesh, PartitionSpec())
