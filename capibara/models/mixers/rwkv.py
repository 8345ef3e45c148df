"""RWKV-4: a weighted mean of the tokens before, and a gated MLP that sees the last token, too.

Both read a mixture of a token and the one before it, channel by channel. Shape letters: I channels.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.config import configurable
from capibara.core import projections
from capibara.core.projections import Projection
from capibara.core.types import UserError
from capibara.kernels.scans import weighted
from capibara.models.cache.dense import STATE, LayerCache
from capibara.models.layers import layers
from capibara.models.mixers.mixer import Mixer, MixerLayer, Rows, Sizes
from capibara.sharding import constrain

# What a new layer begins with: as the middle one of the published models.
_LEAST_DECAY, _DECAYS, _CURVE = -5.0, 8.0, 1.35
_SHARES = {"key": (0.5, 0.0), "value": (0.5, 0.15), "receptance": (0.25, 0.0)}  # exponent, and what is added
_CHANNEL_SHARES = {"up": (0.5, 0.0), "receptance": (0.5, 0.0)}


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rwkv4(Mixer):
    """The time mixing of RWKV-4 (Peng et al. 2023, arXiv:2305.13048).

    Attributes:
      inner_dim: channels; None: the model's width.
    """

    inner_dim: int | None = None

    def __post_init__(self) -> None:
        if self.inner_dim is not None and self.inner_dim < 1:
            raise UserError(f"Rwkv4.inner_dim is {self.inner_dim}, must be at least 1, or None: the model's width")

    def width(self, sizes: Sizes) -> int:
        """Channels."""
        return self.inner_dim or sizes.embed_dim

    def make(self, sizes: Sizes, rngs: nnx.Rngs) -> MixerLayer:
        return _TimeMix(self.width(sizes), sizes, rngs)

    def empty_state(self, sizes: Sizes, batch: int, dtype: jax.typing.DTypeLike) -> LayerCache:
        inputs = jnp.zeros((batch, 1, sizes.embed_dim), dtype)
        return {f"{STATE}_{_TimeMix.inputs}": inputs, STATE: weighted.empty(batch, self.width(sizes))}

    def narrower(self, factor: float) -> Rwkv4:
        inner_dim = self.inner_dim and max(8, round(self.inner_dim * factor / 8) * 8)
        return dataclasses.replace(self, inner_dim=inner_dim)

    def flops_per_token(self, sizes: Sizes) -> float:
        return 8.0 * self.width(sizes) + 4.0 * len(_SHARES) * sizes.embed_dim  # two sums, and the mixtures


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ChannelMix(Mixer):
    """The channel mixing of RWKV-4, in the place of an MLP; its hidden width is the model's mlp_dim."""

    def make(self, sizes: Sizes, rngs: nnx.Rngs) -> MixerLayer:
        return _ChannelMix(sizes, rngs)

    def empty_state(self, sizes: Sizes, batch: int, dtype: jax.typing.DTypeLike) -> LayerCache:
        return {f"{STATE}_{_ChannelMix.inputs}": jnp.zeros((batch, 1, sizes.embed_dim), dtype)}

    def flops_per_token(self, sizes: Sizes) -> float:
        return 4.0 * len(_CHANNEL_SHARES) * sizes.embed_dim


class _Shifting(MixerLayer):
    """A layer that reads mixtures of each token and the one before it.

    Attributes:
      inputs: name of the last token in the state, without STATE.
    """

    inputs: ClassVar[str]

    def make_shares(self, rngs: nnx.Rngs, shares: dict[str, tuple[float, float]]) -> None:
        """Makes each token's share of the mixtures that the projections with these names read."""
        for name, (exponent, added) in shares.items():
            init = functools.partial(_rising, exponent=exponent, added=added)
            setattr(self, f"{name}_share", layers.param(rngs, (self.sizes.embed_dim,), ("norm",), init))

    def mixed(self, by: Projection, x_BTD: jax.Array, rows: Rows) -> tuple[jax.Array, LayerCache]:
        """What a projection makes of its mixture, and the state with the last token."""
        share_D = getattr(self, f"{by.name}_share")[...]
        mixture, state = self.convolve(x_BTD, rows, jnp.stack([1 - share_D, share_D], axis=-1), self.inputs)
        return self.project(by, mixture), state


class _TimeMix(_Shifting):
    inputs = "shifted"

    def __init__(self, width: int, sizes: Sizes, rngs: nnx.Rngs):
        D = sizes.embed_dim
        self.sizes = sizes
        self.make_shares(rngs, _SHARES)
        for by in projections.RWKV:
            setattr(self, by.name, layers.projection(rngs, by, (D, width)))
        self.decay_log = layers.param(rngs, (width,), ("norm",), _decays)
        self.bonus = layers.param(rngs, (width,), ("norm",), _bonuses)
        self.out = layers.projection(rngs, projections.RWKV_OUT, (width, D), 0.5 / sizes.num_layers)

    def mix(self, x_BTD: jax.Array, rows: Rows) -> tuple[jax.Array, LayerCache]:
        (k, state), (v, _), (gate, _) = (self.mixed(by, x_BTD, rows) for by in projections.RWKV)
        k, v, gate = (constrain(x, ("batch", None, "act_mlp")) for x in (k, v, gate))
        log_decay = -jnp.exp(self.decay_log[...].astype(jnp.float32))
        y, after = weighted.attend(
            k, v, log_decay, self.bonus[...], rows.segment_ids, rows.before, rows.are_real(x_BTD.shape[1])
        )
        y = self.project(projections.RWKV_OUT, (jax.nn.sigmoid(gate.astype(jnp.float32)) * y).astype(x_BTD.dtype))
        return y, rows.after(state, after)


class _ChannelMix(_Shifting):
    inputs = "shifted_channels"

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        D, F = sizes.embed_dim, sizes.mlp_dim
        self.sizes = sizes
        self.make_shares(rngs, _CHANNEL_SHARES)
        for by, shape in ((projections.UP, (D, F)), (projections.CHANNEL_GATE, (D, D)), (projections.DOWN, (F, D))):
            setattr(self, by.name, layers.projection(rngs, by, shape))

    def mix(self, x_BTD: jax.Array, rows: Rows) -> tuple[jax.Array, LayerCache]:
        (h, state), (gate, _) = (self.mixed(by, x_BTD, rows) for by in (projections.UP, projections.CHANNEL_GATE))
        h = layers.named(constrain(h, ("batch", "act_time", "act_mlp")), projections.UP)
        y = layers.named(self.project(projections.DOWN, jnp.square(jax.nn.relu(h))), projections.DOWN)
        return jax.nn.sigmoid(gate) * y, state


def _rising(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype, *, exponent: float, added: float) -> jax.Array:
    """Shares that rise from channel to channel."""
    return (jnp.arange(shape[0], dtype=dtype) / shape[0]) ** exponent + added


def _decays(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Logarithms of the rates of channels, from slow to fast."""
    return _LEAST_DECAY + _DECAYS * (jnp.arange(shape[0], dtype=dtype) / max(shape[0] - 1, 1)) ** _CURVE


def _bonuses(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """The bonuses of three kinds of channels, one after the other."""
    return math.log(0.3) + 0.5 * ((jnp.arange(shape[0]) + 1) % 3 - 1).astype(dtype)
