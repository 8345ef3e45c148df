"""The sizes of multi-head latent attention, which parts/latent.py computes."""

from __future__ import annotations

import dataclasses
import enum
import math

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.kernels.rotary import Pairs


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Indexer:
    """Sizes of DeepSeek sparse attention (DeepSeek-V3.2, 2025): each query sees the keys with the best scores alone.

    Nothing trains the indexer.

    Attributes:
      heads, head_dim: of the indexer; all its heads share their keys.
      top: how many keys a query sees; in rows of at most so many tokens it sees all.
      pairs: which dimensions of its heads are rotated together.
    """

    heads: int = 64
    head_dim: int = 128
    top: int = 2048
    pairs: Pairs = Pairs.HALVES

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim", "top"):
            if getattr(self, name) < 1:
                raise UserError(f"Indexer.{name} is {getattr(self, name)}, must be at least 1")


class QueryLatents(enum.StrEnum):
    """Which latents queries are computed from: the normalised ones, or both these and the others (A.X-K2).

    both: the gate of attention's results is computed from them, too.
    """

    NORMALIZED = "normalized"
    BOTH = "both"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-V2 2024, arXiv:2405.04434). DecoderConfig.head_dim is that of queries.

    Attributes:
      kv_rank: width of the latents that keys and values are computed from.
      query_rank: width of the latents that queries are computed from; None: they are computed from the input.
      rotary_dim: the last dimensions of each head's queries, which are rotated; all heads share their keys.
      value_dim: size of a head's values; at most that of its queries.
      norm_eps: epsilon of the latents' norms.
      indexer: chooses the keys that a query sees; None: it sees all.
      queries: which latents queries are computed from.
    """

    kv_rank: int
    query_rank: int | None = None
    rotary_dim: int = 64
    value_dim: int = 128
    norm_eps: float = 1e-6
    indexer: Indexer | None = None
    queries: QueryLatents = QueryLatents.NORMALIZED

    def __post_init__(self) -> None:
        for name in ("kv_rank", "query_rank", "rotary_dim", "value_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"LatentAttention.{name} is {value}, must be at least 1")
        if self.rotary_dim % 2:
            raise UserError(f"LatentAttention.rotary_dim ({self.rotary_dim}) must be even: try {self.rotary_dim + 1}")
        if self.queries is QueryLatents.BOTH and self.query_rank is None:
            raise UserError("LatentAttention.queries is 'both', and query_rank None: set it, or write 'normalized'")
        if not 0 < self.norm_eps < math.inf:
            raise UserError(f"LatentAttention.norm_eps is {self.norm_eps}, must be finite and above 0: try 1e-6")
        if self.indexer is not None and (self.query_rank is None or self.indexer.head_dim < self.rotary_dim):
            raise UserError(
                f"LatentAttention.indexer has head_dim {self.indexer.head_dim} and query_rank is {self.query_rank}, must have at "
                f"least rotary_dim ({self.rotary_dim}) and a query_rank: try query_rank = 1536"
            )

    @property
    def cached_dim(self) -> int:
        """Width of a token's keys and of its values in a cache; an indexer's keys lie behind the values."""
        width = self.rotary_dim if self.indexer is None else max(self.rotary_dim, self.indexer.head_dim)
        return self.kv_rank + width
