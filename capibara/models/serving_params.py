"""A model's parameters as generation reads them: layers apart, in the compute dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from capibara import sharding
from capibara.core import tree
from capibara.core.types import Params
from capibara.kernels.matmul import dispatch as matmul
from capibara.kernels.matmul.cpu import OutputFirst
from capibara.kernels.matmul.quantized import Quantization
from capibara.models.layers.transformer import TransformerConfig

Axes = tuple[str, ...]
Convert = Callable[[Callable[[jax.Array], Any], jax.Array], Any]
"""Calls the first argument with the second, of one array after the other."""


def served(config: TransformerConfig, axes: Params, params: Params, convert: Convert) -> Params:
    """The parameters as generation reads them fastest: layers apart, matrices in the compute dtype.

    A program that runs the layers one by one would copy each of a stack. On a CPU matrices have their outputs first
    (`OutputFirst`). The results are those of the parameters themselves.

    Args:
      config: of the model.
      axes: logical axes of `params`.
      params: as training has them.
      convert: makes each array of what `params` has.
    """

    def each(of_array: Callable, axes: Params, values: Params) -> Params:
        one = lambda names, x: convert(functools.partial(of_array, config, names), x)  # noqa: E731
        return jax.tree.map(one, axes, values, is_leaf=tree.is_axes)

    stacks: list[Params] = []
    rest_axes, rest = (with_layers(given, stacks.append) for given in (axes, params))
    of_all = each(_of_stack, *stacks)
    layers = tuple(_of_layer(of_all, number) for number in range(config.num_layers))
    arrays = each(_of_array, rest_axes, rest)
    if "decoder" in params:
        return arrays | {"decoder": arrays["decoder"] | {"layers": layers}}
    return arrays | {"layers": layers}


def served_axes(config: TransformerConfig, axes: Params, abstract_params: Params) -> Params:
    """The logical axes of what `served` gives, where it turns nothing."""

    def of_each(layers: Params) -> tuple[Params, ...]:
        stacks: list[Params] = []
        with_layers(abstract_params, stacks.append)
        of_all = jax.tree.map(lambda names, x: (names[1:],) * x.shape[0], layers, *stacks, is_leaf=tree.is_axes)
        return tuple(_of_layer(of_all, number) for number in range(config.num_layers))

    return with_layers(axes, of_each)


def computed(config: TransformerConfig, axes: Params, params: Params) -> Params:
    """The parameters in the compute dtype, those that are cast to it wherever they are used."""
    return jax.tree.map(functools.partial(_computed, config), axes, params, is_leaf=tree.is_axes)


def with_layers(params: Params, fn: Callable[[Params], Params | None]) -> Params:
    """The parameters with `fn` of those of the decoder's layers; without them where it gives None."""
    if "decoder" in params:
        return params | {"decoder": with_layers(params["decoder"], fn)}
    rest = {name: value for name, value in params.items() if name != "layers"}
    layers = fn(params["layers"])
    return rest if layers is None else rest | {"layers": layers}


def _computed(config: TransformerConfig, axes: Axes, x: jax.Array) -> jax.Array:
    plain = config.quantization is Quantization.NONE
    return x.astype(config.dtype.value) if plain and _is_cast(axes) else x


def _of_array(config: TransformerConfig, axes: Axes, x: jax.Array) -> jax.Array:
    return sharding.constrain(_computed(config, axes, x), axes)


def _of_stack(config: TransformerConfig, axes: Axes, x: jax.Array) -> tuple[jax.Array | OutputFirst, ...]:
    """Of an array of all layers that of each."""
    turns = config.quantization is Quantization.NONE and matmul.wants_outputs_first()
    layers = (sharding.constrain(one, axes[1:]) for one in _computed(config, axes, x))
    return tuple(_output_first(axes[1:], one) if turns else one for one in layers)


def _of_layer(of_all: Params, number: int) -> Params:
    """Of tuples with an entry for each layer that has the parameter, those of one layer."""
    if isinstance(of_all, dict):
        parts = {name: _of_layer(value, number) for name, value in of_all.items()}
        return {name: part for name, part in parts.items() if part is not None}
    return of_all[number] if number < len(of_all) else None


def _output_first(axes: Axes, x: jax.Array) -> jax.Array | OutputFirst:
    """A matrix of a projection turned, all else as it is."""
    if axes in (("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim"), ("embed", "mlp")):
        return OutputFirst.of(x, 1)
    return OutputFirst.of(x, x.ndim - 1) if axes in (("heads", "head_dim", "embed"), ("mlp", "embed")) else x


def _is_cast(axes: Axes) -> bool:
    """Whether a parameter with these axes is cast to the compute dtype wherever it is used."""
    return not {"norm", "router"} & set(axes) and axes[-1] != "heads"  # tables of relative positions, sinks
