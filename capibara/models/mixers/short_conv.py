"""A gated convolution over the last few tokens (LFM2, Liquid AI 2025)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.config import configurable
from capibara.core import projections
from capibara.core.projections import Projection
from capibara.core.types import UserError
from capibara.kernels.scans import convolution
from capibara.models.cache.dense import LayerCache
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
        if self.taps < 2:
            raise UserError(f"ShortConv.taps is {self.taps}, must be at least 2: try 3")

    def make(self, sizes: Sizes, rngs: nnx.Rngs) -> MixerLayer:
        return _ShortConv(self, sizes, rngs)

    def empty_state(self, sizes: Sizes, batch: int, dtype: jax.typing.DTypeLike) -> LayerCache:
        return {"state_inputs": jnp.zeros((batch, self.taps - 1, sizes.embed_dim), dtype)}

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
            constrain(self._dense(by, x_BTD), ("batch", None, "act_mlp"))
            for by in (projections.CONV_IN, projections.CONV_GATE, projections.CONV_VALUE)
        )
        inputs, state = before * value, None if rows.state is None else rows.state["state_inputs"]
        y = gate * convolution.convolve(inputs, self.conv[...], rows.segment_ids, state)
        y = self._dense(projections.CONV_OUT, y)
        if state is None or rows.counts is None:
            return y, {}
        return y, {"state_inputs": convolution.last_inputs(inputs, state, rows.counts)}

    def _dense(self, by: Projection, x: jax.Array) -> jax.Array:
        adapter = layers.adapter_of(self, by.name)
        return layers.dense(x, getattr(self, by.name)[...], quantization=self.sizes.quantization, adapter=adapter)
