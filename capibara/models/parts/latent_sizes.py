"""The sizes of multi-head latent attention, which parts/latent.py computes."""

from __future__ import annotations

import dataclasses
import math

from capibara.config import configurable
from capibara.core.types import UserError


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
    """

    kv_rank: int
    query_rank: int | None = None
    rotary_dim: int = 64
    value_dim: int = 128
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("kv_rank", "query_rank", "rotary_dim", "value_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"LatentAttention.{name} is {value}, must be at least 1")
        if self.rotary_dim % 2:
            raise UserError(f"LatentAttention.rotary_dim ({self.rotary_dim}) must be even: try {self.rotary_dim + 1}")
        if not 0 < self.norm_eps < math.inf:
            raise UserError(f"LatentAttention.norm_eps is {self.norm_eps}, must be finite and above 0: try 1e-6")
