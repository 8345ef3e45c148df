"""RG-LRU: a recurrence of each channel, whose decays and inputs have gates, behind a convolution (RecurrentGemma).

Shape letters: I channels, N blocks of them, W channels of a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.config import configurable
from capibara.core import projections
from capibara.kernels.scans import chunks, diagonal
from capibara.models.cache.dense import STATE, LayerCache
from capibara.models.layers import layers
from capibara.models.mixers.mixer import Mixer, MixerBias, MixerLayer, Rows, Sizes
from capibara.sharding import constrain

_POWER = 8.0  # of a decay whose gate is open
_DECAYS = (0.9, 0.999)  # of a new model
_LEAST_SLOPE = 1e-6  # the least square of twice the root that a gradient is divided by
_HAS_READ = f"{STATE}_has_read"
_GATES = ("write_gate", "decay_gate")


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class RgLru(Mixer):
    """The recurrent block of Griffin (De et al. 2024, arXiv:2402.19427).

    Attributes:
      inner_dim: channels.
      blocks: blocks of channels, whose gates read the channels of their own block.
      taps: tokens that the convolution of the channels sees, the current one included.
    """

    inner_dim: int = 2560
    blocks: int = 10
    taps: int = 4

    def __post_init__(self) -> None:
        self.check("inner_dim", "blocks", multiple=("inner_dim", "blocks"))

    def make(self, sizes: Sizes, rngs: nnx.Rngs) -> MixerLayer:
        return _RgLru(self, sizes, rngs)

    def empty_state(self, sizes: Sizes, batch: int, dtype: jax.typing.DTypeLike) -> LayerCache:
        inputs = jnp.zeros((batch, self.taps - 1, self.inner_dim), dtype)
        state = jnp.zeros((batch, self.inner_dim), jnp.float32)
        return {f"{STATE}_{projections.SSM_VALUE.name}": inputs, STATE: state, _HAS_READ: jnp.zeros(batch, jnp.int32)}

    def narrower(self, factor: float) -> RgLru:
        width = max(8, round(self.inner_dim / self.blocks * factor / 8) * 8)
        return dataclasses.replace(self, inner_dim=self.blocks * width)

    def flops_per_token(self, sizes: Sizes) -> float:
        return 2.0 * self.inner_dim


class _RgLru(MixerLayer):
    bias = MixerBias.ALL

    def __init__(self, config: RgLru, sizes: Sizes, rngs: nnx.Rngs):
        D, width, N = sizes.embed_dim, config.inner_dim, config.blocks
        W = width // N
        self.config, self.sizes = config, sizes
        for by in (projections.SSM_GATE, projections.SSM_VALUE):
            setattr(self, by.name, layers.projection(rngs, by, (D, width)))
            setattr(self, f"{by.name}_bias", layers.param(rngs, (width,), by.out_axes, layers.zeros))
        conv = f"{projections.SSM_VALUE.name}_conv"
        setattr(self, conv, layers.param(rngs, (width, config.taps), ("mlp", None), layers.fan_in(1)))
        setattr(self, f"{conv}_bias", layers.param(rngs, (width,), ("mlp",), layers.zeros))
        for name in _GATES:
            setattr(self, name, layers.param(rngs, (N, W, W), ("mlp", None, None), layers.fan_in(1)))
            setattr(self, f"{name}_bias", layers.param(rngs, (N, W), ("mlp", None), layers.zeros))
        self.rate = layers.param(rngs, (width,), ("norm",), _inverse_of_decays)
        self.out = layers.projection(rngs, projections.SSM_OUT, (width, D), 0.5 / sizes.num_layers)
        self.out_bias = layers.param(rngs, (D,), ("norm",), layers.zeros)

    def mix(self, x_BTD: jax.Array, rows: Rows) -> tuple[jax.Array, LayerCache]:
        (x,), state = self.convolved((projections.SSM_VALUE,), x_BTD, rows, activation=None)
        x = constrain(x, ("batch", None, "act_mlp"))
        write, decay = (self._gated(name, x) for name in _GATES)
        log_decay = -_POWER * decay * jax.nn.softplus(self.rate[...].astype(jnp.float32))
        share = _root(-jnp.expm1(2 * log_decay))
        share = jnp.where(self._is_first(x, rows)[..., None], 1, share)  # a document's first token is written whole
        written = x.astype(jnp.float32) * write * share
        y, after = diagonal.recur(rows.real(written), rows.real(log_decay), rows.segment_ids, rows.before)
        y = y * jax.nn.gelu(self.project(projections.SSM_GATE, x_BTD).astype(jnp.float32))
        y = self.project(projections.SSM_OUT, y.astype(x_BTD.dtype))
        if rows.state is None or rows.counts is None:
            return y, state
        return y, state | {STATE: after, _HAS_READ: jnp.maximum(rows.state[_HAS_READ], jnp.minimum(rows.counts, 1))}

    def _gated(self, name: str, x_BTI: jax.Array) -> jax.Array:
        """A gate [B, T, I] of the channels, float32."""
        x = x_BTI.reshape(*x_BTI.shape[:2], self.config.blocks, -1)
        y = jnp.einsum("BTNV,NVW->BTNW", x, getattr(self, name)[...].astype(x.dtype))
        y = y.astype(jnp.float32) + getattr(self, f"{name}_bias")[...]
        return jax.nn.sigmoid(y).reshape(x_BTI.shape)

    def _is_first(self, x_BTI: jax.Array, rows: Rows) -> jax.Array:
        """[B, T], whether a token is the first one of its document."""
        begins = chunks.begins(rows.segment_ids, x_BTI.shape[:2])
        return begins.at[:, 0].set(True if rows.state is None else rows.state[_HAS_READ] == 0)


@jax.custom_gradient
def _root(x: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """The square root, whose slope at 0 is bounded."""
    return jnp.sqrt(x), lambda gradient: gradient * jax.lax.rsqrt(jnp.maximum(4 * x, _LEAST_SLOPE))


def _inverse_of_decays(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """What softplus makes decays of whose squares are spread evenly, as the published models begin."""
    least, most = (decay**2 for decay in _DECAYS)
    return jnp.log(jnp.expm1(-0.5 * jnp.log(jax.random.uniform(key, shape, dtype, least, most))))
