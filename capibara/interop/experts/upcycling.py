"""Makes a mixture of experts of a model with MLPs (Sparse Upcycling, Komatsuzaki et al. 2022, arXiv:2212.05055)."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from capibara.config import configurable
from capibara.core import projections
from capibara.core.types import UserError
from capibara.interop.experts.operation import HIDDEN, Arrays, ExpertOperation, Place

if TYPE_CHECKING:
    from capibara.models.api import DecoderConfig


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class UpcycleExperts(ExpertOperation):
    """Experts that are copies of the MLP, or of parts of it, behind a new router.

    The function is the same with drop_ratio 0, whatever the router says: a token's gates sum to 1. With `granularity` above 1 an
    expert has a part of the hidden units; the parts that make a whole MLP have the same row of the router, so that they are
    chosen together, and their outputs are scaled by the number of parts (virtual groups, He et al. 2024, arXiv:2410.07524).

    Attributes:
      experts: number of experts of a layer.
      top_k: experts of a token.
      granularity: number of parts of an MLP.
      drop_ratio: share of an expert's hidden units that are drawn anew, each expert its own, with the mean and standard deviation
        of the weights that they replace (Drop-Upcycling, Nakamura et al. 2025, arXiv:2502.19261).
      router_scale: standard deviation of the router's weights times the square root of the model's width.
      seed: of random numbers.
    """

    name: ClassVar[str] = "upcycle"
    of_dense: ClassVar[bool] = True

    experts: int
    top_k: int = 2
    granularity: int = 1
    drop_ratio: float = 0.0
    router_scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("experts", 1), ("top_k", 1), ("granularity", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}, must be at least {least}")
        if not 0 <= self.drop_ratio <= 1:
            raise UserError(f"drop_ratio is {self.drop_ratio}, must be from 0 to 1: try 0.5")
        if not 0 < self.router_scale < math.inf:
            raise UserError(f"router_scale is {self.router_scale}, must be finite and above 0: try 1.0")
        for name in ("experts", "top_k"):
            if getattr(self, name) % self.granularity:
                near = max(1, round(getattr(self, name) / self.granularity)) * self.granularity
                raise UserError(
                    f"{name} ({getattr(self, name)}) must be a multiple of granularity ({self.granularity}), so that whole MLPs are chosen: "
                    f"try {near}"
                )

    def result(self, config: DecoderConfig) -> DecoderConfig:
        from capibara.models.api import Moe

        if config.moe is not None:
            raise UserError(
                f"the model has {config.moe.num_experts} experts already, upcycle is for MLPs: try split or duplicate"
            )
        if config.one_branch:
            raise UserError(
                "upcycle is for layers with an MLP after attention, this model's layers have one branch each"
            )
        if config.mlp_dim % self.granularity:
            divisor = next(n for n in range(self.granularity, config.mlp_dim + 1) if config.mlp_dim % n == 0)
            raise UserError(
                f"granularity ({self.granularity}) must divide the {config.mlp_dim} hidden units of an MLP: try {divisor}"
            )
        if config.bias.of_down and config.activation.gated:
            raise UserError(
                "upcycle is not for gated MLPs with biases, whose gates have none as experts: try another model"
            )
        moe = Moe(num_experts=self.experts, top_k=self.top_k, expert_dim=config.mlp_dim // self.granularity)
        return dataclasses.replace(config, moe=moe)

    def layer(self, weights: Arrays, place: Place) -> tuple[Arrays, list[list[int]]]:
        parts, wholes = self.granularity, self.experts // self.granularity
        result: dict[str, np.ndarray] = {}
        for name, value in weights.items():
            if name in HIDDEN:
                pieces = np.stack(np.split(value, parts, HIDDEN[name] - 1))
            else:
                pieces = np.stack([value] * parts)
            result[name] = np.concatenate([pieces] * wholes) * (float(parts) if name == "down" else 1.0)
        if self.drop_ratio:
            self._drop(result, place.draw)
        width = weights["up"].shape[0]
        rows = place.draw.standard_normal((wholes, width)) * (self.router_scale / math.sqrt(width))
        result["router"] = np.repeat(rows, parts, 0).astype(np.float32)
        return result, [[part] for _ in range(wholes) for part in range(parts)]

    def _drop(self, experts: dict[str, np.ndarray], draw: np.random.Generator) -> None:
        """Draws hidden units of each expert anew; the same in all of its weights."""
        count = experts["up"].shape[2]
        for expert in range(self.experts):
            units = draw.permutation(count)[: round(self.drop_ratio * count)]
            for name in (item.name for item in projections.EXPERTS):
                if name in experts and len(units):
                    by_unit = np.moveaxis(experts[name][expert], HIDDEN[name] - 1, 0)  # a view
                    replaced = by_unit[units]
                    by_unit[units] = draw.normal(replaced.mean(), replaced.std(), replaced.shape)
