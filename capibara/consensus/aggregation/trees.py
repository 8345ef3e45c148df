"""Trees of several nodes as one: the leaves stacked, and checked before anything is compiled."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from capibara.core import tree
from capibara.core.types import PyTree, UserError


def stack(trees: Sequence[PyTree], names: Sequence[str] | None = None) -> PyTree:
    """One tree with arrays [n, ...] from the trees of n nodes.

    Args:
      trees: of one structure and shapes.
      names: of the nodes, for errors; None: node 0, node 1, ...

    Raises:
      UserError: no tree, or one that is not like the first; the message names the node and the leaf.
    """
    if not trees:
        raise UserError("stack has no trees, must have one of each node")
    first = _shapes(trees[0])
    for index, other in enumerate(trees[1:], 1):
        name = names[index] if names else f"node {index}"
        shapes = _shapes(other)
        for leaf in (*first, *shapes):
            want, has = first.get(leaf), shapes.get(leaf)
            if want != has:
                shown = f"{leaf} is {_shown(has)}, must be {_shown(want)}"
                raise UserError(f"{name} has another model: {shown} as on {names[0] if names else 'node 0'}")
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def check_stacked(stacked: PyTree, nodes: int | None = None) -> int:
    """The number of nodes of a stacked tree.

    Args:
      stacked: the tree.
      nodes: how many it must have; None: any number.

    Raises:
      UserError: a leaf that is not floating-point or not of as many nodes.
    """
    names, leaves = tree.path_names(stacked), jax.tree.leaves(stacked)
    if not leaves:
        raise UserError("the tree to aggregate is empty, must have an array")
    for name, leaf in zip(names, leaves):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise UserError(f"{name} is {leaf.dtype}, must be floating-point to be aggregated: leave it out")
        nodes = leaf.shape[0] if nodes is None and leaf.ndim else nodes
        if not leaf.ndim or leaf.shape[0] != nodes or not nodes:
            raise UserError(f"{name} is {_shown((leaf.shape, leaf.dtype))}, must begin with the nodes' axis of {nodes}")
    assert nodes is not None
    return nodes


def references(stacked: PyTree, reference: PyTree | None) -> list[jax.Array]:
    """The leaves of the reference; none where there is no reference.

    Raises:
      UserError: it is not like one node's tree.
    """
    if reference is None:
        return []
    shapes = {name: shape[1:] for name, (shape, _) in _shapes(stacked).items()}
    has = {name: shape for name, (shape, _) in _shapes(reference).items()}
    for name in (*shapes, *has):
        if shapes.get(name) != has.get(name):
            raise UserError(
                f"reference {name} has the shape {has.get(name)}, must be {shapes.get(name)} as on the nodes"
            )
    return jax.tree.leaves(reference)


def _shapes(values: PyTree) -> dict[str, tuple[tuple[int, ...], jnp.dtype]]:
    return {
        name: (jnp.shape(leaf), jnp.result_type(leaf))
        for name, leaf in zip(tree.path_names(values), jax.tree.leaves(values))
    }


def _shown(array: tuple[tuple[int, ...], jnp.dtype] | None) -> str:
    return "missing" if array is None else f"{array[1]}{list(array[0])}"
