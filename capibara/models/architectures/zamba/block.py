"""The layers of Zamba2, and the blocks that they share.

B rows, T positions, D embed, W twice that, N heads, H head_dim, F hidden width, R rank of adapters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.core import projections
from capibara.core.projections import Projection
from capibara.kernels import rotary
from capibara.kernels.attention.spec import AttentionSpec
from capibara.models.architectures.zamba.config import Adapters, ZambaConfig
from capibara.models.cache import dense
from capibara.models.layers import dropout, layers, stack
from capibara.models.layers.dropout import Site
from capibara.models.layers.stack import Stats
from capibara.models.parts.attention import Attention
from capibara.models.parts.kinds import LayerKind
from capibara.models.parts.transformer import MLP, Block, Branch, Rows, Shared, mix_rows, residual, within
from capibara.sharding import constrain


class SharedInput(nnx.Module):
    """What a layer has of its own of the block that it reads: adapters, and a projection of the block's results."""

    def __init__(self, config: ZambaConfig, rngs: nnx.Rngs):
        D, N, H, F, R = config.embed_dim, config.num_heads, config.head_size, config.mlp_dim, config.adapter_rank
        self.config = config
        shapes: dict[Projection, tuple[int, ...]] = dict.fromkeys((projections.UP, projections.GATE), (F,))
        if config.adapters is Adapters.ALL:
            shapes |= dict.fromkeys((projections.QUERY, projections.KEY, projections.VALUE), (N, H))
        for of, shape in shapes.items():
            into, out = projections.SHARED_INTO[of], projections.SHARED_FROM[of]
            width = D if of.part == projections.UP.part else 2 * D
            setattr(self, into.name, layers.projection(rngs, into, (width, R)))
            setattr(self, out.name, layers.projection(rngs, out, (R, *shape)))
        self.projection = layers.projection(rngs, projections.SHARED_RESULT, (D, D))

    def adapted(self, of: Projection, x: jax.Array, y: jax.Array) -> jax.Array:
        """What a projection of the block makes of x, with the layer's adapter; y is that without."""
        if not hasattr(self, (out := projections.SHARED_FROM[of]).name):
            return y
        h = self._dense(projections.SHARED_INTO[of], x)
        return y + self._dense(out, h)

    def result(self, x: jax.Array) -> jax.Array:
        """What is added to the input of the layer's mixer."""
        return self._dense(projections.SHARED_RESULT, x)

    def _dense(self, by: Projection, x: jax.Array) -> jax.Array:
        weight, adapter = getattr(self, by.name)[...], layers.adapter_of(self, by.name)
        return layers.dense(x, weight, quantization=self.config.quantization, adapter=adapter)


class _WideAttention(Attention):
    """Attention that reads the residual stream and the token embeddings side by side."""

    def __init__(self, config: ZambaConfig, rngs: nnx.Rngs):
        wide = dataclasses.replace(config, embed_dim=2 * config.embed_dim, head_dim=config.head_size)
        super().__init__(wide, rngs)
        shape = (config.num_heads, config.head_size, config.embed_dim)
        self.out = layers.projection(rngs, projections.OUT, shape)

    def heads(
        self, x_BTW: jax.Array, inputs: SharedInput, angles: rotary.Angles | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values with a layer's adapters, rotated."""
        of_heads = zip(projections.ATTENTION, self._projections(x_BTW, x_BTW), strict=False)
        q, k, v = (inputs.adapted(of, x_BTW, y) for of, y in of_heads)
        if angles is not None:
            pairs = self.config.rotary_pairs
            q, k = rotary.rotate(q, angles, pairs), rotary.rotate(k, angles, pairs)
        return q, k, v


class _AdaptedMLP(MLP):
    """An MLP whose first projections have adapters of a layer."""

    def of_layer(self, x_BTD: jax.Array, inputs: SharedInput) -> jax.Array:
        """[B, T, D]."""
        config = self.config

        def into(of: Projection) -> jax.Array:
            weight, adapter = getattr(self, of.name)[...], layers.adapter_of(self, of.name)
            y = layers.dense(x_BTD, weight, quantization=config.quantization, adapter=adapter)
            y = y + getattr(self, f"{of.name}_bias")[...].astype(y.dtype) if config.bias.of_mlp else y
            y = constrain(inputs.adapted(of, x_BTD, y), ("batch", "act_time", "act_mlp"))
            return layers.named(y, of)

        h = config.gating.gate(into(projections.GATE), into(projections.UP))
        down = layers.adapter_of(self, projections.DOWN.name)
        y = layers.dense(h, self.down[...], quantization=config.quantization, adapter=down)
        y = y + self.down_bias[...].astype(y.dtype) if config.bias.of_down else y
        return layers.named(y, projections.DOWN)


class SharedBlock(nnx.Module):
    """Attention and an MLP, one after the other, without residuals."""

    def __init__(self, config: ZambaConfig, rngs: nnx.Rngs):
        self.attention = _WideAttention(config, rngs)
        self.mlp = _AdaptedMLP(config, rngs)
        self.attention_norm = layers.Norm(
            2 * config.embed_dim, kind=config.norm, eps=config.norm_eps, rngs=rngs, scale=config.norm_scale
        )
        self.mlp_norm = config.make_norm(rngs)


class SharedBlocks(nnx.Module):
    """All of them; their parameters have an axis of blocks."""

    def __init__(self, config: ZambaConfig, rngs: nnx.Rngs):
        self.layers = stack.stacked(lambda rngs: SharedBlock(config, rngs), rngs, config.shared_blocks)

    def each(self) -> list[SharedBlock]:
        """The blocks one by one."""
        return list(stack.each(self.layers, stack.unstacked(nnx.to_pure_dict(nnx.state(self.layers)), {})))


class ZambaBlock(Block):
    """A mixer, to whose input some layers add what a shared block makes of the stream."""

    config: ZambaConfig
    shared_input: SharedInput

    def __init__(self, config: ZambaConfig, rngs: nnx.Rngs):
        self.config = config
        assert config.mixer is not None, "the configuration checks it"
        self.mixer = config.mixer.make(config, rngs)
        self.branch_norm = config.make_norm(rngs)
        self.shared_input = SharedInput(config, rngs)

    def __call__(
        self, x_BTD: jax.Array, rows: Rows, shared: Shared, kind: AttentionSpec, layer_kind: LayerKind
    ) -> tuple[jax.Array, Stats]:
        def attended(block: SharedBlock, x: jax.Array) -> jax.Array:
            heads = block.attention.heads(x, self.shared_input, _angles(rows, layer_kind))
            return block.attention(x, kind=kind, segment_ids_BT=rows.segment_ids, drop=shared.drop, heads=heads)

        def mixed(x: jax.Array) -> jax.Array:
            return dropout.apply(shared.drop, mix_rows(self.mixer, x, rows, shared), Site.ATTENTION)

        return self._around(x_BTD, rows, shared, attended, mixed), {}

    def cached(
        self,
        x_BTD: jax.Array,
        layer: dense.LayerCache,
        now: dense.PrefillInputs,
        rows: Rows,
        shared: Shared,
        kind: AttentionSpec,
        layer_kind: LayerKind,
    ) -> tuple[jax.Array, dense.LayerCache]:
        written: dense.LayerCache = {}

        def attended(block: SharedBlock, x: jax.Array) -> jax.Array:
            heads = block.attention.heads(x, self.shared_input, _angles(rows, layer_kind))
            y, new = block.attention.cached(x, layer, now, kind=kind, heads=heads)
            written.update(new)
            return y

        def mixed(x: jax.Array) -> jax.Array:
            y, new = self.mixer.cached(x, layer, now, shared.number)
            written.update(new)
            return y

        return self._around(x_BTD, rows, shared, attended, mixed), written

    def _around(
        self,
        x_BTD: jax.Array,
        rows: Rows,
        shared: Shared,
        attended: Callable[[SharedBlock, jax.Array], jax.Array],
        mixed: Branch,
    ) -> jax.Array:
        """The residual stream after the layer."""
        entering = x_BTD
        if shared.block is not None:
            block = shared.block
            assert isinstance(block, SharedBlock) and rows.embedded is not None, "the decoder gives both"
            with jax.named_scope("attention"):
                x_BTW = jnp.concatenate([x_BTD, rows.embedded], axis=-1)
                y = attended(block, within(block.attention_norm(x_BTW)))
            with jax.named_scope("mlp"):
                y = block.mlp.of_layer(within(block.mlp_norm(y)), self.shared_input)
            entering = residual(x_BTD + self.shared_input.result(y))
        with jax.named_scope("branch"):
            return residual(x_BTD + mixed(within(self.branch_norm(entering))))


def _angles(rows: Rows, kind: LayerKind) -> rotary.Angles | None:
    return None if rows.angles is None else rows.angles[kind]
