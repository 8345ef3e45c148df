"""A layer of Gemma 3n, over several residual streams."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.models.architectures.gemma3n import parts
from capibara.models.architectures.gemma3n.config import Gemma3nConfig
from capibara.models.architectures.shared_keys.block import Branch, LayerInputs, NormedAttention, SharedKeysBlock
from capibara.models.architectures.shared_keys.parts import RESIDUAL, PerLayerInput, narrowed
from capibara.models.parts.transformer import MLP, within
from capibara.sharding import constrain


class Gemma3nBlock(SharedKeysBlock):
    """Attention and an MLP on the first stream, with AltUp, LAuReL and the per-layer embedding around them."""

    def __init__(self, config: Gemma3nConfig, rngs: nnx.Rngs):
        self.config = config
        self.attention = NormedAttention(config, rngs)
        self.mlp = MLP(config, rngs)
        self.attention_norm, self.attention_post_norm = config.make_norm(rngs), config.make_norm(rngs)
        self.mlp_norm, self.mlp_post_norm = config.make_norm(rngs), config.make_norm(rngs)
        self.altup = parts.AltUp(config, rngs)
        self.laurel = parts.Laurel(config, rngs)
        self.per_layer = PerLayerInput(config, rngs)

    def around(self, x_SBTD: jax.Array, inputs: LayerInputs, attention: Branch) -> jax.Array:
        with jax.named_scope("altup"):
            predicted = self.altup.predict(x_SBTD, inputs.training)
        active = predicted[0]
        with jax.named_scope("attention"):
            x = self.attention_norm(active)
            attended = active + self.attention_post_norm(attention(within(x)))
        with jax.named_scope("laurel"):
            x = constrain((attended + self.laurel(x)) * math.sqrt(0.5), RESIDUAL)
        with jax.named_scope("mlp"):
            y = narrowed(self.mlp, within(self.mlp_norm(x)), inputs)
            x = x + self.mlp_post_norm(y)
        with jax.named_scope("altup"):
            corrected = self.altup.correct(predicted, x, inputs.training)
            first = corrected[0] * self.altup.correct_scale[...].astype(x.dtype)
        with jax.named_scope("per_layer"):
            assert inputs.embedding is not None, "every layer has one"
            added = self.per_layer(constrain(first, RESIDUAL), inputs.embedding)
        return constrain(jnp.concatenate([corrected[:1], corrected[1:] + added]), parts.STREAMS)
