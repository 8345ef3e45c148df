"""The layout of parameters that generation reads: unstacked layers, matrices in the compute dtype."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax

from capibara import sharding
from capibara.core import tree
from capibara.core.types import ParamAxes, Params, PyTree
from capibara.kernels import lookup_tables
from capibara.kernels.matmul.quantized import Quantization
from capibara.models.parts.config import TransformerConfig

Axes = tuple[str, ...]
Convert = Callable[[Callable[[jax.Array], Any], jax.Array], Any]
"""Called as convert(function, array) for one array after the other; returns function(array)."""


def served(config: TransformerConfig, axes: ParamAxes, params: Params, convert: Convert) -> Params:
    """The parameters in the layout that generation reads fastest.

    Layers are unstacked, since a program that unrolls them would copy each one out of a stack; matrices are in the
    compute dtype. Results are the same.

    Args:
      config: of the model.
      axes: logical axes of `params`.
      params: parameters as training has them.
      convert: calls the conversion of each array.
    """

    def each(of_array: Callable, axes: PyTree, values: PyTree) -> Any:
        item = lambda names, x: convert(functools.partial(of_array, config, names), x)  # noqa: E731
        return jax.tree.map(item, axes, values, is_leaf=tree.is_axes)

    stacks: list[PyTree] = []
    rest_axes, rest = (with_layers(part, stacks.append) for part in (axes, params))
    of_all = each(_of_stack, *stacks)
    layers = _each_layer(config, of_all)
    if "decoder" in params:
        arrays = each(_of_array, rest_axes, rest)
        return arrays | {"decoder": arrays["decoder"] | {"layers": layers}}
    table = each(_of_table, rest_axes.pop("embedding"), rest.pop("embedding"))
    return each(_of_array, rest_axes, rest) | {"embedding": table, "layers": layers}


def served_axes(config: TransformerConfig, axes: ParamAxes, abstract_params: Params) -> ParamAxes:
    """The logical axes of the result of `served`, where no matrix is transposed."""

    def of_each(layers: PyTree) -> tuple[Params, ...]:
        stacks: list[PyTree] = []
        with_layers(abstract_params, stacks.append)
        of_all = jax.tree.map(lambda names, x: (names[1:],) * x.shape[0], layers, *stacks, is_leaf=tree.is_axes)
        return _each_layer(config, of_all)

    return with_layers(axes, of_each)


def computed(config: TransformerConfig, axes: ParamAxes, params: Params) -> Params:
    """The parameters, with those that every use casts to the compute dtype cast already."""
    return jax.tree.map(functools.partial(_computed, config), axes, params, is_leaf=tree.is_axes)


def with_layers(params: Mapping[str, Any], fn: Callable[[PyTree], PyTree | None]) -> dict[str, Any]:
    """The parameters, or their axes, with `fn` applied to the decoder's layers; without the layers if it returns None."""
    if "decoder" in params:
        return {**params, "decoder": with_layers(params["decoder"], fn)}
    rest = {name: value for name, value in params.items() if name != "layers"}
    layers = fn(params["layers"])
    return rest if layers is None else rest | {"layers": layers}


def _computed(config: TransformerConfig, axes: Axes, x: jax.Array) -> jax.Array:
    plain = config.quantization is Quantization.NONE
    return x.astype(config.dtype.value) if plain and _is_cast(axes) else x


def _of_array(config: TransformerConfig, axes: Axes, x: jax.Array) -> jax.Array:
    return sharding.constrain(_computed(config, axes, x), axes)


def _of_table(config: TransformerConfig, axes: Axes, x: jax.Array) -> jax.Array:
    return sharding.constrain(lookup_tables.for_lookups(_computed(config, axes, x)), axes)


def _of_stack(config: TransformerConfig, axes: Axes, x: jax.Array) -> tuple[jax.Array, ...]:
    """Splits an array of all layers into one array per layer."""
    return tuple(sharding.constrain(item, axes[1:]) for item in _computed(config, axes, x))


def _each_layer(config: TransformerConfig, of_all: Params) -> tuple[Params, ...]:
    """Splits tuples that have an entry for each layer."""
    item = functools.partial(tree.of_layer, layers=config.module_layers, depth=_depth, pick=operator.getitem)
    return tuple(item(of_all, number) for number in range(config.num_layers))


def _depth(of_all: Params | tuple) -> int:
    """The number of layers that have a module."""
    return max(map(_depth, of_all.values())) if isinstance(of_all, dict) else len(of_all)


def _is_cast(axes: Axes) -> bool:
    """Whether a parameter with these axes is cast to the compute dtype wherever it is used."""
    return not {"norm", "router"} & set(axes) and axes[-1] != "heads"  # tables of relative positions, sinks
