"""A decoder whose last layers read keys and values of earlier ones, and whose layers may have embeddings of their own."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from capibara import sharding
from capibara.core.types import Batch, Params, UserError
from capibara.models.adapters import unmerged
from capibara.models.architectures.decoder import DecoderBase
from capibara.models.architectures.registry import ReadBatch
from capibara.models.architectures.shared_keys.block import CachedLayer, KeysValues, LayerInputs, SharedKeysBlock
from capibara.models.architectures.shared_keys.config import Segment, SharedKeysConfig
from capibara.models.cache import dense
from capibara.models.layers import layers, stack
from capibara.models.layers.embedding import lookup
from capibara.models.layers.layers import Norm
from capibara.models.layers.stack import LayerLoop
from capibara.models.parts.kinds import LayerKind
from capibara.models.parts.transformer import Rows
from capibara.sharding import RematPolicy, constrain

_OfLayer = tuple[jax.Array | None, jax.Array | None]  # its embedding of every token, its MLP's width where they differ
_Beside = tuple[Rows, dict[LayerKind, KeysValues]]


class SharedKeysDecoder(DecoderBase):
    """Embeddings, layers, final norm.

    Parameters of `layers` have an axis of all layers, or of those that have their module
    (Layers.module_layers), but keys and values one of those of them that have some
    (SharedKeysConfig.kv_layers): the first ones.
    """

    packs_prompts: ClassVar[bool] = True
    config: SharedKeysConfig

    def __init__(self, config: SharedKeysConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        D, P = config.embed_dim, config.num_layers * config.per_layer_dim
        if not P:
            return
        shape = (config.per_layer_vocab_size, P)
        self.per_layer_embedding = layers.param(rngs, shape, ("vocab", "embed"), layers.normal(0.02))
        self.per_layer_projection = layers.param(rngs, (D, P), ("embed", None), layers.fan_in(0))
        self.per_layer_norm = Norm(
            config.per_layer_dim, kind=config.norm, eps=config.norm_eps, rngs=rngs, scale=config.norm_scale
        )

    @abc.abstractmethod
    def _block(self, rngs: nnx.Rngs) -> SharedKeysBlock:
        """A layer."""

    def _entered(self, embedding_BTD: jax.Array) -> jax.Array:
        """The residual stream, or streams, before the first layer."""
        return embedding_BTD

    def _left(self, x: jax.Array) -> jax.Array:
        """[B, T, D], what the last layer's stream, or streams, are to the final norm."""
        return x

    def _make_layers(self, rngs: nnx.Rngs) -> None:
        config = self.config
        self.layers = stack.stacked(self._block, rngs, config.num_layers)
        for module, numbers in config.module_layers.items():
            stack.keep_layers(getattr(self.layers, module), numbers)
        for kind in dict.fromkeys(config.kinds):
            attention = self.layers.attention_of(kind)
            count = sum(
                config.attention_module(of) == config.attention_module(kind) for of in config.kinds[: config.kv_layers]
            )
            for owner, name in ((attention, "key"), (attention, "value"), (attention.key_norm, "scale")):
                if (whole := getattr(owner, name, None)) is not None:
                    setattr(owner, name, nnx.Param(whole[...][:count], axes=whole.axes))

    def __call__(self, batch: Batch, remat: RematPolicy, step: jax.Array | None) -> tuple[jax.Array, stack.Stats]:
        """The final hidden states [B, T, D], normalised, in the compute dtype; and the layers' statistics [L, ...]."""
        if sharding.active_pipeline() is not None:
            raise UserError(
                f"Plan.stage is above 1, and the last layers of a {type(self).__name__} read keys and values of earlier stages: "
                "set Plan.stage to 1, and share out by fsdp, tensor or context"
            )
        rows, embedding = self._rows(batch), self._embed(batch)
        x, per_layer = self._entered(embedding), self._per_layer(embedding, batch["tokens"])
        of_layers = (per_layer, None if self.config.mlp_dims is None else jnp.asarray(self.config.mlp_dims, jnp.int32))
        shared: dict[LayerKind, KeysValues] = {}
        of_segments: list[stack.Stats] = []
        for segment in self.config.segments():
            x, stored, stats = self._segment(
                segment, x, rows, of_layers, shared, remat, step, batch.get("row_positions")
            )
            shared |= stored
            of_segments.append(stats)
        return self._normed(self._left(x)), jax.tree.map(lambda *parts: jnp.concatenate(parts), *of_segments)

    def _segment(
        self,
        segment: Segment,
        x: jax.Array,
        rows: Rows,
        of_layers: _OfLayer,
        shared: dict[LayerKind, KeysValues],
        remat: RematPolicy,
        step: jax.Array | None,
        row_positions_T: jax.Array | None,
    ) -> tuple[jax.Array, dict[LayerKind, KeysValues], stack.Stats]:
        """The streams after some layers, the keys and values that later ones read, by kind of layer, and statistics."""
        config, specs = self.config, self._kinds()
        kinds = config.kinds[segment.start : segment.stop]

        def apply(
            block: SharedKeysBlock, x: jax.Array, per_layer: _Beside, kind: LayerKind, of_layer: _OfLayer
        ) -> tuple[jax.Array, stack.Stats]:
            rows, shared = per_layer
            assert rows.angles is not None, "positions are rotary"
            inputs = LayerInputs(
                kind, of_layer[0], config.sparsity(segment.start), of_layer[1],
                training=step is not None, segment_ids=rows.segment_ids, stats={},
            )  # fmt: skip
            read = shared[kind] if segment.reads else None
            x, (k, v) = block(x, inputs, read, specs[kind], rows.angles[kind], rows.segment_ids, row_positions_T)
            return x, inputs.stats | ({f"{kind}_key": k, f"{kind}_value": v} if segment.stores else {})

        start = segment.start % len(config.layer_pattern)
        pattern = config.layer_pattern[start:] + config.layer_pattern[:start]
        loop = LayerLoop.UNROLL if segment.stores else config.layer_loop  # a scan would stack what a few layers store
        of_segment = jax.tree.map(lambda a: a[segment.start : segment.stop], of_layers)
        span, both = (segment.start, segment.stop), (rows, shared)
        x, results = stack.run(
            self.layers, x, both, apply, pattern, loop, remat,
            all_trained=config.lora is None and not config.untrained,
            of_layers=of_segment, span=span, some=config.module_layers,
        )  # fmt: skip
        stored = set(kinds) if segment.stores else set()
        retained = {kind: (results.pop(f"{kind}_key")[-1], results.pop(f"{kind}_value")[-1]) for kind in stored}
        return x, retained, results

    def start_cache(
        self, batch: int, length: int, dtype: jax.typing.DTypeLike, encoder_length: int | None = None, spare: int = 0
    ) -> dense.Cache:
        """As of every decoder; of the layers that have keys and values."""
        cache = super().start_cache(batch, length, dtype, encoder_length, spare)
        return cache | {"layers": cache["layers"][: self.config.kv_layers]}

    def read(
        self, values: Sequence[Params], batch: ReadBatch, cache: dense.Cache, is_prefill: bool
    ) -> tuple[jax.Array, dense.Cache]:
        """As of every decoder."""
        config, specs = self.config, self._kinds()
        now = dense.prefill_inputs(batch["tokens"], batch["counts"], cache, is_prefill, batch.get("packed"))
        whole = {"tokens": batch["tokens"], "positions": now.positions, "segment_ids": now.segments}
        rows, embedding = self._rows(whole, self._length(cache)), self._embed(whole)
        assert rows.angles is not None, "positions are rotary"
        x, per_layer = self._entered(embedding), self._per_layer(embedding, batch["tokens"])
        sources: dict[LayerKind, CachedLayer] = {}
        of_layers: list[dense.LayerCache] = []
        for index, block in enumerate(stack.each(self.layers, values)):
            unmerged.attach(block, batch.get("adapters"), index)
            kind, width = config.kinds[index], None if config.mlp_dims is None else config.mlp_dims[index]
            embedding_BTP = None if per_layer is None else per_layer[index]
            inputs = LayerInputs(
                kind, embedding_BTP, config.sparsity(index), width,
                training=False, segment_ids=whole["segment_ids"], stats={},
            )  # fmt: skip
            stores_keys = index < config.kv_layers
            source = CachedLayer(cache["layers"][index]) if stores_keys else sources[kind]
            x, source = block.cached(x, inputs, source, now, specs[kind], rows.angles[kind])
            if stores_keys:
                assert source.after is not None, "it is written"
                sources[kind] = source
                of_layers.append(source.after)
        cache = cache | {"lengths": now.lengths + now.counts, "layers": tuple(of_layers)}
        return self._normed(self._left(x)), cache

    def _per_layer(self, embedding_BTD: jax.Array, tokens_BT: jax.Array) -> jax.Array | None:
        """[L, B, T, P]: the embedding that each layer has of every token; None: they have none."""
        config, dtype = self.config, embedding_BTD.dtype
        if not config.per_layer_dim:
            return None
        projected = layers.dense(embedding_BTD, self.per_layer_projection[...]) * config.embed_dim**-0.5
        shape = (*tokens_BT.shape, config.num_layers, config.per_layer_dim)
        projected = self.per_layer_norm(projected.reshape(shape))
        known_BT = jnp.where(tokens_BT < config.per_layer_vocab_size, tokens_BT, 0)
        looked_up = lookup(self.per_layer_embedding[...], known_BT, dtype).reshape(shape)
        joined = (projected + looked_up * config.per_layer_dim**0.5) * math.sqrt(0.5)
        return constrain(jnp.moveaxis(joined, 2, 0), (None, "batch", "act_residual", None))
