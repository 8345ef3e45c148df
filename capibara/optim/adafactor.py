"""Adafactor (Shazeer and Stern 2018, arXiv:1804.04235) for weights with any number of dimensions, as in T5X.

A weight's second moment is stored as the means of its rows and of its columns. An attention kernel [embed, heads,
head_dim] is a matrix from `embed` to the features of all heads: two dimensions are its columns, so the size of one head
does not decide whether it is factored.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from capibara.config import configurable
from capibara.core import tree
from capibara.core.types import Params, PyTree, UserError
from capibara.optim import matrices
from capibara.optim.matrices import Axes, Dims

_ROLES = ("row", "column", "batch", "none")
_T = TypeVar("_T")
_D = TypeVar("_D")

Moments = tuple[jax.Array, jax.Array, jax.Array]  # v_row, v_col and v of a parameter


class Factoring(enum.StrEnum):
    """Which weights have a factored second moment (row and column means).

    matrices: weights of which both sides, such as [embed] and [heads x head_dim], have at least
    Optimizer.factored_min_size; T5X's rule if each layer is a parameter of its own.

    stacked: every matrix that is stacked over layers; other weights as "matrices". T5X's rule if layers are scanned
    (`scan_layers`).

    dimensions: weights whose two largest dimensions, whatever they are, have that size, so attention with smaller heads
    is not factored; momentum is of the updates before the learning rate. The rule of runs that were started before the
    others existed.
    """

    MATRICES = "matrices"
    STACKED = "stacked"
    DIMENSIONS = "dimensions"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor:
    """Options of Adafactor beyond the fields of Optimizer, with T5X's names.

    T5X's beta1 is Optimizer.momentum, its min_dim_size_to_factor Optimizer.factored_min_size, its
    multiply_by_parameter_scale Optimizer.parameter_scale, its global_norm_clip_threshold Optimizer.clip_norm.

    Attributes:
      factoring: which weights are factored.
      factor_map: (pattern, roles) for parameter names ("layers/attention/query"): the first pattern found in a name gives
        the role of each dimension, "row", "column", "batch" (independent weights are stacked along it) or "none".
        Without rows and columns the parameter is not factored. It overrides the rule of sizes.
      decay_rate: the second moments' decay at update t is 1 - t ** -decay_rate.
      step_offset: steps before the first update of this optimizer, for fine-tuning that continues to count steps.
      clipping_threshold: a weight's update is scaled down to this root mean square; None: no clipping.
      epsilon1: added to squared gradients.
      epsilon2: the smallest scale of a parameter.
      max_parameter_scale: the largest scale of a parameter; None: no limit.
      parameter_scale_map: (pattern, flag) for parameter names; overrides Optimizer.parameter_scale.
      weight_decay_rate: decay of every parameter, including norm scales, independent of the learning rate; None: none.
        Optimizer.weight_decay is the alternative, for matrices and multiplied by the learning rate.
      weight_decay_rate_lr_exponent: weight_decay_rate (None: 1) is multiplied by the learning rate to this power.
    """

    factoring: Factoring = Factoring.MATRICES
    factor_map: tuple[tuple[str, tuple[str, ...]], ...] = ()
    decay_rate: float = 0.8
    step_offset: int = 0
    clipping_threshold: float | None = 1.0
    epsilon1: float = 1e-30
    epsilon2: float = 1e-3
    max_parameter_scale: float | None = None
    parameter_scale_map: tuple[tuple[str, bool], ...] = ()
    weight_decay_rate: float | None = None
    weight_decay_rate_lr_exponent: float | None = None

    def __post_init__(self) -> None:
        for name in ("decay_rate", "clipping_threshold", "epsilon1", "epsilon2", "max_parameter_scale"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"Adafactor.{name} is {value}, must be finite and above 0")
        for name in ("weight_decay_rate", "weight_decay_rate_lr_exponent"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise UserError(f"Adafactor.{name} is {value}, must be finite and not negative: None is none")
        if self.step_offset < 0:
            raise UserError(f"Adafactor.step_offset is {self.step_offset}, must not be negative: 0 is none")
        if self.factor_map and self.factoring is Factoring.DIMENSIONS:
            raise UserError("Adafactor.factor_map has no effect with factoring 'dimensions': set 'matrices'")
        for name, patterns in (("factor_map", self.factor_map), ("parameter_scale_map", self.parameter_scale_map)):
            for pattern, _ in patterns:
                _check_pattern(name, pattern)
        for pattern, roles in self.factor_map:
            if wrong := [role for role in roles if role not in _ROLES]:
                raise UserError(
                    f"Adafactor.factor_map has the role {wrong[0]!r} for {pattern!r}, must be one of {', '.join(_ROLES)}"
                )
            if ("row" in roles) != ("column" in roles):
                raise UserError(
                    f"Adafactor.factor_map has {roles} for {pattern!r}, must have both rows and columns, or neither"
                )

    @property
    def decays(self) -> bool:
        """Whether parameters decay by weight_decay_rate."""
        return self.weight_decay_rate is not None or bool(self.weight_decay_rate_lr_exponent)

    def decay_of(self, learning_rate: jax.Array) -> jax.Array | float:
        """The factor by which an update with this learning rate decays a parameter."""
        if not self.weight_decay_rate_lr_exponent:
            return self.weight_decay_rate or 0.0
        return (self.weight_decay_rate or 1.0) * learning_rate**self.weight_decay_rate_lr_exponent


@dataclasses.dataclass(frozen=True)
class Parts:
    """The roles of a parameter's dimensions.

    Attributes:
      rows, columns: dimensions of the matrix; both empty: it is not factored.
      dims: all dimensions but those along which independent weights are stacked.
    """

    rows: Dims
    columns: Dims
    dims: Dims


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FactoredState:
    """State of `scale_by_factored_rms`; a moment that a parameter does not have is a zero of shape [1].

    Attributes:
      count: number of updates, int32.
      v_row: tree like the parameters: second moments averaged over columns (the shape without these dimensions).
      v_col: tree like the parameters: second moments averaged over rows.
      v: tree like the parameters: second moments of those that are not factored.
      parts: roles of the dimensions of each parameter, in the order of jax.tree.leaves.
    """

    count: jax.Array
    v_row: PyTree
    v_col: PyTree
    v: PyTree
    parts: tuple[Parts, ...] = dataclasses.field(metadata={"static": True})

    def axes_of(self, axes: PyTree) -> FactoredState:
        """The logical axes of every leaf, from those of the parameters."""
        names, structure = jax.tree.flatten(axes, is_leaf=tree.is_axes)

        def without(dropped: Callable[[Parts], Dims]) -> PyTree:
            each = (
                _left(name_axes, dropped(p)) if p.rows else (None,)
                for name_axes, p in zip(names, self.parts, strict=True)
            )
            return jax.tree.unflatten(structure, list(each))

        unfactored = [(None,) if p.rows else name_axes for name_axes, p in zip(names, self.parts, strict=True)]
        scalar: PyTree = ()
        v = jax.tree.unflatten(structure, unfactored)
        return FactoredState(scalar, without(lambda p: p.columns), without(lambda p: p.rows), v, self.parts)


class Rule:
    """The transformations of Adafactor for parameters with these axes; an optimizer chains them.

    Args:
      config: options.
      axes: tree like the parameters, of tuples of logical axis names.
      min_size: smallest size of a side (or dimension) that is factored.
      parameter_scale: whether updates are relative to the parameter, if config.parameter_scale_map has no match.
    """

    def __init__(self, config: Adafactor, axes: PyTree, *, min_size: int, parameter_scale: bool):
        self.config, self.axes, self.min_size, self.parameter_scale = config, axes, min_size, parameter_scale

    def parts(self, params: PyTree) -> tuple[Parts, ...]:
        """The roles of the dimensions of each parameter (arrays or shapes), in the order of jax.tree.leaves."""
        names = jax.tree.leaves(self.axes, is_leaf=tree.is_axes)
        named = zip(tree.path_names(params), jax.tree.leaves(params), names, strict=True)
        return tuple(self._parts(name, leaf.shape, axes) for name, leaf, axes in named)

    def scale_by_factored_rms(self) -> optax.GradientTransformation:
        """Divides gradients by the root of their second moments."""
        config = self.config

        def init(params: Params) -> FactoredState:
            leaves, structure = jax.tree.flatten(params)
            parts = self.parts(params)
            empty = [_empty(leaf, p) for leaf, p in zip(leaves, parts, strict=True)]
            v_row, v_col, v = _transposed(structure, empty)
            return FactoredState(jnp.zeros((), jnp.int32), v_row, v_col, v, parts)

        def update(
            grads: optax.Updates, state: FactoredState, params: Params | None = None
        ) -> tuple[optax.Updates, FactoredState]:
            del params
            t = jnp.asarray(state.count - config.step_offset + 1, jnp.float32)
            if config.step_offset:  # up to it, as at the first update, the moments are those of the current gradient
                t = jnp.maximum(t, 1.0)
            decay = 1.0 - t ** (-config.decay_rate)
            leaves, structure = jax.tree.flatten(grads)
            moments = (jax.tree.leaves(x) for x in (state.v_row, state.v_col, state.v))
            each = [
                _scaled(grad, retained, p, decay, config.epsilon1)
                for grad, *retained, p in zip(leaves, *moments, state.parts, strict=True)
            ]
            v_row, v_col, v = _transposed(structure, [retained for _, retained in each])
            new = FactoredState(optax.safe_increment(state.count), v_row, v_col, v, state.parts)
            return jax.tree.unflatten(structure, [update for update, _ in each]), new

        return optax.GradientTransformation(init, update)

    def clip_by_rms(self) -> optax.GradientTransformation:
        """Scales updates down to a root mean square of `clipping_threshold`, weight by weight."""
        limit = self.config.clipping_threshold
        return self._stateless(
            lambda u, _p, dims, _n: u if limit is None else u / jnp.maximum(1.0, _rms(u, dims) / limit)
        )

    def scale_by_parameter_rms(self) -> optax.GradientTransformation:
        """Multiplies updates by their parameter's root mean square, clipped to [`epsilon2`, `max_parameter_scale`]."""
        least, most = self.config.epsilon2, self.config.max_parameter_scale

        def scaled(update: jax.Array, param: jax.Array, dims: Dims, name: str) -> jax.Array:
            if not _first_match(self.config.parameter_scale_map, name, self.parameter_scale):
                return update
            scale = jnp.maximum(_rms(param, dims), least)
            return update * (scale if most is None else jnp.minimum(scale, most))

        return self._stateless(scaled)

    @property
    def scales_by_parameters(self) -> bool:
        return self.parameter_scale or any(whether for _, whether in self.config.parameter_scale_map)

    def _stateless(self, fn: Callable[[jax.Array, jax.Array, Dims, str], jax.Array]) -> optax.GradientTransformation:
        def update(updates: optax.Updates, params: Params | None) -> optax.Updates:
            leaves, structure = jax.tree.flatten(updates)
            values = leaves if params is None else jax.tree.leaves(params)
            owns = (parts.dims for parts in self.parts(updates))
            named = zip(leaves, values, owns, tree.path_names(updates), strict=True)
            return jax.tree.unflatten(structure, [fn(*each) for each in named])

        return optax.stateless(update)

    def _parts(self, name: str, shape: tuple[int, ...], axes: Axes) -> Parts:
        matrix_axes = matrices.own_dims(axes)
        roles = _first_match(self.config.factor_map, name, None)
        if roles is not None:
            if len(roles) != len(shape):
                raise UserError(
                    f"Adafactor.factor_map has {len(roles)} roles for {name}, which has {len(shape)} dimensions: {axes}"
                )
            dims = {role: tuple(i for i, own_role in enumerate(roles) if own_role == role) for role in _ROLES}
            return Parts(dims["row"], dims["column"], tuple(i for i in range(len(shape)) if i not in dims["batch"]))
        if self.config.factoring is Factoring.DIMENSIONS:
            largest = [int(i) for i in np.argsort(shape)]
            factored = len(shape) >= 2 and shape[largest[-2]] >= self.min_size
            return Parts((largest[-2],), (largest[-1],), matrix_axes) if factored else Parts((), (), matrix_axes)
        if (sides := matrices.sides(axes)) is None:
            return Parts((), (), matrix_axes)
        stacked = len(matrix_axes) < len(shape) and self.config.factoring is Factoring.STACKED
        small = min(math.prod(shape[i] for i in side) for side in sides) < self.min_size
        if small and not stacked or stacked and "position" in axes:  # T5X does not factor relative positions
            return Parts((), (), matrix_axes)
        inputs, outputs = sides
        return (
            Parts(outputs, inputs, matrix_axes) if axes[outputs[-1]] == "embed" else Parts(inputs, outputs, matrix_axes)
        )


def decay(rate: Callable[[jax.Array], jax.Array | float], mask: PyTree | None) -> optax.GradientTransformation:
    """Weight decay that is applied after all other transformations.

    Args:
      rate: (number of earlier updates) -> the factor of decay.
      mask: tree like the parameters, of bools: which of them decay; None: all.
    """

    def init(params: Params) -> optax.ScaleByScheduleState:
        del params
        return optax.ScaleByScheduleState(count=jnp.zeros((), jnp.int32))

    def update(
        updates: optax.Updates, state: optax.ScaleByScheduleState, params: Params | None = None
    ) -> tuple[optax.Updates, optax.ScaleByScheduleState]:
        share = rate(state.count)
        of = jax.tree.map(lambda _: True, params) if mask is None else mask
        updates = jax.tree.map(lambda u, p, decays: u - share * p if decays else u, updates, params, of)
        return updates, optax.ScaleByScheduleState(count=optax.safe_increment(state.count))

    return optax.GradientTransformation(init, update)


def _empty(param: jax.Array, parts: Parts) -> Moments:
    """v_row, v_col and v of a parameter before its first update."""
    nothing = jnp.zeros((1,), param.dtype)
    if not parts.rows:
        return nothing, nothing, jnp.zeros_like(param)
    v_row, v_col = (jnp.zeros(_left(param.shape, dims), param.dtype) for dims in (parts.columns, parts.rows))
    return v_row, v_col, nothing


def _scaled(
    grad: jax.Array, averages: list[jax.Array], parts: Parts, decay: jax.Array, epsilon: float
) -> tuple[jax.Array, Moments]:
    """Divides a gradient by the root of its second moment; also returns the new v_row, v_col and v."""
    (v_row, v_col, v), square = averages, jnp.square(grad) + epsilon
    mix = lambda old, new: (decay * old + (1.0 - decay) * new).astype(grad.dtype)  # noqa: E731
    nothing = jnp.zeros((1,), grad.dtype)
    if not parts.rows:
        v = mix(v, square)
        return grad * v**-0.5, (nothing, nothing, v)
    v_row, v_col = (
        mix(old, jnp.mean(square, axis=dims)) for old, dims in ((v_row, parts.columns), (v_col, parts.rows))
    )
    rows_left = tuple(i - sum(j < i for j in parts.columns) for i in parts.rows)
    row_factor = (v_row / jnp.mean(v_row, axis=rows_left, keepdims=True)) ** -0.5
    update = grad * jnp.expand_dims(row_factor, parts.columns) * jnp.expand_dims(v_col**-0.5, parts.rows)
    return update, (v_row, v_col, nothing)


def _rms(x: jax.Array, dims: Dims) -> jax.Array:
    """Root mean square of each of the weights stacked in `x`; the dimensions `dims` become 1."""
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=dims, keepdims=True))


def _left(values: tuple[_T, ...], dropped: Dims) -> tuple[_T, ...]:
    return tuple(value for i, value in enumerate(values) if i not in dropped)


def _transposed(structure: jax.tree_util.PyTreeDef, each: Sequence[Moments]) -> tuple[PyTree, PyTree, PyTree]:
    """Three trees from one triple for each leaf."""
    v_row, v_col, v = (jax.tree.unflatten(structure, [of[i] for of in each]) for i in range(3))
    return v_row, v_col, v


def _first_match(rules: tuple[tuple[str, _T], ...], name: str, default: _D) -> _T | _D:
    return next((value for pattern, value in rules if re.search(pattern, name)), default)


def _check_pattern(field: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(
            f"Adafactor.{field} has the pattern {pattern!r}, must be a regular expression ({error})"
        ) from None
