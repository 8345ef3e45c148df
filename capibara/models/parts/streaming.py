"""Streaming heads: key/value heads that see a document's first tokens and its last ones alone.

DuoAttention (Xiao et al. 2024, arXiv:2410.10819): few heads retrieve from far back, and need all keys and values. The others
do with attention sinks and recent tokens (Xiao et al. 2023, arXiv:2309.17453).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.kernels.attention.spec import AttentionSpec


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamingHeads:
    """Which key/value heads stream; the rest retrieve: they see all keys before a query.

    Attributes:
      heads: for each layer, the numbers of its streaming heads. None: each head has a gate g in [0, 1], which @DuoAttention()
        trains, and gives g x what it retrieves + (1 - g) x what it streams.
      sink_tokens: a document's first tokens, which streaming heads see.
      recent_window: positions before a query, its own included, which they see too.
    """

    heads: tuple[tuple[int, ...], ...] | None = None
    sink_tokens: int = 64
    recent_window: int = 256

    def __post_init__(self) -> None:
        for name, least, usual in (("sink_tokens", 0, 64), ("recent_window", 1, 256)):
            if not least <= (value := getattr(self, name)) < 2**30:
                raise UserError(f"StreamingHeads.{name} is {value}, must be from {least} to below 2**30: try {usual}")
        for layer, heads in enumerate(self.heads or ()):
            if list(heads) != sorted(set(heads)):
                raise UserError(
                    f"StreamingHeads.heads[{layer}] is {heads}, must be in order and have each head once: try {tuple(sorted(set(heads)))}"
                )

    def check(self, config_name: str, kv_heads: int, windows: Sequence[int | None]) -> None:
        """Raises UserError unless the pattern fits a model's layers.

        Args:
          config_name: of the model's configuration, for errors.
          kv_heads: key/value heads of a layer.
          windows: of its layers, as in Layers.windows.
        """
        if self.heads is None:
            return
        if len(self.heads) != len(windows):
            raise UserError(
                f"StreamingHeads.heads has {len(self.heads)} layers, must have {config_name}.num_layers ({len(windows)}): take the "
                "pattern of this model"
            )
        for layer, (heads, window) in enumerate(zip(self.heads, windows, strict=True)):
            if heads and not 0 <= heads[0] <= heads[-1] < kv_heads:
                raise UserError(
                    f"StreamingHeads.heads[{layer}] is {heads}, must be from 0 to {kv_heads - 1} ({config_name}.num_kv_heads is "
                    f"{kv_heads}): take the pattern of this model"
                )
            if heads and window is not None:
                raise UserError(
                    f"StreamingHeads.heads[{layer}] is {heads}, and that layer has a window or no attention: write () for it"
                )

    @property
    def capacity(self) -> int:
        """Tokens of a row that a streaming head sees at most."""
        return self.sink_tokens + self.recent_window

    def spec(self, kind: AttentionSpec) -> AttentionSpec:
        """What streaming heads see in a layer of this kind."""
        return dataclasses.replace(kind, window=self.recent_window, sink_tokens=self.sink_tokens)

    def shares(self, kv_heads: int) -> jax.Array | None:
        """[L, K] float32: 1 where a head retrieves, 0 where it streams; None: the model's gates say so."""
        if self.heads is None:
            return None
        shares_LK = np.ones((len(self.heads), kv_heads), np.float32)
        for layer, heads in enumerate(self.heads):
            shares_LK[layer, list(heads)] = 0
        return jnp.asarray(shares_LK)


def mixed(y_BTNH: jax.Array, streamed_BTNH: jax.Array, share_K: jax.Array) -> jax.Array:
    """The share of retrieval and the rest of streaming, for the query heads of each of K key/value heads."""
    share_N = jnp.repeat(share_K, y_BTNH.shape[2] // len(share_K))[:, None]
    both = share_N * y_BTNH.astype(jnp.float32) + (1 - share_N) * streamed_BTNH.astype(jnp.float32)
    return both.astype(y_BTNH.dtype)


@jax.custom_vjp
def bounded(gates: jax.Array) -> jax.Array:
    """Gates clipped to [0, 1]; a gradient passes unless a step against it would leave the interval.

    A plain clip would have no gradient beyond the bounds, and a gate that an optimizer moved there would stay.
    """
    return jnp.clip(gates, 0, 1)


def _bounded_forward(gates: jax.Array) -> tuple[jax.Array, jax.Array]:
    return bounded(gates), gates


def _bounded_backward(gates: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    outward = ((gates <= 0) & (gradient > 0)) | ((gates >= 1) & (gradient < 0))
    return (jnp.where(outward, 0, gradient),)


bounded.defvjp(_bounded_forward, _bounded_backward)


class Heads(NamedTuple):
    """What attention reads of some heads: N query heads of K key/value heads.

    Attributes:
      q_BTNH: queries.
      k_BTKH, v_BTKH: keys and values.
      sinks_N: the query heads' attention sinks; None: no sinks.
    """

    q_BTNH: jax.Array
    k_BTKH: jax.Array
    v_BTKH: jax.Array
    sinks_N: jax.Array | None = None

    def of(self, numbers: Sequence[int]) -> Heads:
        """The key/value heads with these numbers, and their query heads."""
        (B, T, N, H), K, chosen = self.q_BTNH.shape, self.k_BTKH.shape[2], np.asarray(numbers)
        q_BTNH = self.q_BTNH.reshape(B, T, K, N // K, H)[:, :, chosen].reshape(B, T, -1, H)
        sinks_N = None if self.sinks_N is None else self.sinks_N.reshape(K, -1)[chosen].reshape(-1)
        return Heads(q_BTNH, self.k_BTKH[:, :, chosen], self.v_BTKH[:, :, chosen], sinks_N)


Attend = Callable[[Heads], jax.Array]


def by_heads(heads: Heads, streaming: Sequence[int], retrieve: Attend, stream: Attend) -> jax.Array:
    """Attention [B, T, N, H] whose streaming key/value heads are computed by `stream`, and the others by `retrieve`."""
    (B, T, N, H), K = heads.q_BTNH.shape, heads.k_BTKH.shape[2]
    others = [head for head in range(K) if head not in streaming]
    parts = [attend(heads.of(numbers)) for numbers, attend in ((others, retrieve), (streaming, stream)) if numbers]
    y_BTKGH = jnp.concatenate([y.reshape(B, T, -1, N // K, H) for y in parts], axis=2)
    return y_BTKGH[:, :, np.argsort([*others, *streaming])].reshape(B, T, N, H)
