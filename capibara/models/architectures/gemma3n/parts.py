"""What a layer of Gemma 3n has that others have not: AltUp, LAuReL, the per-layer embedding's gate, sparse MLPs.

S streams, B rows, T positions, D embed, R rank, P width of the per-layer embedding, F hidden width of an MLP.
"""

from __future__ import annotations

import statistics

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.core import projections
from capibara.models.architectures.gemma3n.config import Gemma3nConfig
from capibara.models.layers import layers
from capibara.sharding import constrain

STREAMS = (None, "batch", "act_residual", "act_embed")
_RESIDUAL = STREAMS[1:]
_TINY = jnp.finfo(jnp.float32).tiny  # of a root's argument: at zero it has no gradient


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
        h_BTR = _dense(self, "left", x_BTD)
        return x_BTD + self.norm(constrain(_dense(self, "right", h_BTR), _RESIDUAL))


class PerLayerInput(nnx.Module):
    """What a layer adds to all streams but the first: its embedding of the token, gated by the first stream."""

    def __init__(self, config: Gemma3nConfig, rngs: nnx.Rngs):
        D, P = config.embed_dim, config.per_layer_dim
        self.input_gate = layers.projection(rngs, projections.INPUT_GATE, (D, P))
        self.projection = layers.projection(rngs, projections.PER_LAYER, (P, D))
        self.norm = config.make_norm(rngs)
        self.config = config

    def __call__(self, x_BTD: jax.Array, embedding_BTP: jax.Array) -> jax.Array:
        h_BTP = self.config.activation(_dense(self, "input_gate", x_BTD)) * embedding_BTP
        return self.norm(constrain(_dense(self, "projection", h_BTP), _RESIDUAL))


def _dense(module: Laurel | PerLayerInput, name: str, x: jax.Array) -> jax.Array:
    quantization = module.config.quantization
    return layers.dense(x, getattr(module, name)[...], 1, quantization, layers.adapter_of(module, name))


def gate(sparsity: float, width: jax.Array | int | None, gate_BTF: jax.Array) -> jax.Array:
    """An MLP's gate before its activation, with zeros for the hidden units that a sparse layer drops.

    Args:
      sparsity: share that is zeroed, were the units of a token normally distributed.
      width: units of the layer, those beyond it only fill the stack; None: all.
      gate_BTF: the gate.
    """
    F = gate_BTF.shape[-1]
    there_F = None if width is None else jnp.arange(F) < width
    within = lambda x: x if there_F is None else jnp.where(there_F, x, jnp.zeros((), x.dtype))  # noqa: E731
    if sparsity > 0:
        x, count = within(gate_BTF.astype(jnp.float32)), F if width is None else jnp.asarray(width, jnp.float32)
        mean = jnp.sum(x, axis=-1, keepdims=True) / count
        variance = jnp.sum(within(jnp.square(x - mean)), axis=-1, keepdims=True) / count
        deviation = jnp.sqrt(jnp.maximum(variance, _TINY))
        cutoff = mean + deviation * statistics.NormalDist().inv_cdf(sparsity)
        gate_BTF = jax.nn.relu(gate_BTF - cutoff.astype(gate_BTF.dtype))
    return within(gate_BTF)  # an activation of zero is zero: the product with the other projection has nothing there


def magnitude(x_BTD: jax.Array, least: jax.typing.ArrayLike) -> jax.Array:
    """Root of the mean square of each token, [B, T, 1] float32; `least`: of the mean square, so that its root has a gradient."""
    mean = jnp.mean(jnp.square(x_BTD.astype(jnp.float32)), axis=-1, keepdims=True)
    return jnp.sqrt(jnp.maximum(mean, least))
