"""The options of multi-token prediction, and what a decoder's configuration says of it."""

from __future__ import annotations

import abc
import dataclasses
import enum
import math

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.models.parts.config import (
    FinalNorm,
    FirstNorm,
    Head,
    HeadBias,
    Positions,
    TransformerConfig,
)
from capibara.models.parts.head import Transform
from capibara.models.parts.kinds import LayerKind

PREFIX = "mtp"
"""The modules' parameters are below this name."""
_KINDS = (LayerKind.GLOBAL, LayerKind.LOCAL, LayerKind.UNROTATED)


class MtpMlp(enum.StrEnum):
    """What follows attention in a module: experts where the model has them, or an MLP in any model (ERNIE 4.5)."""

    MODEL = "model"
    DENSE = "dense"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mtp:
    """Modules that predict further tokens: an auxiliary loss in training, drafts in generation.

    Attributes:
      layers: number of modules, each with one layer. Module k predicts the token k places after the next one.
      loss_weight: factor of the modules' mean loss, which is added to that of the model; 0: no loss, and training
        does not change the modules.
      mlp: what follows attention in a module.
      norm: whether the modules' results are normalised before the head.
      kind: of the modules' layers.
    """

    layers: int = 1
    loss_weight: float = 0.1
    mlp: MtpMlp = MtpMlp.MODEL
    norm: FinalNorm = FinalNorm.LAYER
    kind: LayerKind = LayerKind.GLOBAL

    def __post_init__(self) -> None:
        if not 1 <= self.layers <= 16:
            raise UserError(f"Mtp.layers is {self.layers}, must be from 1 to 16: try 1")
        if not 0 <= self.loss_weight < math.inf:
            raise UserError(f"Mtp.loss_weight is {self.loss_weight}, must be finite and at least 0: try 0.1")
        if self.kind not in _KINDS:
            raise UserError(f"Mtp.kind is {str(self.kind)!r}, must be one of {', '.join(_KINDS)}: the modules attend")


class Predicted(TransformerConfig):
    """What a decoder's configuration says of the modules that predict further tokens."""

    mtp: Mtp | None
    layer_pattern: tuple[LayerKind, ...]
    window: int | None
    positions: Positions
    logit_scale: float
    transform: Transform
    first_norm: FirstNorm

    @property
    def mtp_windows(self) -> tuple[int | None, ...]:
        return (
            () if self.mtp is None else (self.window if self.mtp.kind is LayerKind.LOCAL else None,) * self.mtp.layers
        )

    @property
    def trains_mtp(self) -> bool:
        return self.mtp is not None and self.mtp.loss_weight > 0

    @property
    def rotated_kinds(self) -> set[LayerKind]:
        """The kinds of layers that a model has rotary positions for."""
        return {*self.layer_pattern} | (set() if self.mtp is None else {self.mtp.kind})

    @property
    @abc.abstractmethod
    def of_mtp(self) -> TransformerConfig:
        """The configuration of the modules' layers."""


def check(config: Predicted, supported: type[Predicted]) -> None:
    """Raises UserError if a model has modules and an option that they do not support, or another class than `supported`."""
    if (mtp := config.mtp) is None:
        return
    name = type(config).__name__
    unsupported = {
        f"the model is a {name}": type(config) is not supported,
        f"positions are {str(config.positions)!r}": config.positions not in (Positions.ROPE, Positions.NONE),
        f"data are {config.data_kind!r}": config.data_kind != "causal",
        "window_kind is 'block'": config.in_blocks,
        "layers have one branch each": config.one_branch,
        f"head is {str(config.head)!r}": config.head is Head.SCORE,
        f"head_bias is {str(config.head_bias)!r}": config.head_bias is not HeadBias.NONE,
        f"logit_scale is {config.logit_scale}": config.logit_scale != 1,
        f"transform is {str(config.transform)!r}": config.transform is not Transform.NONE,
        f"first_norm is {str(config.first_norm)!r}": config.first_norm is not FirstNorm.LAYER,
        f"dropout_rate is {config.dropout_rate}": config.dropout_rate > 0,
        "streaming is set": config.streaming is not None,
        "window is None and Mtp.kind 'local'": config.window is None and mtp.kind is LayerKind.LOCAL,
    }
    for option, is_set in unsupported.items():
        if is_set:
            raise UserError(f"{name}.mtp is not supported where {option}: leave it out")
    assert config.of_mtp, "raises if the layers cannot have these options"
