"""Optimizers and learning-rate schedules by name, and the logical axes of an optimizer's state.

`axes` is everywhere a tree like the parameters whose leaves are tuples of logical axis names, one name (or None) per
dimension: ("layers", "embed", "mlp"), ("vocab", "embed"), ("layers", "embed").
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from capibara import optim_state
from capibara.config import configurable
from capibara.optim_state import StateDtype
from capibara.tree import is_axes
from capibara.types import Params, PyTree, UserError

Axes = tuple[str | None, ...]
StepFunction = Callable[[Any], jax.Array]

STACK_AXES = ("layers", "stage", "expert")  # leading axes over which independent weights are stacked
HEAD_AXES = ("heads", "kv_heads", "head_dim")  # neighbours among these are one space: all the heads' features
LOOKUP_AXES = ("vocab", "position")  # tables of embeddings and the output head
MAX_LEARNING_RATE = 10.0  # no update rule here learns with more: what is above is a slip of the pen


class ScheduleKind(enum.StrEnum):
    """How the learning rate goes on after the warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"
    LINEAR = "linear"
    WSD = "wsd"
    RSQRT = "rsqrt"


class OptimizerName(enum.StrEnum):
    """The update rules."""

    ADAMW = "adamw"
    ADAFACTOR = "adafactor"
    LION = "lion"
    MUON = "muon"
    SGD = "sgd"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """A learning rate for every step: a linear warm-up to the peak, then what `kind` says.

    constant stays at the peak. cosine and linear fall to `final_fraction` of it. wsd (warm-up, stable, decay; Hu et
    al. 2024, arXiv:2404.06395) stays at the peak and falls linearly over the last steps of the run. rsqrt falls as
    sqrt(warm-up / step), without an end (T5).

    Attributes:
      kind: the shape after the warm-up.
      learning_rate: the peak, at most 10.
      warmup_steps: updates until the peak: update i (from 0) of the warm-up has (i + 1) / warmup_steps of it.
      warmup_fraction: the warm-up as a share of the run, for files whose number of steps varies; used where
        warmup_steps is 0.
      decay_steps: cosine, linear: updates from the end of the warm-up to the final learning rate (None: until the
        end of the run). wsd: length of the last decay (None: decay_fraction of the run).
      decay_fraction: wsd without decay_steps: the last decay as a share of the run.
      final_fraction: cosine, linear, wsd: the final learning rate over the peak.
    """

    kind: ScheduleKind = ScheduleKind.COSINE
    learning_rate: float = 3e-4
    warmup_steps: int = 0
    warmup_fraction: float = 0.0
    decay_steps: int | None = None
    decay_fraction: float = 0.2
    final_fraction: float = 0.1

    def __post_init__(self):
        if not 0 < self.learning_rate <= MAX_LEARNING_RATE:
            limits = f"above 0 and at most {MAX_LEARNING_RATE:g}"
            raise UserError(f"Schedule.learning_rate is {self.learning_rate}, must be {limits}: try 3e-4")
        if self.warmup_steps < 0:
            raise UserError(f"Schedule.warmup_steps is {self.warmup_steps}, must not be negative: 0 is no warm-up")
        for name in ("warmup_fraction", "decay_fraction", "final_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"Schedule.{name} is {getattr(self, name)}, must be from 0 to 1")
        if self.decay_steps is not None and self.decay_steps < 1:
            raise UserError(f"Schedule.decay_steps is {self.decay_steps}, must be at least 1, or None for the default")
        shares = self.warmup_fraction + self.decay_fraction
        by_shares = self.kind == ScheduleKind.WSD and not self.warmup_steps and self.decay_steps is None
        if by_shares and shares > 1 + 1e-9:
            raise UserError(
                f"Schedule.warmup_fraction ({self.warmup_fraction}) and decay_fraction ({self.decay_fraction}) must be "
                f"at most 1 together: try decay_fraction = {max(0.0, 1 - self.warmup_fraction):.3g}"
            )

    def build(self, total_steps: int) -> StepFunction:
        """The learning rate as a function of the number of updates done before (0 for the first).

        Args:
          total_steps: updates in the whole run.

        Returns:
          A function of an int or a traced int32 scalar to a float32 scalar; constant beyond the end of its decay.

        Raises:
          UserError: the warm-up, or the warm-up and wsd's decay, do not fit into the run.
        """
        warmup, decay = self._lengths(total_steps)
        final = self.final_fraction

        def learning_rate(step):
            step = jnp.asarray(step, jnp.float32)
            after = step - warmup
            match self.kind:
                case ScheduleKind.CONSTANT:
                    scale = jnp.ones_like(step)
                case ScheduleKind.RSQRT:
                    scale = jnp.sqrt(max(warmup, 1) / jnp.maximum(step, max(warmup, 1)))
                case ScheduleKind.COSINE:
                    scale = final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(after / decay, 0, 1)))
                case ScheduleKind.LINEAR:
                    scale = 1 - (1 - final) * jnp.clip(after / decay, 0, 1)
                case ScheduleKind.WSD:
                    scale = 1 - (1 - final) * jnp.clip((step - (total_steps - decay)) / decay, 0, 1)
            rise = jnp.minimum(1, (step + 1) / warmup) if warmup else 1.0
            return self.learning_rate * rise * scale

        return learning_rate

    def _lengths(self, total_steps: int) -> tuple[int, int]:
        """Updates of the warm-up and of the decay in a run of `total_steps`."""
        if total_steps < 1:
            raise UserError(f"total_steps is {total_steps}, must be at least 1")
        warmup = self.warmup_steps or round(self.warmup_fraction * total_steps)
        if warmup > total_steps:
            raise UserError(
                f"Schedule.warmup_steps ({warmup}) must not exceed the run's {total_steps} steps: "
                f"try {max(1, total_steps // 10)}, or Schedule.warmup_fraction = 0.1"
            )
        if self.kind != ScheduleKind.WSD:
            return warmup, self.decay_steps or max(1, total_steps - warmup)
        decay = self.decay_steps or max(1, round(self.decay_fraction * total_steps))
        if not self.warmup_steps and self.decay_steps is None:
            return warmup, min(decay, max(1, total_steps - warmup))  # the shares fit, but each was rounded
        if warmup + decay > total_steps:
            first = "warmup_steps" if self.warmup_steps else f"warmup_fraction = {self.warmup_fraction}"
            last = "decay_steps" if self.decay_steps else f"decay_fraction = {self.decay_fraction}"
            raise UserError(
                f"Schedule's warm-up ({first}: {warmup}) and decay ({last}: {decay}) must not exceed the run's "
                f"{total_steps} steps together: try decay_steps = {max(1, (total_steps - warmup) // 5)}"
            )
        return warmup, decay


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An update rule with its schedule, global-norm clip and decoupled, masked weight decay.

    adamw (Loshchilov and Hutter 2019, arXiv:1711.05101); adafactor (Shazeer and Stern 2018, arXiv:1804.04235), whose
    learning rate is relative to the root mean square of each weight unless parameter_scale is False; lion (Chen et
    al. 2023, arXiv:2302.06675); muon (Jordan 2024; scaled as in Liu et al. 2025, arXiv:2502.16982, so that AdamW's
    learning rates fit) for the matrices of the hidden layers, AdamW for embeddings, output head, biases and norms;
    sgd with momentum. Stacked layers are treated as separate weights by all of them.

    Attributes:
      name: the update rule.
      schedule: the learning rate.
      weight_decay: share of a weight that the update takes away, times the learning rate. Only weights that map one
        space to another decay: biases and norm scales do not.
      b1: decay of the first moment: adamw, lion, and adamw inside muon.
      b2: decay of the second moment, for lion of the momentum; None is 0.95, for lion 0.99.
      eps: what adamw and muon add to denominators.
      momentum: muon (None is 0.95), sgd (None is 0.9), adafactor (None is without).
      nesterov: whether muon and sgd look ahead along their momentum.
      muon_rms: root mean square of muon's update before the learning rate; 0.2 is what AdamW's is.
      factored_min_size: adafactor keeps row and column moments where a weight's two largest dimensions have this size.
      parameter_scale: whether adafactor's update is relative to the weight.
      clip_norm: gradients are scaled down to this global norm; None is no limit.
      state_dtype: how the moments of weights are stored between updates. Adafactor's are small by themselves.
    """

    name: OptimizerName = OptimizerName.ADAMW
    schedule: Schedule = dataclasses.field(default_factory=Schedule)
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float | None = None
    eps: float = 1e-8
    momentum: float | None = None
    nesterov: bool = True
    muon_rms: float = 0.2
    factored_min_size: int = 128
    parameter_scale: bool = True
    clip_norm: float | None = 1.0
    state_dtype: StateDtype = StateDtype.FLOAT32

    def __post_init__(self):
        for name in ("b1", "b2", "momentum"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise UserError(f"Optimizer.{name} is {value}, must be from 0 to below 1: try 0.9")
        for name in ("eps", "clip_norm", "muon_rms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                hint = ": None is no limit" if name == "clip_norm" else ""
                raise UserError(f"Optimizer.{name} is {value}, must be finite and above 0{hint}")
        if not 0 <= self.weight_decay < math.inf:
            raise UserError(
                f"Optimizer.weight_decay is {self.weight_decay}, must be finite and not negative: 0 is none"
            )
        if self.factored_min_size < 2:
            raise UserError(f"Optimizer.factored_min_size is {self.factored_min_size}, must be at least 2: try 128")
        if self.name is OptimizerName.ADAFACTOR and self.state_dtype is not StateDtype.FLOAT32:
            raise UserError(
                f"Optimizer.state_dtype is {self.state_dtype}, which adafactor's row and column moments do not take: "
                "set float32, or another Optimizer.name"
            )

    def build(self, total_steps: int, axes: PyTree) -> optax.GradientTransformation:
        """The optimizer for parameters with these axes.

        Args:
          total_steps: updates in the whole run, for the schedule.
          axes: tree like the parameters, of tuples of logical axis names.

        Raises:
          UserError: the schedule does not fit into the run.
        """
        schedule = self.schedule.build(total_steps)
        chain = [] if self.clip_norm is None else [optax.clip_by_global_norm(self.clip_norm)]
        weights = jax.tree.map(lambda a, decays: a if decays else None, axes, decay_mask(axes), is_leaf=is_axes)
        chain += [optim_state.stored(rule, self.state_dtype, weights) for rule in self._rule(axes)]
        if self.weight_decay:
            chain.append(optax.add_decayed_weights(self.weight_decay, mask=decay_mask(axes)))
        return optax.chain(*chain, optax.scale_by_learning_rate(schedule))

    def _rule(self, axes: PyTree) -> list[optax.GradientTransformation]:
        """From gradients to updates, before weight decay and learning rate."""
        adam = optax.scale_by_adam(b1=self.b1, b2=_default(self.b2, 0.95), eps=self.eps)
        match self.name:
            case OptimizerName.ADAMW:
                return [adam]
            case OptimizerName.LION:
                return [optax.scale_by_lion(b1=self.b1, b2=_default(self.b2, 0.99))]
            case OptimizerName.SGD:
                return [optax.trace(decay=_default(self.momentum, 0.9), nesterov=self.nesterov)]
            case OptimizerName.MUON:
                hidden = jax.tree.map(lambda a: "muon" if hidden_matrix(a) else "adamw", axes, is_leaf=is_axes)
                muon = _muon(axes, _default(self.momentum, 0.95), self.eps, self.nesterov, self.muon_rms)
                return [optax.partition({"muon": muon, "adamw": adam}, hidden)]
            case OptimizerName.ADAFACTOR:
                rule = [
                    optax.scale_by_factored_rms(min_dim_size_to_factor=self.factored_min_size),
                    _clip_by_rms(axes, limit=1.0),
                ]
                if self.parameter_scale:
                    rule.append(_scale_by_parameter_rms(axes, floor=1e-3))
                if self.momentum is not None:
                    rule.append(optax.ema(self.momentum, debias=False))
                return rule


def decay_mask(axes: PyTree) -> PyTree:
    """True for the weights that decay: those with at least two spaces beside the stack axes.

    A bias of attention heads, ("heads", "head_dim"), has one space (the heads' features): it does not decay.
    """
    return jax.tree.map(lambda a: len(_spaces(a)) >= 2, axes, is_leaf=is_axes)


def hidden_matrix(axes: Axes) -> optax.contrib.MuonDimensionNumbers | None:
    """Which dimensions of a weight are a matrix's inputs and outputs; None for everything but hidden matrices.

    The inputs are the first space after the stack axes and the outputs the rest; in a projection back to "embed" the
    inputs are all but the last. Stack axes hold independent matrices.
    """
    spaces = _spaces(axes)
    if len(spaces) < 2 or set(axes) & set(LOOKUP_AXES):
        return None
    back = axes[-1] == "embed" and axes[spaces[0][0]] != "embed"
    inputs, outputs = (spaces[:-1], spaces[-1:]) if back else (spaces[:1], spaces[1:])
    return optax.contrib.MuonDimensionNumbers(tuple(sum(inputs, [])), tuple(sum(outputs, [])))


def state_axes(tx: optax.GradientTransformation, abstract_params: Params, axes: PyTree) -> PyTree:
    """Logical axes of an optimizer's state, so that it can be sharded like the parameters.

    Args:
      tx: the optimizer.
      abstract_params: tree of the parameters' shapes (jax.ShapeDtypeStruct) or arrays.
      axes: tree like the parameters, of tuples of logical axis names.

    Returns:
      A tree like `jax.eval_shape(tx.init, abstract_params)` whose leaves are tuples with one entry per dimension:
      the parameter's axes where a leaf mirrors a parameter (the scales of 8-bit blocks too, though one dimension of
      theirs is shorter and may not divide over its mesh axes), the remaining axes for Adafactor's rows and columns,
      None (replicated) for every dimension of anything else, () for scalars. Containers of the state are tuples
      too: map it beside the abstract state, `jax.tree.map(fn, state, axes)`, or with `is_leaf=is_axes`.
    """
    shapes = {path: leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params)}
    named = dict(jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes))
    if missing := sorted(map(jax.tree_util.keystr, shapes.keys() ^ named.keys())):
        raise ValueError(f"parameters and axes differ in {', '.join(missing)}")

    def leaf_axes(path, leaf):
        owner = optim_state.parameter_path(path, shapes)
        if owner is None:
            return (None,) * leaf.ndim
        shape, names = shapes[owner], named[owner]
        if leaf.shape == shape or getattr(path[-1], "name", None) in optim_state.Blocks._fields:
            return names
        field = getattr(path[len(path) - len(owner) - 1], "name", None) if len(owner) < len(path) else None
        if field in ("v_row", "v_col") and len(shape) >= 2:
            # optax drops the largest dimension for rows and the second largest for columns; a weight that it does
            # not factor has a placeholder of shape (1,) there.
            dropped = int(np.argsort(shape)[-1 if field == "v_row" else -2])
            if leaf.shape == shape[:dropped] + shape[dropped + 1 :]:
                return names[:dropped] + names[dropped + 1 :]
        return (None,) * leaf.ndim

    return jax.tree_util.tree_map_with_path(leaf_axes, jax.eval_shape(tx.init, abstract_params))


def _spaces(axes: Axes) -> list[list[int]]:
    """Dimensions after the leading stack axes, grouped: neighbouring head axes are one space."""
    first = next((i for i, name in enumerate(axes) if name not in STACK_AXES), len(axes))
    spaces: list[list[int]] = []
    for i in range(first, len(axes)):
        if i > first and axes[i] in HEAD_AXES and axes[i - 1] in HEAD_AXES:
            spaces[-1].append(i)
        else:
            spaces.append([i])
    return spaces


def _muon(axes: PyTree, momentum: float, eps: float, nesterov: bool, rms: float) -> optax.GradientTransformation:
    """Momentum, orthogonalised matrix by matrix, then scaled to root mean square `rms`."""
    numbers = jax.tree.map(lambda a: hidden_matrix(a) or optax.MaskedNode(), axes, is_leaf=is_axes)

    def scale(updates, params):
        del params

        def one(update, matrix):
            sizes = [math.prod(update.shape[i] for i in dims) for dims in matrix]
            return rms * math.sqrt(max(sizes)) * update

        return jax.tree.map(one, updates, numbers)

    return optax.chain(
        optax.contrib.scale_by_muon(beta=momentum, eps=eps, nesterov=nesterov, weight_dimension_numbers=numbers),
        optax.stateless(scale),
    )


def _rms(x: jax.Array, axes: Axes) -> jax.Array:
    """Root mean square of each of the weights stacked in `x`; its other dimensions are 1."""
    spaces = _spaces(axes)
    dims = tuple(range(spaces[0][0], x.ndim)) if spaces else ()
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=dims, keepdims=True))


def _clip_by_rms(axes: PyTree, limit: float) -> optax.GradientTransformation:
    def clip(updates, params):
        del params
        return jax.tree.map(lambda u, a: u / jnp.maximum(1.0, _rms(u, a) / limit), updates, axes)

    return optax.stateless(clip)


def _scale_by_parameter_rms(axes: PyTree, floor: float) -> optax.GradientTransformation:
    def scale(updates, params):
        return jax.tree.map(lambda u, p, a: u * jnp.maximum(_rms(p, a), floor), updates, params, axes)

    return optax.stateless(scale)


def _default(value: float | None, default: float) -> float:
    return default if value is None else value
