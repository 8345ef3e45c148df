"""Kimi Delta Attention: the delta rule with a decay for each channel of a key (Kimi Linear).

Shape letters: N heads, H size of a head's queries, keys and values.
"""

from __future__ import annotations

import dataclasses
import enum
import math

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.config import configurable
from capibara.core import projections
from capibara.core.projections import Projection
from capibara.core.types import UserError
from capibara.kernels.scans import delta
from capibara.models.cache.dense import STATE, LayerCache
from capibara.models.layers import layers
from capibara.models.mixers.gated_delta import unit
from capibara.models.mixers.mixer import Mixer, MixerLayer, Rows, Sizes, inverse_of_steps, log_of_rates
from capibara.sharding import constrain

_HEADS = ("kv_heads", "head_dim")
_CONVOLVED = (projections.DELTA_QUERY, projections.DELTA_KEY, projections.DELTA_VALUE)
# By a whole matrix, or by two of few dimensions.
_DECAY = (projections.DELTA_DECAY, projections.KIMI_DECAY_DOWN, projections.KIMI_DECAY_UP)
_GATE = (projections.DELTA_GATE, projections.KIMI_GATE_DOWN, projections.KIMI_GATE_UP)


class ChannelMaps(enum.StrEnum):
    """How decays and gates of channels are projected: through head_dim dimensions, or by whole matrices (Ling 3)."""

    FACTORED = "factored"
    WHOLE = "whole"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiDelta(Mixer):
    """Kimi Delta Attention (Kimi Team 2025, arXiv:2510.26692).

    Attributes:
      heads, head_dim: heads of queries, keys and values, and their size.
      taps: tokens that the convolution of queries, keys and values sees, the current one included.
      maps: how decays and gates are projected.
      least_decay: the logarithm of the strongest decay, which a sigmoid approaches (Ling 3: -5.0); None: there is none, and
        a softplus makes logarithms.
    """

    heads: int = 32
    head_dim: int = 128
    taps: int = 4
    maps: ChannelMaps = ChannelMaps.FACTORED
    least_decay: float | None = None

    def __post_init__(self) -> None:
        self.check("heads", "head_dim")
        if self.least_decay is not None and not -math.inf < self.least_decay < 0:
            raise UserError(
                f"KimiDelta.least_decay is {self.least_decay}, must be finite and below 0, or None: try -5.0"
            )

    def make(self, sizes: Sizes, rngs: nnx.Rngs) -> MixerLayer:
        return _KimiDelta(self, sizes, rngs)

    def empty_state(self, sizes: Sizes, batch: int, dtype: jax.typing.DTypeLike) -> LayerCache:
        N, H = self.heads, self.head_dim
        inputs = {f"{STATE}_{by.name}": jnp.zeros((batch, self.taps - 1, N, H), dtype) for by in _CONVOLVED}
        return inputs | {STATE: jnp.zeros((batch, N, H, H), jnp.float32)}

    def narrower(self, factor: float) -> KimiDelta:
        return dataclasses.replace(self, head_dim=max(8, round(self.head_dim * factor / 8) * 8))

    def flops_per_token(self, sizes: Sizes) -> float:
        return 6.0 * self.heads * self.head_dim**2  # reading, replacing, and reading for the query


class _KimiDelta(MixerLayer):
    def __init__(self, config: KimiDelta, sizes: Sizes, rngs: nnx.Rngs):
        D, N, H = sizes.embed_dim, config.heads, config.head_dim
        self.config, self.sizes = config, sizes
        for by in _CONVOLVED:
            setattr(self, by.name, layers.projection(rngs, by, (D, N, H)))
            weight = layers.param(rngs, (N, H, config.taps), (*_HEADS, None), layers.fan_in(2))
            setattr(self, f"{by.name}_conv", weight)
        for whole, down, up in (_DECAY, _GATE):
            if config.maps is ChannelMaps.WHOLE:
                setattr(self, whole.name, layers.projection(rngs, whole, (D, N, H)))
                continue
            setattr(self, down.name, layers.projection(rngs, down, (D, H)))
            setattr(self, up.name, layers.projection(rngs, up, (H, N, H)))
        self.strength = layers.projection(rngs, projections.DELTA_STRENGTH, (D, N, 1))
        self.decay_log = layers.param(rngs, (N,), ("norm",), log_of_rates(1.0))
        self.decay_bias = layers.param(rngs, (N, H), ("norm", None), inverse_of_steps)
        self.norm = layers.Norm(H, kind=layers.NormKind.RMS, eps=sizes.norm_eps, rngs=rngs)
        self.out = layers.projection(rngs, projections.DELTA_OUT, (N, H, D), 0.5 / sizes.num_layers)

    def mix(self, x_BTD: jax.Array, rows: Rows) -> tuple[jax.Array, LayerCache]:
        (q, k, v), state = self.convolved(_CONVOLVED, x_BTD, rows)
        q, k = unit(q) * self.config.head_dim**-0.5, unit(k)
        q, k, v = (constrain(x, ("batch", None, "act_heads", None)) for x in (q, k, v))
        strength = jax.nn.sigmoid(self.project(projections.DELTA_STRENGTH, x_BTD)[..., 0])
        decay = self._log_decay(x_BTD)
        y, after = delta.attend_by_channel(
            q, k, v, rows.real(decay), rows.real(strength), rows.segment_ids, rows.before
        )
        gate = self._of_channels(_GATE, x_BTD)
        y = self.norm(y.astype(x_BTD.dtype)) * jax.nn.sigmoid(gate.astype(jnp.float32))
        y = self.project(projections.DELTA_OUT, y.astype(x_BTD.dtype))
        return y, rows.after(state, after)

    def _log_decay(self, x_BTD: jax.Array) -> jax.Array:
        """The logarithm of each channel's decay, [B, T, N, H] in float32."""
        raw = self._of_channels(_DECAY, x_BTD).astype(jnp.float32) + self.decay_bias[...]
        rates = jnp.exp(self.decay_log[...])[:, None]
        if self.config.least_decay is None:
            return -rates * jax.nn.softplus(raw)
        return self.config.least_decay * jax.nn.sigmoid(rates * raw)

    def _of_channels(self, by: tuple[Projection, Projection, Projection], x_BTD: jax.Array) -> jax.Array:
        whole, down, up = by
        if self.config.maps is ChannelMaps.WHOLE:
            return self.project(whole, x_BTD)
        return self.project(up, self.project(down, x_BTD))
