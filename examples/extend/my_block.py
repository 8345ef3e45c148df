"""A decoder block: each branch is scaled by a learned vector that begins small (LayerScale, arXiv:2103.17239).

cd examples/extend && python -m capibara.train --gin_file=my_block.gin --emulate=2
"""

import dataclasses

import jax

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.models.api import DecoderConfig, model_of
from capibara.models.architectures.decoder import Decoder
from capibara.models.layers import layers
from capibara.models.parts.transformer import Block


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledDecoderConfig(DecoderConfig):
    """A decoder with scaled branches; all else is as of DecoderConfig.

    Attributes:
      initial_scale: of the branches, before training.
    """

    initial_scale: float = 0.1

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.initial_scale <= 1:
            raise UserError(f"ScaledDecoderConfig.initial_scale is {self.initial_scale}, must be in (0, 1]: try 0.1")


class ScaledBlock(Block):
    """Attention and MLP as they are, in training and in generation, times a vector each."""

    def __init__(self, config, rngs):
        super().__init__(config, rngs)
        init = jax.nn.initializers.constant(config.initial_scale)
        # Logical axes say how a parameter lies on a mesh: "norm" is a vector over the residual stream.
        self.attention_scale = layers.param(rngs, (config.embed_dim,), ("norm",), init)
        self.mlp_scale = layers.param(rngs, (config.embed_dim,), ("norm",), init)

    def add(self, x, name, part):
        scale = getattr(self, f"{name}_scale")[...].astype(x.dtype)
        return super().add(x, name, lambda y: scale * part(y))


@model_of(ScaledDecoderConfig)
class ScaledDecoder(Decoder):
    block = ScaledBlock
