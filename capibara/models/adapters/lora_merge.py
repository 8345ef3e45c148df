"""Merges adapters (models/adapters/lora.py) into their weights, and takes them out again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from capibara.core import tree
from capibara.core.projections import in_dims, stack_dims
from capibara.core.types import AxisNames, ParamAxes, Params, UserError
from capibara.models.adapters import trainable_tokens
from capibara.models.adapters.lora import SUFFIX, Lora, block_dim
from capibara.models.layers.quantized_weights import Blocks


def merge(params: Params, lora: Lora | None, axes: ParamAxes, some: tree.LayersOf) -> Params:
    """The plain model's parameters in float32, with every adapter added to its weight.

    Args:
      params: parameters of a model with these adapters.
      lora: the adapters' configuration; None: there are none.
      axes: logical axes of the parameters.
      some: the numbers of the layers of modules that some layers lack.
    """
    if lora is None:
        return params

    def merged(name: str, weight: jax.Array, adapter: Params | None, axes: AxisNames) -> jax.Array:
        if adapter is None:
            return weight
        if trainable_tokens.PART in adapter:
            return trainable_tokens.replaced(weight, tree.leaf(adapter, trainable_tokens.PART), lora.trainable_tokens)
        stacked, inputs = stack_dims(axes), in_dims(axes)
        weight = weight + _product(adapter, weight.shape, stacked, lora, name, some)
        if "magnitude" not in adapter:
            return weight
        dims = tuple(range(stacked, stacked + inputs))
        lengths = jnp.sqrt(jnp.sum(jnp.square(weight), dims))
        return weight * jnp.expand_dims(tree.leaf(adapter, "magnitude") / lengths, dims)

    return _over_weights(_as_arrays(params, axes, lora), axes, lora, merged)


def base(params: Params, lora: Lora, axes: ParamAxes) -> Params:
    """The plain model's parameters in float32, without the adapters; arguments as in `merge`."""
    return _over_weights(_as_arrays(params, axes, lora), axes, lora, lambda name, weight, adapter, axes: weight)


def unmerge(merged: Params, adapters: Params, lora: Lora | None, axes: ParamAxes, some: tree.LayersOf) -> Params:
    """Undoes `merge`, up to rounding.

    Args:
      merged: the result of `merge`.
      adapters: parameters that include the adapters; others are ignored.
      lora, axes, some: as in `merge`.

    Raises:
      UserError: the adapters cannot be taken out: DoRA's original column norms or replaced embedding rows are lost.
    """
    if lora is None:
        return merged
    if lora.dora:
        raise UserError("Lora.dora is set, and a weight merged with it cannot be recovered: keep the base beside it")

    if lora.trainable_tokens:
        raise UserError("Lora.trainable_tokens has replaced rows, which cannot be recovered: keep the base beside it")

    def unmerged(name: str, weight: jax.Array, adapter: Params | None, axes: AxisNames) -> jax.Array:
        if adapter is None:
            return weight
        return weight - _product(adapter, weight.shape, stack_dims(axes), lora, name, some)

    return _over_weights(_with_adapters(merged, adapters), axes, lora, unmerged)


def _over_weights(
    params: Params, axes: ParamAxes, lora: Lora, change: Callable[..., jax.Array], prefix: str = ""
) -> Params:
    """Maps each parameter to `change(name, weight, its adapter or None, its axes)`; leaves the adapters out."""
    plain: dict[str, Params | jax.Array] = {}
    for key, value in params.items():
        if key.endswith(SUFFIX):
            continue
        if isinstance(value, Mapping):
            plain[key] = _over_weights(value, tree.branch_axes(axes, key), lora, change, f"{prefix}{key}/")
        else:
            quantized = isinstance(axes[key], Mapping)
            of_weight = tree.axes(axes, key, "codes") if quantized else tree.axes(axes, key)
            plain[key] = change(prefix + key, value, whole(params, key, lora), of_weight)
    return plain


def whole(params: Params, key: str, lora: Lora) -> Params | None:
    """The adapter of a weight, with the `a` that it shares; None: the weight has no adapter.

    Args:
      params: parameters of the block that owns the weight.
      key: the weight's key in `params`.
      lora: the configuration of all adapters.
    """
    if key + SUFFIX not in params:
        return None
    adapter = tree.branch(params, key + SUFFIX)
    if "a" in adapter or trainable_tokens.PART in adapter:
        return adapter
    adapted = {name.removesuffix(SUFFIX) for name in params if name.endswith(SUFFIX)}
    return {**adapter, "a": tree.leaf(params, lora.first_of(key, adapted) + SUFFIX, "a")}


def _as_arrays(params: Params, axes: ParamAxes, lora: Lora) -> Params:
    """The parameters as float32 arrays, quantized ones dequantized."""
    result: dict[str, Params | jax.Array] = {}
    for key, value in params.items():
        if not isinstance(value, Mapping):
            result[key] = value.astype(jnp.float32)
        elif "codes" in value:
            result[key] = _dequantized(value, tree.axes(axes, key, "codes"), lora)
        else:
            result[key] = _as_arrays(value, tree.branch_axes(axes, key), lora)
    return result


def _dequantized(weight: Params, axes: AxisNames, lora: Lora) -> jax.Array:
    codes, scales, means, steps = (
        tree.leaf(weight, name) if name in weight else None for name in ("codes", "scales", "means", "steps")
    )
    assert codes is not None and scales is not None
    return Blocks(codes, scales, means, steps, lora.base_dtype, block_dim(axes)).astype(jnp.float32)


def _with_adapters(params: Params, adapters: Params) -> Params:
    result: dict[str, Params | jax.Array] = {}
    for key, value in params.items():
        inner = tree.branch(adapters, key) if key in adapters and isinstance(value, Mapping) else {}
        result[key] = _with_adapters(value, inner) if isinstance(value, Mapping) else value
    return result | {key: value for key, value in adapters.items() if key.endswith(SUFFIX)}


def _product(
    adapter: Params, shape: tuple[int, ...], stacked: int, lora: Lora, name: str, some: tree.LayersOf
) -> jax.Array:
    """`scale * a b`, in the weight's shape."""
    a, b = tree.leaf(adapter, "a"), tree.leaf(adapter, "b")
    rank, count = a.shape[-1], math.prod(shape[:stacked])
    flat = jnp.einsum("lir,lro->lio", a.reshape(count, -1, rank), b.reshape(count, rank, -1))
    _, scales = lora.of_layers(name, tree.layer_numbers(name, some, shape[0]) if stacked else (0,))
    if len(set(scales)) == 1:
        return scales[0] * flat.reshape(shape)
    return jnp.asarray(scales, jnp.float32).reshape(-1, *(1,) * (len(shape) - 1)) * flat.reshape(shape)
