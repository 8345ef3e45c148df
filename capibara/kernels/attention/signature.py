"""What every back end of attention is given and what it gives back: the signature stands here once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import numpy as np

from capibara import sharding
from capibara.kernels.attention.spec import AttentionSpec


class AttentionInputs(NamedTuple):
    """The arrays of one attention. B rows, T queries and S keys of each, N = K * G query heads of K key/value heads.

    Attributes:
      q_BTNH: queries; query head n reads key/value head n // G.
      k_BSKH: keys.
      v_BSKH: values.
      q_segments_BT: document number of each query, at least 0; it sees only keys of its own number.
      kv_segments_BS: document number of each key.
      q_row_positions_T: column of each query in the row as it was before sharding.balanced; None: in order.
      kv_row_positions_S: the same of keys.
      bias_NTS: added to the scores (T5's relative positions).
      prefix_BT: of self-attention: queries with a 1 see later keys with a 1, too (a prefix LM's inputs).
      drop: probabilities [B, N, T, S] -> those that dropout leaves.
      sinks_N: float32, a logit of each query head in the softmax's denominator, as of a key whose value is 0.
    """

    q_BTNH: jax.Array
    k_BSKH: jax.Array
    v_BSKH: jax.Array
    q_segments_BT: jax.Array
    kv_segments_BS: jax.Array
    q_row_positions_T: jax.Array | np.ndarray | None = None
    kv_row_positions_S: jax.Array | np.ndarray | None = None
    bias_NTS: jax.Array | None = None
    prefix_BT: jax.Array | None = None
    drop: Callable[[jax.Array], jax.Array] | None = None
    sinks_N: jax.Array | None = None

    @property
    def in_order(self) -> bool:
        """Whether each row's queries and keys are in their order."""
        return self.q_row_positions_T is None and self.kv_row_positions_S is None

    def described(self, spec: AttentionSpec) -> str:
        """Dtype and shape, as messages name what a back end cannot compute."""
        (_, T, _, H), S = self.q_BTNH.shape, self.k_BSKH.shape[1]
        biased = "" if self.bias_NTS is None else ", relative positions"
        return f"{self.q_BTNH.dtype}, head_dim {H}, {T} queries, {S} keys, {spec}{biased}"


class AttentionKernel(Protocol):
    """A back end: a module with these two functions.

    Whatever computes it, attention is softmax(scores) v with the softmax in float32, and the numbers are those of
    reference.py.
    """

    def objection(self, inputs: AttentionInputs, spec: AttentionSpec) -> str | None:
        """Why the back end cannot compute this, to follow "attention is 'cudnn', which"; None: it can."""

    def attend(self, inputs: AttentionInputs, spec: AttentionSpec) -> jax.Array:
        """Attention [B, T, N, H] in the dtype of the queries.

        Args:
          inputs: queries, keys, values and what hides some of them.
          spec: mask, scale and cap of the scores.
        """


def plain_alone(inputs: AttentionInputs) -> str | None:
    """What only the plain formula does of these inputs, as an objection to the others; None: nothing."""
    if inputs.prefix_BT is not None:
        return "lets no inputs see each other both ways"
    return None if inputs.drop is None else "drops no probabilities"


def cut_rows(inputs: AttentionInputs) -> str | None:
    """The objection of those who need whole rows in their order on each device; None: they have them."""
    mesh, _ = sharding.active() or (None, None)
    if inputs.in_order and (mesh is None or mesh.shape["context"] == 1):
        return None
    return "needs whole rows in their order on each device, but Plan.context cuts and reorders them"
