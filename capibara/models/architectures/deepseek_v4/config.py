"""Sizes and variants of a DeepSeek-V4 decoder."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.models.architectures.decoder import DecoderConfig
from capibara.models.layers.layers import Activation
from capibara.models.parts.config import Positions
from capibara.models.parts.kinds import LayerKind
from capibara.models.parts.latent_sizes import Indexer

_SUPPORTED = (
    "activation", "dtype", "embed_dim", "embedding_multiplier", "head", "head_dim", "layer_loop", "layer_pattern",
    "logit_scale", "lora", "max_length", "mlp_dim", "moe", "norm", "norm_eps", "norm_scale", "num_heads", "num_kv_heads",
    "num_layers", "positions", "quantization", "rope", "swiglu_alpha", "swiglu_limit", "value_head", "vocab_size", "window",
)  # fmt: skip


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekV4Config(DecoderConfig):
    """Sizes of a DeepSeek-V4 decoder (DeepSeek-AI 2026); the rest is in DecoderConfig.

    All heads share one key for each token, which is its value, too: the results of attention are turned back by the rotary
    angles of the query. Layers of the kind `local` see a window. Those of the kinds `compressed` and `compressed_sparse` also
    see entries that stand for earlier windows of their document, the latter those that an indexer chooses.

    Attributes:
      first_kinds: kinds of the first layers, before those of layer_pattern.
      rate, sparse_rate: tokens between two entries of `compressed` and of `compressed_sparse` layers. Of the latter an entry
        stands for twice as many.
      indexer: of `compressed_sparse` layers; its `top` are entries.
      query_rank: width of the latents that queries are computed from.
      out_groups, out_rank: groups of heads whose results are projected by themselves, and the width that each gets.
      streams: residual streams, which each branch joins and mixes (manifold-constrained hyper-connections, Xie et al. 2025,
        arXiv:2512.24880).
      sinkhorn_steps, stream_eps: how often rows and columns of a mixture are normalised, and what is added to their sums.
    """

    has_entries: ClassVar[bool] = True

    activation: Activation = Activation.LIMITED_SWIGLU
    first_kinds: tuple[LayerKind, ...] = ()
    rate: int = 128
    sparse_rate: int = 4
    indexer: Indexer = Indexer()
    query_rank: int = 1024
    out_groups: int = 8
    out_rank: int = 1024
    streams: int = 4
    sinkhorn_steps: int = 20
    stream_eps: float = 1e-6

    @property
    def tables(self) -> frozenset[str]:
        has_tables = self.moe is not None and self.moe.hash_layers > 0
        return frozenset({"layers/hash_mlp/expert_table"} if has_tables else ())

    @property
    def untrained(self) -> frozenset[str]:
        if LayerKind.COMPRESSED_SPARSE not in self.kinds:
            return self.tables
        of_indexer = ("index_query", "index_weight", *(f"compressor/{name}" for name in _OF_COMPRESSOR))
        return self.tables | {f"layers/sparse_attention/indexer/{name}" for name in of_indexer}

    @property
    def stateful(self) -> bool:
        return True

    @property
    def runs_in_stages(self) -> bool:
        return False

    @property
    def cuts(self) -> tuple[int, ...]:
        return (min(len(self.first_kinds), self.num_layers), *super().cuts)

    def kind_of(self, layer: int) -> LayerKind:
        first = len(self.first_kinds)
        return self.first_kinds[layer] if layer < first else super().kind_of(layer - first)

    @property
    def rotated_kinds(self) -> set[LayerKind]:
        return {*self.first_kinds, *self.layer_pattern}

    def attention_module(self, kind: LayerKind) -> str:
        names = {LayerKind.COMPRESSED: "compressed_attention", LayerKind.COMPRESSED_SPARSE: "sparse_attention"}
        return names.get(kind, "attention")

    @property
    def width(self) -> int:
        """Tokens that a query sees, itself included."""
        assert self.window is not None, "all layers have it"
        return self.window

    def rate_of(self, kind: LayerKind) -> int:
        """Tokens between two entries of a layer of this kind."""
        return self.sparse_rate if kind is LayerKind.COMPRESSED_SPARSE else self.rate

    def further_keys(self, length: int) -> float:
        total = 0.0
        for kind in self.kinds:
            if not kind.compresses:
                continue
            ready = length // self.rate_of(kind)
            seen = ready / 2
            if kind is LayerKind.COMPRESSED_SPARSE:
                top = min(self.indexer.top, ready)
                seen = top - top**2 / (2 * max(ready, 1))
                of_index = self.indexer.heads * self.indexer.head_dim / (2 * self.num_heads * self.head_size)
                seen += ready / 2 * of_index  # each entry is scored
            total += seen
        return total

    @property
    def unplanned(self) -> str | None:
        return (
            "DeepseekV4Config has entries and streams, which a search does not know: choose the mesh yourself "
            "(--gin.Plan.fsdp=8, ...) and ask `capibara prove`"
        )

    def emulated(self, values: dict[str, Any], factor: float) -> dict[str, Any]:
        smaller, count = super().emulated(values, factor), values["num_layers"]
        size = self.rope.rotated_dims(values["head_dim"])
        moe = values.get("moe", self.moe)
        return smaller | {
            "first_kinds": self.first_kinds[: max(0, count - len(self.layer_pattern))],
            "moe": None if moe is None else dataclasses.replace(moe, hash_layers=min(moe.hash_layers, count - 1)),
            "indexer": dataclasses.replace(self.indexer, head_dim=max(size, round(self.indexer.head_dim * factor))),
            "query_rank": max(8, round(self.query_rank * factor)),
            "out_rank": max(8, round(self.out_rank * factor)),
        }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rate", "sparse_rate", "query_rank", "out_groups", "out_rank", "streams", "sinkhorn_steps"):
            if getattr(self, name) < 1:
                raise UserError(f"DeepseekV4Config.{name} is {getattr(self, name)}, must be at least 1")
        if not 0 < self.stream_eps < math.inf:
            raise UserError(f"DeepseekV4Config.stream_eps is {self.stream_eps}, must be finite and above 0: try 1e-6")
        if strange := [kind for kind in (*self.first_kinds, *self.layer_pattern) if not kind.windowed]:
            raise UserError(
                f"DeepseekV4Config.layer_pattern or first_kinds has {str(strange[0])!r}, must be of 'local', 'compressed' and "
                "'compressed_sparse' alone"
            )
        if self.num_heads % self.out_groups:
            raise UserError(
                f"DeepseekV4Config.out_groups ({self.out_groups}) must divide num_heads ({self.num_heads}): try 1"
            )
        self._check_fixed()

    def _check_fixed(self) -> None:
        for field in dataclasses.fields(DecoderConfig):
            if field.name not in _SUPPORTED and getattr(self, field.name) != field.default:
                value = str(getattr(self, field.name))
                raise UserError(f"DeepseekV4Config.{field.name} ({value}) is of other decoders: leave it out")
        if self.num_kv_heads not in (None, 1):
            raise UserError(f"DeepseekV4Config.num_kv_heads is {self.num_kv_heads}, must be 1: leave it out")
        if self.positions is not Positions.ROPE:
            raise UserError(f"DeepseekV4Config.positions is {str(self.positions)!r}, must be 'rope': leave it out")
        rotated, size = self.rope.rotated_dims(self.head_size), self.indexer.head_dim
        if LayerKind.COMPRESSED_SPARSE in self.kinds and (size < rotated or self.indexer.pairs != self.rope.pairs):
            raise UserError(
                f"Indexer.head_dim ({size}) and pairs ({str(self.indexer.pairs)!r}) must be at least the {rotated} dimensions of "
                f"a head that are rotated, and Rope.pairs ({str(self.rope.pairs)!r})"
            )
        if self.rope.scaling.by_length:
            raise UserError(
                f"Rope.scaling is {str(self.rope.scaling)!r}, whose angles depend on the row's length, and entries keep theirs: "
                "write 'yarn'"
            )


_OF_COMPRESSOR = ("index_key", "index_gate", "position_bias", "norm/scale")
