"""Multi-token prediction: modules after the last layer that predict the tokens after the next one.

As in DeepSeek-V3 (2024, arXiv:2412.19437, section 2.2). Module k reads, at each position i, the state of module k - 1 (the
model's final hidden states for the first one) and the embedding of token i + k. It normalises both, adds their projections,
which is one projection of the two side by side, and applies a layer like the model's and a norm. The model's head reads the
result: it predicts token i + k + 1.

B rows, T tokens, D embed_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from capibara import sharding
from capibara.core.types import Batch, UserError
from capibara.kernels.attention.spec import AttentionSpec
from capibara.models.cache import dense
from capibara.models.layers import layers, stack
from capibara.models.layers.stack import LayerLoop, Stats
from capibara.models.mtp.config import Mtp
from capibara.models.parts.config import FinalNorm, TransformerConfig
from capibara.models.parts.transformer import Block, Rows, Shared
from capibara.sharding import RematPolicy

STATE = f"{dense.STATE}_hidden"
"""In the modules' layer of a cache: [B, D], the final hidden states of each row's last token."""


class Module(nnx.Module):
    """One module: what it reads, its layer and its norm.

    Args:
      config: of the modules' layers, which have the model's sizes.
      mtp: their options.
      block: the class of the model's layers.
      rngs: source of the initial weights.
    """

    def __init__(self, config: TransformerConfig, mtp: Mtp, block: type[Block], rngs: nnx.Rngs):
        D = config.embed_dim
        self.config, self.options = config, mtp
        self.embedding_norm, self.hidden_norm = config.make_norm(rngs), config.make_norm(rngs)
        half = layers.fan_in(0, scale=0.5)  # the two are a projection of 2 D values
        self.from_embedding = layers.param(rngs, (D, D), ("embed", "norm"), half)
        self.from_hidden = layers.param(rngs, (D, D), ("embed", "norm"), half)
        self.block = block(config, rngs)
        if mtp.norm is FinalNorm.LAYER:
            self.norm = config.make_norm(rngs)

    def joined(self, hidden_BTD: jax.Array, embedded_BTD: jax.Array) -> jax.Array:
        """The input of the module's layer, [B, T, D]."""
        quantization = self.config.quantization
        hidden_BTD, embedded_BTD = self.hidden_norm(hidden_BTD), self.embedding_norm(embedded_BTD)
        of_hidden_BTD = layers.dense(hidden_BTD, self.from_hidden[...], quantization=quantization)
        return layers.dense(embedded_BTD, self.from_embedding[...], quantization=quantization) + of_hidden_BTD

    def normed(self, x_BTD: jax.Array) -> jax.Array:
        """What the head and the next module read."""
        return self.norm(x_BTD) if hasattr(self, "norm") else x_BTD


def run(
    modules: Module,
    hidden_BTD: jax.Array,
    embedded: Sequence[jax.Array],
    rows: Rows,
    shared: Shared,
    spec: AttentionSpec,
    remat: RematPolicy,
) -> tuple[list[jax.Array], list[Stats]]:
    """What the head reads of each module, [B, T, D], and the statistics of the modules' layers.

    Args:
      modules: made by `stack.stacked`.
      hidden_BTD: the model's final hidden states.
      embedded: for each module the embeddings of its tokens, [B, T, D].
      rows, shared, spec: inputs of a layer.
      remat: what the backward pass recomputes.
    """
    if sharding.active_pipeline() is not None:
        raise UserError(
            "Plan.stage is above 1, and pipelines have no multi-token prediction: set Plan.stage to 1, or DecoderConfig.mtp "
            "to None"
        )

    def apply(
        module: Module, x: jax.Array, inputs: tuple[Rows, jax.Array], entry: AttentionSpec
    ) -> tuple[jax.Array, Stats]:
        rows, embedded_BTD = inputs
        x, stats = module.block(module.joined(x, embedded_BTD), rows, shared, entry, module.options.kind)
        return module.normed(x), stats

    x, results, statistics = hidden_BTD, [], []
    for number, embedded_BTD in enumerate(embedded):
        span = (number, number + 1)
        x, stats = stack.run(modules, x, (rows, embedded_BTD), apply, [spec], LayerLoop.UNROLL, remat, span=span)
        results.append(x)
        statistics.append(stats)
    return results, statistics


def first(modules: Module) -> Module:
    """The first of the modules."""
    (module,) = stack.each(modules, stack.unstacked(nnx.to_pure_dict(nnx.state(modules)), {})[:1])
    return module


def next_tokens(batch: Batch, depth: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The tokens that module `depth` reads, its targets and their weights, [B, T] each.

    A target after the end of its document has the weight 0.
    """
    segments_BT = batch["segment_ids"]

    def shifted(x_BT: jax.Array) -> jax.Array:
        return jnp.pad(x_BT[:, depth:], ((0, 0), (0, depth)))

    inside_BT = (shifted(segments_BT) == segments_BT) & (segments_BT > 0)
    weights_BT = shifted(batch["weights"])
    return shifted(batch["tokens"]), shifted(batch["targets"]), jnp.where(inside_BT, weights_BT, 0)


def cache_layer(
    config: TransformerConfig, batch: int, length: int, dtype: jax.typing.DTypeLike, window: int | None
) -> dense.LayerCache:
    """The empty cache of the first module, the only one that generation reads."""
    state = {STATE: jnp.zeros((batch, config.embed_dim), config.dtype.value)}
    return dense.empty_layer(config, batch, length, dtype, window) | state


def pairs(
    hidden_BTD: jax.Array, tokens_BT: jax.Array, now: dense.PrefillInputs, before_BD: jax.Array
) -> tuple[jax.Array, jax.Array, dense.PrefillInputs]:
    """What the first module reads of new tokens: hidden states, the tokens after them, and where they are.

    The pair of a token and the state before it is at the position of that state.

    Args:
      hidden_BTD, tokens_BT, now: of the new tokens.
      before_BD: the hidden states of the tokens before them.
    """
    if now.is_prefill:
        fewer = now._replace(counts=now.counts - 1, positions=now.positions[:, :-1])
        return hidden_BTD[:, :-1], tokens_BT[:, 1:], fewer
    states_BTD = jnp.concatenate([before_BD[:, None].astype(hidden_BTD.dtype), hidden_BTD[:, :-1]], axis=1)
    return states_BTD, tokens_BT, now._replace(lengths=now.lengths - 1, positions=now.positions - 1)


def state_at(layer: dense.LayerCache, hidden_BTD: jax.Array, index_B: jax.Array) -> dense.LayerCache:
    """The state of a module's cache whose rows end with the tokens at these columns, of those that were read last."""
    taken_BD = jnp.take_along_axis(hidden_BTD, index_B[:, None, None], axis=1)[:, 0]
    return {STATE: taken_BD.astype(layer[STATE].dtype)}


def at_token(cache: dense.Cache, hidden_BTD: jax.Array, index_B: jax.Array) -> dense.Cache:
    """The cache of a model whose rows end with these tokens; unchanged for a model without modules."""
    *others, last = cache["layers"]
    return cache if STATE not in last else cache | {"layers": (*others, last | state_at(last, hidden_BTD, index_B))}
