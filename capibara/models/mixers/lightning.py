"""Lightning attention: linear attention with a decay that is fixed for each head and layer (MiniMax-Text-01).

Shape letters: N heads, H size of a head.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from capibara.config import configurable
from capibara.core import projections
from capibara.core.types import UserError
from capibara.kernels.scans import linear
from capibara.models.cache.dense import STATE, LayerCache
from capibara.models.layers import layers
from capibara.models.mixers.mixer import Mixer, MixerLayer, Rows, Sizes
from capibara.sharding import constrain

_LEAST = 1e-5  # of a rate, as a share of the first layer's


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Lightning(Mixer):
    """Lightning attention (Qin et al. 2024, arXiv:2401.04658; MiniMax 2025, arXiv:2501.08313).

    The rates of decay fall with the number of the head, as ALiBi's slopes do, and with that of the layer.

    Attributes:
      heads, head_dim: heads, and the size of their queries, keys and values.
      norm_eps: of the norm of all heads' results.
    """

    heads: int = 64
    head_dim: int = 128
    norm_eps: float = 1e-6
    numbered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check("heads", "head_dim")
        if not 0 < self.norm_eps < math.inf:
            raise UserError(f"Lightning.norm_eps is {self.norm_eps}, must be finite and above 0: try 1e-6")

    def make(self, sizes: Sizes, rngs: nnx.Rngs) -> MixerLayer:
        return _Lightning(self, sizes, rngs)

    def empty_state(self, sizes: Sizes, batch: int, dtype: jax.typing.DTypeLike) -> LayerCache:
        return {STATE: jnp.zeros((batch, self.heads, self.head_dim, self.head_dim), jnp.float32)}

    def narrower(self, factor: float) -> Lightning:
        return dataclasses.replace(self, head_dim=max(8, round(self.head_dim * factor / 8) * 8))

    def flops_per_token(self, sizes: Sizes) -> float:
        return 4.0 * self.heads * self.head_dim**2  # writing, and reading for the query

    def rates(self, num_layers: int) -> np.ndarray:
        """[layers, N], how fast the state of each layer and head decays: it is multiplied by exp(-rate) at a token."""
        of_heads = 2.0 ** (-8.0 / self.heads * np.arange(1, self.heads + 1))
        of_layers = 1 + _LEAST - np.arange(num_layers) / (num_layers - 1 + _LEAST)
        return of_layers[:, None] * of_heads


class _Lightning(MixerLayer):
    def __init__(self, config: Lightning, sizes: Sizes, rngs: nnx.Rngs):
        D, N, H = sizes.embed_dim, config.heads, config.head_dim
        self.config, self.sizes = config, sizes
        for by in (*projections.LIGHTNING, projections.LIGHTNING_GATE):
            setattr(self, by.name, layers.projection(rngs, by, (D, N, H)))
        self.out_norm = layers.Norm(
            (N, H),
            kind=layers.NormKind.RMS,
            eps=config.norm_eps,
            rngs=rngs,
            axes=projections.LIGHTNING_GATE.out_axes,
            whole=True,
        )
        self.out = layers.projection(rngs, projections.LIGHTNING_OUT, (N, H, D), 0.5 / sizes.num_layers)

    def mix(self, x_BTD: jax.Array, rows: Rows) -> tuple[jax.Array, LayerCache]:
        q, k, v = (
            constrain(jax.nn.silu(self.project(by, x_BTD)), ("batch", None, "act_heads", None))
            for by in projections.LIGHTNING
        )
        rate_N = jnp.asarray(self.config.rates(self.sizes.num_layers), jnp.float32)[rows.number]
        decay = jnp.broadcast_to(-rate_N, k.shape[:3])
        y, after = linear.attend(q, rows.real(k), v, rows.real(decay), rows.segment_ids, rows.before)
        gate = jax.nn.sigmoid(self.project(projections.LIGHTNING_GATE, x_BTD).astype(jnp.float32))
        y = self.project(projections.LIGHTNING_OUT, (gate * self.out_norm(y)).astype(x_BTD.dtype))
        return y, rows.after({}, after)
