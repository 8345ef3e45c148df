"""The interface of `Trainer.optimizer`: a class that a Gin file binds and that builds an optax transformation.

A new optimizer is a frozen dataclass marked `capibara.config.configurable`: a `StandardOptimizer` if only the update rule
is new, otherwise an `OptimizerConfig`. See examples/extend/my_optimizer.py.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Protocol, Self, runtime_checkable

import jax
import optax

from capibara.core.fields import returned
from capibara.core.tree import is_axes, path_names
from capibara.core.types import Params, PyTree, UserError
from capibara.optim import matrices
from capibara.optim import state_dtypes as optim_state
from capibara.optim.schedules import Schedule, ScheduleConfig
from capibara.optim.state_dtypes import StateDtype


class OptimizerConfig(abc.ABC):
    """Configuration of an optimizer.

    Leaves of the state from `build(...).init` that mirror parameters are sharded like them (`optim.state_axes`). A node of
    the state with other shapes must declare its axes: see `HasAxes`.

    Attributes:
      schedule: the learning rate; it is also logged.
      state_dtype: how the state's moments are stored between updates.
    """

    schedule: ScheduleConfig
    state_dtype: StateDtype = StateDtype.FLOAT32

    @abc.abstractmethod
    def build(self, total_steps: int, axes: PyTree) -> optax.GradientTransformation:
        """The optimizer for parameters with these axes.

        Args:
          total_steps: updates in the whole run, for the schedule.
          axes: tree like the parameters, of tuples of logical axis names.

        Returns:
          A transformation from gradients to the updates that are added to the parameters.

        Raises:
          UserError: the schedule does not fit into the run.
        """

    def transformation(self, total_steps: int, axes: PyTree) -> optax.GradientTransformation:
        """What `build` returns, checked; arguments as there.

        Raises:
          UserError: it is no transformation, or the class has no schedule.
        """
        class_name = type(self).__name__
        if not isinstance(getattr(self, "schedule", None), ScheduleConfig):
            raise UserError(f"{class_name} has no schedule: add a field, schedule: ScheduleConfig")
        return returned(self.build(total_steps, axes), optax.GradientTransformation, f"{class_name}.build")

    def with_state_dtype(self, dtype: StateDtype) -> OptimizerConfig:
        """The same optimizer with moments stored in another dtype; the planner compares their memory.

        Raises:
          UserError: its moments cannot have this dtype.
        """
        if dtype is self.state_dtype:
            return self
        raise UserError(f"with @{type(self).__name__}(), which stores its state only in {self.state_dtype}")


@runtime_checkable
class HasAxes(Protocol):
    """A node of an optimizer's state whose arrays do not have the shapes of the parameters."""

    def axes_of(self, axes: PyTree) -> Self:
        """The node with each array replaced by its logical axes, from those of the parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StandardOptimizer(OptimizerConfig):
    """Global-norm clip, an update rule that a subclass implements, and decoupled, masked weight decay.

    Attributes:
      schedule: the learning rate.
      weight_decay: weight decay, multiplied by the learning rate. Only matrices decay; biases and norm scales do not.
      clip_norm: gradients are scaled down to this global norm; None: no clipping.
      state_dtype: how the moments of weights are stored between updates.
    """

    schedule: ScheduleConfig = dataclasses.field(default_factory=Schedule)
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    state_dtype: StateDtype = StateDtype.FLOAT32

    def __post_init__(self) -> None:
        class_name = type(self).__name__
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise UserError(f"{class_name}.clip_norm is {self.clip_norm}, must be finite and above 0: None is no limit")
        if not 0 <= self.weight_decay < math.inf:
            raise UserError(
                f"{class_name}.weight_decay is {self.weight_decay}, must be finite and not negative: 0 is none"
            )

    @abc.abstractmethod
    def rule(self, axes: PyTree) -> optax.GradientTransformation:
        """The transformation from clipped gradients to updates, before weight decay and learning rate.

        The moments in its state must be trees like the parameters, so that they can be sharded and stored in
        `state_dtype`.
        """

    def build(self, total_steps: int, axes: PyTree) -> optax.GradientTransformation:
        weights = jax.tree.map(lambda a, decays: a if decays else None, axes, decay_mask(axes), is_leaf=is_axes)
        rule = returned(self.rule(axes), optax.GradientTransformation, f"{type(self).__name__}.rule")
        chain = [*self._clip(), optim_state.stored(rule, self.state_dtype, weights)]
        if self.weight_decay:
            chain.append(optax.add_decayed_weights(self.weight_decay, mask=decay_mask(axes)))
        return optax.chain(*chain, optax.scale_by_learning_rate(self.schedule.learning_rates(total_steps)))

    def with_state_dtype(self, dtype: StateDtype) -> OptimizerConfig:
        return dataclasses.replace(self, state_dtype=dtype)

    def _clip(self) -> list[optax.GradientTransformation]:
        return [] if self.clip_norm is None else [optax.clip_by_global_norm(self.clip_norm)]


def check_updates(tx: optax.GradientTransformation, params: Params, name: str) -> None:
    """Checks that an optimizer returns updates that are like the parameters; nothing is computed.

    Args:
      tx: the optimizer.
      params: tree of the parameters' shapes.
      name: of its class, for the error.

    Raises:
      UserError: an update is missing or has another shape.
    """
    updates = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p)[0], params)
    shapes, shapes_of = (dict(zip(path_names(tree), jax.tree.leaves(tree))) for tree in (params, updates))
    for path, leaf in shapes.items():
        update = shapes_of.get(path)
        if update is None or update.shape != leaf.shape:
            result = "none" if update is None else str(update.shape)
            raise UserError(
                f"the updates of {name} have {result} for {path}, must have the parameter's shape {leaf.shape}"
            )


def updates_made(opt_state: PyTree, steps: jax.Array) -> jax.Array:
    """The number of updates that an optimizer has made, by which its schedule goes: less than `steps` if some were skipped.

    Args:
      opt_state: its state.
      steps: steps done; the result where the state has no `optax.scale_by_learning_rate` that counts.
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, optax.ScaleByScheduleState))
    counts = [node.count for node in nodes if isinstance(node, optax.ScaleByScheduleState)]
    return counts[0] if counts else steps


def decay_mask(axes: PyTree) -> PyTree:
    """True for the weights that decay: those with at least two spaces (see `matrices.spaces`), i.e. matrices.

    A bias of attention heads, ("heads", "head_dim"), has one space, the features of all heads: it does not decay.
    """
    return jax.tree.map(lambda a: matrices.sides(a) is not None, axes, is_leaf=is_axes)
