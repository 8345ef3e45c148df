"""Mamba: a state of each channel with its own decays (Mamba, Falcon Mamba, Jamba).

Shape letters: I channels, K entries of a channel's state, R rank of the steps.
"""

from __future__ import annotations

import dataclasses
import enum

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.config import configurable
from capibara.core import projections
from capibara.core.types import UserError
from capibara.kernels.scans import selective
from capibara.models.cache.dense import STATE, LayerCache
from capibara.models.layers import layers
from capibara.models.mixers.mixer import Mixer, MixerBias, MixerLayer, Rows, Sizes, inverse_of_steps
from capibara.sharding import constrain


class StateNorms(enum.StrEnum):
    """Whether steps, keys and queries are normalised (RMS): not (Mamba), without (Falcon Mamba) or with scales (Jamba)."""

    NONE = "none"
    UNSCALED = "unscaled"
    SCALED = "scaled"

    @property
    def scale(self) -> layers.NormScale:
        return layers.NormScale.ONE if self is StateNorms.SCALED else layers.NormScale.NONE


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba(Mixer):
    """Mamba (Gu and Dao 2023, arXiv:2312.00752).

    Attributes:
      inner_dim: channels.
      state_dim: entries of a channel's state.
      step_rank: rank of the projection that makes the channels' steps.
      taps: tokens that the convolution of the channels sees, the current one included.
      bias: which parts have biases; "projections" are those from and to the model's width.
      norms, norms_eps: of steps, keys and queries, and their epsilon.
    """

    inner_dim: int = 1536
    state_dim: int = 16
    step_rank: int = 48
    taps: int = 4
    bias: MixerBias = MixerBias.CONV
    norms: StateNorms = StateNorms.NONE
    norms_eps: float = 1e-6

    def __post_init__(self) -> None:
        self.check("inner_dim", "state_dim", "step_rank")
        if not self.norms_eps > 0:
            raise UserError(f"Mamba.norms_eps is {self.norms_eps}, must be above 0: try 1e-6")

    def make(self, sizes: Sizes, rngs: nnx.Rngs) -> MixerLayer:
        return _Mamba(self, sizes, rngs)

    def empty_state(self, sizes: Sizes, batch: int, dtype: jax.typing.DTypeLike) -> LayerCache:
        inputs = jnp.zeros((batch, self.taps - 1, self.inner_dim), dtype)
        state = jnp.zeros((batch, self.state_dim, self.inner_dim), jnp.float32)
        return {f"{STATE}_{projections.SSM_VALUE.name}": inputs, STATE: state}

    def narrower(self, factor: float) -> Mamba:
        inner_dim, step_rank = (max(8, round(size * factor / 8) * 8) for size in (self.inner_dim, self.step_rank))
        return dataclasses.replace(self, inner_dim=inner_dim, step_rank=step_rank)

    def flops_per_token(self, sizes: Sizes) -> float:
        return 4.0 * self.inner_dim * self.state_dim  # writing, and reading for the query


class _Mamba(MixerLayer):
    def __init__(self, config: Mamba, sizes: Sizes, rngs: nnx.Rngs):
        D, width, K, R = sizes.embed_dim, config.inner_dim, config.state_dim, config.step_rank
        self.config, self.sizes, self.bias = config, sizes, config.bias
        of_each = ((D, width), (D, width), (width, R), (width, K), (width, K), (R, width))
        for by, shape in zip(projections.SSM, of_each, strict=True):
            setattr(self, by.name, layers.projection(rngs, by, shape))
        if config.bias.of_projections:
            for by in (projections.SSM_GATE, projections.SSM_VALUE):
                setattr(self, f"{by.name}_bias", layers.param(rngs, (width,), by.out_axes, layers.zeros))
            self.out_bias = layers.param(rngs, (D,), ("norm",), layers.zeros)
        conv = f"{projections.SSM_VALUE.name}_conv"
        setattr(self, conv, layers.param(rngs, (width, config.taps), ("mlp", None), layers.fan_in(1)))
        if config.bias.of_conv:
            setattr(self, f"{conv}_bias", layers.param(rngs, (width,), ("mlp",), layers.zeros))
        self.time_bias = layers.param(rngs, (width,), ("norm",), inverse_of_steps)
        self.decay_log = layers.param(rngs, (width, K), ("norm", None), _log_of_rates)
        self.skip = layers.param(rngs, (width,), ("norm",), layers.ones)
        if config.norms is not StateNorms.NONE:
            for by, size in zip(projections.SSM_NORMED, (R, K, K), strict=True):
                norm = layers.Norm(
                    size, kind=layers.NormKind.RMS, eps=config.norms_eps, rngs=rngs, scale=config.norms.scale
                )
                setattr(self, f"{by.name}_norm", norm)
        self.out = layers.projection(rngs, projections.SSM_OUT, (width, D), 0.5 / sizes.num_layers)

    def mix(self, x_BTD: jax.Array, rows: Rows) -> tuple[jax.Array, LayerCache]:
        (x,), state = self.convolved((projections.SSM_VALUE,), x_BTD, rows)
        x = constrain(x, ("batch", None, "act_mlp"))
        step, k, q = (self._normed(by.name, self.project(by, x)) for by in projections.SSM_NORMED)
        step = self.project(projections.SSM_STEP_UP, step).astype(jnp.float32)
        step = constrain(jax.nn.softplus(step + self.time_bias[...]), ("batch", None, "act_mlp"))
        rates = jnp.exp(self.decay_log[...].astype(jnp.float32)).T
        y, after = selective.attend(x, rows.real(step), rates, k, q, rows.segment_ids, rows.before)
        y = y + self.skip[...] * x.astype(jnp.float32)
        y = y * jax.nn.silu(self.project(projections.SSM_GATE, x_BTD).astype(jnp.float32))
        y = self.project(projections.SSM_OUT, y.astype(x_BTD.dtype))
        return y, rows.after(state, after)

    def _normed(self, name: str, x: jax.Array) -> jax.Array:
        return x if self.config.norms is StateNorms.NONE else getattr(self, f"{name}_norm")(x)


def _log_of_rates(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Logarithms of 1 to the state's size, for each channel the same, as the published models begin."""
    return jnp.broadcast_to(jnp.log(jnp.arange(1, shape[1] + 1, dtype=dtype)), shape)
