"""What all ways to rewire experts have in common: a change of the configuration, and one of a layer's weights.

Shape letters: E experts, D model width, F hidden units of an expert.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from capibara.core.types import UserError
from capibara.interop.experts.statistics import Use

if TYPE_CHECKING:
    from capibara.models.api import DecoderConfig, Moe, TransformerConfig

Arrays = Mapping[str, np.ndarray]
"""Weights of a layer's experts by their names, float32. Each has the experts first: the router is [E, D]."""

HIDDEN: Mapping[str, int] = {"up": 2, "gate": 2, "down": 1, "up_bias": 1, "gate_bias": 1}
"""Weights of experts, and which of their dimensions is that of the hidden units."""
OF_ROUTER = ("router", "router_bias", "correction")
PARAMETERS = (*HIDDEN, "down_bias", *OF_ROUTER)
"""What a layer's experts have, in a parameter each."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A layer whose experts are rewired.

    Attributes:
      moe: the mixture before; None: the layer has an MLP.
      use: how its experts were used; None: there are no statistics.
      draw: random numbers of this layer.
    """

    moe: Moe | None
    use: Use | None
    draw: np.random.Generator


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertOperation(abc.ABC):
    """A way to rewire experts: the new configuration, and the new weights of each layer. Subclasses are bound by Gin.

    Attributes (of the class):
      name: its name on the command line.
      of_dense: whether it makes experts of MLPs.
    """

    name: ClassVar[str]
    of_dense: ClassVar[bool] = False

    @property
    def needs_statistics(self) -> bool:
        """Whether it depends on how the experts were used."""
        return False

    @property
    def domain(self) -> str | None:
        """The domain whose use counts; None: that of all data."""
        return None

    @property
    def seed(self) -> int:
        """Of random numbers."""
        return 0

    @abc.abstractmethod
    def result(self, config: DecoderConfig) -> DecoderConfig:
        """The configuration of the result.

        Raises:
          UserError: the settings do not fit the model.
        """

    def caveat(self, config: DecoderConfig) -> str | None:
        """Why the result has another function where the operation would keep it; None: it keeps it, or never does."""
        return None

    @abc.abstractmethod
    def layer(self, weights: Arrays, place: Place) -> tuple[Arrays, list[list[int]]]:
        """The new experts of a layer, and for each of them the experts that it is made of.

        Args:
          weights: of the layer's experts; of its MLP, without a dimension of experts, if `of_dense`.
          place: the layer.
        """


def mixture(config: TransformerConfig, name: str) -> Moe:
    """The mixture of experts of a model.

    Args:
      config: of the model.
      name: of the operation.

    Raises:
      UserError: it has none, or experts choose the tokens.
    """
    if config.moe is None:
        raise UserError(
            f"{name} is for models with experts, this has MLPs: `capibara experts upcycle` makes experts of them"
        )
    if config.moe.routing != "token_choice":
        raise UserError(
            f"{name} is for tokens that choose experts, Moe.routing is {str(config.moe.routing)!r}: leave it as it is"
        )
    if config.moe.hash_layers:
        raise UserError(
            f"{name} is for tokens that choose experts, Moe.hash_layers is {config.moe.hash_layers} and tables have their numbers: "
            "leave it as it is"
        )
    return config.moe


def check_count(moe: Moe, experts: int, name: str) -> None:
    """Compares a smaller number of experts with a mixture.

    Raises:
      UserError: it is not smaller, too small for the experts of a token, or does not divide into its groups.
    """
    if not 1 <= experts < moe.num_experts:
        raise UserError(
            f"experts is {experts}, must be from 1 to {moe.num_experts - 1} for {name}: the model has {moe.num_experts}"
        )
    if moe.groups > 1 and (experts % moe.groups or experts < 2 * moe.groups):
        near = max(2, round(experts / moe.groups)) * moe.groups
        raise UserError(
            f"experts ({experts}) must be a multiple of the {moe.groups} groups (n_group) with at least 2 in each: try {near}"
        )
    most = experts // moe.groups * moe.top_groups
    if moe.top_k > most:
        raise UserError(
            f"experts ({experts}) leave a token {most} to choose from, it has {moe.top_k} (num_experts_per_tok): try "
            f"{-(-moe.top_k // moe.top_groups) * moe.groups}"
        )


def groups(moe: Moe) -> list[np.ndarray]:
    """The numbers of the experts of each group."""
    return np.split(np.arange(moe.num_experts), moe.groups)
