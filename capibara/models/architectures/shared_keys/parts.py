"""What layers of several decoders have beside attention and an MLP: a per-layer embedding's gate, narrow and sparse MLPs.

B rows, T positions, D embed, P width of the per-layer embedding, F hidden width of an MLP.
"""

from __future__ import annotations

import functools
import statistics

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.core import projections
from capibara.models.architectures.shared_keys.block import LayerInputs
from capibara.models.architectures.shared_keys.config import SharedKeysConfig
from capibara.models.layers import layers
from capibara.models.parts.transformer import MLP
from capibara.sharding import constrain

RESIDUAL = ("batch", "act_residual", "act_embed")
_TINY = jnp.finfo(jnp.float32).tiny  # of a root's argument: at zero it has no gradient


class PerLayerInput(nnx.Module):
    """What a layer adds by its embedding of the token, which its input gates."""

    def __init__(self, config: SharedKeysConfig, rngs: nnx.Rngs):
        D, P = config.embed_dim, config.per_layer_dim
        self.input_gate = layers.projection(rngs, projections.INPUT_GATE, (D, P))
        self.projection = layers.projection(rngs, projections.PER_LAYER, (P, D))
        self.norm = config.make_norm(rngs)
        self.config = config

    def __call__(self, x_BTD: jax.Array, embedding_BTP: jax.Array) -> jax.Array:
        h_BTP = self.config.activation(dense(self, self.config, "input_gate", x_BTD)) * embedding_BTP
        return self.norm(constrain(dense(self, self.config, "projection", h_BTP), RESIDUAL))


def dense(module: nnx.Module, config: SharedKeysConfig, name: str, x: jax.Array) -> jax.Array:
    """The product of x with a module's weight."""
    return layers.dense(x, getattr(module, name)[...], 1, config.quantization, layers.adapter_of(module, name))


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


def narrowed(mlp: MLP, x_BTD: jax.Array, inputs: LayerInputs) -> jax.Array:
    """What an MLP of the layer's width and sparsity makes of x."""
    changed = inputs.sparsity or inputs.width is not None
    return mlp(x_BTD, on_gate=functools.partial(gate, inputs.sparsity, inputs.width) if changed else None)
