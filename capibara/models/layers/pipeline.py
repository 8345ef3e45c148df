"""Pipeline parallelism: stages of layers along the mesh's stage axis; microbatches pass from stage to stage.

With repeats it is the circular schedule (Megatron's interleaved one, Narayanan et al. 2021, arXiv:2104.04473): each
stage holds several runs of layers and a microbatch passes it once per run, so that a bubble lasts `stages - 1` shorter
runs. It is one program: all stages compute at once (a vmap over the stage axis), then all activations move one stage on
(a roll, which the compiler turns into a collective permute). Differentiation yields the reverse schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from capibara.sharding import Pipeline, constrain

Stage = Callable[[jax.Array, Any, Any], tuple[jax.Array, Any]]
_STAGE = "stage"
_FREE: Any = jax.sharding.PartitionSpec.UNCONSTRAINED


def run(stage: Stage, x: jax.Array, rows: Any, values: Any, shape: Pipeline) -> tuple[jax.Array, Any]:
    """Runs all layers over all rows.

    Args:
      stage: (x, values of consecutive layers, rows) -> (x, statistics with a leading axis of those layers).
      x: [B, T, D]; B divides by the microbatches.
      rows: pytree of [B, ...] arrays.
      values: pytree of [L, ...] parameters in the order of layers; L divides by stages x repeats.
      shape: the pipeline.

    Returns:
      x after the last layer, and the statistics [L, ...] summed over microbatches.
    """
    S, M, R = shape.stages, shape.microbatches, shape.repeats
    # Row r belongs to microbatch r % M, so that each device keeps its rows.
    split = lambda a: jnp.moveaxis(a.reshape(-1, M, *a.shape[1:]), 1, 0)  # noqa: E731
    store, rows = _by_microbatch(split(x)), jax.tree.map(lambda a: _by_microbatch(split(a)), rows)
    # Layer l = (repeat * S + stage) * size + i.
    values = jax.tree.map(lambda v: _on_stages(v.reshape(R, S, -1, *v.shape[1:]).swapaxes(0, 1)), values)
    vmapped = jax.vmap(stage, spmd_axis_name=_STAGE)
    stages = jnp.arange(S)

    def tick(carry: Any, t: jax.Array) -> tuple[Any, None]:
        state, store, totals = carry
        work = t - stages  # index of each stage's current run; outside [0, M * R) the stage is in a bubble
        real = (work >= 0) & (work < M * R)
        microbatch, repeat = work % M, jnp.clip(work // M, 0, R - 1)
        # The first stage takes a new microbatch, or one that returns for the next repeat.
        first = (stages == 0).reshape(S, *[1] * (state.ndim - 1))
        state = _on_stages(jnp.where(first, _piece(store, t % M)[None], state), "batch")
        pick = jax.vmap(_pick, spmd_axis_name=_STAGE)
        mine = jax.tree.map(lambda v: v[:, 0] if R == 1 else pick(v, repeat), values)
        state, stats = vmapped(state, mine, jax.tree.map(lambda a: _on_stages(a[microbatch]), rows))
        state = _on_stages(state, "batch")
        done = (t - (S - 1)) % M
        last = _by_rows(jnp.where(real[-1], state[-1], _piece(store, done)))
        store = _by_microbatch(jax.lax.dynamic_update_index_in_dim(store, last, done, 0))
        totals = jax.tree.map(lambda total, s: _add_real(total, s, real, repeat), totals, stats)
        return (jnp.roll(state, 1, axis=0), store, totals), None

    state = _on_stages(jnp.zeros((S, *store.shape[1:]), x.dtype), "batch")
    item = jax.tree.map(lambda v: v[:, 0], values)
    of_stats = jax.eval_shape(vmapped, state, item, jax.tree.map(lambda a: a[jnp.zeros(S, jnp.int32)], rows))[1]
    totals = jax.tree.map(lambda s: jnp.zeros((R, *s.shape), s.dtype), of_stats)
    (_, store, totals), _ = jax.lax.scan(tick, (state, store, totals), jnp.arange(M * R + S - 1))
    # [R, S, layers of a stage, ...] is the order of layers.
    stats = jax.tree.map(lambda s: s.reshape(-1, *s.shape[3:]), totals)
    return jnp.moveaxis(store, 0, 1).reshape(x.shape), stats


def _on_stages(x: jax.Array, second: Any = _FREE) -> jax.Array:
    """Shards the leading axis over the stage axis and the second by name; the compiler decides the others."""
    return constrain(x, ("act_stage", second, *[_FREE] * (x.ndim - 2)))


def _by_microbatch(x: jax.Array) -> jax.Array:
    """Keeps [M, rows, ...] sharded by rows; else the compiler would gather all rows."""
    return constrain(x, (None, "batch", *[_FREE] * (x.ndim - 2)))


def _piece(store: jax.Array, index: jax.Array) -> jax.Array:
    """One microbatch [rows, ...]."""
    return _by_rows(jax.lax.dynamic_index_in_dim(store, index, keepdims=False))


def _by_rows(piece: jax.Array) -> jax.Array:
    return constrain(piece, ("batch", *[_FREE] * (piece.ndim - 1)))


def _pick(values_R: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(values_R, index, keepdims=False)


def _add_real(total: jax.Array, stats: jax.Array, real: jax.Array, repeat: jax.Array) -> jax.Array:
    """Adds statistics [S, ...] to totals [R, S, ...] at each stage's current repeat, except in bubbles."""
    R, S = total.shape[:2]
    chosen = (jnp.arange(R)[:, None] == repeat[None, :]) & real[None, :]
    # A bubble computes on arbitrary data: `where`, unlike a product, keeps infinities out.
    return total + jnp.where(chosen.reshape(R, S, *[1] * (stats.ndim - 1)), stats[None], 0.0)
