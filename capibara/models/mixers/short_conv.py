"""A gated convolution over the last few tokens (LFM2, Liquid AI 2025)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.config import configurable
from capibara.core import projections
from capibara.models.cache.dense import STATE, LayerCache
from capibara.models.layers import layers
from capibara.models.mixers.mixer import Mixer, MixerLayer, Rows, Sizes
from capibara.sharding import constrain


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortConv(Mixer):
    """A gated short convolution.

    Attributes:
      taps: number of tokens that it sees, the current one included.
    """

    taps: int = 3

    def __post_init__(self) -> None:
        self.check()

    def make(self, sizes: Sizes, rngs: nnx.Rngs) -> MixerLayer:
        return _ShortConv(self, sizes, rngs)

    def empty_state(self, sizes: Sizes, batch: int, dtype: jax.typing.DTypeLike) -> LayerCache:
        return {f"{STATE}_inputs": jnp.zeros((batch, self.taps - 1, sizes.embed_dim), dtype)}

    def flops_per_token(self, sizes: Sizes) -> float:
        return 0.0  # its weights are all


class _ShortConv(MixerLayer):
    def __init__(self, config: ShortConv, sizes: Sizes, rngs: nnx.Rngs):
        D = sizes.embed_dim
        self.sizes = sizes
        for name in (projections.CONV_IN, projections.CONV_GATE, projections.CONV_VALUE):
            setattr(self, name.name, layers.projection(rngs, name, (D, D)))
        self.conv = layers.param(rngs, (D, config.taps), ("mlp", None), layers.fan_in(1))
        self.out = layers.projection(rngs, projections.CONV_OUT, (D, D), 0.5 / sizes.num_layers)

    def mix(self, x_BTD: jax.Array, rows: Rows) -> tuple[jax.Array, LayerCache]:
        before, gate, value = (
            constrain(self.project(by, x_BTD), ("batch", None, "act_mlp"))
            for by in (projections.CONV_IN, projections.CONV_GATE, projections.CONV_VALUE)
        )
        y, state = self.convolve(before * value, rows, self.conv[...], "inputs")
        return self.project(projections.CONV_OUT, gate * y), state
