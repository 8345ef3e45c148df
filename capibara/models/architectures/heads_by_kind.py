"""What heads of a decoder have differently in some of its layers, or for values."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from capibara.core.types import UserError
from capibara.models.parts.config import Positions, TransformerConfig
from capibara.models.parts.kinds import LayerKind, LocalHeads


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadsByKind(TransformerConfig):
    """Heads whose values have a size of their own, and those of local layers.

    Attributes:
      value_dim: size of a head's values; None: head_dim, which is the largest (a cache has as much room for values).
      local_heads: what heads of local layers have differently; None: they are as the others.
    """

    value_dim: int | None = None
    local_heads: LocalHeads | None = None

    @property
    def value_size(self) -> int:
        return super().value_size if self.value_dim is None else self.value_dim

    def attention_module(self, kind: LayerKind) -> str:
        return "attention" if self.local_heads is None or kind is not LayerKind.LOCAL else "local_attention"

    def attention_of(self, kind: LayerKind) -> TransformerConfig:
        return self._of_local if self.local_heads is not None and kind is LayerKind.LOCAL else self

    @functools.cached_property
    def _of_local(self) -> TransformerConfig:
        """The configuration whose heads are those of local layers."""
        assert self.local_heads is not None, "the caller asks"
        values = {field.name: getattr(self.local_heads, field.name) for field in dataclasses.fields(self.local_heads)}
        values = {name: value for name, value in values.items() if value is not None}
        return dataclasses.replace(self, **{"num_kv_heads": self.kv_heads} | values, local_heads=None)

    @property
    def unplanned(self) -> str | None:
        if self.local_heads is None and self.value_dim is None:
            return super().unplanned
        return (
            "DecoderConfig.local_heads or value_dim is set, heads that differ, which a search does not know: choose the mesh "
            "yourself (--gin.Plan.fsdp=8, ...) and ask `capibara prove`"
        )

    def emulated(self, values: dict[str, Any], factor: float) -> dict[str, Any]:
        if self.value_dim is None:
            return super().emulated(values, factor)
        return {"value_dim": min(values["head_dim"], max(8, round(self.value_dim * factor / 8) * 8))}

    def check_heads(self) -> None:
        """Checks the sizes of heads.

        Raises:
          UserError: they do not fit the others.
        """
        name, kinds = type(self).__name__, {kind for kind in self.kinds if kind.attends}
        if self.value_dim is not None and not 1 <= self.value_dim <= self.head_size:
            raise UserError(
                f"{name}.value_dim is {self.value_dim}, must be from 1 to head_dim ({self.head_size}), or None: head_dim"
            )
        if self.value_dim is not None and self.latent is not None:
            raise UserError(f"{name}.value_dim is {self.value_dim}, and latent has one of its own: leave it out")
        if self.local_heads is None:
            return
        if LayerKind.LOCAL not in kinds or len(kinds) == 1:
            raise UserError(
                f"{name}.local_heads is for local layers beside others, layer_pattern has {' and '.join(sorted(kinds))} alone: "
                "leave it out"
            )
        unsupported = {
            "latent is set": self.latent is not None,
            "streaming is set": self.streaming is not None,
            "norm_placement is 'mixed'": self.mixed_norms,
            "positions add a bias to the scores": self._bias_by_head,
        }
        for option, is_set in unsupported.items():
            if is_set:
                raise UserError(f"{name}.local_heads is not supported where {option}: leave it out")
        self.attention_of(LayerKind.LOCAL)  # its own checks

    @property
    def _bias_by_head(self) -> bool:
        return getattr(self, "positions", Positions.NONE).biases
