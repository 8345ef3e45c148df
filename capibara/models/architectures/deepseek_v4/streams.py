"""Residual streams that a branch joins and mixes: manifold-constrained hyper-connections (Xie et al. 2025, arXiv:2512.24880).

B rows, T positions, S streams, D embed, M weights of a token: S to join the streams, S to add the branch's result to each, and
S * S to mix them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.models.architectures.deepseek_v4.config import DeepseekV4Config
from capibara.models.layers import layers
from capibara.sharding import constrain

_STREAMS = ("batch", "act_residual", None, "act_embed")


def spread(x_BTSD: jax.Array) -> jax.Array:
    """Shards residual streams between blocks."""
    return constrain(x_BTSD, _STREAMS)


class _Weights(nnx.Module):
    """What weights of the streams are computed from."""

    def __init__(self, config: DeepseekV4Config, count: int, parts: int, rngs: nnx.Rngs):
        S, D = config.streams, config.embed_dim
        self.eps = config.norm_eps
        self.weight = layers.param(rngs, (S, D, count), (None, "embed", "router"), layers.fan_in(0, 1))
        self.bias = layers.param(rngs, (count,), ("router",), layers.zeros)
        self.factor = layers.param(rngs, (parts,), ("router",), layers.ones)

    def __call__(self, x_BTSD: jax.Array) -> jax.Array:
        """[B, T, M] in float32, of the streams' values after a norm over all of them."""
        x = x_BTSD.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=(-2, -1)) + self.eps)
        with jax.default_matmul_precision("highest"):
            return jnp.einsum("BTSD,SDM->BTM", x, self.weight[...]) * inverse[..., None]


class Joined(NamedTuple):
    """What a branch reads of the streams, and how its result comes back.

    Attributes:
      input: [B, T, D].
      shares: [B, T, S, 1], of the result that are added to each stream.
      mixture: [B, T, S, S, 1], how much of each stream goes into each.
    """

    input: jax.Array
    shares: jax.Array
    mixture: jax.Array

    def add(self, x_BTSD: jax.Array, y_BTD: jax.Array) -> jax.Array:
        """The streams, mixed, with a branch's result."""
        # As sums, not as products of matrices of a few rows for each token.
        mixed = jnp.sum(self.mixture.astype(x_BTSD.dtype) * x_BTSD[..., None, :], axis=2)
        return spread(mixed + self.shares.astype(y_BTD.dtype) * y_BTD[..., None, :])


class HyperConnection(nnx.Module):
    """The streams around a branch."""

    def __init__(self, config: DeepseekV4Config, rngs: nnx.Rngs):
        self.config = config
        self.weights = _Weights(config, (2 + config.streams) * config.streams, 3, rngs)

    def __call__(self, x_BTSD: jax.Array) -> Joined:
        S, eps = self.config.streams, self.config.stream_eps
        of_parts = jnp.split(self.weights(x_BTSD), (S, 2 * S), axis=-1)
        biases = jnp.split(self.weights.bias[...], (S, 2 * S))
        factors = self.weights.factor[...]
        join, share, mix = (x * factors[at] + bias for at, (x, bias) in enumerate(zip(of_parts, biases, strict=True)))
        joined = jnp.sum((jax.nn.sigmoid(join) + eps)[..., None] * x_BTSD, axis=2).astype(x_BTSD.dtype)
        mixture = _doubly_stochastic(mix.reshape(*mix.shape[:-1], S, S), self.config.sinkhorn_steps, eps)
        return Joined(joined, 2 * jax.nn.sigmoid(share)[..., None], mixture[..., None])


class HyperHead(nnx.Module):
    """What joins the streams behind the last layer."""

    def __init__(self, config: DeepseekV4Config, rngs: nnx.Rngs):
        self.config = config
        self.weights = _Weights(config, config.streams, 1, rngs)

    def __call__(self, x_BTSD: jax.Array) -> jax.Array:
        """[B, T, D]."""
        join = self.weights(x_BTSD) * self.weights.factor[...] + self.weights.bias[...]
        share = jax.nn.sigmoid(join) + self.config.stream_eps
        return jnp.sum(share[..., None] * x_BTSD, axis=2).astype(x_BTSD.dtype)


def _doubly_stochastic(logits: jax.Array, steps: int, eps: float) -> jax.Array:
    """Matrices whose columns, and nearly whose rows, sum to 1 (Sinkhorn and Knopp 1967)."""

    def by_columns(matrix: jax.Array) -> jax.Array:
        return matrix / (jnp.sum(matrix, axis=-2, keepdims=True) + eps)

    def step(matrix: jax.Array, _: None) -> tuple[jax.Array, None]:
        return by_columns(matrix / (jnp.sum(matrix, axis=-1, keepdims=True) + eps)), None

    first = by_columns(jax.nn.softmax(logits, axis=-1) + eps)
    return jax.lax.scan(step, first, length=steps - 1)[0]
