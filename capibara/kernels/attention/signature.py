"""The signature of attention back ends: their inputs and outputs, declared once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import numpy as np

from capibara import sharding
from capibara.kernels.attention.spec import AttentionSpec


class AttentionInputs(NamedTuple):
    """The arrays of one attention call: B rows of T queries and S keys, N = K * G query heads for K key/value heads.

    Attributes:
      q_BTNH: queries; query head n reads key/value head n // G.
      k_BSKH: keys.
      v_BSKH: values.
      q_segments_BT: document number of each query, at least 0; a query sees only keys of its own document.
      kv_segments_BS: document number of each key.
      q_row_positions_T: column of each query in the row as it was before sharding.balanced; None: in order.
      kv_row_positions_S: the same for keys.
      bias_NTS: added to the scores (T5's relative positions).
      row_bias_BNTS: float32, added to the scores, and different in each row (disentangled attention).
      prefix_BT: self-attention only: queries marked 1 also see later keys marked 1 (the inputs of a prefix LM).
      drop: applies dropout to the probabilities [B, N, T, S].
      sinks_N: float32, a logit per query head in the softmax's denominator, like a key whose value is 0.
    """

    q_BTNH: jax.Array
    k_BSKH: jax.Array
    v_BSKH: jax.Array
    q_segments_BT: jax.Array
    kv_segments_BS: jax.Array
    q_row_positions_T: jax.Array | np.ndarray | None = None
    kv_row_positions_S: jax.Array | np.ndarray | None = None
    bias_NTS: jax.Array | None = None
    row_bias_BNTS: jax.Array | None = None
    prefix_BT: jax.Array | None = None
    drop: Callable[[jax.Array], jax.Array] | None = None
    sinks_N: jax.Array | None = None

    @property
    def in_order(self) -> bool:
        """Whether each row's queries and keys are in order."""
        return self.q_row_positions_T is None and self.kv_row_positions_S is None

    def described(self, spec: AttentionSpec) -> str:
        """Dtype and shape for messages about unsupported inputs."""
        (_, T, _, H), S = self.q_BTNH.shape, self.k_BSKH.shape[1]
        biased = "" if self.bias_NTS is None else ", relative positions"
        return f"{self.q_BTNH.dtype}, head_dim {H}, {T} queries, {S} keys, {spec}{biased}"


class AttentionKernel(Protocol):
    """A back end: a module with these two functions.

    Every back end computes softmax(scores) v with the softmax in float32, and agrees with reference.py.
    """

    def unsupported_reason(self, inputs: AttentionInputs, spec: AttentionSpec) -> str | None:
        """Why the back end cannot compute this, as the end of "attention is 'cudnn', which"; None: it can."""

    def attend(self, inputs: AttentionInputs, spec: AttentionSpec) -> jax.Array:
        """Attention [B, T, N, H] in the queries' dtype.

        Args:
          inputs: queries, keys, values and masks.
          spec: mask, scale and soft cap of the scores.
        """


def reference_only(inputs: AttentionInputs) -> str | None:
    """Why only the reference supports these inputs, in the form of `unsupported_reason`; None: others may too."""
    if inputs.prefix_BT is not None:
        return "does not support a prefix LM's bidirectional inputs"
    if inputs.row_bias_BNTS is not None:
        return "does not support scores of contents with distances"
    return None if inputs.drop is None else "does not support dropout of probabilities"


def needs_whole_rows(inputs: AttentionInputs) -> str | None:
    """The reason for back ends that need whole rows in order on each device; None: rows are whole and in order."""
    mesh, _ = sharding.active() or (None, None)
    if inputs.in_order and (mesh is None or mesh.shape["context"] == 1):
        return None
    return "needs whole rows in their order on each device, but Plan.context cuts and reorders them"
