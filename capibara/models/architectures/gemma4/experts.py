"""The experts of Gemma 4, beside an MLP that every token meets."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.models.architectures.gemma4.config import Gemma4Config
from capibara.models.layers import layers
from capibara.models.parts.moe import MoeMLP
from capibara.models.parts.router import Choice, ExpertChoice, Moe


class NormedExperts(MoeMLP):
    """Experts and a shared one that read the residual stream, each by norms of what they read and of what they give.

    The router reads the normalised stream, each of whose dimensions has a factor; so has each expert's output.
    """

    def __init__(self, config: Gemma4Config, moe: Moe, rngs: nnx.Rngs):
        super().__init__(config, moe, rngs)
        D, E = config.embed_dim, moe.num_experts
        self.router_norm = layers.Norm(D, kind=config.norm, eps=config.norm_eps, rngs=rngs, scale=layers.NormScale.NONE)
        self.router_scale = layers.param(rngs, (D,), ("norm",), layers.ones)
        self.expert_scale = layers.param(rngs, (E,), ("router",), layers.ones)
        self.experts_norm, self.experts_post_norm = config.make_norm(rngs), config.make_norm(rngs)
        self.shared_norm, self.shared_post_norm = config.make_norm(rngs), config.make_norm(rngs)

    def router_inputs(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = self.router_norm(super().router_inputs(x_BTD))
        return x_BTD * self.router_scale[...] * x_BTD.shape[-1] ** -0.5

    def weighted_sum(
        self, x_BTD: jax.Array, choice: Choice | ExpertChoice, positions_BTk: jax.Array | None
    ) -> jax.Array:
        assert isinstance(choice, Choice), "the configuration checks it"
        scale_BTk = jnp.take(self.expert_scale[...], choice.experts, mode="clip")  # padding has no expert, and gate 0
        scaled = choice._replace(gates=choice.gates * scale_BTk)
        return self.experts_post_norm(super().weighted_sum(self.experts_norm(x_BTD), scaled, positions_BTk))

    def _shared(self, x_BTD: jax.Array) -> jax.Array:
        return self.shared_post_norm(super()._shared(self.shared_norm(x_BTD)))
