"""Several unmerged adapters beside one model: each row of a batch uses one of them, or none.

The factors of all adapters of a weight are stacked, padded with zeros to the largest rank, with the scale multiplied
into `b`. For A adapters they are `a` [in ..., A, r] and `b` [A, r, out ...], separate for each layer, as generation
reads weights. DoRA's magnitudes become one factor per output, `gain` [A, out ...]. Batching rows of different adapters
follows S-LoRA (Sheng et al. 2023, arXiv:2311.03285).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from capibara import sharding
from capibara.core import tree
from capibara.core.types import ParamAxes, Params, PyTree, UserError
from capibara.models.adapters.lora import SUFFIX, Lora, column_lengths
from capibara.models.layers import layers

Factors = Mapping[str, jax.Array]
"""`a`, `b` and perhaps `gain` of one weight."""
LayerFactors = Mapping[str, Mapping[str, Factors]]
"""Those of one layer: part of the block -> name of the weight -> factors."""

_END = f"{SUFFIX}/b"
_PARTS = ("a", "b", "magnitude", "seed", "scale")


class Adapter(NamedTuple):
    """One adapter.

    Attributes:
      name: the name that requests use.
      lora: its configuration.
      values: its parameters, as returned by Model.trained.
    """

    name: str
    lora: Lora
    values: Params


class BatchAdapters(NamedTuple):
    """The adapters of a batch.

    Attributes:
      layers: for each layer, by the block's part and the weight's name, the stacked factors of all adapters.
      of_row: [B] int32, the number of each row's adapter, from 1; 0: no adapter.
    """

    layers: tuple[LayerFactors, ...]
    of_row: jax.Array | np.ndarray


class HasLayers(Protocol):
    """The part of a configuration that is used here."""

    @property
    def module_layers(self) -> tree.LayersOf: ...


class PlainModel(Protocol):
    """The parts of a model without adapters (an api.Model) that are used here."""

    @property
    def axes(self) -> ParamAxes: ...

    @property
    def abstract_params(self) -> Params: ...

    @property
    def config(self) -> HasLayers: ...


def check(model: PlainModel, adapter: Adapter) -> None:
    """Checks that the model can run with this adapter unmerged.

    Raises:
      UserError: the adapter belongs to another model, or works only when merged.
    """
    axes, known = _flat(model.axes), _flat(model.abstract_params)
    for name in _flat(adapter.values):
        owner, _, part = name.rpartition("/")
        weight = owner.removesuffix(SUFFIX)
        if weight == owner or part not in _PARTS:
            option = "trainable_tokens" if weight == "embedding" and weight != owner else "modules_to_save"
            raise UserError(
                f"{name} is trained in full (Lora.{option}), which requests cannot choose: merge the adapter with "
                "capibara convert, and serve the merged model"
            )
        if weight not in known:
            raise UserError(f"{weight} is no weight of this model: name an adapter of this model")
        if not weight.startswith("layers/"):
            raise UserError(f"{weight} is of an encoder-decoder, whose adapters must be merged: use capibara convert")
        if weight.split("/")[1] in model.config.module_layers:
            raise UserError(f"{weight} is of some layers only, whose adapters must be merged: use capibara convert")
        if "experts" in axes[weight] or weight.endswith("/router"):
            raise UserError(
                f"{weight} is of experts or their router, whose adapters must be merged: use capibara convert"
            )
        if part == "b":
            _check_shape(weight, known[weight].shape, adapter)


def _check_shape(weight: str, shape: tuple[int, ...], adapter: Adapter) -> None:
    a, b, _ = _factors(adapter)[weight]
    result = (*b.shape[:1], *a.shape[1:-1], *b.shape[2:])
    if result != shape or a.shape[0] != shape[0]:
        raise UserError(
            f"{weight} is {list(result)} in the adapter and {list(shape)} in this model: name an adapter of this model"
        )


def stack_factors(
    adapters: Sequence[Adapter], num_layers: int, dtype: Any, gains: Sequence[Mapping[str, np.ndarray]] = ()
) -> tuple[LayerFactors, ...]:
    """Stacks the factors of all adapters, for each layer, on the host.

    Args:
      adapters: adapters that passed `check`.
      num_layers: of the model.
      dtype: the model's compute dtype.
      gains: for each adapter the `gain` of its weights with magnitudes, by name.
    """
    each = [_factors(adapter) for adapter in adapters]
    names = sorted({name for factors in each for name in factors})
    result: tuple[dict[str, Any], ...] = tuple({} for _ in range(num_layers))
    for name in names:
        first = next(factors[name] for factors in each if name in factors)
        inner, outer = first[0].shape[1:-1], first[1].shape[2:]
        rank = max(factors[name][0].shape[-1] for factors in each if name in factors)
        a = np.zeros((num_layers, *inner, len(adapters), rank), np.float32)
        b = np.zeros((num_layers, len(adapters), rank, *outer), np.float32)
        gain = np.ones((num_layers, len(adapters), *outer), np.float32)
        for number, factors in enumerate(each):
            if name in factors:
                own_a, own_b, _ = factors[name]
                a[..., number, : own_a.shape[-1]] = own_a
                b[:, number, : own_b.shape[1]] = own_b
            if gains and name in gains[number]:
                gain[:, number] = gains[number][name]
        _, part, last = name.split("/")
        scaled = any(name in of_one for of_one in gains)
        for layer, values in enumerate(result):
            of_layer = {"a": a[layer].astype(dtype), "b": b[layer].astype(dtype)}
            values.setdefault(part, {})[last] = of_layer | ({"gain": gain[layer]} if scaled else {})
    return result


def axes_of(model: PlainModel, layers: tuple[LayerFactors, ...]) -> tuple[PyTree, ...]:
    """The logical axes of the result of `stack_factors`."""

    def of_weight(part: str, last: str, factors: Factors) -> dict[str, tuple[str | None, ...]]:
        axes = tree.axes(model.axes, "layers", part, last)[1:]
        inputs = factors["a"].ndim - 2
        every = {"a": (*axes[:inputs], None, None), "b": (None, None, *axes[inputs:]), "gain": (None, *axes[inputs:])}
        return {name: every[name] for name in factors}

    return tuple(
        {
            part: {last: of_weight(part, last, weight_axes) for last, weight_axes in of_part.items()}
            for part, of_part in layer.items()
        }
        for layer in layers
    )


def attach(block: nnx.Module, adapters: BatchAdapters | None, layer: int) -> None:
    """Attaches one layer's adapters to the parts of a bound block, for the rows that it reads next."""
    if adapters is None:
        return
    for part, weights in adapters.layers[layer].items():
        for name, factors in weights.items():
            setattr(getattr(block, part), name + SUFFIX, _RowAdapters(factors, adapters.of_row))


class _RowAdapters:
    """Stands in for an adapter: applies each row's own."""

    def __init__(self, factors: Factors, of_row: jax.Array | np.ndarray):
        self._factors, self._of_row = factors, jnp.asarray(of_row)

    def __call__(self, x: jax.Array, y: jax.Array, weight: Any) -> jax.Array:
        """The weight's output for x [B, T, in ...] with each row's adapter; `y` is that of the weight alone."""
        a, b = self._factors["a"], self._factors["b"]
        count = a.shape[-2]
        B, T = x.shape[:2]
        # For one token per row, gathering factors costs more than multiplying by those of all adapters.
        of_all = T == 1 and count <= 2 * B
        y = y + (self._of_all(x, a, b) if of_all else self._gathered(x, a, b))
        if "gain" not in self._factors:
            return y
        gain = jnp.take(self._factors["gain"], jnp.maximum(self._of_row - 1, 0), axis=0)
        base = self._of_row.reshape(-1, *(1,) * (gain.ndim - 1)) == 0
        return y * jnp.where(base, 1.0, gain)[:, None].astype(y.dtype)

    def _of_all(self, x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        """Multiplies every row by all adapters and masks out all but its own."""
        h_BTAR = layers.dense(x, a, a.ndim - 2)
        own_BA = self._of_row[:, None] == jnp.arange(1, a.shape[-2] + 1, dtype=jnp.int32)
        return layers.dense(jnp.where(own_BA[:, None, :, None], h_BTAR, 0), b, 2)

    def _gathered(self, x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        """Multiplies every row by a gathered copy of its own adapter."""
        (B, T), number = x.shape[:2], jnp.maximum(self._of_row - 1, 0)
        a_BIR = jnp.moveaxis(jnp.take(a, number, axis=a.ndim - 2), -2, 0).reshape(B, -1, a.shape[-1])
        h_BTR = jnp.einsum("BTI,BIR->BTR", x.reshape(B, T, -1), a_BIR)
        h_BTR = jnp.where(self._of_row[:, None, None] > 0, h_BTR, 0)
        b_BRO = jnp.take(b, number, axis=0).reshape(B, b.shape[1], -1)
        return jnp.einsum("BTR,BRO->BTO", h_BTR, b_BRO).reshape(B, T, *b.shape[2:])


def magnitudes_of(adapter: Adapter) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The inputs of `gain` besides the weight, by name, for each weight of an adapter with magnitudes (DoRA)."""
    return {name: (a, b, magnitude) for name, (a, b, magnitude) in _factors(adapter).items() if magnitude is not None}


def gain(weight: jax.Array, a: jax.Array, b: jax.Array, magnitude: jax.Array) -> jax.Array:
    """DoRA's factor [L, out ...] for the outputs of a plain model's weight [L, in ..., out ...], replicated."""
    lengths = jax.vmap(functools.partial(column_lengths, scale=1.0, inputs=a.ndim - 2))
    result = magnitude / lengths(weight.astype(jnp.float32), a, b)
    return sharding.constrain(result, (None,) * result.ndim)


def _factors(adapter: Adapter) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    """By weight name: `a` [L, in ..., r], `b` [L, r, out ...] with the scale in it, and the magnitudes or None."""
    flat, result = _flat(adapter.values), {}
    names = [name.removesuffix(_END) for name in flat if name.endswith(_END)]
    for name in names:
        owner = name.rpartition("/")[0]
        siblings = {other.rpartition("/")[2] for other in names if other.rpartition("/")[0] == owner}
        a = np.asarray(flat[f"{owner}/{adapter.lora.first_of(name, siblings)}{SUFFIX}/a"], np.float32)
        b = np.asarray(flat[name + _END], np.float32)
        scales = np.asarray(adapter.lora.of_layers(name, range(len(b)))[1], np.float32)
        result[name] = a, b * scales.reshape(-1, *(1,) * (b.ndim - 1)), flat.get(f"{name}{SUFFIX}/magnitude")
    return result


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= {f"{key}/{name}": inner for name, inner in _flat(value).items()}
        else:
            result[key] = value
    return result
