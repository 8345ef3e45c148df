"""Groups of nodes: they meet between the rounds of all (hierarchical federated averaging, Liu et al. 2020, arXiv:1905.06641).

And each may hold parts of the model fixed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from capibara.core import tree
from capibara.core.types import Params, PyTree, UserError
from capibara.sharding import NODE_AXIS
from capibara.strategies.consensus.agreement import along


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

    def local(node_params: Params, has_part: jax.Array) -> Params:
        broken = sum(jnp.sum(~jnp.isfinite(x)) for x in jax.tree.leaves(node_params))
        is_used = (jax.lax.psum(broken, others) == 0) & has_part[jax.lax.axis_index(NODE_AXIS)]
        counts = is_used.astype(jnp.float32)
        count = jax.lax.psum(counts, NODE_AXIS, axis_index_groups=members)

        def mean(x: jax.Array) -> jax.Array:
            used = jnp.where(counts > 0, x, jnp.zeros_like(x)).astype(jnp.float32)
            total = jax.lax.psum(used, NODE_AXIS, axis_index_groups=members)
            return jnp.where(count > 0, total / jnp.maximum(count, 1.0), x).astype(x.dtype)

        return jax.tree.map(mean, node_params)

    return jax.shard_map(local, mesh=mesh, in_specs=(nodes, PartitionSpec()), out_specs=nodes, check_vma=False)


def check_frozen(patterns: Sequence[str], params: Params) -> None:
    """Raises UserError if a pattern is in no parameter's name."""
    names = tree.path_names(params)
    for pattern in patterns:
        if pattern and not any(re.search(pattern, name) for name in names):
            raise UserError(
                f"ConsensusConfig.frozen has {pattern!r}, which is in no trained parameter's name: take a part of one, such as {names[0]!r}"
            )


def held(patterns: Sequence[str], before: Params, after: Params) -> Params:
    """The models [nodes, ...] after a step, without what it has changed in frozen parameters (traceable).

    Args:
      patterns: of the parameters' names; the nodes are cut into as many equal groups, in their order. Empty: none.
      before, after: the models.
    """
    nodes = len(jax.tree.leaves(after)[0])
    of_nodes = [pattern for pattern in patterns for _ in range(nodes // len(patterns))]

    def hold(name: str, value: jax.Array, start: jax.Array) -> jax.Array:
        is_held = np.array([bool(pattern and re.search(pattern, name)) for pattern in of_nodes])
        return jnp.where(along(jnp.asarray(is_held), value), start, value) if is_held.any() else value

    names = jax.tree.unflatten(jax.tree.structure(after), tree.path_names(after))
    return jax.tree.map(hold, names, after, before)
