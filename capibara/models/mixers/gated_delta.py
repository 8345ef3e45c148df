"""Gated DeltaNet: linear attention whose state replaces what it holds for a key (Qwen3-Next, Qwen 3.5, OLMo Hybrid).

Shape letters: G heads of queries and keys, N heads of values, K size of a head's keys, V size of its values.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.config import configurable
from capibara.core import projections
from capibara.core.types import UserError
from capibara.kernels.scans import delta
from capibara.models.cache.dense import STATE, LayerCache
from capibara.models.layers import layers
from capibara.models.mixers.mixer import Mixer, MixerLayer, Rows, Sizes, log_of_rates
from capibara.sharding import constrain

_HEADS = ("kv_heads", "head_dim")
_CONVOLVED = (projections.DELTA_QUERY, projections.DELTA_KEY, projections.DELTA_VALUE)
_LENGTH_EPS = 1e-6  # of the norms of queries and keys, in all published models


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDelta(Mixer):
    """Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464).

    Attributes:
      key_heads, value_heads: heads of queries and keys, and of values, a multiple of these.
      key_dim, value_dim: size of a head's keys, and of its values.
      taps: tokens that the convolution of queries, keys and values sees, the current one included.
      most_strength: up to how much of what the state holds for a key is replaced: 1, or 2, which turns it around (OLMo
        Hybrid; Grazzi et al. 2024, arXiv:2411.12537).
      norm_eps: epsilon of the results' norm; None: the model's.
    """

    key_heads: int = 16
    value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    taps: int = 4
    most_strength: float = 1.0
    norm_eps: float | None = None

    def __post_init__(self) -> None:
        self.check("key_heads", "value_heads", "key_dim", "value_dim", multiple=("value_heads", "key_heads"))
        if not 0 < self.most_strength <= 2:
            raise UserError(f"GatedDelta.most_strength is {self.most_strength}, must be above 0 and at most 2: try 1.0")
        if self.norm_eps is not None and not 0 < self.norm_eps < math.inf:
            raise UserError(f"GatedDelta.norm_eps is {self.norm_eps}, must be finite and above 0, or None: try 1e-5")

    def make(self, sizes: Sizes, rngs: nnx.Rngs) -> MixerLayer:
        return _GatedDelta(self, sizes, rngs)

    def empty_state(self, sizes: Sizes, batch: int, dtype: jax.typing.DTypeLike) -> LayerCache:
        G, K, V, before = self.key_heads, self.key_dim, self.value_dim, self.taps - 1
        sizes_of = zip(_CONVOLVED, (K, K, self.value_heads // G * V), strict=True)
        inputs = {f"{STATE}_{by.name}": jnp.zeros((batch, before, G, size), dtype) for by, size in sizes_of}
        return inputs | {STATE: jnp.zeros((batch, self.value_heads, K, V), jnp.float32)}

    def narrower(self, factor: float) -> GatedDelta:
        key_dim, value_dim = (max(8, round(size * factor / 8) * 8) for size in (self.key_dim, self.value_dim))
        return dataclasses.replace(self, key_dim=key_dim, value_dim=value_dim)

    def flops_per_token(self, sizes: Sizes) -> float:
        return 6.0 * self.value_heads * self.key_dim * self.value_dim  # reading, replacing, and reading for the query


class _GatedDelta(MixerLayer):
    """A head of queries and keys has its values, gates, strengths and decays beside each other: [D, G, (N / G) V]."""

    def __init__(self, config: GatedDelta, sizes: Sizes, rngs: nnx.Rngs):
        D, G, K, taps = sizes.embed_dim, config.key_heads, config.key_dim, config.taps
        each = config.value_heads // G
        self.config, self.sizes = config, sizes
        self.query = layers.projection(rngs, projections.DELTA_QUERY, (D, G, K))
        self.key = layers.projection(rngs, projections.DELTA_KEY, (D, G, K))
        self.value = layers.projection(rngs, projections.DELTA_VALUE, (D, G, each * config.value_dim))
        self.gate = layers.projection(rngs, projections.DELTA_GATE, (D, G, each * config.value_dim))
        self.strength = layers.projection(rngs, projections.DELTA_STRENGTH, (D, G, each))
        self.decay = layers.projection(rngs, projections.DELTA_DECAY, (D, G, each))
        for by, size in zip(_CONVOLVED, (K, K, each * config.value_dim), strict=True):
            weight = layers.param(rngs, (G, size, taps), (*_HEADS, None), layers.fan_in(2))
            setattr(self, f"{by.name}_conv", weight)
        self.decay_log = layers.param(rngs, (G * each,), ("norm",), log_of_rates(0.01))
        self.decay_bias = layers.param(rngs, (G * each,), ("norm",), layers.ones)
        eps = sizes.norm_eps if config.norm_eps is None else config.norm_eps
        self.norm = layers.Norm(config.value_dim, kind=layers.NormKind.RMS, eps=eps, rngs=rngs)
        shape = (G, each * config.value_dim, D)
        self.out = layers.projection(rngs, projections.DELTA_OUT, shape, 0.5 / sizes.num_layers)

    def mix(self, x_BTD: jax.Array, rows: Rows) -> tuple[jax.Array, LayerCache]:
        (q, k, v), state = self.convolved(_CONVOLVED, x_BTD, rows)
        strength = jax.nn.sigmoid(self._flat(self.project(projections.DELTA_STRENGTH, x_BTD)))
        strength = strength if self.config.most_strength == 1 else strength * self.config.most_strength
        decay = self._flat(self.project(projections.DELTA_DECAY, x_BTD)).astype(jnp.float32)
        decay = -jnp.exp(self.decay_log[...]) * jax.nn.softplus(decay + self.decay_bias[...])
        each = self.config.value_heads // self.config.key_heads
        q, k = (jnp.repeat(unit(x), each, axis=2) for x in (q, k))
        v = v.reshape(*v.shape[:2], -1, self.config.value_dim)
        q, k, v = (constrain(x, ("batch", None, "act_heads", None)) for x in (q * self.config.key_dim**-0.5, k, v))
        y, after = delta.attend(q, k, v, rows.real(decay), rows.real(strength), rows.segment_ids, rows.before)
        gate = self.project(projections.DELTA_GATE, x_BTD)
        y = self.norm(y.astype(x_BTD.dtype)) * jax.nn.silu(gate.reshape(y.shape).astype(jnp.float32))
        y = self.project(projections.DELTA_OUT, y.astype(x_BTD.dtype).reshape(gate.shape))
        return y, rows.after(state, after)

    def _flat(self, x_BTGn: jax.Array) -> jax.Array:
        return x_BTGn.reshape(*x_BTGn.shape[:2], -1)


def unit(x: jax.Array) -> jax.Array:
    """Vectors of length 1 along the last axis, float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _LENGTH_EPS)
