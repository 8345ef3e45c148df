"""Which keys a query sees and how their scores are made: the part of attention that every back end must agree on."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The mask and the scores of one attention layer; segment ids come on top, as arrays.

    Attributes:
      causal: a query sees no later place.
      window: how many places a query sees, its own included: at most `window - 1` back; on both sides where not causal.
        None: all.
      soft_cap: the scores become soft_cap * tanh(scores / soft_cap), after scaling (Gemma 2, arXiv:2408.00118).
      scale: what q k^T is multiplied by, usually head_dim**-0.5.
    """

    causal: bool
    window: int | None
    soft_cap: float | None
    scale: float
