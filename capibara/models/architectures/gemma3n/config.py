"""Sizes and variants of a Gemma 3n decoder."""

from __future__ import annotations

import dataclasses
from typing import Any

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.models.architectures.shared_keys.config import SharedKeysConfig


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3nConfig(SharedKeysConfig):
    """Sizes of a Gemma 3n decoder (google/gemma-3n-E4B, its text part); the rest is in SharedKeysConfig.

    Attributes:
      streams: residual streams, of which every layer computes the first and predicts and corrects the others (AltUp,
        Baykal et al. 2023, arXiv:2301.13310).
      coefficient_clip: largest magnitude of AltUp's coefficients in training; None: no limit.
      laurel_rank: of the low-rank residual beside attention (LAuReL, Menghani et al. 2024, arXiv:2411.07501).
      activation_sparsity: of the first layers' MLPs, the share of hidden units that are zeroed: those that are not
        above the quantile of a normal distribution with their mean and variance. Layers beyond leave none out.
    """

    streams: int = 4
    coefficient_clip: float | None = 120.0
    laurel_rank: int = 64
    activation_sparsity: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("streams", "laurel_rank", "per_layer_dim", "per_layer_vocab_size"):
            if getattr(self, name) < 1:
                raise UserError(f"Gemma3nConfig.{name} is {getattr(self, name)}, must be at least 1")
        if self.coefficient_clip is not None and self.coefficient_clip <= 0:
            raise UserError(
                f"Gemma3nConfig.coefficient_clip is {self.coefficient_clip}, must be above 0: try 120.0, or None"
            )
        if len(self.activation_sparsity) > self.num_layers:
            raise UserError(
                f"Gemma3nConfig.activation_sparsity has {len(self.activation_sparsity)} values, must have at most one for "
                f"each of num_layers ({self.num_layers})"
            )
        for share in self.activation_sparsity:
            if not 0 <= share < 1:
                raise UserError(
                    f"Gemma3nConfig.activation_sparsity has {share}, must be from 0 to below 1: try 0.95, or 0.0"
                )

    def emulated(self, values: dict[str, Any], factor: float) -> dict[str, Any]:
        """Of sparse and of dense MLPs at least one each, where the model has both."""
        sparse, layers = len(self.activation_sparsity), values["num_layers"]
        most = layers if sparse == self.num_layers else layers - 1
        return super().emulated(values, factor) | {"activation_sparsity": self.activation_sparsity[:most]}

    def sparsity(self, layer: int) -> float:
        return self.activation_sparsity[layer] if layer < len(self.activation_sparsity) else 0.0
