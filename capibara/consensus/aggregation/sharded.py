"""Aggregation on a mesh, where each device along the nodes' axis has its own node's shard and no other."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import Mesh, PartitionSpec

from capibara.consensus.aggregation import trees
from capibara.consensus.aggregation.blocks import Axes, Exchanged
from capibara.consensus.aggregation.combining import Values
from capibara.consensus.aggregation.report import Report
from capibara.core import tree
from capibara.core.types import PyTree, UserError

Combine = Callable[[Values, jax.Array | None], tuple[list[jax.Array], Report]]
ShardedAggregation = Callable[[PyTree, PyTree | None, jax.Array | None], tuple[PyTree, Report]]


def make(combine: Combine, mesh: Mesh, specs: PyTree, axis: str) -> ShardedAggregation:
    """A function (stacked, reference, key) -> (tree, report) of arrays on a mesh; `Aggregation.sharded` says more.

    Args:
      combine: aggregates the values that a device reads.
      mesh: has `axis`, one position for each node.
      specs: a tree of the PartitionSpecs of one node's arrays.
      axis: name of the nodes' axis.

    Raises:
      UserError: the mesh has no such axis, or a spec has it.
    """
    if axis not in mesh.axis_names:
        raise UserError(f"the mesh has the axes {', '.join(mesh.axis_names)}, must have the nodes' axis {axis!r}")
    nodes = mesh.shape[axis]
    flat = jax.tree.leaves(specs, is_leaf=_is_spec)
    over = [_axes_of(spec) for spec in flat]
    for name, axes in zip(tree.path_names(jax.tree.map(str, specs, is_leaf=_is_spec)), over):
        if axis in axes:
            raise UserError(f"the spec of {name} has the axis {axis!r}, must have others: it is the nodes'")

    def aggregate(
        stacked: PyTree, reference: PyTree | None = None, key: jax.Array | None = None
    ) -> tuple[PyTree, Report]:
        trees.check_stacked(stacked, nodes)
        leaves, structure = jax.tree.flatten(stacked)
        keys = [] if key is None else [key]
        others = trees.references(stacked, reference)

        def local(
            leaves: list[jax.Array], others: list[jax.Array], keys: list[jax.Array]
        ) -> tuple[list[jax.Array], Report]:
            values = Values(
                layout=Exchanged(nodes, axis),
                leaves=[leaf.reshape(-1) for leaf in leaves],
                references=[leaf.reshape(-1) for leaf in others],
                axes=over,
            )
            combined, report = combine(values, keys[0] if keys else None)
            return [new.reshape(leaf.shape[1:]) for new, leaf in zip(combined, leaves)], report

        of_nodes = [PartitionSpec(axis, *spec) for spec in flat]
        everywhere = PartitionSpec()
        in_specs = of_nodes, flat if others else [], [everywhere] * len(keys)
        run = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=(flat, everywhere), check_vma=False)
        combined, report = run(leaves, others, keys)
        return jax.tree.unflatten(structure, combined), report

    return aggregate


def _is_spec(value: object) -> bool:
    return isinstance(value, PartitionSpec)


def _axes_of(spec: PartitionSpec) -> Axes:
    names = (name for part in spec if part for name in ((part,) if isinstance(part, str) else part))
    return tuple(names)
