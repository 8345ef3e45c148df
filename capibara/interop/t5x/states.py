"""Adafactor's state as T5X keeps it and as we do: the same numbers under other names, in other orders of dimensions.

T5X has for each parameter `v_row` (second moments, their mean over the columns) and `v_col`, or `v` (of a parameter that
is not factored), and `m` (momentum, of a run that has one); one zero for each that is not there.

Facts: github.com/google-research/t5x, t5x/adafactor.py.
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
from capibara.interop.hf.tensors import Shape
from capibara.interop.t5x import names as t5x_names
from capibara.optim import FactoredState, Optimizer, OptimizerConfig, OptimizerName, Parts

_OF_GIN = {  # T5X's names of Adafactor's fields -> ours, of Optimizer, then of Adafactor
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
Moments = dict[str, np.ndarray]  # those of KEPT that a parameter has


class Stored(NamedTuple):
    """Of a checkpoint.

    Attributes:
      step: updates done.
      moments: T5X's name of each parameter -> its state, with one zero for what it does not have.
      gin: the bindings of T5X's Gin that say how its Adafactor goes on.
    """

    step: int
    moments: Mapping[str, Moments]
    gin: str


@dataclasses.dataclass(frozen=True)
class Place:
    """Where T5X has one of our parameters, or one layer of it.

    Attributes:
      name: T5X's, of the parameter.
      path: ours.
      layer: which one of ours; None: it has all of them, or there are none.
      groups: of our dimensions (letters of tensors.py), each a dimension of T5X's array.
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
        """An array of ours whose dimensions are `have`, in T5X's order; of its layer alone."""
        if self.layer is not None:
            value, have = value[self.layer], have.replace("l", "")
        groups = [group for group in self.groups if group[0] in have]
        sizes = dict(zip(have, value.shape, strict=True))
        order = [have.index(letter) for letter in "".join(groups)]
        return value.transpose(order).reshape([math.prod(sizes[letter] for letter in group) for group in groups])

    def ours(self, value: np.ndarray, have: str, sizes: Mapping[str, int]) -> np.ndarray:
        """The way back; raises ValueError where the array has another shape."""
        have = have.replace("l", "") if self.layer is not None else have
        letters = "".join(group for group in self.groups if group[0] in have)
        groups = [group for group in self.groups if group[0] in have]
        whole = tuple(sizes[letter] for letter in letters)
        if value.shape not in (whole, tuple(math.prod(sizes[letter] for letter in group) for group in groups)):
            raise ValueError(f"has the shape {list(value.shape)}, must be {list(whole)}")
        return value.reshape(whole).transpose([letters.index(letter) for letter in have])


def places(shapes: Mapping[str, Shape], rows: Mapping[str, t5x_names.Row], *, scanned: bool) -> Iterator[Place]:
    """All places of a model's parameters.

    Args:
      shapes: of our parameters, by name.
      rows: of the model (t5x_names.rows).
      scanned: whether T5X scans its layers: then they are one array, stacked along its second dimension.
    """
    for row in rows.values():
        tensor = row.theirs
        (path,) = tensor.ours
        if path not in shapes:
            continue
        groups = tuple(tensor.dims.split())
        if "l" not in tensor.layout:
            yield Place(tensor.name, path, None, groups, tensor.layout)
        elif scanned:
            letters = list(tensor.dims.replace(" ", ""))
            name = t5x_names.scanned_name(tensor.name)
            yield Place(name, path, None, (letters[0], "l", *letters[1:]), tensor.layout)
        else:
            for name, (layer,) in tensor.names(shapes):
                yield Place(name, path, layer, groups, tensor.layout)


def is_adafactor(optimizer: OptimizerConfig) -> TypeGuard[Optimizer]:
    """Whether it is the Adafactor that T5X has too."""
    return isinstance(optimizer, Optimizer) and optimizer.name is OptimizerName.ADAFACTOR


def gin_of(optimizer: Optimizer) -> str:
    """The options of an optimizer, which is Adafactor, in T5X's Gin."""
    values = {theirs: getattr(optimizer, ours) for theirs, ours in _OF_GIN.items()}
    values |= {name: getattr(optimizer.adafactor, name) for name in _SAME}
    lines = ["", "from t5x import adafactor", "adafactor.Adafactor:", *(f"  {n} = {v!r}" for n, v in values.items())]
    if optimizer.weight_decay:
        lines.append(
            f"  # Optimizer.weight_decay = {optimizer.weight_decay} of capibara is not in T5X: see weight_decay_rate"
        )
    if optimizer.adafactor.factor_map or optimizer.adafactor.parameter_scale_map:
        lines.append("  # factor_map and parameter_scale_map are by capibara's names: write them anew")
    return "\n".join([*lines, "  logical_factor_rules = @adafactor.standard_logical_factor_rules()"]) + "\n"


def factored_of(opt_state: PyTree) -> FactoredState:
    """Adafactor's moments in the state of an optimizer.

    Raises:
      UserError: it is another optimizer's.
    """
    found = _nodes(opt_state, FactoredState)
    if not found:
        raise UserError("T5X has the state of Adafactor alone, and Optimizer.name is another: set it to 'adafactor'")
    return found[0]


def to_t5x(opt_state: PyTree, shapes: Mapping[str, Shape], where: Sequence[Place]) -> Iterator[tuple[str, Moments]]:
    """T5X's name of each parameter, and its state; what it does not have is one zero.

    Args:
      opt_state: of Adafactor.
      shapes: of our parameters, by name, in the order of their tree.
      where: all places of the model.

    Raises:
      UserError: it is another optimizer's state, or factored as T5X cannot.
    """
    factored, names = factored_of(opt_state), list(shapes)
    averaged = _nodes(opt_state, optax.EmaState)
    arrays = {name: dict(zip(names, map(np.asarray, jax.tree.leaves(getattr(factored, name))))) for name in KEPT[:3]}
    # Ours is of what is added to a parameter, T5X's of what is taken away.
    momentum = {n: -np.asarray(x) for n, x in zip(names, jax.tree.leaves(averaged[0].ema))} if averaged else {}
    parts_of = dict(zip(names, factored.parts, strict=True))
    for place in where:
        found: Moments = {name: np.zeros(1, np.float32) for name in KEPT}
        parts, layout = parts_of[place.path], place.layout
        if parts.rows:
            rows, columns = (_letters(layout, dims) for dims in (parts.rows, parts.columns))
            row, column = _names(place, rows, columns, shapes[place.path])
            found[row] = place.theirs(arrays["v_row"][place.path], _without(layout, columns))
            found[column] = place.theirs(arrays["v_col"][place.path], _without(layout, rows))
        else:
            found["v"] = place.theirs(arrays["v"][place.path], layout)
        if momentum:
            found["m"] = place.theirs(momentum[place.path], layout)
        yield place.name, found


def from_t5x(
    opt_state: PyTree,
    shapes: Mapping[str, Shape],
    where: Sequence[Place],
    read: Callable[[str, str], np.ndarray],
    step: int,
) -> PyTree:
    """The state of our Adafactor that goes on where T5X's was.

    Args:
      opt_state: of the optimizer, any of its values, or jax.ShapeDtypeStructs: what it has is what is read.
      shapes: of our parameters, by name, in the order of their tree.
      where: all places of the model.
      read: (T5X's name of a parameter, one of KEPT) -> that array.
      step: updates done.

    Returns:
      the same tree, of numpy arrays.

    Raises:
      UserError: T5X keeps other moments: it factors otherwise, or has no momentum.
    """
    factored, momentum = factored_of(opt_state), bool(_nodes(opt_state, optax.EmaState))
    parts_of = dict(zip(shapes, factored.parts, strict=True))
    new: dict[str, dict[str, np.ndarray]] = {name: {} for name in KEPT}
    for place in where:
        for name, have, value in _arrays(place, parts_of[place.path], shapes[place.path], momentum, read):
            sizes = dict(zip(place.layout, shapes[place.path], strict=True))
            try:
                value = place.ours(value, have, sizes)
            except ValueError as error:
                raise UserError(
                    f"T5X's {name} of {place.name} {error}: this run's Adafactor factors otherwise: set "
                    "Optimizer.factored_min_size, momentum and Adafactor.factoring as T5X has them"
                ) from None
            if place.layer is None:
                new[name][place.path] = np.array(value, np.float32)
            else:
                whole = new[name].setdefault(place.path, np.empty([sizes[letter] for letter in have], np.float32))
                whole[place.layer] = value
    count = cast(jax.Array, np.asarray(step, np.int32))  # as all the others on the host, until the state is placed
    return at_step(_put(opt_state, new, list(shapes)), count)


def _arrays(
    place: Place, parts: Parts, shape: Shape, momentum: bool, read: Callable[[str, str], np.ndarray]
) -> Iterator[tuple[str, str, np.ndarray]]:
    """(our name, its dimensions, T5X's array) of each moment that we keep."""
    layout = place.layout
    if momentum:
        yield "m", layout, read(place.name, "m")
    if not parts.rows:
        yield "v", layout, read(place.name, "v")
        return
    rows, columns = (_letters(layout, dims) for dims in (parts.rows, parts.columns))
    row, column = _names(place, rows, columns, shape)
    yield "v_row", _without(layout, columns), read(place.name, row)
    yield "v_col", _without(layout, rows), read(place.name, column)


def at_step(opt_state: PyTree, step: jax.Array) -> PyTree:
    """The state of an optimizer with all its counts of updates at a step."""

    def counted(node: Any) -> Any:
        if isinstance(node, FactoredState):
            return dataclasses.replace(node, count=step)
        return node._replace(count=step) if isinstance(node, _COUNTED) else node

    return jax.tree.map(counted, opt_state, is_leaf=lambda node: isinstance(node, (FactoredState, *_COUNTED)))


def _put(opt_state: PyTree, new: Mapping[str, Mapping[str, np.ndarray]], names: Sequence[str]) -> PyTree:
    """The state with these arrays."""
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


def _names(place: Place, rows: str, columns: str, shape: Shape) -> tuple[str, str]:
    """What T5X calls the moments of our rows, and those of our columns.

    Of an array of two dimensions its columns are the larger one (the second, where both are as large); of stacked ones
    its rules say so by name, as ours do.
    """
    if any(len({letter in side for letter in group}) > 1 for group in place.groups for side in (rows, columns)):
        raise UserError(
            f"{place.path} is factored head by head, and T5X has all heads of {place.name} in one dimension"
        )
    if place.stacked:
        return "v_row", "v_col"
    sizes = dict(zip(place.layout, shape, strict=True))
    first, second = (math.prod(sizes[letter] for letter in group) for group in place.groups)
    return ("v_row", "v_col") if (place.groups[0][0] in rows) == (first <= second) else ("v_col", "v_row")


def _letters(layout: str, dims: tuple[int, ...]) -> str:
    return "".join(layout[i] for i in dims)


def _without(layout: str, letters: str) -> str:
    return "".join(letter for letter in layout if letter not in letters)
