"""What `Trainer.optimizer` takes: how gradients become updates, as a class that a Gin file binds.

A new optimizer is a frozen dataclass marked `capibara.config.configurable`: a `StandardOptimizer` where only the update
rule is new, else an `OptimizerConfig`. examples/extend/my_optimizer.py is one.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Protocol, Self, runtime_checkable

import jax
import optax

from capibara.core.tree import is_axes
from capibara.core.types import PyTree, UserError
from capibara.optim import matrices
from capibara.optim import state_dtypes as optim_state
from capibara.optim.schedules import Schedule, ScheduleConfig
from capibara.optim.state_dtypes import StateDtype


class OptimizerConfig(abc.ABC):
    """Configuration of an optimizer.

    The state that `build(...).init` makes is sharded like the parameters where its leaves mirror them
    (`optim.state_axes`); a node of the state with other shapes says its axes itself: see `HasAxes`.

    Attributes:
      schedule: the learning rate, which is logged too.
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
          A transformation from gradients to what is added to the parameters.

        Raises:
          UserError: the schedule does not fit into the run.
        """

    def with_state_dtype(self, dtype: StateDtype) -> OptimizerConfig:
        """The same optimizer with its moments stored otherwise, for the planner, which weighs what memory that takes.

        Raises:
          UserError: its moments cannot be stored so.
        """
        if dtype is self.state_dtype:
            return self
        raise UserError(f"with @{type(self).__name__}(), which stores its state in {self.state_dtype} alone")


@runtime_checkable
class HasAxes(Protocol):
    """A node of an optimizer's state whose arrays do not have the shapes of the parameters."""

    def axes_of(self, axes: PyTree) -> Self:
        """The node with the logical axes of each array in its place, by those of the parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StandardOptimizer(OptimizerConfig):
    """An update rule between a global-norm clip and decoupled, masked weight decay; a subclass gives the rule.

    Attributes:
      schedule: the learning rate.
      weight_decay: share of a weight that the update takes away, times the learning rate. Only weights that map one
        space to another decay: biases and norm scales do not.
      clip_norm: gradients are scaled down to this global norm; None is no limit.
      state_dtype: how the moments of weights are stored between updates.
    """

    schedule: ScheduleConfig = dataclasses.field(default_factory=Schedule)
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    state_dtype: StateDtype = StateDtype.FLOAT32

    def __post_init__(self) -> None:
        own = type(self).__name__
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise UserError(f"{own}.clip_norm is {self.clip_norm}, must be finite and above 0: None is no limit")
        if not 0 <= self.weight_decay < math.inf:
            raise UserError(f"{own}.weight_decay is {self.weight_decay}, must be finite and not negative: 0 is none")

    @abc.abstractmethod
    def rule(self, axes: PyTree) -> optax.GradientTransformation:
        """From clipped gradients to updates, before weight decay and learning rate.

        Its state's moments are trees like the parameters, so that they can be sharded and stored in `state_dtype`.
        """

    def build(self, total_steps: int, axes: PyTree) -> optax.GradientTransformation:
        weights = jax.tree.map(lambda a, decays: a if decays else None, axes, decay_mask(axes), is_leaf=is_axes)
        chain = [*self._clip(), optim_state.stored(self.rule(axes), self.state_dtype, weights)]
        if self.weight_decay:
            chain.append(optax.add_decayed_weights(self.weight_decay, mask=decay_mask(axes)))
        return optax.chain(*chain, optax.scale_by_learning_rate(self.schedule.build(total_steps)))

    def with_state_dtype(self, dtype: StateDtype) -> OptimizerConfig:
        return dataclasses.replace(self, state_dtype=dtype)

    def _clip(self) -> list[optax.GradientTransformation]:
        return [] if self.clip_norm is None else [optax.clip_by_global_norm(self.clip_norm)]


def decay_mask(axes: PyTree) -> PyTree:
    """True for the weights that decay: those with at least two spaces beside the stack axes.

    A bias of attention heads, ("heads", "head_dim"), has one space (the heads' features): it does not decay.
    """
    return jax.tree.map(lambda a: matrices.sides(a) is not None, axes, is_leaf=is_axes)
