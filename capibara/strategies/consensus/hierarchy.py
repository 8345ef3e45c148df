"""Nodes that meet in groups between the rounds of all (hierarchical federated averaging, Liu et al. 2020, arXiv:1905.06641)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from capibara.core.types import Params, PyTree
from capibara.sharding import NODE_AXIS


def group_means(mesh: Mesh, specs: PyTree, groups: int) -> Callable[[Params, jax.Array], Params]:
    """Makes (models [nodes, ...], has_part bool [nodes]) -> the mean of each node's group, traceable.

    The mean is of the members that have a part and are finite; a group without any keeps its models. Each shard is averaged
    where it lies.

    Args:
      mesh: with the nodes' axis.
      specs: of one model's parameters.
      groups: into which the nodes are cut, in their order; it divides their number.
    """
    nodes = jax.tree.map(lambda spec: PartitionSpec(NODE_AXIS, *spec), specs)
    size = mesh.shape[NODE_AXIS] // groups
    members = [list(range(start, start + size)) for start in range(0, groups * size, size)]
    others = tuple(axis for axis in mesh.axis_names if axis != NODE_AXIS)

    def local(own: Params, has_part: jax.Array) -> Params:
        broken = sum(jnp.sum(~jnp.isfinite(x)) for x in jax.tree.leaves(own))
        is_used = (jax.lax.psum(broken, others) == 0) & has_part[jax.lax.axis_index(NODE_AXIS)]
        counts = is_used.astype(jnp.float32)
        count = jax.lax.psum(counts, NODE_AXIS, axis_index_groups=members)

        def mean(x: jax.Array) -> jax.Array:
            used = jnp.where(counts > 0, x, jnp.zeros_like(x)).astype(jnp.float32)
            total = jax.lax.psum(used, NODE_AXIS, axis_index_groups=members)
            return jnp.where(count > 0, total / jnp.maximum(count, 1.0), x).astype(x.dtype)

        return jax.tree.map(mean, own)

    return jax.shard_map(local, mesh=mesh, in_specs=(nodes, PartitionSpec()), out_specs=nodes, check_vma=False)
