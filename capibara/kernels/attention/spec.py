"""Which keys a query sees and how scores are computed: what all attention back ends must agree on."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Mask and scores of an attention layer. Segment ids are masked in addition and passed as arrays.

    Attributes:
      causal: whether a query sees no later position.
      window: number of positions that a query sees, its own included: at most `window - 1` back, and as many forward if
        not causal. None: all positions.
      in_blocks: whether a query sees only what is in its own block of `window` positions of its document (Llama 4), for
        attention with a cache; over whole rows the segment ids have a number for each block.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap) after scaling (Gemma 2, arXiv:2408.00118).
      scale: factor of q k^T, usually head_dim**-0.5.
    """

    causal: bool
    window: int | None
    soft_cap: float | None
    scale: float
    in_blocks: bool = False
