"""Models put together of parts of others: the layers of one after those of another, MLPs as experts of a mixture."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from capibara.config import configurable
from capibara.consensus.merging.method import Array, BaseUse, Method, Weighted, check_share, weighted_sum
from capibara.core.types import UserError


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Passthrough(Method):
    """One model as it is, scaled; or ranges of layers of models, one after the other.

    Attributes:
      scale: factor of all tensors.
      layers: for each model the first of its layers, counted from 0, and the one after the last; empty: all layers of the
        one model. What is before the layers is the first model's, what is after them the last one's.
    """

    name: ClassVar[str] = "passthrough"
    fewest: ClassVar[int] = 1
    most: ClassVar[int | None] = 1

    scale: float = 1.0
    layers: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise UserError(f"scale is {self.scale}, must be finite: try 1.0")
        for start, end in self.layers:
            if not 0 <= start < end:
                raise UserError(
                    f"layers has {start}:{end}, must be the first layer, counted from 0, and one after the last: try 0:2"
                )

    def check(self, models: int, *, has_base: bool) -> None:
        if self.layers and models != len(self.layers):
            raise UserError(
                f"layers has {len(self.layers)} range{'s' * (len(self.layers) > 1)}, must have one for each of the {models} "
                "models: name a model again for another range of its layers"
            )
        super().check(1 if self.layers else models, has_base=has_base)

    def merge(self, tensors: Sequence[Array], base: Array | None, draw: np.random.Generator) -> Array:
        (tensor,) = tensors
        return self.alone(tensor)

    def alone(self, tensor: Array) -> Array:
        return tensor if self.scale == 1 else np.float32(self.scale) * tensor


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture(Weighted):
    """A mixture of experts, each expert one model's MLP, with new routers (Branch-Train-MiX, Sukhbaatar et al. 2024).

    All other tensors are the base's, or the weighted mean of the models. Routers are random, so the mixture must be trained.

    Attributes:
      top_k: experts of a token, at least 2: their gates sum to 1, and a router learns nothing from a single gate.
      router_scale: standard deviation of a router's weights times the square root of the number of its inputs.
    """

    name: ClassVar[str] = "moe"
    base: ClassVar[BaseUse] = BaseUse.OPTIONAL

    top_k: int = 2
    router_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self.weights)
        if self.top_k < 2:
            raise UserError(
                f"top_k is {self.top_k}, must be at least 2, because a router learns nothing from one gate, which is always 1: try 2"
            )
        if not 0 < self.router_scale < math.inf:
            raise UserError(f"router_scale is {self.router_scale}, must be finite and greater than 0: try 1.0")

    def check(self, models: int, *, has_base: bool) -> None:
        super().check(models, has_base=has_base)
        if self.top_k > models:
            raise UserError(f"top_k is {self.top_k}, must be at most the {models} models: try {min(2, models)}")
        if has_base and self.weights:
            raise UserError(
                "weights are for the mean of the models, and with a base there is none: leave one of them out"
            )

    def merge(self, tensors: Sequence[Array], base: Array | None, draw: np.random.Generator) -> Array:
        if base is not None:
            return base
        weights = self.weights_of(len(tensors))
        return weighted_sum(tensors, weights) / np.float32(sum(weights))

    def router(self, shape: tuple[int, ...], draw: np.random.Generator) -> Array:
        """The new router of a layer, float32.

        Args:
          shape: (experts, inputs).
          draw: of this tensor (`draw_of`).
        """
        return np.float32(self.router_scale / math.sqrt(shape[-1])) * draw.standard_normal(shape, np.float32)
