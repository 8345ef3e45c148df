"""Sizes and variants of a Gemma 3n decoder."""

from __future__ import annotations

import dataclasses

from capibara.config import configurable
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


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive layers that run by the same code.

    Attributes:
      start, stop: the first of them, and the one after the last.
      sparsity: share of the hidden units that their MLPs zero.
      stores: whether the last layers read the keys and values of some of these.
      reads: whether these read keys and values of earlier layers, and have none of their own.
    """

    start: int
    stop: int
    sparsity: float
    stores: bool
    reads: bool


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3nConfig(DecoderConfig):
    """Sizes of a Gemma 3n decoder (google/gemma-3n-E4B, its text part); the rest is in DecoderConfig.

    Attributes:
      streams: residual streams, of which every layer computes the first and predicts and corrects the others (AltUp,
        Baykal et al. 2023, arXiv:2301.13310).
      coefficient_clip: largest magnitude of AltUp's coefficients in training; None: no limit.
      laurel_rank: of the low-rank residual beside attention (LAuReL, Menghani et al. 2024, arXiv:2411.07501).
      per_layer_dim: width of the embedding that every layer has of each token.
      per_layer_vocab_size: rows of that table; tokens beyond it have the embedding of token 0.
      kv_shared_layers: how many of the last layers have no keys and values and read those of the last layer before them
        that is of their kind (local or global).
      activation_sparsity: of the first layers' MLPs, the share of hidden units that are zeroed: those that are not
        above the quantile of a normal distribution with their mean and variance. Layers beyond leave none out.
      mlp_dims: hidden widths of all layers where they differ (MatFormer, Devvrit et al. 2023, arXiv:2310.07707); the
        largest is mlp_dim, and narrower layers lie in as much memory, of which nothing reads the rest.
    """

    streams: int = 4
    coefficient_clip: float | None = 120.0
    laurel_rank: int = 64
    per_layer_dim: int = 256
    per_layer_vocab_size: int = 262_144
    kv_shared_layers: int = 0
    activation_sparsity: tuple[float, ...] = ()
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
        for name in ("streams", "laurel_rank", "per_layer_dim", "per_layer_vocab_size"):
            if getattr(self, name) < 1:
                raise UserError(f"Gemma3nConfig.{name} is {getattr(self, name)}, must be at least 1")
        if self.coefficient_clip is not None and self.coefficient_clip <= 0:
            raise UserError(
                f"Gemma3nConfig.coefficient_clip is {self.coefficient_clip}, must be above 0: try 120.0, or None"
            )
        self._check_fixed()
        self._check_shared()
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
        if self.mlp_dims is not None and (
            len(self.mlp_dims) != self.num_layers or max(self.mlp_dims) != self.mlp_dim or min(self.mlp_dims) < 1
        ):
            raise UserError(
                f"Gemma3nConfig.mlp_dims has {len(self.mlp_dims)} widths to {max(self.mlp_dims, default=0)}, must be one "
                f"for each of num_layers ({self.num_layers}), the largest mlp_dim ({self.mlp_dim}), none below 1"
            )

    def _check_fixed(self) -> None:
        """Checks what the published models all have.

        Raises:
          UserError: a variant of other decoders that this one does not have.
        """
        only = {
            "activation": (Activation.GEGLU, Activation.SWIGLU),
            "attention_clip": (None,),
            "attention_gate": (AttentionGate.NONE,),
            "attention_sinks": (AttentionSinks.NONE,),
            "bias": (Bias.NONE,),
            "dropout_rate": (0.0,),
            "embedding_multiplier": (1.0,),
            "embedding_norm": (EmbeddingNorm.NONE,),
            "final_norm": (FinalNorm.LAYER,),
            "head_bias": (HeadBias.NONE,),
            "inner_norm": (InnerNorm.NONE,),
            "inputs_attention": ("causal",),
            "latent": (None,),
            "logit_scale": (1.0,),
            "mixer": (None,),
            "moe": (None,),
            "norm_placement": (NormPlacement.SANDWICH,),
            "positions": (Positions.ROPE,),
            "qk_norm": (QKNorm.HEAD,),
            "query_growth": (0.0,),
            "window_kind": ("sliding",),
            "residual": (Residual.SEQUENTIAL,),
            "residual_multiplier": (1.0,),
        }
        if strange := set(self.layer_pattern) - {LayerKind.GLOBAL, LayerKind.LOCAL}:
            raise UserError(
                f"Gemma3nConfig.layer_pattern has {str(min(strange))!r} layers, Gemma 3n has none: write 'global'"
            )
        if self.rope.pairs is not Pairs.HALVES:
            raise UserError(f"Rope.pairs is {str(self.rope.pairs)!r}, Gemma 3n has 'halves' alone: leave it out")
        for name, allowed in only.items():
            value = getattr(self, name)
            if value not in allowed:
                shown = " or ".join(repr(x if x is None else str(x)) for x in allowed)
                raise UserError(f"Gemma3nConfig.{name} is {str(value)!r}, Gemma 3n has {shown} alone: leave it out")

    def _check_shared(self) -> None:
        """Checks that every layer has keys and values, its own or another's.

        Raises:
          UserError: a layer has nobody's keys and values to read.
        """
        if not 0 <= self.kv_shared_layers < self.num_layers:
            raise UserError(
                f"Gemma3nConfig.kv_shared_layers ({self.kv_shared_layers}) must be at least 0 and below num_layers "
                f"({self.num_layers})"
            )
        kinds = self.kinds
        missing = set(kinds[self.kv_layers :]) - set(kinds[: self.kv_layers])
        if missing:
            raise UserError(
                f"Gemma3nConfig.kv_shared_layers ({self.kv_shared_layers}) leaves no {min(missing)} layer whose keys and "
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

    def sparsity(self, layer: int) -> float:
        """Of a layer's MLP."""
        return self.activation_sparsity[layer] if layer < len(self.activation_sparsity) else 0.0

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
            Segment(start, stop, self.sparsity(start), first <= start < self.kv_layers, start >= self.kv_layers)
            for start, stop in zip(ordered, ordered[1:])
        )
