"""An architecture: a recurrent network without attention (minGRU, Feng et al. 2024, arXiv:2410.01201).

cd examples/extend && python -m capibara.train --gin_file=my_model.gin --emulate=2
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.config import configurable
from capibara.models.api import TransformerConfig, model_of
from capibara.models.layers import layers, stack
from capibara.models.parts import transformer


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class MinGruConfig(TransformerConfig):
    """Sizes of a MinGru: embed_dim is its width, mlp_dim that of the recurrent state; heads mean nothing to it."""

    num_heads: int = 1


class Layer(nnx.Module):
    """A gated recurrence h = (1 - z) h + z c, whose gate z and candidate c depend on the input alone."""

    def __init__(self, config, rngs):
        D, F = config.embed_dim, config.mlp_dim
        self.norm = config.make_norm(rngs)
        # Stacked over the layers, sharded by their logical axes, each with its initialiser: one declaration.
        self.gate = layers.param(rngs, (D, F), ("embed", "mlp"), layers.fan_in(0))
        self.candidate = layers.param(rngs, (D, F), ("embed", "mlp"), layers.fan_in(0))
        self.out = layers.param(rngs, (F, D), ("mlp", "embed"), layers.fan_in(0))

    def __call__(self, x_BTD, starts_BT):
        y = self.norm(x_BTD)
        z_BTF = jax.nn.sigmoid(layers.dense(y, self.gate[...]))
        # Rows hold several documents: nothing is kept across the start of one.
        keep_BTF = jnp.where(starts_BT[..., None], 0, 1 - z_BTF)
        new_BTF = z_BTF * layers.dense(y, self.candidate[...])

        def after(first, second):
            return first[0] * second[0], first[1] * second[0] + second[1]

        _, h_BTF = jax.lax.associative_scan(after, (keep_BTF, new_BTF), axis=1)
        return transformer.residual(x_BTD + layers.dense(h_BTF, self.out[...]))


@model_of(MinGruConfig)
class MinGru(nnx.Module):
    """What a model must have to be trained; `read` and `start_cache` (see Decoder) would let it generate, too."""

    def __init__(self, config, rngs):
        self.config = config
        self.embedding = layers.param(
            rngs, (config.vocab_size, config.embed_dim), ("vocab", "embed"), layers.normal(0.02)
        )
        self.layers = stack.stacked(lambda rngs: Layer(config, rngs), rngs, config.num_layers)
        self.final_norm = config.make_norm(rngs)

    def __call__(self, batch, remat, step):
        """The final hidden states [B, T, D], and statistics of the layers, of which there are none."""
        x = transformer.residual(self.embedding[...].astype(self.config.dtype.value)[batch["tokens"]])
        starts_BT = batch["positions"] == 0
        x, stats = stack.run(
            self.layers, x, starts_BT, lambda layer, x, starts, kind: (layer(x, starts), {}), (None,),
            self.config.layer_loop, remat,
        )  # fmt: skip
        return self.final_norm(x), stats

    def head(self):
        """The output projection [V, D]."""
        return self.embedding[...]
