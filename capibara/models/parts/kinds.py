"""Which layers of a model have what."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import ClassVar

import jax

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.kernels.attention.spec import AttentionSpec
from capibara.models.layers.layers import AttentionSinks
from capibara.models.mixers.mixer import Mixer
from capibara.models.parts.router import Moe
from capibara.models.parts.streaming import StreamingHeads


class LayerKind(enum.StrEnum):
    """Whether a layer's queries attend to the whole row (global) or to a sliding window (local).

    unrotated: global, without the rotary positions of the other layers (SmolLM3, Cohere 2). recurrent: the layer has the
    model's mixer in place of attention (Qwen3-Next, LFM2). hybrid: attention as in global layers and the model's mixer
    read the same input, and their results are added (Falcon-H1). feed_forward: the layer has an MLP or experts and nothing
    else, and the other layers have no MLP (Nemotron-H). sparse: global, but a query sees the blocks of keys alone that the
    model's block indexer chooses (MiniMax-M3). compressed: local, and a query also sees an entry for each window of earlier
    tokens. compressed_sparse: of entries of shorter windows, it sees those that an indexer chooses (both DeepSeek-V4).
    """

    GLOBAL = "global"
    LOCAL = "local"
    UNROTATED = "unrotated"
    RECURRENT = "recurrent"
    HYBRID = "hybrid"
    FEED_FORWARD = "feed_forward"
    SPARSE = "sparse"
    COMPRESSED = "compressed"
    COMPRESSED_SPARSE = "compressed_sparse"

    @property
    def compresses(self) -> bool:
        """Whether the layer has entries for windows of tokens."""
        return self in (LayerKind.COMPRESSED, LayerKind.COMPRESSED_SPARSE)

    @property
    def windowed(self) -> bool:
        """Whether its queries see the tokens of a window alone."""
        return self is LayerKind.LOCAL or self.compresses

    @property
    def attends(self) -> bool:
        """Whether the layer has attention."""
        return self not in (LayerKind.RECURRENT, LayerKind.FEED_FORWARD)

    @property
    def mixes(self) -> bool:
        """Whether the layer has the model's mixer."""
        return self in (LayerKind.RECURRENT, LayerKind.HYBRID)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of the layer's first branch."""
        there = {"attention": self.attends, "mixer": self.mixes, "mlp": self is LayerKind.FEED_FORWARD}
        return tuple(module for module, is_there in there.items() if is_there)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalHeads:
    """What attention of local layers has in place of what the others have (MiMo-V2-Flash, Laguna).

    Attributes:
      num_heads, num_kv_heads: query heads, key/value heads; None: as many as the others.
      attention_sinks: whether their heads have sinks.
    """

    num_heads: int | None = None
    num_kv_heads: int | None = None
    attention_sinks: AttentionSinks = AttentionSinks.NONE

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"LocalHeads.{name} is {value}, must be at least 1, or None: that of the other layers")


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockIndexer:
    """Sizes of block-sparse attention (MiniMax-M3): a query of a sparse layer sees the blocks with the best keys alone.

    Nothing trains the indexer.

    Attributes:
      heads, head_dim: of the indexer; all its heads share their keys, and each chooses for an equal part of the query heads.
      block: tokens of a block; blocks are counted from a document's first token.
      top: how many blocks a query sees; in documents of at most so many it sees all.
      recent: how many of these are the last ones, with the query's own, whatever their keys.
    """

    heads: int = 4
    head_dim: int = 128
    block: int = 128
    top: int = 16
    recent: int = 1

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim", "block", "top"):
            if getattr(self, name) < 1:
                raise UserError(f"BlockIndexer.{name} is {getattr(self, name)}, must be at least 1")
        if not 0 <= self.recent <= self.top:
            raise UserError(f"BlockIndexer.recent ({self.recent}) must be from 0 to top ({self.top}): try 1")


class Layers:
    """What a model's configuration says of its layers.

    Attributes:
      has_entries: whether its layers may have entries for windows of tokens.
    """

    has_entries: ClassVar[bool] = False

    num_layers: int
    mlp_dim: int
    mixer: Mixer | None
    moe: Moe | None
    streaming: StreamingHeads | None
    norm_gate_rank: int | None = None

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return (LayerKind.GLOBAL,) * self.num_layers

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer, the number of positions visible to a query, its own included.

        None: all before it; 0: the layer has no queries.
        """
        return (None,) * self.num_layers

    @property
    def in_blocks(self) -> bool:
        """Whether a window is the block of so many positions that has the query."""
        return False

    @property
    def depth(self) -> int:
        """Number of layers that a token passes."""
        return self.num_layers

    @property
    def shared_modules(self) -> tuple[str, ...]:
        """Modules beside the stack of layers that several layers pass."""
        return ()

    def passes(self, name: str) -> float:
        """How often a token passes the parameters with this name, averaged over those of a stack."""
        return self.depth // self.num_layers if name.startswith("layers/") else 1

    @property
    def one_branch(self) -> bool:
        """Whether a layer has one branch, its attention, its mixer or its MLP, and not two."""
        return not self.mlp_dim or LayerKind.FEED_FORWARD in self.kinds

    @property
    def first_dense(self) -> int:
        """Number of the first layers that have an MLP where the others have experts."""
        return 0 if self.moe is None else self.moe.first_dense

    @property
    def cuts(self) -> tuple[int, ...]:
        """Numbers of layers before which a pattern of kinds or modules ends, beside first_dense."""
        return () if self.moe is None else (min(self.moe.hash_layers, self.num_layers),)

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that have an MLP where the others have experts."""
        if self.moe is None:
            return ()
        return tuple(layer for layer in range(self.num_layers) if not self.moe.in_layer(layer))

    @property
    def period(self) -> int:
        """After how many layers their kinds and modules repeat, but for the first_dense."""
        return 1 if self.moe is None else len(self.moe.pattern)

    @property
    def module_layers(self) -> dict[str, tuple[int, ...]]:
        """The modules of a layer that some layers lack, and the numbers of the layers that have them."""
        numbers: dict[str, list[int]] = {}
        for layer, kind in enumerate(self.kinds):
            for module in kind.modules:
                name = self.attention_module(kind) if module == "attention" else module
                numbers.setdefault(name, []).append(layer)
        some = {module: tuple(layers) for module, layers in numbers.items() if len(layers) < self.num_layers}
        if dense := self.dense_layers:
            some |= {"first_mlp": dense, "mlp": tuple(n for n in range(self.num_layers) if n not in dense)}
        if self.moe is not None and self.moe.hash_layers:
            first = range(min(self.moe.hash_layers, self.num_layers))
            rest = tuple(range(len(first), self.num_layers))
            some |= {"hash_mlp": tuple(first), "mlp": rest} if rest else {}
        if self.dense_layers and self.norm_gate_rank is not None:
            some |= {"mlp_norm": some["first_mlp"], "gated_mlp_norm": some["mlp"]}
        if self.mixed_norms:
            some |= {f"{branch}_norm": tuple(numbers["mixer"]) for branch in ("attention", "mlp")}
            some |= {f"{branch}_post_norm": tuple(numbers["attention"]) for branch in ("attention", "mlp")}
        return some

    def attention_module(self, kind: LayerKind) -> str:
        """The module with the attention of a layer of this kind."""
        return "attention"

    @property
    def tables(self) -> frozenset[str]:
        """Names of parameters of whole numbers, which no narrower dtype than float32 has exactly."""
        return frozenset()

    @property
    def stateful(self) -> bool:
        """Whether layers keep a state of the tokens before, which cannot forget the last of them."""
        return self.mixer is not None

    def further_keys(self, length: int) -> float:
        """Keys beside those in `windows` that a token sees, averaged over a row of this length and summed over layers."""
        return 0.0

    @property
    def mixed_norms(self) -> bool:
        """Whether recurrent layers have norms of their branches' inputs, and the others of their outputs."""
        return False

    @property
    def block_sizes(self) -> BlockIndexer | None:
        """Of the indexer by which queries of all layers choose blocks of keys; None: not in all layers."""
        return None

    @property
    def runs_in_stages(self) -> bool:
        """Whether a pipeline can divide its layers into stages."""
        numbered = self.streaming is not None or (self.mixer is not None and self.mixer.numbered)
        return not self.module_layers and not numbered and not self.mtp_windows

    @property
    def mtp_windows(self) -> tuple[int | None, ...]:
        """As `windows`, of the layers of the modules that predict further tokens; none: there are no modules."""
        return ()

    @property
    def trains_mtp(self) -> bool:
        """Whether training changes these modules."""
        return False

    @property
    def has_gates(self) -> bool:
        """Whether each key/value head has a gate between retrieving and streaming; training changes these alone."""
        return self.streaming is not None and self.streaming.heads is None

    def streaming_in(self, layer: jax.Array | int) -> tuple[int, ...]:
        """The streaming heads of a layer by their pattern."""
        if self.streaming is None or self.streaming.heads is None:
            return ()
        assert isinstance(layer, int), "a layer with a cache is compiled by itself"
        return self.streaming.heads[layer]

    def streamed(self, kind: AttentionSpec) -> AttentionSpec:
        """What streaming heads see in a layer of this kind."""
        return kind if self.streaming is None else self.streaming.spec(kind)

    @property
    def kv_layers(self) -> int:
        """Number of layers, from the first, that compute their own keys and values."""
        return self.num_layers

    @property
    def layer_widths(self) -> tuple[int, ...] | None:
        """Hidden widths of the layers' MLPs if they differ (mlp_dim is the largest); None: all are equal."""
        return None


class Patterned(Layers):
    """Layers whose kinds repeat a pattern."""

    layer_pattern: tuple[LayerKind, ...]

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return tuple(map(self.kind_of, range(self.num_layers)))

    def kind_of(self, layer: int) -> LayerKind:
        """The kind of a layer, also of one after the last."""
        return self.layer_pattern[layer % len(self.layer_pattern)]

    @property
    def period(self) -> int:
        return math.lcm(len(self.layer_pattern), super().period)
