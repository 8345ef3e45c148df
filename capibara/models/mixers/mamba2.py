"""Mamba 2: linear attention with a decay for each head and token (Mamba 2, Bamba, Granite 4, Nemotron-H).

Shape letters: N heads, V size of their values, G groups of heads, which share queries and keys, K size of these.
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
from capibara.kernels.scans import linear
from capibara.models.cache.dense import STATE, LayerCache
from capibara.models.layers import layers
from capibara.models.mixers.mixer import Mixer, MixerBias, MixerLayer, Rows, Sizes, inverse_of_steps, log_of_rates
from capibara.sharding import constrain


class GateNorm(enum.StrEnum):
    """Whether results are normalised after their gate (Mamba 2), before it, or not at all (the last two: Falcon-H1)."""

    AFTER = "after"
    BEFORE = "before"
    NONE = "none"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2(Mixer):
    """Mamba 2 (Dao and Gu 2024, arXiv:2405.21060).

    Attributes:
      heads, head_dim: heads of values, and their size.
      groups: groups of heads that share queries and keys, and over which the results are normalised.
      state_dim: size of queries and keys.
      taps: tokens that the convolution of queries, keys and values sees, the current one included.
      bias: which parts have biases.
      least_step, most_step: a token's step, by which it writes and the state decays, is kept within these.
      norm, norm_eps: where the results are normalised, and the epsilon of that; None: the model's.
      projection_multipliers: factors of the gate, values, keys, queries and steps (Falcon-H1).
    """

    heads: int = 128
    head_dim: int = 64
    groups: int = 1
    state_dim: int = 128
    taps: int = 4
    bias: MixerBias = MixerBias.CONV
    least_step: float = 0.0
    most_step: float = math.inf
    norm: GateNorm = GateNorm.AFTER
    norm_eps: float | None = None
    projection_multipliers: tuple[float, ...] = (1.0,) * len(projections.MAMBA)

    def __post_init__(self) -> None:
        self.check("heads", "head_dim", "groups", "state_dim", multiple=("heads", "groups"))
        if len(self.projection_multipliers) != len(projections.MAMBA):
            raise UserError(
                f"Mamba2.projection_multipliers has {len(self.projection_multipliers)} numbers, must have one for each of "
                f"{', '.join(by.name for by in projections.MAMBA)}: try (1.0, 1.0, 1.0, 1.0, 1.0)"
            )
        for factor in self.projection_multipliers:
            if not 0 < factor < math.inf:
                raise UserError(f"Mamba2.projection_multipliers has {factor}, must be finite and above 0: try 1.0")
        if self.norm_eps is not None and not self.norm_eps > 0:
            raise UserError(f"Mamba2.norm_eps is {self.norm_eps}, must be above 0, or None: the model's")
        if not 0 <= self.least_step < self.most_step:
            raise UserError(
                f"Mamba2.least_step ({self.least_step}) must be at least 0 and below most_step "
                f"({self.most_step}): try 0.0"
            )

    def make(self, sizes: Sizes, rngs: nnx.Rngs) -> MixerLayer:
        return _Mamba2(self, sizes, rngs)

    def empty_state(self, sizes: Sizes, batch: int, dtype: jax.typing.DTypeLike) -> LayerCache:
        N, V, K, before = self.heads, self.head_dim, self.state_dim, self.taps - 1
        shapes = zip(projections.MAMBA_CONVOLVED, ((N, V), (self.groups, K), (self.groups, K)), strict=True)
        inputs = {f"{STATE}_{by.name}": jnp.zeros((batch, before, *shape), dtype) for by, shape in shapes}
        return inputs | {STATE: jnp.zeros((batch, N, K, V), jnp.float32)}

    def multiplier(self, by: Projection) -> float:
        """The factor of what this projection makes."""
        return dict(zip(projections.MAMBA, self.projection_multipliers, strict=True)).get(by, 1.0)

    def narrower(self, factor: float) -> Mamba2:
        head_dim, state_dim = (max(8, round(size * factor / 8) * 8) for size in (self.head_dim, self.state_dim))
        return dataclasses.replace(self, head_dim=head_dim, state_dim=state_dim)

    def flops_per_token(self, sizes: Sizes) -> float:
        return 4.0 * self.heads * self.head_dim * self.state_dim  # writing, and reading for the query


class _Mamba2(MixerLayer):
    def __init__(self, config: Mamba2, sizes: Sizes, rngs: nnx.Rngs):
        D, N, V, G, K = sizes.embed_dim, config.heads, config.head_dim, config.groups, config.state_dim
        self.config, self.sizes, self.bias = config, sizes, config.bias
        of_each = ((N, V), (N, V), (G, K), (G, K), (N, 1))
        shapes = {by.name: shape for by, shape in zip(projections.MAMBA, of_each, strict=True)}
        for by in projections.MAMBA:
            setattr(self, by.name, layers.projection(rngs, by, (D, *shapes[by.name])))
            if config.bias.of_projections:
                setattr(self, f"{by.name}_bias", layers.param(rngs, shapes[by.name], by.out_axes, layers.zeros))
        for by in projections.MAMBA_CONVOLVED:
            shape = (*shapes[by.name], config.taps)
            setattr(self, f"{by.name}_conv", layers.param(rngs, shape, (*by.out_axes, None), layers.fan_in(2)))
            if config.bias.of_conv:
                setattr(self, f"{by.name}_conv_bias", layers.param(rngs, shapes[by.name], by.out_axes, layers.zeros))
        self.decay_log = layers.param(rngs, (N,), ("norm",), log_of_rates(1.0))
        self.time_bias = layers.param(rngs, (N,), ("norm",), inverse_of_steps)
        self.skip = layers.param(rngs, (N,), ("norm",), layers.ones)
        if config.norm is not GateNorm.NONE:
            eps = sizes.norm_eps if config.norm_eps is None else config.norm_eps
            self.out_norm = layers.Norm(
                (N, V), kind=layers.NormKind.RMS, eps=eps, rngs=rngs, axes=projections.MAMBA_VALUE.out_axes
            )
        self.out = layers.projection(rngs, projections.MAMBA_OUT, (N, V, D), 0.5 / sizes.num_layers)
        if config.bias.of_projections:
            self.out_bias = layers.param(rngs, (D,), ("norm",), layers.zeros)

    def project(self, by: Projection, x: jax.Array) -> jax.Array:
        y, factor = super().project(by, x), self.config.multiplier(by)
        return y if factor == 1 else y * factor

    def mix(self, x_BTD: jax.Array, rows: Rows) -> tuple[jax.Array, LayerCache]:
        config = self.config
        (v, k, q), state = self.convolved(projections.MAMBA_CONVOLVED, x_BTD, rows)
        step = self.project(projections.MAMBA_STEP, x_BTD)[..., 0].astype(jnp.float32)
        step = jnp.clip(jax.nn.softplus(step + self.time_bias[...]), config.least_step, config.most_step)
        decay = -jnp.exp(self.decay_log[...]) * step
        q, k = (jnp.repeat(x, config.heads // config.groups, axis=2) for x in (q, k))
        q, k, v = (constrain(x, ("batch", None, "act_heads", None)) for x in (q, k, v))
        written = v.astype(jnp.float32) * step[..., None]
        y, after = linear.attend(q, rows.real(k), written, rows.real(decay), rows.segment_ids, rows.before)
        y = y + self.skip[...][:, None] * v.astype(jnp.float32)
        y = self._normed(y) if config.norm is GateNorm.BEFORE else y
        y = y * jax.nn.silu(self.project(projections.MAMBA_GATE, x_BTD).astype(jnp.float32))
        y = self._normed(y) if config.norm is GateNorm.AFTER else y
        y = self.project(projections.MAMBA_OUT, y.astype(x_BTD.dtype))
        return y, rows.after(state, after)

    def _normed(self, y_BTNV: jax.Array) -> jax.Array:
        """Normalised over the heads of each group."""
        y = y_BTNV.reshape(*y_BTNV.shape[:2], self.config.groups, -1)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.out_norm.eps)
        return y.reshape(y_BTNV.shape) * self.out_norm.scale[...]
