"""What a layer of Gemma 3n has that others have not: AltUp and LAuReL.

S streams, B rows, T positions, D embed, R rank.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.core import projections
from capibara.models.architectures.gemma3n.config import Gemma3nConfig
from capibara.models.architectures.shared_keys.parts import RESIDUAL, dense
from capibara.models.layers import layers
from capibara.sharding import constrain

STREAMS = (None, *RESIDUAL)


class AltUp(nnx.Module):
    """Several residual streams of which a layer computes one (Baykal et al. 2023, arXiv:2301.13310)."""

    def __init__(self, config: Gemma3nConfig, rngs: nnx.Rngs):
        D, S = config.embed_dim, config.streams
        self.config = config
        self.router_norm = config.make_norm(rngs)
        self.modality_router = layers.param(rngs, (D, S), ("embed", None), layers.fan_in(0))
        self.prediction = layers.param(rngs, (S, S, S), (None, None, None), layers.fan_in(0))
        self.correction = layers.param(rngs, (S, S), (None, None), layers.fan_in(0))
        self.correct_scale = layers.param(rngs, (D,), ("norm",), layers.zeros)

    def predict(self, x_SBTD: jax.Array, training: bool) -> jax.Array:
        """Every stream as a mixture of all, before the layer computes the first."""
        modalities = self._modalities(x_SBTD[0])
        weight = self._clipped(self.prediction[...], training).astype(x_SBTD.dtype)
        mix = jnp.einsum("BTM,MJI->JIBT", modalities, weight)[..., None]
        # As sums, not as a product of matrices of a few rows for each token.
        streams = range(self.config.streams)
        mixed = [x_SBTD[j] + sum(mix[j, i] * x_SBTD[i] for i in streams) for j in streams]
        return constrain(jnp.stack(mixed), STREAMS)

    def correct(self, predicted_SBTD: jax.Array, computed_BTD: jax.Array, training: bool) -> jax.Array:
        """The predictions, moved by what the layer's result is beyond the first of them."""
        weight = self._clipped(self.correction[...], training).astype(computed_BTD.dtype)
        share = jnp.einsum("BTM,MJ->JBT", self._modalities(computed_BTD), weight)[..., None] + 1
        return predicted_SBTD + share * (computed_BTD - predicted_SBTD[0])

    def _modalities(self, x_BTD: jax.Array) -> jax.Array:
        routed = layers.dense(self.router_norm(x_BTD) / self.config.embed_dim, self.modality_router[...])
        return jnp.tanh(routed.astype(jnp.float32)).astype(x_BTD.dtype)

    def _clipped(self, weight: jax.Array, training: bool) -> jax.Array:
        most = self.config.coefficient_clip
        return jnp.clip(weight, -most, most) if training and most is not None else weight


class Laurel(nnx.Module):
    """x and a low-rank function of it (Menghani et al. 2024, arXiv:2411.07501)."""

    def __init__(self, config: Gemma3nConfig, rngs: nnx.Rngs):
        D, R = config.embed_dim, config.laurel_rank
        self.left = layers.projection(rngs, projections.LAUREL_LEFT, (D, R))
        self.right = layers.projection(rngs, projections.LAUREL_RIGHT, (R, D))
        self.norm = config.make_norm(rngs)
        self.config = config

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        h_BTR = dense(self, self.config, "left", x_BTD)
        return x_BTD + self.norm(constrain(dense(self, self.config, "right", h_BTR), RESIDUAL))


def magnitude(x_BTD: jax.Array, least: jax.typing.ArrayLike) -> jax.Array:
    """Root of the mean square of each token, [B, T, 1] float32; `least`: of the mean square, so that its root has a gradient."""
    mean = jnp.mean(jnp.square(x_BTD.astype(jnp.float32)), axis=-1, keepdims=True)
    return jnp.sqrt(jnp.maximum(mean, least))
