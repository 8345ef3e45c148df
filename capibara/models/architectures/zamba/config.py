"""Sizes and variants of a Zamba2 decoder."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.models.architectures.decoder import DecoderConfig
from capibara.models.layers.layers import Bias
from capibara.models.parts.kinds import LayerKind

SHARED = "shared"
"""The module of the decoder with the blocks that layers share."""
READS = "shared_input"
"""The module of a layer with what is its own of them."""
_SUPPORTED = (
    "activation", "attention", "bias", "dropout_rate", "dtype", "embed_dim", "embedding_multiplier", "embedding_scale",
    "attention_scale", "head", "head_dim", "layer_loop", "layer_pattern", "logit_scale", "logit_soft_cap", "lora",
    "max_length", "mixer", "mlp_dim", "norm", "norm_eps", "norm_scale", "num_heads", "num_kv_heads", "num_layers",
    "positions", "quantization", "rope", "value_head", "vocab_size",
)  # fmt: skip


class Adapters(enum.StrEnum):
    """Which projections of shared blocks have an adapter in each layer: the MLP's, or those of attention, too."""

    MLP = "mlp"
    ALL = "all"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ZambaConfig(DecoderConfig):
    """Sizes of a Zamba2 decoder (Glorioso et al. 2024, arXiv:2411.15242); the rest is in DecoderConfig.

    Every layer has the mixer. What layers of the kind `hybrid` add to its input comes from a block of attention and an MLP,
    which reads the residual stream and the token embeddings side by side. The layers share these blocks in turn.

    Attributes:
      shared_blocks: number of blocks.
      adapters, adapter_rank: what a layer adds to the projections of its block, and the rank of that.
    """

    shared_blocks: int = 1
    adapters: Adapters = Adapters.MLP
    adapter_rank: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("shared_blocks", "adapter_rank"):
            if getattr(self, name) < 1:
                raise UserError(f"ZambaConfig.{name} is {getattr(self, name)}, must be at least 1")
        if strange := {*self.layer_pattern} - {LayerKind.RECURRENT, LayerKind.HYBRID}:
            raise UserError(
                f"ZambaConfig.layer_pattern has {str(min(strange))!r}, must be of 'recurrent' and 'hybrid' alone"
            )
        if len(self.reading) < self.shared_blocks:
            raise UserError(
                f"ZambaConfig.shared_blocks ({self.shared_blocks}) must be at most the number of hybrid layers "
                f"({len(self.reading)}): try 1"
            )
        if not self.activation.gated or not self.mlp_dim:
            raise UserError(
                f"ZambaConfig.activation is {str(self.activation)!r} and mlp_dim {self.mlp_dim}, must be an MLP with a gate: try "
                "'geglu_exact'"
            )
        if self.adapters is Adapters.ALL and self.kv_heads != self.num_heads:
            raise UserError(
                f"ZambaConfig.num_kv_heads ({self.kv_heads}) must be num_heads ({self.num_heads}) where adapters is 'all': leave "
                "it out"
            )
        if self.bias not in (Bias.NONE, Bias.MLP):
            raise UserError(f"ZambaConfig.bias is {str(self.bias)!r}, must be 'none' or 'mlp'")
        for field in dataclasses.fields(DecoderConfig):
            if field.name not in _SUPPORTED and getattr(self, field.name) != field.default:
                value = str(getattr(self, field.name))
                raise UserError(f"ZambaConfig.{field.name} ({value}) is of other decoders: leave it out")

    @property
    def reading(self) -> tuple[int, ...]:
        """The numbers of the layers that read a shared block."""
        return tuple(number for number, kind in enumerate(self.kinds) if kind is LayerKind.HYBRID)

    @property
    def period(self) -> int:
        period = super().period
        of_period = sum(kind is LayerKind.HYBRID for kind in self.layer_pattern) * period // len(self.layer_pattern)
        return period * self.shared_blocks // math.gcd(of_period, self.shared_blocks)

    @property
    def module_layers(self) -> dict[str, tuple[int, ...]]:
        return {READS: self.reading} if len(self.reading) < self.num_layers else {}

    @property
    def runs_in_stages(self) -> bool:
        return False

    def block_of(self, layer: int) -> int | None:
        """The number of the block that a layer reads."""
        return self.reading.index(layer) % self.shared_blocks if layer in self.reading else None

    @property
    def shared_modules(self) -> tuple[str, ...]:
        return (SHARED,)

    def passes(self, name: str) -> float:
        if name.startswith(f"{SHARED}/"):
            return len(self.reading) / self.shared_blocks
        return super().passes(name)

    def emulated(self, values: dict[str, Any], factor: float) -> dict[str, Any]:
        smaller = super().emulated(values, factor)
        reading = sum(self.layer_pattern[n % len(self.layer_pattern)] == "hybrid" for n in range(values["num_layers"]))
        return smaller | {
            "shared_blocks": min(self.shared_blocks, reading),
            "adapter_rank": max(2, round(self.adapter_rank * factor)),
        }
