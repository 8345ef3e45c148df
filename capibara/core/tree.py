"""Names, masks and sizes over pytrees of arrays.

A leaf's name is its path with slashes: params["layers"]["mlp"]["kernel"] is "layers/mlp/kernel".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from capibara.core.types import AxisNames, ParamAxes, Params, PyTree

if TYPE_CHECKING:
    import jax

LayersOf = Mapping[str, Sequence[int]]
"""Module of a layer -> the numbers of the layers that have it, for the modules that some layers lack."""


def branch(params: Params, *names: str) -> Params:
    """The parameters of the module with this path."""
    for name in names:
        value = params[name]
        assert isinstance(value, Mapping), f"{'/'.join(names)} is no module"
        params = value
    return params


def leaf(params: Params, *names: str) -> jax.Array:
    """The parameter with this path."""
    value = branch(params, *names[:-1])[names[-1]]
    assert not isinstance(value, Mapping), f"{'/'.join(names)} is no parameter"
    return value


def axes(tree: ParamAxes, *names: str) -> AxisNames:
    """The logical axes of the parameter with this path."""
    value = branch_axes(tree, *names[:-1])[names[-1]]
    assert isinstance(value, tuple), f"{'/'.join(names)} is no parameter"
    return value


def branch_axes(tree: ParamAxes, *names: str) -> ParamAxes:
    """The logical axes of the parameters of the module with this path."""
    for name in names:
        value = tree[name]
        assert not isinstance(value, tuple), f"{'/'.join(names)} is no module"
        tree = value
    return tree


def path_names(tree: PyTree) -> list[str]:
    """The name of every leaf, in the order of jax.tree.leaves."""
    import jax

    return [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def layer_numbers(name: str, layers: LayersOf, count: int) -> Sequence[int]:
    """The numbers of the `count` layers that have a stacked parameter: "layers/mlp/up" is of the module "mlp"."""
    module = name.rpartition("layers/")[2].partition("/")[0]
    return layers.get(module, range(count))


def of_layer(
    values: Any, number: int, layers: LayersOf, depth: Callable[[Any], int], pick: Callable[[Any, int], Any]
) -> dict[str, Any]:
    """The parameters of one layer.

    Args:
      values: nested dicts of all layers' parameters.
      number: of the layer.
      layers: of the modules that some layers lack.
      depth: (a part of `values`) -> the number of layers that have it, which are the first ones of its module.
      pick: (the leaf of all layers, index) -> that of one.
    """
    result = {}
    for name, value in values.items():
        numbers = layers.get(name, range(number + 1))
        rank = numbers.index(number) if number in numbers else -1
        if 0 <= rank < depth(value):
            inside = isinstance(value, dict)
            result[name] = of_layer(value, rank, {}, depth, pick) if inside else pick(value, rank)
    return result


def map_with_names(fn: Callable[[str, Any], Any], tree: PyTree) -> PyTree:
    """A tree like `tree` with `fn(name, leaf)` in place of each leaf."""
    import jax

    return jax.tree_util.tree_map_with_path(lambda path, leaf: fn(_name(path), leaf), tree)


def is_axes(x: object) -> bool:
    """Whether `x` is one parameter's tuple of logical axis names (and not a container of parameters)."""
    return isinstance(x, tuple) and not hasattr(x, "_fields") and all(a is None or isinstance(a, str) for a in x)


def byte_count(tree: PyTree) -> int:
    """Bytes of all leaves: arrays or jax.ShapeDtypeStruct, counted whole however they are sharded."""
    import jax

    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def param_count(tree: PyTree) -> int:
    """Elements of all leaves: arrays or jax.ShapeDtypeStruct."""
    import jax

    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def part(tree: Any, keep: Callable[[str], bool], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dicts whose full name `keep` accepts; dicts that would be empty are omitted."""
    inner = {
        key: part(value, keep, f"{prefix}{key}/") if isinstance(value, dict) else value
        for key, value in tree.items()
        if isinstance(value, dict) or keep(prefix + key)
    }
    return {key: value for key, value in inner.items() if not isinstance(value, dict) or value}


def joined(first: Any, second: Any) -> Any:
    """Merges two nested dicts; where both have an entry, the first one's is kept."""
    if not isinstance(first, dict) or not second:
        return first
    return {key: joined(first[key], second.get(key)) if key in first else second[key] for key in {**first, **second}}


def nested(values: Mapping[str, object]) -> dict[str, Any]:
    """Nested dicts from a flat mapping of names with slashes to leaves."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        *owners, last = name.split("/")
        inner = result
        for owner in owners:
            inner = inner.setdefault(owner, {})
        inner[last] = value
    return result


def _name(path: tuple[object, ...]) -> str:
    import jax

    return jax.tree_util.keystr(path, simple=True, separator="/")
