"""Outer optimizers: from what the nodes agreed on to the model that the next round starts from.

The outer gradient is the round's start less the aggregate of the nodes' models. With plain SGD at learning rate 1 the
aggregate itself is the next model (FedAvg, McMahan et al. 2017).
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from capibara.config import configurable
from capibara.core.types import Params, PyTree, UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class OuterOptimizer(abc.ABC):
    """What is done with an outer gradient.

    Attributes:
      learning_rate: the outer one.
    """

    learning_rate: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise UserError(
                f"{type(self).__name__}.learning_rate is {self.learning_rate}, must be positive and finite: try 0.7"
            )

    @abc.abstractmethod
    def build(self) -> optax.GradientTransformation:
        """The transformation of outer gradients into updates."""

    def init(self, params: PyTree) -> PyTree:
        """The state before the first round, float32 in the shapes of the parameters."""
        return self.build().init(_float32(params))

    def step(self, start: PyTree, aggregate: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """One outer step.

        Args:
          start: the model that the round began with.
          aggregate: of the nodes' models, with the same shapes.
          state: of the step before, or `init`.

        Returns:
          the next round's model, in the dtypes of `start`, and the state.
        """
        start32 = _float32(start)
        gradient = jax.tree.map(jnp.subtract, start32, _float32(aggregate))
        updates, state = self.build().update(gradient, state, start32)
        new = jax.tree.map(lambda x, change, like: (x + change).astype(like.dtype), start32, updates, start)
        return new, state


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class OuterSgd(OuterOptimizer):
    """SGD. The defaults are FedAvg; DiLoCo (Douillard et al. 2023) takes 0.7 with Nesterov's momentum of 0.9.

    Attributes:
      momentum: 0: none.
      nesterov: whether the momentum looks ahead.
    """

    learning_rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_decay("OuterSgd.momentum", self.momentum)

    def build(self) -> optax.GradientTransformation:
        return optax.sgd(self.learning_rate, momentum=self.momentum or None, nesterov=self.nesterov)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Adaptive(OuterOptimizer):
    """A server optimizer of Reddi et al. (2021, algorithm 2), without bias correction.

    Attributes:
      b1: decay of the first moment.
      b2: decay of the second moment.
      tau: degree of adaptivity, added to the root of the second moment, which begins at its square.
    """

    learning_rate: float = 0.01
    b1: float = 0.9
    b2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_decay(f"{type(self).__name__}.b1", self.b1)
        _check_decay(f"{type(self).__name__}.b2", self.b2)
        if not self.tau > 0:
            raise UserError(f"{type(self).__name__}.tau is {self.tau}, must be positive: try 0.001")

    @abc.abstractmethod
    def second_moment(self, v: jax.Array, square: jax.Array) -> jax.Array:
        """The next second moment, from the last and the squared gradient."""

    def build(self) -> optax.GradientTransformation:
        def init(params: Params) -> _Moments:
            return _Moments(
                jax.tree.map(jnp.zeros_like, params), jax.tree.map(lambda x: jnp.full_like(x, self.tau**2), params)
            )

        def update(gradient: Params, state: PyTree, params: Params | None = None) -> tuple[Params, PyTree]:
            del params
            first = jax.tree.map(lambda m, g: self.b1 * m + (1 - self.b1) * g, state.first, gradient)
            second = jax.tree.map(lambda v, g: self.second_moment(v, jnp.square(g)), state.second, gradient)
            updates = jax.tree.map(lambda m, v: -self.learning_rate * m / (jnp.sqrt(v) + self.tau), first, second)
            return updates, _Moments(first, second)

        return optax.GradientTransformation(init, update)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAdam(_Adaptive):
    """Adam on the outer gradient."""

    def second_moment(self, v: jax.Array, square: jax.Array) -> jax.Array:
        return self.b2 * v + (1 - self.b2) * square


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class FedYogi(_Adaptive):
    """Yogi on the outer gradient: the second moment changes by as much as the new square allows, whatever its size."""

    def second_moment(self, v: jax.Array, square: jax.Array) -> jax.Array:
        return v - (1 - self.b2) * square * jnp.sign(v - square)


class _Moments(NamedTuple):
    first: Params
    second: Params


def sample_nodes(num_nodes: int, count: int, *, seed: int, round_: int) -> tuple[int, ...]:
    """The nodes that take part in a round, drawn without replacement, sorted: the same on every host and after a resume.

    Raises:
      UserError: `count` is not from 1 to `num_nodes`.
    """
    if not 1 <= count <= num_nodes:
        raise UserError(f"{count} nodes a round, must be from 1 to num_nodes ({num_nodes}): try {num_nodes}")
    drawn = np.random.default_rng((seed, round_)).choice(num_nodes, count, replace=False)
    return tuple(sorted(int(node) for node in drawn))


def _check_decay(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise UserError(f"{name} is {value}, must be at least 0 and below 1: try 0.9")


def _float32(tree: Params) -> Params:
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
