"""The interface of `Trainer.strategy`: how the replicas of a run, which train apart, become one model."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from capibara.core.types import Batch, Params, PyTree, UserError
from capibara.objectives.base import Metrics
from capibara.sharding import Plan

# (parameters, optimizer state) of all nodes, each array [nodes, ...], the step and a batch -> both after each node's own
# update on its rows, and metrics, each [nodes].
NodesStep = Callable[[Params, PyTree, jax.Array, Batch], tuple[Params, PyTree, Metrics]]
# (parameters of all nodes [nodes, ...], a batch) -> float32 [nodes, 2]: the loss summed over each node's rows, without
# dropout, and its weight.
NodesLoss = Callable[[Params, Batch], jax.Array]
# The same -> the gradients of those sums [nodes, ...], and the sums.
NodesGradient = Callable[[Params, Batch], tuple[Params, jax.Array]]


class NodesPrograms(NamedTuple):
    """What nodes compute, each by itself on its rows."""

    step: NodesStep
    loss: NodesLoss
    gradient: NodesGradient


class Round(NamedTuple):
    """What a strategy's step has made of a run's state.

    Attributes:
      params: the trained parameters of the run's model, which is evaluated, saved and exported.
      state: the strategy's state.
      metrics: of the step.
      average: the average that the strategy keeps; None: it keeps none.
    """

    params: Params
    state: PyTree
    metrics: Metrics
    average: Params | None = None


# (step, trained parameters, the strategy's average or None, its state, batch) -> Round.
StrategyStep = Callable[[jax.Array, Params, Params | None, PyTree, Batch], Round]


class Strategy(abc.ABC):
    """Configuration of how nodes train apart and come together. The nodes are `Plan.node` positions of the mesh.

    The parameters in the train state are those of the model that the nodes agreed on last; the nodes' own are a part of
    the strategy's state, which stands in the place of the optimizer's.
    """

    @property
    @abc.abstractmethod
    def round_steps(self) -> int:
        """Steps from one change of the agreed model to the next; a run ends with one."""

    @property
    def averages(self) -> bool:
        """Whether it keeps an average of models, which is evaluated and exported in the place of the agreed model."""
        return False

    @abc.abstractmethod
    def check(self, plan: Plan) -> None:
        """Raises UserError if the strategy does not support the plan."""

    @abc.abstractmethod
    def init(self, tx: optax.GradientTransformation, params: Params, nodes: int) -> PyTree:
        """The strategy's state before the first step (traceable).

        Args:
          tx: the optimizer of each node.
          params: the trained parameters.
          nodes: their number.
        """

    @abc.abstractmethod
    def shardings(self, state: PyTree, params: PyTree, opt_state: PyTree) -> PyTree:
        """The shardings of the strategy's state.

        Args:
          state: its shapes, as `init` makes it.
          params, opt_state: the shardings of one model's trained parameters and of its optimizer's state.
        """

    @property
    def starts(self) -> tuple[str, ...]:
        """Run folders or open models whose weights are the nodes' own initial ones, in turn; empty: the agreed model's."""
        return ()

    def restarted(self, state: PyTree, node: jax.Array, params: Params) -> PyTree:
        """The strategy's state in which a node has initial weights of its own (traceable); only with `starts`.

        Args:
          state: as `init` makes it.
          node: its index.
          params: the trained parameters with which it begins.

        Raises:
          UserError: the strategy has `starts`, and no such method.
        """
        name = type(self).__name__
        raise UserError(f"{name}.starts names models, and {name} has no method begun to put them on its nodes: add it")

    @abc.abstractmethod
    def step(self, nodes: NodesPrograms, mesh: Mesh, params: PyTree) -> StrategyStep:
        """Makes the step of a run whose nodes train apart, traceable.

        Args:
          nodes: the update of each node by itself, and its loss.
          mesh: with an axis `sharding.NODE_AXIS`.
          params: the shardings of the trained parameters.
        """

    def remarks(self, step: int, metrics: Mapping[str, float]) -> Iterator[str]:
        """Lines for the user on what a step did; called on every process at each log, for each step since the last one.

        Args:
          step: its number, from 1.
          metrics: of the step.

        Raises:
          UserError: the run must end.
        """
        del step, metrics
        return iter(())


def weight_of(metrics: Metrics) -> jax.Array:
    """What a step's loss is a mean over: its real tokens, or pairs."""
    return metrics["pairs" if "pairs" in metrics else "tokens"]


def of_all(metrics: Metrics) -> dict[str, jax.Array]:
    """The metrics of a step from those of its nodes, each [nodes].

    Counts are summed; the others are means, weighted like the loss, over the nodes whose loss and gradients are finite. If
    there is no such node the loss is NaN. An update counts as skipped if no node made one.
    """
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    used = jnp.any(finite)
    weight = jnp.where(used, jnp.where(finite, weight_of(metrics), 0.0), 1.0)
    share = weight / jnp.maximum(jnp.sum(weight), 1.0)
    result = {name: jnp.sum(jnp.where(weight > 0, values, 0.0) * share) for name, values in metrics.items()}
    counts = {name: metrics[name] for name in ("tokens", "pairs") if name in metrics}
    result |= {name: jnp.sum(jnp.where(jnp.isfinite(values), values, 0.0)) for name, values in counts.items()}
    result["loss"] = jnp.where(used, result["loss"], jnp.nan)
    return result | ({"skipped": jnp.min(metrics["skipped"])} if "skipped" in metrics else {})
