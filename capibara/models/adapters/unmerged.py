"""Several unmerged adapters beside one model: each row of a batch uses one of them, or none.

The factors of all adapters of a weight are stacked, padded with zeros to the largest rank, with the scale multiplied
into `b`. For A adapters they are `a` [in ..., A, r] and `b` [A, r, out ...], separate for each layer, as generation
reads weights. DoRA's magnitudes become one factor per output, `gain` [A, out ...]. Batching rows of different adapters
follows S-LoRA (Sheng et al. 2023, arXiv:2311.03285). There may be room for adapters that are loaded later (`Room`): their
factors are zeros until then.
"""

from __future__ import annotations

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Room:
    """Room for adapters in the stacked factors.

    Attributes:
      weights: name of a weight -> its inputs [in ...], the largest rank, and its outputs [out ...].
      count: of adapters.
    """

    weights: Mapping[str, tuple[tuple[int, ...], int, tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    count: int = 0


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
        if reason := _merged_only(model, axes, weight):
            raise UserError(f"{weight} is of {reason}, whose adapters must be merged: use capibara convert")
        if part == "b":
            _check_shape(weight, known[weight].shape, adapter)


def _merged_only(model: PlainModel, axes: Mapping[str, Any], weight: str) -> str:
    """Of what a weight is whose adapters work only when merged; "": they work unmerged."""
    if not weight.startswith("layers/"):
        return "an encoder-decoder"
    if weight.split("/")[1] in model.config.module_layers:
        return "some layers only"
    return "experts or their router" if "experts" in axes[weight] or weight.endswith("/router") else ""


def room_of(model: PlainModel, like: Adapter, count: int) -> Room:
    """Room for adapters of the weights of another one that work unmerged.

    Args:
      model: without adapters.
      like: with the largest rank; its values may be jax.ShapeDtypeStructs.
      count: of adapters.
    """
    axes, flat = _flat(model.axes), _flat(like.values)
    weights = {}
    for name in (name.removesuffix(_END) for name in flat if name.endswith(_END)):
        if not _merged_only(model, axes, name):
            a, b = (flat[f"{name}{SUFFIX}/{part}"].shape for part in ("a", "b"))
            weights[name] = a[1:-1], a[-1], b[2:]
    return Room(weights, count)


def room_in(layers: Sequence[LayerFactors]) -> Room:
    """Room for one adapter of the weights and ranks that stacked factors have."""
    weights = {}
    for part, factors_of in layers[0].items():
        for last, factors in factors_of.items():
            a, b = factors["a"].shape, factors["b"].shape
            weights[f"layers/{part}/{last}"] = a[:-2], a[-1], b[2:]
    return Room(weights, 1)


def check_room(adapter: Adapter, room: Room) -> None:
    """Raises UserError if there is no room for an adapter that passed `check`."""
    for name, (a, _, magnitude) in _factors(adapter).items():
        if magnitude is not None:
            raise UserError(
                f"{name} has magnitudes (DoRA), which need the weights as they were at the start: load it there, or merge it"
            )
        if name not in room.weights:
            raise UserError(
                f"{name} is none of the weights with room for adapters: add it to Adapters.targets, and start again"
            )
        if a.shape[-1] > (most := room.weights[name][1]):
            raise UserError(
                f"{name} has rank {a.shape[-1]}, must have at most {most}: raise Adapters.rank, and start again"
            )


def _check_shape(weight: str, shape: tuple[int, ...], adapter: Adapter) -> None:
    a, b, _ = _factors(adapter)[weight]
    result = (*b.shape[:1], *a.shape[1:-1], *b.shape[2:])
    if result != shape or a.shape[0] != shape[0]:
        raise UserError(
            f"{weight} is {list(result)} in the adapter and {list(shape)} in this model: name an adapter of this model"
        )


def stack_factors(
    adapters: Sequence[Adapter],
    num_layers: int,
    dtype: Any,
    gains: Sequence[Mapping[str, np.ndarray]] = (),
    room: Room = Room(),
) -> tuple[LayerFactors, ...]:
    """Stacks the factors of all adapters, for each layer, on the host.

    Args:
      adapters: adapters that passed `check`.
      num_layers: of the model.
      dtype: the model's compute dtype.
      gains: for each adapter the `gain` of its weights with magnitudes, by name.
      room: for adapters after these; its weights and ranks are those of the result at least.

    Raises:
      UserError: an adapter has values that are infinite in this dtype, or no numbers: rows of others would have them, too.
    """
    each, count = [_factors(adapter) for adapter in adapters], len(adapters) + room.count
    result: tuple[dict[str, Any], ...] = tuple({} for _ in range(num_layers))
    for name in sorted({name for factors in each for name in factors} | set(room.weights)):
        of_name = [factors[name] for factors in each if name in factors]
        inner, rank, outer = room.weights.get(name) or (of_name[0][0].shape[1:-1], 0, of_name[0][1].shape[2:])
        rank = max(rank, *(a.shape[-1] for a, _, _ in of_name), 0)
        a = np.zeros((num_layers, *inner, count, rank), dtype)
        b = np.zeros((num_layers, count, rank, *outer), dtype)
        gain = np.ones((num_layers, count, *outer), np.float32)
        for number, factors in enumerate(each):
            if name in factors:
                own_a, own_b, _ = factors[name]
                a[..., number, : own_a.shape[-1]] = _cast(own_a, dtype, adapters[number], name)
                b[:, number, : own_b.shape[1]] = _cast(own_b, dtype, adapters[number], name)
            if gains and name in gains[number]:
                gain[:, number] = gains[number][name]
        _, part, last = name.split("/")
        scaled = any(name in of_one for of_one in gains)
        for layer, values in enumerate(result):
            of_layer = {"a": a[layer], "b": b[layer]}
            values.setdefault(part, {})[last] = of_layer | ({"gain": gain[layer]} if scaled else {})
    return result


def _cast(values: np.ndarray, dtype: Any, adapter: Adapter, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        result = values.astype(dtype)
    if not np.isfinite(result.astype(np.float32)).all():
        raise UserError(
            f"adapter {adapter.name!r} has values of {name} that are not finite in {np.dtype(dtype)}: train it anew"
        )
    return result


def written(layer: LayerFactors, new: LayerFactors, number: jax.Array) -> LayerFactors:
    """A layer's factors with those of one adapter, stacked alone in the same room, at index `number`; its gain is 1."""

    def put(x: jax.Array, value: jax.Array, axis: int) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(x, value.astype(x.dtype), number, axis)

    def of_weight(factors: Factors, values: Factors) -> dict[str, jax.Array]:
        result = {"a": put(factors["a"], values["a"], factors["a"].ndim - 2), "b": put(factors["b"], values["b"], 0)}
        gain = {name: put(x, jnp.ones((1, *x.shape[1:]), x.dtype), 0) for name, x in factors.items() if name == "gain"}
        return result | gain

    return {
        part: {last: of_weight(factors, new[part][last]) for last, factors in of_part.items()}
        for part, of_part in layer.items()
    }


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


def _flat(values: Mapping[str, object]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= {f"{key}/{name}": inner for name, inner in _flat(value).items()}
        else:
            result[key] = value
    return result
