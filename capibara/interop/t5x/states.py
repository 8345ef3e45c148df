"""Converts Adafactor's state between T5X and ours: the same numbers, with other names and orders of dimensions.

For each parameter T5X has `v_row` (second moments averaged over columns) and `v_col`, or `v` (if it is not factored),
and `m` (momentum, if the run has it); a single zero stands for each that does not exist.

Source: github.com/google-research/t5x, t5x/adafactor.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, cast

import jax
import numpy as np
import optax

from capibara.core.types import PyTree, UserError
from capibara.interop.hf.layout.tensors import Shape
from capibara.interop.t5x import names as t5x_names
from capibara.optim import FactoredState, Optimizer, OptimizerConfig, OptimizerName, Parts

_OF_GIN = {  # T5X's fields of Adafactor -> ours, in Optimizer, then in Adafactor
    "beta1": "momentum",
    "min_dim_size_to_factor": "factored_min_size",
    "multiply_by_parameter_scale": "parameter_scale",
    "global_norm_clip_threshold": "clip_norm",
}
_SAME = (
    "decay_rate", "step_offset", "clipping_threshold", "epsilon1", "epsilon2", "max_parameter_scale", "weight_decay_rate",
    "weight_decay_rate_lr_exponent",
)  # fmt: skip
KEPT = ("v_row", "v_col", "v", "m")
_COUNTED = (optax.EmaState, optax.ScaleByScheduleState)
Moments = dict[str, np.ndarray]  # the entries of KEPT that a parameter has


class Stored(NamedTuple):
    """The optimizer state of a checkpoint.

    Attributes:
      step: number of updates.
      moments: T5X's name of each parameter -> its state, with a single zero for what it does not have.
      gin: T5X's Gin bindings to resume with the same Adafactor.
    """

    step: int
    moments: Mapping[str, Moments]
    gin: str


@dataclasses.dataclass(frozen=True)
class Location:
    """The T5X array of one of our parameters, or of one layer of it.

    Attributes:
      name: T5X's name of the parameter.
      path: our name.
      layer: index of our layer; None: the array has all layers, or there are none.
      groups: groups of our dimensions (letters of hf.tensors), each one dimension of T5X's array.
      layout: our dimensions.
    """

    name: str
    path: str
    layer: int | None
    groups: tuple[str, ...]
    layout: str

    @property
    def stacked(self) -> bool:
        return self.layer is None and "l" in self.layout

    def theirs(self, value: np.ndarray, have: str) -> np.ndarray:
        """Converts an array of ours with dimensions `have` to T5X's order; only this layer of it."""
        if self.layer is not None:
            value, have = value[self.layer], have.replace("l", "")
        groups = [group for group in self.groups if group[0] in have]
        sizes = dict(zip(have, value.shape, strict=True))
        order = [have.index(letter) for letter in "".join(groups)]
        return value.transpose(order).reshape([math.prod(sizes[letter] for letter in group) for group in groups])

    def ours(self, value: np.ndarray, have: str, sizes: Mapping[str, int]) -> np.ndarray:
        """The inverse; raises ValueError if the array has another shape."""
        have = have.replace("l", "") if self.layer is not None else have
        letters = "".join(group for group in self.groups if group[0] in have)
        groups = [group for group in self.groups if group[0] in have]
        whole = tuple(sizes[letter] for letter in letters)
        if value.shape not in (whole, tuple(math.prod(sizes[letter] for letter in group) for group in groups)):
            raise ValueError(f"has the shape {list(value.shape)}, must be {list(whole)}")
        return value.reshape(whole).transpose([letters.index(letter) for letter in have])


def locations(shapes: Mapping[str, Shape], rows: Mapping[str, t5x_names.Row], *, scanned: bool) -> Iterator[Location]:
    """The locations of all parameters of a model.

    Args:
      shapes: of our parameters, by name.
      rows: of the model (names.rows).
      scanned: whether T5X scans its layers: then they are one array, stacked along its second dimension.
    """
    for row in rows.values():
        tensor = row.theirs
        (path,) = tensor.ours
        if path not in shapes:
            continue
        groups = tuple(tensor.dims.split())
        if "l" not in tensor.layout:
            yield Location(tensor.name, path, None, groups, tensor.layout)
        elif scanned:
            letters = list(tensor.dims.replace(" ", ""))
            name = t5x_names.scanned_name(tensor.name)
            yield Location(name, path, None, (letters[0], "l", *letters[1:]), tensor.layout)
        else:
            for name, (layer,) in tensor.names(shapes):
                yield Location(name, path, layer, groups, tensor.layout)


def is_adafactor(optimizer: OptimizerConfig) -> TypeGuard[Optimizer]:
    """Whether it is the Adafactor that T5X has too."""
    return isinstance(optimizer, Optimizer) and optimizer.name is OptimizerName.ADAFACTOR


def gin_of(optimizer: Optimizer) -> str:
    """The options of an Adafactor optimizer in T5X's Gin."""
    values = {theirs: getattr(optimizer, ours) for theirs, ours in _OF_GIN.items()}
    values |= {name: getattr(optimizer.adafactor, name) for name in _SAME}
    lines = ["", "from t5x import adafactor", "adafactor.Adafactor:", *(f"  {n} = {v!r}" for n, v in values.items())]
    if optimizer.weight_decay:
        lines.append(
            f"  # Optimizer.weight_decay = {optimizer.weight_decay} of capibara is not in T5X: see weight_decay_rate"
        )
    if optimizer.adafactor.factor_map or optimizer.adafactor.parameter_scale_map:
        lines.append("  # factor_map and parameter_scale_map use capibara's names: rewrite them")
    return "\n".join([*lines, "  logical_factor_rules = @adafactor.standard_logical_factor_rules()"]) + "\n"


def factored_of(opt_state: PyTree) -> FactoredState:
    """Adafactor's moments in an optimizer's state.

    Raises:
      UserError: it is another optimizer's.
    """
    result = _nodes(opt_state, FactoredState)
    if not result:
        raise UserError("T5X supports only Adafactor's state, and Optimizer.name is another: set it to 'adafactor'")
    return result[0]


def to_t5x(opt_state: PyTree, shapes: Mapping[str, Shape], where: Sequence[Location]) -> Iterator[tuple[str, Moments]]:
    """T5X's name of each parameter, and its state; a single zero stands for what it does not have.

    Args:
      opt_state: of Adafactor.
      shapes: of our parameters, by name, in the order of their tree.
      where: the locations of the model's parameters.

    Raises:
      UserError: it is another optimizer's state, or T5X cannot factor so.
    """
    factored, names = factored_of(opt_state), list(shapes)
    averaged = _nodes(opt_state, optax.EmaState)
    arrays = {name: dict(zip(names, map(np.asarray, jax.tree.leaves(getattr(factored, name))))) for name in KEPT[:3]}
    # Ours is the average of what is added to a parameter, T5X's of what is subtracted.
    momentum = {n: -np.asarray(x) for n, x in zip(names, jax.tree.leaves(averaged[0].ema))} if averaged else {}
    parts_of = dict(zip(names, factored.parts, strict=True))
    for location in where:
        result: Moments = {name: np.zeros(1, np.float32) for name in KEPT}
        parts, layout = parts_of[location.path], location.layout
        if parts.rows:
            rows, columns = (_letters(layout, dims) for dims in (parts.rows, parts.columns))
            row, column = _names(location, rows, columns, shapes[location.path])
            result[row] = location.theirs(arrays["v_row"][location.path], _without(layout, columns))
            result[column] = location.theirs(arrays["v_col"][location.path], _without(layout, rows))
        else:
            result["v"] = location.theirs(arrays["v"][location.path], layout)
        if momentum:
            result["m"] = location.theirs(momentum[location.path], layout)
        yield location.name, result


def from_t5x(
    opt_state: PyTree,
    shapes: Mapping[str, Shape],
    where: Sequence[Location],
    read: Callable[[str, str], np.ndarray],
    step: int,
) -> PyTree:
    """The state of our Adafactor that resumes from T5X's.

    Args:
      opt_state: of our optimizer, with any values, or jax.ShapeDtypeStructs: its structure decides what is read.
      shapes: of our parameters, by name, in the order of their tree.
      where: the locations of the model's parameters.
      read: (T5X's name of a parameter, one of KEPT) -> that array.
      step: number of updates.

    Returns:
      the same tree, of numpy arrays.

    Raises:
      UserError: T5X has other moments: it factors differently, or has no momentum.
    """
    factored, momentum = factored_of(opt_state), bool(_nodes(opt_state, optax.EmaState))
    parts_of = dict(zip(shapes, factored.parts, strict=True))
    new: dict[str, dict[str, np.ndarray]] = {name: {} for name in KEPT}
    for location in where:
        for name, have, value in _arrays(location, parts_of[location.path], shapes[location.path], momentum, read):
            sizes = dict(zip(location.layout, shapes[location.path], strict=True))
            try:
                value = location.ours(value, have, sizes)
            except ValueError as error:
                raise UserError(
                    f"T5X's {name} of {location.name} {error}: this run's Adafactor factors otherwise: set "
                    "Optimizer.factored_min_size, momentum and Adafactor.factoring as T5X has them"
                ) from None
            if location.layer is None:
                new[name][location.path] = np.array(value, np.float32)
            else:
                whole = new[name].setdefault(location.path, np.empty([sizes[letter] for letter in have], np.float32))
                whole[location.layer] = value
    count = cast(jax.Array, np.asarray(step, np.int32))  # on the host like all others, until the state is placed
    return at_step(_put(opt_state, new, list(shapes)), count)


def _arrays(
    location: Location, parts: Parts, shape: Shape, momentum: bool, read: Callable[[str, str], np.ndarray]
) -> Iterator[tuple[str, str, np.ndarray]]:
    """(our name, its dimensions, T5X's array) of each moment that we have."""
    layout = location.layout
    if momentum:
        yield "m", layout, read(location.name, "m")
    if not parts.rows:
        yield "v", layout, read(location.name, "v")
        return
    rows, columns = (_letters(layout, dims) for dims in (parts.rows, parts.columns))
    row, column = _names(location, rows, columns, shape)
    yield "v_row", _without(layout, columns), read(location.name, row)
    yield "v_col", _without(layout, rows), read(location.name, column)


def at_step(opt_state: PyTree, step: jax.Array) -> PyTree:
    """An optimizer's state with all its update counts set to `step`."""

    def counted(node: object) -> Any:
        if isinstance(node, FactoredState):
            return dataclasses.replace(node, count=step)
        return node._replace(count=step) if isinstance(node, _COUNTED) else node

    return jax.tree.map(counted, opt_state, is_leaf=lambda node: isinstance(node, (FactoredState, *_COUNTED)))


def _put(opt_state: PyTree, new: Mapping[str, Mapping[str, np.ndarray]], names: Sequence[str]) -> PyTree:
    """The state with these arrays replaced."""
    nothing = np.zeros(1, np.float32)

    def of(name: str, old: PyTree) -> PyTree:
        return jax.tree.unflatten(jax.tree.structure(old), [new[name].get(path, nothing) for path in names])

    def replaced(node: Any) -> Any:
        if isinstance(node, FactoredState):
            return dataclasses.replace(node, **{name: of(name, getattr(node, name)) for name in KEPT[:3]})
        return node._replace(ema=jax.tree.map(np.negative, of("m", node.ema))) if _is_ema(node) else node

    return jax.tree.map(replaced, opt_state, is_leaf=lambda node: isinstance(node, FactoredState) or _is_ema(node))


def _is_ema(node: object) -> bool:
    return isinstance(node, optax.EmaState)


def _nodes(opt_state: PyTree, kind: type) -> list:
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in leaves if isinstance(node, kind)]


def _names(location: Location, rows: str, columns: str, shape: Shape) -> tuple[str, str]:
    """T5X's names of the moments of our rows, and of our columns.

    For a two-dimensional array, T5X's columns are the larger dimension (the second if both are equal); for stacked
    layers its rules assign them by name, as ours do.
    """
    if any(len({letter in side for letter in group}) > 1 for group in location.groups for side in (rows, columns)):
        raise UserError(
            f"{location.path} is factored head by head, and T5X has all heads of {location.name} in one dimension"
        )
    if location.stacked:
        return "v_row", "v_col"
    sizes = dict(zip(location.layout, shape, strict=True))
    first, second = (math.prod(sizes[letter] for letter in group) for group in location.groups)
    return ("v_row", "v_col") if (location.groups[0][0] in rows) == (first <= second) else ("v_col", "v_row")


def _letters(layout: str, dims: tuple[int, ...]) -> str:
    return "".join(layout[i] for i in dims)


def _without(layout: str, letters: str) -> str:
    return "".join(letter for letter in layout if letter not in letters)
