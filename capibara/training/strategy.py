"""The interface of `Trainer.strategy`: how the replicas of a run, which train apart, become one model."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from capibara.core.types import Batch, Params, PyTree
from capibara.objectives.base import Metrics
from capibara.sharding import Plan

# (parameters, optimizer state) of all nodes, each array [nodes, ...], the step and a batch -> both after each node's own
# update on its rows, and metrics, each [nodes].
NodesStep = Callable[[Params, PyTree, jax.Array, Batch], tuple[Params, PyTree, Metrics]]


class Round(NamedTuple):
    """What a strategy's step has made of a run's state.

    Attributes:
      params: the trained parameters of the run's model, which is evaluated, saved and exported.
      state: the strategy's state.
      metrics: of the step.
    """

    params: Params
    state: PyTree
    metrics: Metrics


StrategyStep = Callable[[jax.Array, Params, PyTree, Batch], Round]


class Strategy(abc.ABC):
    """Configuration of how nodes train apart and come together. The nodes are `Plan.node` positions of the mesh.

    The parameters in the train state are those of the model that the nodes agreed on last; the nodes' own are a part of
    the strategy's state, which stands in the place of the optimizer's.
    """

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

    @abc.abstractmethod
    def step(self, nodes_step: NodesStep, mesh: Mesh, params: PyTree) -> StrategyStep:
        """Makes (step, trained parameters, the strategy's state, batch) -> Round, traceable.

        Args:
          nodes_step: the update of each node by itself.
          mesh: with an axis `sharding.NODE_AXIS`.
          params: the shardings of the trained parameters.
        """

    def remarks(self, step: int, since: int, metrics: Mapping[str, float]) -> Iterator[str]:
        """Lines for the user on what happened after step `since`, up to `step`; called on every process at each log.

        Args:
          step, since: completed steps, now and at the log before.
          metrics: those of the last step, as the host has read them.

        Raises:
          UserError: the run must end.
        """
        del step, since, metrics
        return iter(())


def weight_of(metrics: Metrics) -> jax.Array:
    """What a step's loss is a mean over: its real tokens, or pairs."""
    return metrics["pairs" if "pairs" in metrics else "tokens"]


def of_all(metrics: Metrics) -> dict[str, jax.Array]:
    """The metrics of a step from those of its nodes, each [nodes].

    Counts are summed; the others are means, weighted like the loss, over the nodes whose loss and gradients are finite: NaN
    if there is none. An update counts as skipped if no node made one.
    """
    weight, finite = weight_of(metrics), jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    weight = jnp.where(finite, weight, 0.0)
    share = jnp.where(jnp.any(finite), weight / jnp.maximum(jnp.sum(weight), 1.0), jnp.nan)
    found = {name: jnp.sum(jnp.where(finite, values, 0.0) * share) for name, values in metrics.items()}
    found |= {name: jnp.sum(metrics[name]) for name in ("tokens", "pairs") if name in metrics}
    return found | ({"skipped": jnp.min(metrics["skipped"])} if "skipped" in metrics else {})
