"""Biases of the attention scores that depend on the distance from query to key: T5's relative positions, ALiBi."""

from __future__ import annotations

import math
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from capibara.models.layers import layers
from capibara.sharding import constrain


def buckets(distance: np.ndarray, *, count: int, longest: int, bidirectional: bool) -> np.ndarray:
    """Buckets of distances (Raffel et al. 2020, arXiv:1910.10683, section 2.1).

    Half of the buckets hold one distance each, the other half hold ranges that grow geometrically.

    Args:
      distance: position of the key minus position of the query.
      count: number of buckets.
      longest: distances from this one on share the last bucket.
      bidirectional: half of the buckets are for later keys; otherwise later keys are masked, and share the first
        bucket.

    Returns:
      int32 of the shape of `distance`.
    """
    if bidirectional:
        count //= 2
        first, distance = np.where(distance > 0, count, 0), np.abs(distance)
    else:
        first, distance = np.zeros_like(distance), np.maximum(-distance, 0)
    exact = count // 2
    # float32 as in T5's own code: its rounding decides where a range begins.
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact)) / np.float32(np.log(longest / exact))
    ranges = exact + (ratio * np.float32(count - exact)).astype(np.int32)
    return (first + np.where(distance < exact, distance, np.minimum(ranges, count - 1))).astype(np.int32)


class RelativePositions(Protocol):
    """The sizes of a model that its relative bias depends on."""

    @property
    def relative_buckets(self) -> int: ...
    @property
    def relative_distance(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def embed_dim(self) -> int: ...


class RelativeBias(nnx.Module):
    """The relative bias of one stack of layers, or of one layer."""

    def __init__(self, config: RelativePositions, rngs: nnx.Rngs, *, bidirectional: bool):
        self.count, self.longest = config.relative_buckets, config.relative_distance
        self.bidirectional = bidirectional
        shape = (config.relative_buckets, config.num_heads)
        self.table = layers.param(rngs, shape, ("position", "heads"), layers.normal(config.embed_dim**-0.5))

    def __call__(self, length: int, row_positions_T: jax.Array | np.ndarray | None = None) -> jax.Array:
        """Biases [N, T, T] in float32 of rows of this length.

        `row_positions_T` holds each column's index in the row as it was before sharding.balanced; None: in order.
        """
        distances = np.arange(1 - length, length)
        index = buckets(distances, count=self.count, longest=self.longest, bidirectional=self.bidirectional)
        by_distance = self.table[...][index].T  # [N, 2 T - 1]
        # Each query's row is the previous one shifted by one position: computed by reshaping a repeated row, whose
        # gradient is a sum. A lookup per position would make it a scatter of T x T updates.
        N, R = by_distance.shape
        repeated = jnp.broadcast_to(jnp.pad(by_distance, ((0, 0), (0, 1)))[:, None], (N, length, R + 1))
        moved = repeated.reshape(N, -1)[:, : length * R].reshape(N, length, R)
        bias_NTT = moved[:, :, length - 1 :]
        if row_positions_T is not None:
            bias_NTT = bias_NTT[:, row_positions_T][:, :, row_positions_T]
        return constrain(bias_NTT, ("act_heads", "act_time", None))

    def at(self, q_positions_BT: jax.Array, kv_positions_BS: jax.Array) -> jax.Array:
        """Biases [B, N, T, S] in float32 of a causal stack, by position; arbitrary for masked keys."""
        back = np.arange(self.longest + 1)  # from the last of them on all distances share a bucket
        index = jnp.asarray(buckets(-back, count=self.count, longest=self.longest, bidirectional=False))
        back_BTS = jnp.clip(q_positions_BT[:, :, None] - kv_positions_BS[:, None, :], 0, self.longest)
        return jnp.moveaxis(self.table[...][index[back_BTS]], -1, 1)


class Alibi:
    """Attention with linear biases (Press et al. 2022, arXiv:2108.12409): a head's slope times the distance is subtracted."""

    def __init__(self, num_heads: int):
        self.slopes_N = jnp.asarray(slopes(num_heads))

    def __call__(self, length: int, row_positions_T: jax.Array | np.ndarray | None = None) -> jax.Array:
        """Biases [N, T, T] in float32 of rows of this length; arbitrary for masked keys. As `RelativeBias`."""
        columns_T = jnp.arange(length) if row_positions_T is None else row_positions_T
        back_TT = jnp.maximum(columns_T[:, None] - columns_T[None, :], 0).astype(jnp.float32)
        return constrain(-self.slopes_N[:, None, None] * back_TT, ("act_heads", "act_time", None))

    def at(self, q_positions_BT: jax.Array, kv_positions_BS: jax.Array) -> jax.Array:
        """Biases [B, N, T, S] in float32, by position; arbitrary for masked keys."""
        back_BTS = jnp.maximum(q_positions_BT[:, :, None] - kv_positions_BS[:, None, :], 0).astype(jnp.float32)
        return -self.slopes_N[:, None, None] * back_BTS[:, None]


class RoundedAlibi:
    """ALiBi as Falcon computes it: by a key's own position, in bfloat16, divided by sqrt(head_dim).

    Adding a head's slope times the key's position is ALiBi, as softmax ignores what all keys of a query share; but the
    rounding depends on the position, which in a row of several documents is that in the row.
    """

    def __init__(self, num_heads: int, head_dim: int):
        self.slopes_N, self.scale = jnp.asarray(slopes(num_heads)), head_dim**-0.5

    def __call__(self, length: int, row_positions_T: jax.Array | np.ndarray | None = None) -> jax.Array:
        """Biases [N, T, T] in float32 of rows of this length, as `RelativeBias`."""
        columns_T = jnp.arange(length) if row_positions_T is None else jnp.asarray(row_positions_T)
        bias_NTT = jnp.broadcast_to(self._of_keys(columns_T)[:, None], (len(self.slopes_N), length, length))
        return constrain(bias_NTT, ("act_heads", "act_time", None))

    def at(self, q_positions_BT: jax.Array, kv_positions_BS: jax.Array) -> jax.Array:
        """Biases [B, N, T, S] in float32, by position; arbitrary for masked keys."""
        bias_BNS = jnp.moveaxis(self._of_keys(kv_positions_BS), 0, 1)
        shape = (*bias_BNS.shape[:2], q_positions_BT.shape[1], bias_BNS.shape[2])
        return jnp.broadcast_to(bias_BNS[:, :, None], shape)

    def _of_keys(self, positions: jax.Array) -> jax.Array:
        """[N, ...] for positions [...]."""
        slopes = self.slopes_N.reshape(-1, *(1,) * positions.ndim)
        return _bfloat16(_bfloat16(slopes) * _bfloat16(positions.astype(jnp.float32))) * self.scale


def _bfloat16(x: jax.Array) -> jax.Array:
    """Rounded to bfloat16, in float32: XLA may leave a conversion there and back out."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def slopes(num_heads: int) -> np.ndarray:
    """ALiBi's slope of each head, float32 [N]: 2**(-8 i / n) for a power of two n, and between them for the other heads."""
    whole = 2 ** math.floor(math.log2(num_heads))
    powers = [8 * (i + 1) / whole for i in range(whole)]
    powers += [4 * (2 * i + 1) / whole for i in range(num_heads - whole)]
    return np.exp2(-np.array(powers)).astype(np.float32)
