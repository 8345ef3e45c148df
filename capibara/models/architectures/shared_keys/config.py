"""Sizes that decoders with shared keys and values have in common."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from capibara.core.types import UserError
from capibara.kernels.rotary import Pairs
from capibara.models.architectures.decoder import DecoderConfig
from capibara.models.layers.layers import Activation, AttentionSinks, Bias, QKNorm
from capibara.models.parts.config import (
    AttentionGate,
    EmbeddingNorm,
    EmbeddingScale,
    FinalNorm,
    HeadBias,
    InnerNorm,
    NormPlacement,
    Positions,
    Residual,
)
from capibara.models.parts.kinds import LayerKind
from capibara.models.parts.multipliers import Multipliers


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive layers that run by the same code.

    Attributes:
      start, stop: the first of them, and the one after the last.
      stores: whether the last layers read the keys and values of some of these.
      reads: whether these read keys and values of earlier layers, and have none of their own.
    """

    start: int
    stop: int
    stores: bool
    reads: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedKeysConfig(DecoderConfig):
    """Sizes of a decoder whose last layers may read earlier keys and values; the rest is in DecoderConfig.

    Attributes:
      per_layer_dim: width of the embedding that every layer has of each token.
      per_layer_vocab_size: rows of that table; tokens beyond it have the embedding of token 0.
      kv_shared_layers: how many of the last layers have no keys and values and read those of the last layer before them
        that is of their kind (local or global).
      mlp_dims: hidden widths of all layers where they differ (MatFormer, Devvrit et al. 2023, arXiv:2310.07707); the
        largest is mlp_dim, and narrower layers lie in as much memory, of which nothing reads the rest.
      has_experts: whether such a decoder may have a mixture of experts.
    """

    has_experts: ClassVar[bool] = False

    per_layer_dim: int = 256
    per_layer_vocab_size: int = 262_144
    kv_shared_layers: int = 0
    mlp_dims: tuple[int, ...] | None = None
    activation: Activation = Activation.GEGLU
    attention_scale: float | None = 1.0
    embedding_scale: EmbeddingScale = EmbeddingScale.SQRT_DIM
    norm_placement: NormPlacement = NormPlacement.SANDWICH
    qk_norm: QKNorm = QKNorm.HEAD

    @property
    def runs_in_stages(self) -> bool:
        return False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_fixed()
        self._check_shared()
        class_name = type(self).__name__
        if self.mlp_dims is not None and (
            len(self.mlp_dims) != self.num_layers or max(self.mlp_dims) != self.mlp_dim or min(self.mlp_dims) < 1
        ):
            raise UserError(
                f"{class_name}.mlp_dims has {len(self.mlp_dims)} widths to {max(self.mlp_dims, default=0)}, must be one "
                f"for each of num_layers ({self.num_layers}), the largest mlp_dim ({self.mlp_dim}), none below 1"
            )

    def _check_fixed(self) -> None:
        """Checks what the published models all have.

        Raises:
          UserError: a variant of other decoders that this one does not have.
        """
        only: dict[str, tuple[Any, ...]] = {
            "activation": (Activation.GEGLU, Activation.SWIGLU),
            "attention_clip": (None,),
            "attention_gate": (AttentionGate.NONE,),
            "attention_sinks": (AttentionSinks.NONE,),
            "bias": (Bias.NONE,),
            "block_indexer": (None,),
            "dropout_rate": (0.0,),
            "embedding_multiplier": (1.0,),
            "embedding_norm": (EmbeddingNorm.NONE,),
            "final_norm": (FinalNorm.LAYER,),
            "first_norm": ("layer",),
            "transform": ("none",),
            "head_bias": (HeadBias.NONE,),
            "inner_norm": (InnerNorm.NONE,),
            "inputs_attention": ("causal",),
            "latent": (None,),
            "local_heads": (None,),
            "logit_scale": (1.0,),
            "mixer": (None,),
            "channel_mixer": (None,),
            "norm_gate_rank": (None,),
            "norm_placement": (NormPlacement.SANDWICH,),
            "output_rows": (None,),
            "positions": (Positions.ROPE,),
            "qk_norm": (QKNorm.HEAD,),
            "query_growth": (0.0,),
            "window_kind": ("sliding",),
            "value_dim": (None,),
            "residual": (Residual.SEQUENTIAL,),
            "residual_multiplier": (1.0,),
            "multipliers": (Multipliers(),),
        }
        only |= {} if self.has_experts else {"moe": (None,)}
        class_name = type(self).__name__
        name_of_model = class_name.removesuffix("Config").replace("Gemma", "Gemma ")
        if strange := set(self.layer_pattern) - {LayerKind.GLOBAL, LayerKind.LOCAL}:
            raise UserError(
                f"{class_name}.layer_pattern has {str(min(strange))!r} layers, {name_of_model} has none: write 'global'"
            )
        if self.rope.pairs is not Pairs.HALVES:
            raise UserError(f"Rope.pairs is {str(self.rope.pairs)!r}, {name_of_model} has 'halves' alone: leave it out")
        for name, allowed in only.items():
            value = getattr(self, name)
            if value not in allowed:
                shown = " or ".join(repr(x if x is None else str(x)) for x in allowed)
                raise UserError(
                    f"{class_name}.{name} is {str(value)!r}, {name_of_model} has {shown} alone: leave it out"
                )

    def _check_shared(self) -> None:
        """Checks that every layer has keys and values, its own or another's.

        Raises:
          UserError: a layer has nobody's keys and values to read.
        """
        class_name = type(self).__name__
        if not 0 <= self.kv_shared_layers < self.num_layers:
            raise UserError(
                f"{class_name}.kv_shared_layers ({self.kv_shared_layers}) must be at least 0 and below num_layers "
                f"({self.num_layers})"
            )
        kinds = self.kinds
        missing = set(kinds[self.kv_layers :]) - set(kinds[: self.kv_layers])
        if missing:
            raise UserError(
                f"{class_name}.kv_shared_layers ({self.kv_shared_layers}) leaves no {min(missing)} layer whose keys and "
                "values the last ones could read: make it smaller"
            )

    @property
    def layer_widths(self) -> tuple[int, ...] | None:
        return self.mlp_dims

    @property
    def embedded_dim(self) -> int:
        return self.num_layers * self.per_layer_dim

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Of every layer."""
        pattern = self.layer_pattern
        return tuple(LayerKind(pattern[index % len(pattern)]) for index in range(self.num_layers))

    @property
    def kv_layers(self) -> int:
        return self.num_layers - self.kv_shared_layers

    def emulated(self, values: dict[str, Any], factor: float) -> dict[str, Any]:
        """As many layers without keys and values of their own as leave a whole pattern before them."""
        spare = values["num_layers"] - len(self.layer_pattern)
        return {"kv_shared_layers": max(0, min(self.kv_shared_layers, spare)), "mlp_dims": None}

    def sparsity(self, layer: int) -> float:
        """Of a layer's MLP, the share of hidden units that it zeroes."""
        return 0.0

    def source(self, kind: LayerKind) -> int:
        """The layer whose keys and values the last layers of a kind read."""
        return max(layer for layer in range(self.kv_layers) if self.kinds[layer] == kind)

    def segments(self) -> tuple[Segment, ...]:
        """All layers, cut where the code changes."""
        shared = set(self.kinds[self.kv_layers :])
        first = min((self.source(kind) for kind in shared), default=self.kv_layers)
        cuts = {0, first, self.kv_layers, self.num_layers}
        cuts |= {layer for layer in range(1, self.num_layers) if self.sparsity(layer) != self.sparsity(layer - 1)}
        ordered = sorted(cuts)
        return tuple(
            Segment(start, stop, first <= start < self.kv_layers, start >= self.kv_layers)
            for start, stop in zip(ordered, ordered[1:])
        )
