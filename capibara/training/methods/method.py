"""The interface of a training method: how a run turns batches into updates, and what it does not support."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
from jax.sharding import Mesh

from capibara.core.types import Params, UserError
from capibara.models.api import Model
from capibara.objectives.base import Objective
from capibara.sharding import Plan
from capibara.training.base.gradient import Gradient, make_gradient
from capibara.training.base.options import RunOptions
from capibara.training.base.state import OptStatePart, Step, TrainState
from capibara.training.methods.hooks import Hooks


class StepParts(NamedTuple):
    """What a step is made of.

    Attributes:
      model, plan, mesh, objective: of the run.
      shardings: of its state.
    """

    model: Model
    plan: Plan
    mesh: Mesh
    objective: Objective
    shardings: TrainState


class OwnWeights(NamedTuple):
    """Initial weights of a method's own, beside those of `Trainer.init_from`.

    Attributes:
      option: the field that names them, for errors.
      paths: run folders or open models; empty: it has none.
    """

    option: str = ""
    paths: tuple[str, ...] = ()


class Method:
    """A training method. Every member has the default of a plain run: override what differs.

    A method of your own is a frozen dataclass marked with @configurable, set as `Trainer.method`; it holds options alone. What it
    keeps while a run trains is in its `Hooks`.

    Attributes:
      field: the field of Trainer that chooses the method, for errors.
      has_nodes: whether it trains nodes apart (Plan.node above 1).
    """

    field: ClassVar[str] = "method"
    has_nodes: ClassVar[bool] = False

    @property
    def configured(self) -> object:
        """The value of the field: errors name its class, and mistakes of the user's code are looked for there."""
        return self

    @property
    def name(self) -> str:
        """The method in errors, as "Trainer.method (@MyMethod())"."""
        return f"Trainer.{self.field} (@{type(self.configured).__name__}())"

    # What it supports.

    def unsupported(self, options: RunOptions) -> Mapping[str, bool]:
        """Options that the method does not support, by name, and whether the run sets each."""
        del options
        return {}

    def check(self, options: RunOptions) -> None:
        """Raises UserError if the method does not support the run's options; called when a Trainer is made."""
        if options.plan.node > 1 and not self.has_nodes:
            raise UserError(
                f"Plan.node is {options.plan.node} and Trainer.strategy is None: set Trainer.strategy = @ConsensusConfig(), or "
                f"Plan.node = 1 and Plan.data = {options.plan.node} for one model"
            )
        for option, is_set in self.unsupported(options).items():
            if is_set:
                raise UserError(f"{option} is not supported with {self.name}: leave it out")

    def check_start(self) -> None:
        """Raises UserError for what only a start can find out, before anything is compiled; called on every process."""

    # Its part of the state.

    @property
    def averages(self) -> bool:
        """Whether it keeps an average of models (TrainState.ema), also without `Trainer.ema_decay`."""
        return False

    def opt_part(self, plan: Plan) -> OptStatePart | None:
        """What it keeps in the place of the optimizer's state; None: that state."""
        del plan
        return None

    @property
    def own_weights(self) -> OwnWeights:
        """Initial weights of its own."""
        return OwnWeights()

    def with_own_weights(
        self, plan: Plan, state: TrainState, loads: Sequence[Callable[[], Params]], shardings: TrainState
    ) -> TrainState:
        """A new state in which the method has put its own initial weights.

        Args:
          plan: of the run.
          state: its arrays may be used only once.
          loads: each loads the trained parameters of one of `own_weights`.
          shardings: of the state.
        """
        del plan, loads, shardings
        return state

    # Its step.

    def gradient(self, parts: StepParts) -> Gradient:
        """Makes the gradient that the optimizer gets."""
        return make_gradient(parts.objective, parts.plan, parts.mesh)

    def step(self, parts: StepParts, update: Step) -> Step:
        """Makes the step of the run, traceable, of one that updates by `gradient`."""
        del parts
        return update

    # Its batches.

    def loader_options(self) -> dict[str, Any]:
        """Options of `make_loader` for the training split."""
        return {}

    def batch_spec(self, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
        """Arrays of every batch besides those of the data: shapes, dtypes, shardings. `Hooks.constants` makes them."""
        del mesh
        return {}

    # What the planner must know.

    @property
    def unplanned(self) -> str | None:
        """Why a search for a plan does not know what the step needs; None: it does."""
        return None

    @property
    def program(self) -> dict[str, str]:
        """What of the method decides the compiled step, by name: results of compiling are kept by it."""
        return {self.field: repr(self.configured)}

    # What it does around the steps.

    def hooks(self, options: RunOptions, trained: Params, status: Callable[[str], None]) -> Hooks:
        """Makes the hooks of a run, before anything is compiled.

        Args:
          options: of the run.
          trained: its trained parameters, as jax.ShapeDtypeStruct.
          status: called with lines that a user should read.

        Raises:
          UserError: the run cannot be trained with this method.
        """
        del trained, status
        return Hooks(options)


def check_rounds(options: RunOptions, every: int, name: str) -> None:
    """Raises UserError if a run of rounds would end within one."""
    if options.steps % every:
        nearest = max(1, round(options.steps / every)) * every
        raise UserError(
            f"Trainer.steps ({options.steps}) must be a multiple of the {every} steps of a round (@{name}()), or the last ones "
            f"would not count: try {nearest}"
        )
