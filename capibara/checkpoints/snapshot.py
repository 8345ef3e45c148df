"""Copies of a state, to be written while training goes on."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara.core.types import PyTree


def snapshot(arrays: PyTree) -> tuple[PyTree, jax.Array]:
    """Copies of arrays that outlive them, under way when this returns; and whether each has only finite numbers.

    On TPU and GPU the copies are in the host's memory: the HBM has no room for a second state.
    """
    finite = all_finite(arrays)
    if next(iter(jax.tree.leaves(arrays)[0].sharding.device_set)).platform == "cpu":
        return _copied(arrays), finite
    hosts = jax.tree.map(lambda x: x.sharding.with_memory_kind("pinned_host"), arrays)
    return jax.device_put(arrays, hosts, may_alias=False), finite


@jax.jit
def _copied(arrays: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, arrays)


@jax.jit
def all_finite(arrays: PyTree) -> jax.Array:
    """Whether each array has only finite numbers, bool [arrays]."""
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(arrays)])
