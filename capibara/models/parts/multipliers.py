"""Constant factors of what a layer's branches read and make."""

from __future__ import annotations

import dataclasses
import math

import jax

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.models.parts.kinds import LayerKind


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Multipliers:
    """Factors within a layer's branches (Falcon-H1, arXiv:2507.22448).

    Attributes:
      attention_input, attention_output: of what attention reads, and of its results.
      mixer_input, mixer_output: of what a mixer reads, and of its results.
      mlp_gate: of the MLP's gate before its activation.
      mlp_output: of the results of the MLP or the experts.
      attention_residual, mixer_residual, mlp_residual: of the residual stream that results are added to, where
        norm_placement is "stream" (MiniMax-Text-01, arXiv:2501.08313).
    """

    attention_input: float = 1.0
    attention_output: float = 1.0
    mixer_input: float = 1.0
    mixer_output: float = 1.0
    mlp_gate: float = 1.0
    mlp_output: float = 1.0
    attention_residual: float = 1.0
    mixer_residual: float = 1.0
    mlp_residual: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise UserError(f"Multipliers.{field.name} is {value}, must be finite and above 0: try 1.0")

    @property
    def residuals(self) -> tuple[float, float, float]:
        """The factors of the residual stream."""
        return self.attention_residual, self.mixer_residual, self.mlp_residual

    def of_stream(self, branch: str, kind: LayerKind) -> float:
        """The factor of the residual stream at a branch ("attention", "mlp") of a layer of this kind."""
        if branch == "mlp":
            return self.mlp_residual
        return self.attention_residual if kind.attends else self.mixer_residual


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """The product with a constant factor."""
    return x if factor == 1 else x * factor
