"""The decoder of Gemma 4."""

from __future__ import annotations

import jax
from flax import nnx

from capibara.core import projections
from capibara.models.architectures.gemma4.config import Gemma4Config, GlobalValues
from capibara.models.architectures.gemma4.experts import NormedExperts
from capibara.models.architectures.registry import model_of
from capibara.models.architectures.shared_keys.block import Branch, LayerInputs, NormedAttention, SharedKeysBlock
from capibara.models.architectures.shared_keys.model import SharedKeysDecoder
from capibara.models.architectures.shared_keys.parts import PerLayerInput, narrowed
from capibara.models.layers import layers
from capibara.models.parts.config import TransformerConfig
from capibara.models.parts.kinds import LayerKind
from capibara.models.parts.transformer import MLP, residual, within
from capibara.sharding import constrain


class KeysAsValues(NormedAttention):
    """Attention whose values are its keys before they are normalised and rotated."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        del self.value

    def _projections(self, x_BTD: jax.Array, y_BSD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q = constrain(self._dense(projections.QUERY, x_BTD), ("batch", "act_time", "act_heads", None))
        k = constrain(self._dense(projections.KEY, y_BSD), ("batch", "act_time", "act_kv_heads", None))
        return q, k, k


class Gemma4Block(SharedKeysBlock):
    """Attention, an MLP or experts and the per-layer embedding, one after the other, and a factor of what they give."""

    def __init__(self, config: Gemma4Config, rngs: nnx.Rngs):
        self.config = config
        for kind in dict.fromkeys(config.kinds):
            as_values = kind is LayerKind.GLOBAL and config.global_values is GlobalValues.KEYS
            attention = KeysAsValues if as_values else NormedAttention
            setattr(self, config.attention_module(kind), attention(config.attention_of(kind), rngs))
        self.attention_norm, self.attention_post_norm = config.make_norm(rngs), config.make_norm(rngs)
        self.mlp: MLP | NormedExperts
        if config.moe is None:
            self.mlp, self.mlp_norm = MLP(config, rngs), config.make_norm(rngs)
        else:
            self.mlp = NormedExperts(config, config.moe, rngs)
        self.mlp_post_norm = config.make_norm(rngs)
        if config.per_layer_dim:
            self.per_layer = PerLayerInput(config, rngs)
        self.layer_scale = layers.param(rngs, (), (), layers.ones)

    def around(self, x_BTD: jax.Array, inputs: LayerInputs, attention: Branch) -> jax.Array:
        with jax.named_scope("attention"):
            x_BTD = residual(x_BTD + self.attention_post_norm(attention(within(self.attention_norm(x_BTD)))))
        with jax.named_scope("mlp"):
            y = self._fed_forward(x_BTD, inputs)
            x_BTD = residual(x_BTD + self.mlp_post_norm(y))
        if inputs.embedding is not None:
            with jax.named_scope("per_layer"):
                x_BTD = residual(x_BTD + self.per_layer(x_BTD, inputs.embedding))
        return x_BTD * self.layer_scale[...].astype(x_BTD.dtype)

    def _fed_forward(self, x_BTD: jax.Array, inputs: LayerInputs) -> jax.Array:
        """What the MLP or the experts make of the residual stream."""
        if isinstance(self.mlp, MLP):
            return narrowed(self.mlp, within(self.mlp_norm(x_BTD)), inputs)
        y, stats = self.mlp(within(x_BTD), inputs.segment_ids)
        inputs.stats.update(stats)
        return y


@model_of(Gemma4Config)
class Gemma4(SharedKeysDecoder):
    """Embeddings, layers with heads of two sizes, final norm."""

    config: Gemma4Config

    def _block(self, rngs: nnx.Rngs) -> Gemma4Block:
        return Gemma4Block(self.config, rngs)
