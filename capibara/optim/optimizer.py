"""Optimizers by name, and the logical axes of an optimizer's state."""

from __future__ import annotations

import dataclasses
import enum
import math

import jax
import optax

from capibara.config import configurable
from capibara.core.tree import is_axes
from capibara.core.types import Params, PyTree, UserError
from capibara.optim import adafactor, matrices
from capibara.optim import state_dtypes as optim_state
from capibara.optim.adafactor import Adafactor, Factoring
from capibara.optim.base import HasAxes, OptimizerConfig, StandardOptimizer, decay_mask
from capibara.optim.matrices import Axes
from capibara.optim.schedules import StepFunction
from capibara.optim.state_dtypes import Path, StateDtype


class OptimizerName(enum.StrEnum):
    """The update rules that come with the package; `Trainer.optimizer` takes any OptimizerConfig."""

    ADAMW = "adamw"
    ADAFACTOR = "adafactor"
    LION = "lion"
    MUON = "muon"
    SGD = "sgd"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer(StandardOptimizer):
    """A known update rule with its schedule, global-norm clip and decoupled, masked weight decay.

    adamw (Loshchilov and Hutter 2019, arXiv:1711.05101); adafactor (Shazeer and Stern 2018, arXiv:1804.04235), whose
    learning rate is relative to the root mean square of each weight unless parameter_scale is False; lion (Chen et
    al. 2023, arXiv:2302.06675); muon (Jordan 2024; scaled as in Liu et al. 2025, arXiv:2502.16982, so that AdamW's
    learning rates fit) for the matrices of the hidden layers, AdamW for embeddings, output head, biases and norms;
    sgd with momentum. All of them treat stacked layers as separate weights.

    Attributes:
      name: the update rule.
      schedule: the learning rate.
      weight_decay: weight decay, multiplied by the learning rate. Only matrices decay; biases and norm scales do not.
      b1: decay of the first moment: adamw, lion, and adamw inside muon.
      b2: decay of the second moment (lion: of the momentum); None: 0.95 (lion: 0.99).
      eps: added to denominators by adamw and muon.
      momentum: muon (None: 0.95), sgd (None: 0.9), adafactor (None: no momentum; otherwise of the updates after the
        learning rate).
      nesterov: whether muon and sgd use Nesterov momentum.
      muon_rms: root mean square of muon's update before the learning rate; AdamW's is about 0.2.
      factored_min_size: adafactor factors the second moment of a weight if both sides of it, as a matrix, have at least
        this size; heads and their features are one side. Adafactor.factoring has other rules.
      parameter_scale: whether adafactor's update is relative to the weight.
      adafactor: further options of adafactor.
      clip_norm: gradients are scaled down to this global norm; None: no clipping.
      state_dtype: how the moments of weights are stored between updates; not for adafactor, whose moments are small.
    """

    name: OptimizerName = OptimizerName.ADAMW
    b1: float = 0.9
    b2: float | None = None
    eps: float = 1e-8
    momentum: float | None = None
    nesterov: bool = True
    muon_rms: float = 0.2
    factored_min_size: int = 128
    parameter_scale: bool = True
    adafactor: Adafactor = dataclasses.field(default_factory=Adafactor)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("b1", "b2", "momentum"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise UserError(f"Optimizer.{name} is {value}, must be from 0 to below 1: try 0.9")
        for name in ("eps", "muon_rms"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise UserError(f"Optimizer.{name} is {value}, must be finite and above 0")
        if self.factored_min_size < 2:
            raise UserError(f"Optimizer.factored_min_size is {self.factored_min_size}, must be at least 2: try 128")
        if self.name is OptimizerName.ADAFACTOR and self.state_dtype is not StateDtype.FLOAT32:
            raise UserError(
                f"Optimizer.state_dtype is {self.state_dtype}, but adafactor's moments must be float32: set float32, or "
                "another Optimizer.name"
            )
        if self.name is OptimizerName.ADAFACTOR and self.weight_decay and self.adafactor.decays:
            raise UserError(
                f"Optimizer.weight_decay ({self.weight_decay}) and Adafactor.weight_decay_rate exclude each other: set "
                "Optimizer.weight_decay = 0.0, or remove the other"
            )

    def build(self, total_steps: int, axes: PyTree) -> optax.GradientTransformation:
        if self.name is not OptimizerName.ADAFACTOR:
            return super().build(total_steps, axes)
        return optax.chain(*self._clip(), *self._adafactor(axes, self.schedule.learning_rates(total_steps)))

    def with_state_dtype(self, dtype: StateDtype) -> OptimizerConfig:
        if self.name is OptimizerName.ADAFACTOR and dtype is not self.state_dtype:
            raise UserError("with Optimizer.name adafactor, whose moments are float32 only")
        return super().with_state_dtype(dtype)

    def rule(self, axes: PyTree) -> optax.GradientTransformation:
        adam = optax.scale_by_adam(b1=self.b1, b2=_default(self.b2, 0.95), eps=self.eps)
        match self.name:
            case OptimizerName.ADAMW:
                return adam
            case OptimizerName.LION:
                return optax.scale_by_lion(b1=self.b1, b2=_default(self.b2, 0.99))
            case OptimizerName.SGD:
                return optax.trace(decay=_default(self.momentum, 0.9), nesterov=self.nesterov)
            case OptimizerName.MUON:
                hidden = jax.tree.map(lambda a: "muon" if hidden_matrix(a) else "adamw", axes, is_leaf=is_axes)
                muon = _muon(axes, _default(self.momentum, 0.95), self.eps, self.nesterov, self.muon_rms)
                return optax.partition({"muon": muon, "adamw": adam}, hidden)
        raise ValueError(f"{self.name} does not use `rule`")

    def _adafactor(self, axes: PyTree, schedule: StepFunction) -> list[optax.GradientTransformation]:
        """The transformations from gradients to updates, including weight decay and learning rate.

        Without momentum their order, and so the structure of the state, is that of older checkpoints.
        """
        settings, old = self.adafactor, self.adafactor.factoring is Factoring.DIMENSIONS
        rule = adafactor.Rule(settings, axes, min_size=self.factored_min_size, parameter_scale=self.parameter_scale)
        parts = [rule.scale_by_factored_rms(), rule.clip_by_rms()]
        if rule.scales_by_parameters:
            parts.append(rule.scale_by_parameter_rms())
        averaged = [] if self.momentum is None else [optax.ema(self.momentum, debias=False)]
        learn = optax.scale_by_learning_rate(schedule)
        if self.weight_decay and (old or not averaged):
            decay = optax.add_decayed_weights(self.weight_decay, mask=decay_mask(axes))
            parts += [*averaged, decay, learn]
        elif self.weight_decay:
            share = lambda step: self.weight_decay * schedule(step)  # noqa: E731
            parts += [learn, *averaged, adafactor.decay(share, decay_mask(axes))]
        else:
            parts += [*averaged, learn] if old else [learn, *averaged]
        if settings.decays:
            parts.append(adafactor.decay(lambda step: settings.decay_of(schedule(step)), None))
        return parts


def hidden_matrix(axes: Axes) -> optax.contrib.MuonDimensionNumbers | None:
    """The input and output dimensions of a hidden matrix (see `matrices.sides`); None: the weight is not one.

    Along stack axes there are independent matrices.
    """
    sides = matrices.sides(axes)
    if sides is None or set(axes) & set(matrices.LOOKUP_AXES):
        return None
    return optax.contrib.MuonDimensionNumbers(*sides)


def state_axes(tx: optax.GradientTransformation, abstract_params: Params, axes: PyTree) -> PyTree:
    """Logical axes of an optimizer's state, so that it can be sharded like the parameters.

    Args:
      tx: the optimizer.
      abstract_params: tree of the parameters' shapes (jax.ShapeDtypeStruct) or arrays.
      axes: tree like the parameters, of tuples of logical axis names.

    Returns:
      A tree like `jax.eval_shape(tx.init, abstract_params)` whose leaves are tuples with one entry per dimension:
      for a leaf that mirrors a parameter, the parameter's axes (also for the scales of 8-bit blocks, though their shorter
      dimension may not divide over its mesh axes); for a node with `HasAxes`, what it returns; for other leaves None
      (replicated) in every dimension, () for scalars. Containers of the state are tuples, too: map the tree beside the
      abstract state, `jax.tree.map(fn, state, axes)`, or with `is_leaf=is_axes`.
    """
    shapes = {path: leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params)}
    named = dict(jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes))
    if missing := sorted(map(jax.tree_util.keystr, shapes.keys() ^ named.keys())):
        raise ValueError(f"parameters and axes differ in {', '.join(missing)}")

    def leaf_axes(path: Path, leaf: jax.ShapeDtypeStruct) -> Axes:
        owner = optim_state.parameter_path(path, shapes)
        if owner is None:
            return (None,) * leaf.ndim
        shape, names = shapes[owner], named[owner]
        if leaf.shape == shape or getattr(path[-1], "name", None) in optim_state.Blocks._fields:
            return names
        return (None,) * leaf.ndim

    def node_axes(path: Path, node: jax.ShapeDtypeStruct | HasAxes) -> PyTree:
        if isinstance(node, HasAxes):
            return node.axes_of(axes)
        return leaf_axes(path, node)

    state = jax.eval_shape(tx.init, abstract_params)
    return jax.tree_util.tree_map_with_path(node_axes, state, is_leaf=lambda x: isinstance(x, HasAxes))


def _muon(axes: PyTree, momentum: float, eps: float, nesterov: bool, rms: float) -> optax.GradientTransformation:
    """Muon's update: momentum, orthogonalised matrix by matrix, then scaled to root mean square `rms`."""
    numbers = jax.tree.map(lambda a: hidden_matrix(a) or optax.MaskedNode(), axes, is_leaf=is_axes)

    def scale(updates: optax.Updates, params: Params | None) -> optax.Updates:
        del params

        def scaled(update: jax.Array, matrix: optax.contrib.MuonDimensionNumbers) -> jax.Array:
            sizes = [math.prod(update.shape[i] for i in dims) for dims in matrix]
            return rms * math.sqrt(max(sizes)) * update

        return jax.tree.map(scaled, updates, numbers)

    return optax.chain(
        optax.contrib.scale_by_muon(beta=momentum, eps=eps, nesterov=nesterov, weight_dimension_numbers=numbers),
        optax.stateless(scale),
    )


def _default(value: float | None, default: float) -> float:
    return default if value is None else value
