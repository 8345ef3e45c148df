"""What heads of a decoder have differently in some of its layers, or for values."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from capibara.core.types import UserError
from capibara.models.parts.config import Positions, TransformerConfig
from capibara.models.parts.kinds import BlockIndexer, LayerKind, LocalHeads


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadsByKind(TransformerConfig):
    """Heads whose values have a size of their own, and those of local layers.

    Attributes:
      value_dim: size of a head's values; None: head_dim, which is the largest (a cache has as much room for values).
      local_heads: what heads of local layers have differently; None: they are as the others.
      block_indexer: chooses the blocks of keys that a query of a sparse layer sees.
    """

    value_dim: int | None = None
    local_heads: LocalHeads | None = None
    block_indexer: BlockIndexer | None = None

    @property
    def untrained(self) -> frozenset[str]:
        if self.block_indexer is None:
            return super().untrained
        names = ("block_query", "block_key", "query_norm/scale", "key_norm/scale")
        return frozenset(f"layers/sparse_attention/indexer/{name}" for name in names)

    @property
    def block_sizes(self) -> BlockIndexer | None:
        return self.block_indexer if {*self.kinds} == {LayerKind.SPARSE} else None

    @property
    def cached_heads(self) -> tuple[int, int]:
        count, size = super().cached_heads
        return (count, size) if self.block_sizes is None else (count, size - -self.block_sizes.head_dim // count)

    @property
    def value_size(self) -> int:
        return super().value_size if self.value_dim is None else self.value_dim

    def attention_module(self, kind: LayerKind) -> str:
        if kind is LayerKind.SPARSE:
            return "sparse_attention"
        return "attention" if self.local_heads is None or kind is not LayerKind.LOCAL else "local_attention"

    def attention_of(self, kind: LayerKind) -> TransformerConfig:
        if kind is LayerKind.SPARSE and self.block_sizes is None:
            return self._of_sparse
        return self._of_local if self.local_heads is not None and kind is LayerKind.LOCAL else self

    @functools.cached_property
    def _of_sparse(self) -> TransformerConfig:
        """The configuration whose heads are those of sparse layers."""
        alone: dict[str, Any] = {
            "layer_pattern": (LayerKind.SPARSE,),
            "window": None,
            "mixer": None,
            "local_heads": None,
        }
        return dataclasses.replace(self, **alone)

    @functools.cached_property
    def _of_local(self) -> TransformerConfig:
        """The configuration whose heads are those of local layers."""
        assert self.local_heads is not None, "the caller asks"
        values = {field.name: getattr(self.local_heads, field.name) for field in dataclasses.fields(self.local_heads)}
        values = {name: value for name, value in values.items() if value is not None}
        return dataclasses.replace(self, **{"num_kv_heads": self.kv_heads} | values, local_heads=None)

    @property
    def unplanned(self) -> str | None:
        set_names = [name for name in ("value_dim", "local_heads", "block_indexer") if getattr(self, name) is not None]
        if not set_names:
            return super().unplanned
        return (
            f"DecoderConfig.{set_names[0]} is set, which a search does not know: choose the mesh yourself (--gin.Plan.fsdp=8, "
            "...) and ask `capibara prove`"
        )

    def emulated(self, values: dict[str, Any], factor: float) -> dict[str, Any]:
        size, smaller = values["head_dim"], super().emulated(values, factor)
        if self.value_dim is not None:
            smaller["value_dim"] = min(size, max(8, round(self.value_dim * factor / 8) * 8))
        if self.block_indexer is not None:
            smaller["block_indexer"] = dataclasses.replace(self.block_indexer, head_dim=size)
        return smaller

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
        self._check_blocks_of_keys()
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

    def _check_blocks_of_keys(self) -> None:
        name, sizes = type(self).__name__, self.block_indexer
        if (sizes is not None) != (LayerKind.SPARSE in self.kinds):
            raise UserError(
                f"{name}.block_indexer is {sizes}, which sparse layers in layer_pattern ({', '.join({*self.kinds})}) have alone: set "
                "both, or leave them out"
            )
        if sizes is None:
            return
        if self.num_heads % sizes.heads:
            raise UserError(
                f"BlockIndexer.heads ({sizes.heads}) must divide {name}.num_heads ({self.num_heads}): try 1"
            )
        rope = getattr(self, "rope", None)
        rotated = 0 if rope is None else rope.rotated_dims(self.head_size)
        if rotated > sizes.head_dim:
            raise UserError(
                f"BlockIndexer.head_dim ({sizes.head_dim}) must be at least the {rotated} dimensions of a head that are rotated"
            )
        unsupported = {
            "latent is set": self.latent is not None,
            "streaming is set": self.streaming is not None,
            "inputs_attention is 'bidirectional'": self.data_kind == "prefix",
        }
        for option, is_set in unsupported.items():
            if is_set:
                raise UserError(f"{name}.block_indexer is not supported where {option}: leave it out")

    @property
    def _bias_by_head(self) -> bool:
        return getattr(self, "positions", Positions.NONE).biases
