"""Sizes and variants of a Gemma 4 decoder."""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any, ClassVar

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.models.architectures.shared_keys.config import SharedKeysConfig
from capibara.models.parts.config import TransformerConfig
from capibara.models.parts.kinds import LayerKind
from capibara.models.parts.router import Moe


class GlobalValues(enum.StrEnum):
    """Whether the values of global layers have a projection of their own, or are the keys before norm and rotation."""

    PROJECTED = "projected"
    KEYS = "keys"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Config(SharedKeysConfig):
    """Sizes of a Gemma 4 decoder (google/gemma-4-E2B, its text part); the rest is in SharedKeysConfig.

    A factor for each layer's output is in the checkpoint, and is not trained. per_layer_dim may be 0: layers have no
    embeddings of tokens then. With moe (google/gemma-4-26B-A4B) the MLP of a layer is a shared expert, and it and the others
    have each a norm of their inputs and one of their outputs.

    Attributes:
      global_head_dim, global_kv_heads: size of a head, and key/value heads, in global layers; None: those of local ones.
      global_values: what the values of global layers are.
    """

    has_experts: ClassVar[bool] = True

    global_head_dim: int | None = None
    global_kv_heads: int | None = None
    global_values: GlobalValues = GlobalValues.PROJECTED

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_layer_dim < 0 or self.per_layer_vocab_size < 1:
            raise UserError(
                f"Gemma4Config.per_layer_dim is {self.per_layer_dim} and per_layer_vocab_size {self.per_layer_vocab_size}, must "
                "be at least 0 and 1"
            )
        for name in ("global_head_dim", "global_kv_heads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"Gemma4Config.{name} is {value}, must be at least 1, or None: that of local layers")
        if self.moe is not None:
            _check_experts(self.moe, self.mlp_dims)
        if LayerKind.GLOBAL in self.kinds:
            self.attention_of(LayerKind.GLOBAL)

    @property
    def untrained(self) -> frozenset[str]:
        return frozenset({"layers/layer_scale"})

    @property
    def module_layers(self) -> dict[str, tuple[int, ...]]:
        numbers: dict[str, tuple[int, ...]] = {}
        for layer, kind in enumerate(self.kinds):
            module = self.attention_module(kind)
            numbers[module] = (*numbers.get(module, ()), layer)
        return numbers if len(numbers) > 1 else {}

    @property
    def unplanned(self) -> str | None:
        return (
            "Gemma4Config has heads of two sizes, which a search does not know: choose the mesh yourself (--gin.Plan.fsdp=8, "
            "...) and ask `capibara prove`"
        )

    def emulated(self, values: dict[str, Any], factor: float) -> dict[str, Any]:
        size = self.global_head_dim
        narrow = None if size is None else max(8, round(size * factor / 8) * 8)
        return super().emulated(values, factor) | {"global_head_dim": narrow}

    def attention_module(self, kind: LayerKind) -> str:
        return "attention" if kind is LayerKind.LOCAL else "global_attention"

    def attention_of(self, kind: LayerKind) -> TransformerConfig:
        sizes = (self.global_head_dim, self.global_kv_heads)
        return self if kind is LayerKind.LOCAL or sizes == (None, None) else self._of_global

    @functools.cached_property
    def _of_global(self) -> TransformerConfig:
        """The configuration whose heads are those of global layers."""
        return dataclasses.replace(
            self,
            head_dim=self.global_head_dim or self.head_size,
            num_kv_heads=self.global_kv_heads or self.kv_heads,
            global_head_dim=None,
            global_kv_heads=None,
        )


_OF_EXPERTS = ("num_experts", "top_k", "expert_dim", "shared_dim", "balance_loss", "router_z_loss")


def _check_experts(moe: Moe, mlp_dims: tuple[int, ...] | None) -> None:
    only = Moe(shared_experts=1, **{name: getattr(moe, name) for name in _OF_EXPERTS})
    for field in dataclasses.fields(moe):
        value, allowed = getattr(moe, field.name), getattr(only, field.name)
        if value != allowed:
            raise UserError(f"Moe.{field.name} is {value!s}, Gemma 4 has {allowed!s} alone: write that")
    if mlp_dims is not None:
        raise UserError("Gemma4Config.mlp_dims is set, and layers with experts are alike: leave it out, or moe")
