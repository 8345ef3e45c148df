"""Parts of all transformers: the MLP and the residual block."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.core import projections
from capibara.core.types import Batch, UserError
from capibara.kernels.attention.spec import AttentionSpec
from capibara.kernels.gradients import gradients_together
from capibara.models.cache import dense
from capibara.models.layers import dropout, layers
from capibara.models.layers.dropout import Dropout, Site
from capibara.models.layers.relative import RelativeBias
from capibara.models.layers.rope import Angles, Rope, angles
from capibara.models.layers.stack import Stats
from capibara.models.mixers.mixer import MixerLayer
from capibara.models.parts.attention import Attention
from capibara.models.parts.config import InnerNorm, NormPlacement, Residual, TransformerConfig
from capibara.models.parts.kinds import LayerKind
from capibara.models.parts.latent import Latent
from capibara.models.parts.moe import MoeMLP
from capibara.models.parts.multipliers import scaled
from capibara.models.parts.router import Remix
from capibara.sharding import constrain

Branch = Callable[[jax.Array], jax.Array]
"""A branch of a block: its normalised input [B, T, D] -> what is added to the residual stream."""


class Pathways(NamedTuple):
    """Scores of experts that are mixed into those of one token of each row, in every layer (router.Remix).

    Attributes:
      at: [B, T] bool.
      scores: [B, L, E] float32, L layers of the model; those without experts are not read.
      weights: [B, L] float32.
    """

    at: jax.Array
    scores: jax.Array
    weights: jax.Array

    def in_layer(self, number: jax.Array | int) -> Remix:
        """What is mixed in in the layer with this number."""
        return Remix(self.at, self.scores[:, number], self.weights[:, number])


class Rows(NamedTuple):
    """Per-row inputs of a layer besides the activations; each leaf has the batch axis, or is None.

    Attributes:
      segment_ids: [B, T] document numbers.
      angles: of the rotary positions, by kind of layer.
      domains: [B, T] domain hints.
      encoded, encoded_segments: [B, S, D] output of an encoder and [B, S] its document numbers.
      prefix: [B, T], 1 at a document's inputs, which attend to each other in both directions.
      query_scale: by kind of layer: [B, T], factors of the queries; None, or a kind without them: 1.
      pathways: what is mixed into the router's scores; None: nothing.
      blocks: [B, T], numbers of the blocks that tokens of local layers attend in, 0 for padding; None: they have none.
      embedded: [B, T, D], the token embeddings, for layers that read them beside the stream; None: none does.
      tokens: [B, T] their ids, for layers whose experts a table chooses by them; None: none does.
    """

    segment_ids: jax.Array
    angles: dict[LayerKind, Angles] | None = None
    domains: jax.Array | None = None
    encoded: jax.Array | None = None
    encoded_segments: jax.Array | None = None
    prefix: jax.Array | None = None
    query_scale: dict[LayerKind, jax.Array] | None = None
    blocks: jax.Array | None = None
    pathways: Pathways | None = None
    embedded: jax.Array | None = None
    tokens: jax.Array | None = None

    def scale_of(self, kind: LayerKind) -> jax.Array | None:
        """The factors of the queries in a layer of this kind."""
        return None if self.query_scale is None else self.query_scale.get(kind)


class Shared(NamedTuple):
    """Inputs of a layer that all rows share, or None.

    Attributes:
      row_positions: [T] column of each token in the row as it was before sharding.balanced; None: in order.
      bias: [N, T, S], added to the attention scores.
      step: int32 scalar, the train step; None outside training.
      drop: the layer's dropout; None: no dropout.
      bias_at: computes the bias for rows that have read tokens before (dense.attend).
      mlp: the module of its MLP or experts.
      bare: whether the layer's attention reads its input without a norm.
      distances_RD: embeddings of distances, of disentangled attention.
      number: of the layer, where dropout, its mixer or its streaming heads ask for it.
      shares_LK: how much each key/value head of each layer retrieves (parts.streaming).
      block: what several layers share, and this one reads (architectures.zamba); None: nothing.
    """

    row_positions: jax.Array | None = None
    bias: jax.Array | None = None
    step: jax.Array | None = None
    bias_at: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    drop: Dropout | None = None
    mlp: str = "mlp"
    bare: bool = False
    distances_RD: jax.Array | None = None
    number: jax.Array | int = 0
    shares_LK: jax.Array | None = None
    block: nnx.Module | None = None

    def share_of(self, kind: LayerKind) -> jax.Array | None:
        """How much each key/value head of the layer, which is of this kind, retrieves; None: it only retrieves."""
        return None if self.shares_LK is None or kind is LayerKind.LOCAL else self.shares_LK[self.number]


def pathways(batch: Batch) -> Pathways | None:
    """The batch's entries pathway_at, pathway_scores and pathway_weights; None: it has none."""
    if "pathway_at" not in batch:
        return None
    return Pathways(batch["pathway_at"] > 0, batch["pathway_scores"], batch["pathway_weights"])


class MLP(nnx.Module):
    """Two projections with an activation between them, or three if the activation is gated."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        D, F = config.embed_dim, config.mlp_dim
        self.config = config
        self.up = layers.projection(rngs, projections.UP, (D, F))
        if config.activation.gated:
            self.gate = layers.projection(rngs, projections.GATE, (D, F))
        if config.activation is layers.Activation.XIELU:
            self.activation = layers.Xielu(rngs)
        self.down = layers.projection(rngs, projections.DOWN, (F, D), 0.5 / config.depth)
        if config.bias.of_mlp:
            self.up_bias = layers.param(rngs, (F,), ("mlp",), layers.zeros)
            if config.activation.gated:
                self.gate_bias = layers.param(rngs, (F,), ("mlp",), layers.zeros)
        if config.bias.of_down:
            self.down_bias = layers.param(rngs, (D,), ("norm",), layers.zeros)
        if config.inner_norm is not InnerNorm.NONE:
            norm = functools.partial(layers.Norm, kind=config.norm, eps=config.norm_eps, scale=config.norm_scale)
            self.down_norm = norm(F, rngs=rngs, axes=("mlp",))

    def __call__(
        self,
        x_BTD: jax.Array,
        drop: Dropout | None = None,
        on_gate: Callable[[jax.Array], jax.Array] | None = None,
    ) -> jax.Array:
        """[B, T, D]; `on_gate` maps the gate [B, T, F] to the activation's input; None: the gate itself."""
        dtype, quantization = x_BTD.dtype, self.config.quantization
        into = [self.up[...], self.gate[...]] if self.config.activation.gated else [self.up[...]]
        down, up_lora, gate_lora, down_lora = (
            self.down[...],
            *(layers.adapter_of(self, item.name) for item in projections.MLP),
        )
        if self.config.lora is None:  # with adapters these weights have no gradient
            x_BTD, down, *into = gradients_together(x_BTD, down, *into)
        h = layers.dense(x_BTD, into[0], quantization=quantization, adapter=up_lora)
        if self.config.bias.of_mlp:
            h = h + self.up_bias[...].astype(dtype)
        h = layers.named(constrain(h, ("batch", "act_time", "act_mlp")), projections.UP)
        if self.config.activation.gated:
            gate = layers.dense(x_BTD, into[1], quantization=quantization, adapter=gate_lora)
            gate = gate + self.gate_bias[...].astype(dtype) if self.config.bias.of_mlp else gate
            gate = scaled(gate, self.config.multipliers.mlp_gate)
            gate = constrain(gate, ("batch", "act_time", "act_mlp"))
            gate = layers.named(gate, projections.GATE)
            h = self.config.gating.gate(gate if on_gate is None else on_gate(gate), h)
        else:
            h = self.activation(h) if self.config.activation is layers.Activation.XIELU else self.config.activation(h)
        h = self.down_norm(h) if self.config.inner_norm is not InnerNorm.NONE else h
        h = dropout.apply(drop, h, Site.MLP_INNER)
        y = layers.dense(h, down, quantization=quantization, adapter=down_lora)
        y = y + self.down_bias[...].astype(dtype) if self.config.bias.of_down else y
        return layers.named(y, projections.DOWN)


class GatedNorm(layers.Norm):
    """A norm whose results have a gate: the sigmoid of what an MLP of few dimensions makes of them."""

    def __init__(self, config: TransformerConfig, rank: int, rngs: nnx.Rngs):
        D = config.embed_dim
        super().__init__(D, kind=config.norm, eps=config.norm_eps, rngs=rngs, scale=config.norm_scale)
        self.norm_down = layers.projection(rngs, projections.NORM_DOWN, (D, rank))
        self.norm_up = layers.projection(rngs, projections.NORM_UP, (rank, D))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = super().__call__(x)
        gate = layers.dense(jax.nn.silu(layers.dense(y, self.norm_down[...])), self.norm_up[...])
        return (y * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(y.dtype)


class Block(nnx.Module):
    """A residual layer: self-attention, then an MLP or a mixture of experts.

    Attributes:
      relative_bias: the layer's own relative positions; None: it has none of its own.
    """

    attention: Attention | Latent
    attention_norm: layers.Norm
    branch_norm: layers.Norm
    mlp: MLP | MoeMLP | MixerLayer
    relative_bias: RelativeBias | None = None

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.config = config
        for kind in dict.fromkeys(kind for kind in config.kinds if kind.attends):
            if not hasattr(self, module := config.attention_module(kind)):
                setattr(self, module, _attention(config.attention_of(kind), rngs))
        if config.mixer is not None:
            self.mixer = config.mixer.make(config, rngs)
        make_feed_forward(self, config, rngs)
        _make_norms(self, config, rngs)

    def __call__(
        self, x_BTD: jax.Array, rows: Rows, shared: Shared, kind: AttentionSpec, layer_kind: LayerKind
    ) -> tuple[jax.Array, Stats]:
        """The layer's output, and its statistics (those of the experts, or none)."""
        stats: Stats = {}

        def attention(x: jax.Array) -> jax.Array:
            y = self._in_parallel(
                x,
                layer_kind,
                lambda x: self.attended(x, rows, shared, kind, layer_kind),
                lambda x: mix_rows(self.mixer, x, rows, shared),
            )
            return dropout.apply(shared.drop, y, Site.ATTENTION)

        if self.config.one_branch:
            return self._alone(
                x_BTD, attention if layer_kind is not LayerKind.FEED_FORWARD else self.mlp_part(rows, shared, stats)
            ), stats
        mlp = self.mlp_part(rows, shared, stats)
        if shared.bare:
            return self._bare(x_BTD, attention, mlp), stats
        return self._joined(x_BTD, attention, mlp, layer_kind, shared), stats

    def attended(
        self, x_BTD: jax.Array, rows: Rows, shared: Shared, kind: AttentionSpec, layer_kind: LayerKind
    ) -> jax.Array:
        """What attention makes of its input [B, T, D]."""
        attend: Callable[..., jax.Array] = _attention_of(self, layer_kind)
        if (share_K := shared.share_of(layer_kind)) is not None:
            if shared.row_positions is not None:
                raise UserError(
                    "Plan.context is above 1, and streaming heads see the first tokens of whole rows: set Plan.context to 1, and "
                    "share out by fsdp, tensor or data"
                )
            attend = functools.partial(attend, share_K=share_K)
        return attend(
            x_BTD,
            kind=kind,
            segment_ids_BT=rows.blocks if kind.in_blocks and rows.blocks is not None else rows.segment_ids,
            angles=None if rows.angles is None else rows.angles.get(layer_kind),
            row_positions_T=shared.row_positions,
            bias_NTS=shared.bias,
            prefix_BT=rows.prefix,
            drop=shared.drop,
            query_scale_BT=rows.scale_of(layer_kind),
        )

    def cached(
        self, x_BTD: jax.Array, layer: dense.LayerCache, now: dense.PrefillInputs,
        rows: Rows, shared: Shared, kind: AttentionSpec, layer_kind: LayerKind,
    ) -> tuple[jax.Array, dense.LayerCache]:  # fmt: skip
        """The layer's output for the new tokens, and its updated cache."""
        written: dense.LayerCache = {}

        def attended(x: jax.Array) -> jax.Array:
            y, new = self.attended_cached(x, layer, now, rows, shared, kind, layer_kind)
            written.update(new)
            return y

        def mixed(by: MixerLayer, x: jax.Array) -> jax.Array:
            y, new = by.cached(x, layer, now, shared.number)
            written.update(new)
            return y

        def attention(x: jax.Array) -> jax.Array:
            return self._in_parallel(x, layer_kind, attended, lambda x: mixed(self.mixer, x))

        def channels_mixed(x: jax.Array) -> jax.Array:
            assert isinstance(self.mlp, MixerLayer), "the configuration's"
            return scaled(mixed(self.mlp, x), self.config.multipliers.mlp_output)

        if self.config.one_branch:
            return self._alone(
                x_BTD, attention if layer_kind is not LayerKind.FEED_FORWARD else self.mlp_part(rows, shared, {})
            ), written
        mlp = self.mlp_part(rows, shared, {}) if self.config.channel_mixer is None else channels_mixed
        if shared.bare:
            return self._bare(x_BTD, attention, mlp), written
        return self._joined(x_BTD, attention, mlp, layer_kind, shared), written

    def attended_cached(
        self, x_BTD: jax.Array, layer: dense.LayerCache, now: dense.PrefillInputs,
        rows: Rows, shared: Shared, kind: AttentionSpec, layer_kind: LayerKind,
    ) -> tuple[jax.Array, dense.LayerCache]:  # fmt: skip
        """What attention makes of the new tokens [B, T, D], and its updated cache."""
        options: dict[str, Any] = {}
        if (share_K := shared.share_of(layer_kind)) is not None:
            options["share_K"] = share_K
        elif streaming := self.config.streaming_in(shared.number):
            options["streaming"] = streaming
        return _attention_of(self, layer_kind).cached(
            x_BTD, layer, now, kind=kind, angles=None if rows.angles is None else rows.angles.get(layer_kind),
            bias_NTS=shared.bias, bias_at=shared.bias_at, prefix_BT=rows.prefix,
            query_scale_BT=rows.scale_of(layer_kind), **options,
        )  # fmt: skip

    def _in_parallel(self, x_BTD: jax.Array, kind: LayerKind, attended: Branch, mixed: Branch) -> jax.Array:
        """What attention and the mixer make of the same input, together; most kinds of layers have one of them."""
        factors = self.config.multipliers
        results: list[jax.Array] = []
        if kind.attends:
            results.append(scaled(attended(scaled(x_BTD, factors.attention_input)), factors.attention_output))
        if kind.mixes:
            results.append(scaled(mixed(scaled(x_BTD, factors.mixer_input)), factors.mixer_output))
        return functools.reduce(operator.add, results)

    def _alone(self, x_BTD: jax.Array, branch: Branch) -> jax.Array:
        with jax.named_scope("branch"):
            return residual(x_BTD + self._scaled(branch(within(self.branch_norm(x_BTD)))))

    def _bare(self, x_BTD: jax.Array, attention: Branch, mlp: Branch) -> jax.Array:
        """Both branches, attention without a norm of its input."""
        with jax.named_scope("attention"):
            x_BTD = residual(x_BTD + self._scaled(attention(within(x_BTD))))
        return self.add(x_BTD, "mlp", mlp)

    def _joined(self, x_BTD: jax.Array, attention: Branch, mlp: Branch, kind: LayerKind, shared: Shared) -> jax.Array:
        if self.config.residual is Residual.SHARED:
            h_BTD = within(self.attention_norm(x_BTD))
            with jax.named_scope("attention"):
                y = attention(h_BTD)
            with jax.named_scope("mlp"):
                return residual(x_BTD + self._scaled(y + mlp(h_BTD)))
        if self.config.residual is Residual.PARALLEL:
            y = self._normed(x_BTD, "attention", attention, kind) + self._normed(x_BTD, "mlp", mlp, kind)
            return residual(x_BTD + self._scaled(y))
        x_BTD = self.add(x_BTD, "attention", attention, kind)
        has_gate = self.config.norm_gate_rank is not None and self.config.moe is not None and shared.mlp == "mlp"
        return self.add(x_BTD, "gated_mlp" if has_gate else "mlp", mlp, kind)

    def mlp_part(self, rows: Rows, shared: Shared, stats: Stats) -> Branch:
        """The MLP or the experts as a part for `add`; fills `stats` with the experts' statistics."""
        mlp, factor = getattr(self, shared.mlp), self.config.multipliers.mlp_output

        def part(x: jax.Array) -> jax.Array:
            if isinstance(mlp, MixerLayer):
                return dropout.apply(shared.drop, scaled(mlp(x, rows.segment_ids), factor), Site.MLP)
            if not isinstance(mlp, MoeMLP):
                return dropout.apply(shared.drop, scaled(mlp(x, shared.drop), factor), Site.MLP)
            remix = None if rows.pathways is None else rows.pathways.in_layer(shared.number)
            y, of_experts = mlp(
                x, rows.segment_ids, rows.domains, shared.step, shared.row_positions, remix, rows.tokens
            )
            stats.update(of_experts)
            return dropout.apply(shared.drop, scaled(y, factor), Site.MLP)

        return part

    def add(self, x: jax.Array, name: str, part: Branch, kind: LayerKind = LayerKind.GLOBAL) -> jax.Array:
        """`x + part(x)`, with the norms of that name of a block of this kind. Profiles show the name."""
        if self.config.norm_placement is NormPlacement.STREAM:
            with jax.named_scope(name):
                x = getattr(self, f"{name}_norm")(x)
                factor = self.config.multipliers.of_stream(name, kind)
                return residual(scaled(x, factor) + self._scaled(part(within(x))))
        if self.config.norm_placement is NormPlacement.POST:
            with jax.named_scope(name):
                return residual(getattr(self, f"{name}_norm")(x + self._scaled(part(within(x)))))
        return residual(x + self._scaled(self._normed(x, name, part, kind)))

    def _scaled(self, y: jax.Array) -> jax.Array:
        """What a branch adds to the residual stream."""
        return y if self.config.residual_multiplier == 1 else y * self.config.residual_multiplier

    def _normed(self, x: jax.Array, name: str, part: Branch, kind: LayerKind) -> jax.Array:
        placement = self.config.norm_placement.of(kind)
        with jax.named_scope(name):
            y = part(within(getattr(self, f"{name}_norm")(x) if placement.of_inputs else x))
            if placement.of_outputs:
                y = getattr(self, f"{name}_post_norm")(y)
            return y


def _make_norms(block: Block, config: TransformerConfig, rngs: nnx.Rngs) -> None:
    if config.one_branch:
        block.branch_norm = config.make_norm(rngs)
        return
    rank, names = config.norm_gate_rank, []
    if config.norm_placement is not NormPlacement.OUTPUT:
        names = ["attention_norm"] if config.residual is Residual.SHARED else ["attention_norm", "mlp_norm"]
    if config.norm_placement.of_outputs:
        names += ["attention_post_norm", "mlp_post_norm"]
    if rank is not None:
        plain = ["mlp_norm"] if config.moe is None or config.dense_layers else []
        for name in ("attention_norm",) if config.moe is None else ("attention_norm", "gated_mlp_norm"):
            setattr(block, name, GatedNorm(config, rank, rngs))
        names = plain
    for name in names:
        setattr(block, name, config.make_norm(rngs))


def _attention_of(block: Block, kind: LayerKind) -> Attention | Latent:
    module = getattr(block, block.config.attention_module(kind))
    assert isinstance(module, Attention | Latent), "the block makes it"
    return module


def mix_rows(mixer: MixerLayer, x_BTD: jax.Array, rows: Rows, shared: Shared) -> jax.Array:
    """What a mixer makes of whole rows, [B, T, D].

    Raises:
      UserError: rows are divided.
    """
    if shared.row_positions is not None:
        raise UserError(
            "Plan.context is above 1, and recurrent layers read a row's tokens one after the other: set Plan.context to "
            "1, and share out by fsdp, tensor or data"
        )
    return layers.named(mixer(x_BTD, rows.segment_ids, shared.number), projections.OUT)


def make_feed_forward(block: Block, config: TransformerConfig, rngs: nnx.Rngs) -> None:
    """Makes a block's MLPs, experts or channel mixer."""
    moe = config.moe
    if config.channel_mixer is not None:
        block.mlp = config.channel_mixer.make(config, rngs)
    elif moe is not None and moe.hash_layers < config.num_layers:
        block.mlp = MoeMLP(config, moe, rngs)
    elif moe is None and (not config.one_branch or LayerKind.FEED_FORWARD in config.kinds):
        block.mlp = MLP(config, rngs)
    if moe is not None and moe.hash_layers:
        setattr(block, "hash_mlp", MoeMLP(config, moe, rngs, hashed=True))  # noqa: B010
    if config.dense_layers:
        setattr(block, "first_mlp", MLP(config, rngs))  # noqa: B010


def _attention(config: TransformerConfig, rngs: nnx.Rngs) -> Attention | Latent:
    return Attention(config, rngs) if config.latent is None else Latent(config, config.latent, rngs)


def residual(x_BTD: jax.Array) -> jax.Array:
    """Shards the residual stream between blocks."""
    return constrain(x_BTD, ("batch", "act_residual", "act_embed"))


def within(x_BTD: jax.Array) -> jax.Array:
    """Shards the input of a block's projections."""
    return constrain(x_BTD, ("batch", "act_time", "act_embed"))


def rotary(
    config: TransformerConfig, rope: Rope, positions_BT: jax.Array, kinds: set[LayerKind], length: int | None = None
) -> dict[LayerKind, Angles]:
    """Rotary angles for each kind of rotated layer; equal ones share a table. `length` is as in `rope.angles`."""
    rotated = {kind for kind in kinds if kind.attends} - {LayerKind.UNROTATED}
    differs = rope.local_theta is not None or rope.local_fraction is not None
    table_of = {kind: (kind is LayerKind.LOCAL and differs, config.attention_of(kind).rotary_size) for kind in rotated}
    tables = {
        (local, size): angles(positions_BT, rope, size, local=local, length=length)
        for local, size in set(table_of.values())
    }
    return {kind: tables[table] for kind, table in table_of.items()}
