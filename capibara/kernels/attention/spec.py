"""Which keys a query sees and how scores are computed: what all attention back ends must agree on."""

from __future__ import annotations

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Mask and scores of an attention layer. Segment ids are masked in addition and passed as arrays.

    Attributes:
      causal: whether a query sees no later position.
      window: number of positions that a query sees, its own included: at most `window - 1` back, and as many forward if
        not causal. None: all positions.
      in_blocks: whether a query sees only what is in its own block of `window` positions of its document (Llama 4), for
        attention with a cache; over whole rows the segment ids have a number for each block.
      sink_tokens: number of a document's first tokens that a query with a window sees in addition to it (StreamingLLM,
        arXiv:2309.17453).
      soft_cap: scores become soft_cap * tanh(scores / soft_cap) after scaling (Gemma 2, arXiv:2408.00118).
      scale: factor of q k^T, usually head_dim**-0.5.
    """

    causal: bool
    window: int | None
    soft_cap: float | None
    scale: float
    in_blocks: bool = False
    sink_tokens: int = 0

    def in_window(self, back: jax.Array, positions: jax.Array) -> jax.Array:
        """Whether keys are in the window of queries, or are sinks.

        Args:
          back: positions from the key to its query.
          positions: of the keys in their documents, to broadcast with `back`.
        """
        assert self.window is not None, "the caller has checked it"
        near = abs(back) < self.window
        return near | (positions < self.sink_tokens) if self.sink_tokens else near
