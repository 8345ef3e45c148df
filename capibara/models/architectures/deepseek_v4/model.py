"""The layers of DeepSeek-V4, and its decoder."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.kernels import rotary
from capibara.kernels.attention.spec import AttentionSpec
from capibara.models.architectures.decoder import Decoder
from capibara.models.architectures.deepseek_v4.attention import EntryAttention
from capibara.models.architectures.deepseek_v4.config import DeepseekV4Config
from capibara.models.architectures.deepseek_v4.streams import HyperConnection, HyperHead, spread
from capibara.models.architectures.registry import model_of
from capibara.models.cache import dense
from capibara.models.parts.kinds import LayerKind
from capibara.models.parts.transformer import Block, Branch, Rows, Shared, make_feed_forward, residual, within


class DeepseekV4Block(Block):
    """Attention and experts over several residual streams."""

    config: DeepseekV4Config

    def __init__(self, config: DeepseekV4Config, rngs: nnx.Rngs):
        self.config = config
        for kind in dict.fromkeys(config.kinds):
            setattr(self, config.attention_module(kind), EntryAttention(config, kind, rngs))
        make_feed_forward(self, config, rngs)
        self.attention_norm, self.mlp_norm = config.make_norm(rngs), config.make_norm(rngs)
        self.attention_streams, self.mlp_streams = HyperConnection(config, rngs), HyperConnection(config, rngs)

    def attended(
        self, x_BTD: jax.Array, rows: Rows, shared: Shared, kind: AttentionSpec, layer_kind: LayerKind
    ) -> jax.Array:
        by = self.attention_of(layer_kind)
        return by(x_BTD, rows.segment_ids, _angles(rows, layer_kind), shared.row_positions)

    def attended_cached(
        self, x_BTD: jax.Array, layer: dense.LayerCache, now: dense.PrefillInputs,
        rows: Rows, shared: Shared, kind: AttentionSpec, layer_kind: LayerKind,
    ) -> tuple[jax.Array, dense.LayerCache]:  # fmt: skip
        return self.attention_of(layer_kind).cached(x_BTD, layer, now, _angles(rows, layer_kind))

    def attention_of(self, kind: LayerKind) -> EntryAttention:
        """The attention of a layer of this kind."""
        module = getattr(self, self.config.attention_module(kind))
        assert isinstance(module, EntryAttention), "the block makes it"
        return module

    def add(self, x: jax.Array, name: str, part: Branch, kind: LayerKind = LayerKind.GLOBAL) -> jax.Array:
        """The streams [B, T, S, D] with a branch's result."""
        with jax.named_scope(name):
            joined = getattr(self, f"{name}_streams")(x)
            y_BTD = part(within(getattr(self, f"{name}_norm")(residual(joined.input))))
            return joined.add(x, y_BTD)


def _angles(rows: Rows, kind: LayerKind) -> rotary.Angles:
    assert rows.angles is not None, "positions are rotary"
    return rows.angles[kind]


@model_of(DeepseekV4Config)
class DeepseekV4(Decoder):
    """Embedding, layers over several streams, and the final norm."""

    config: DeepseekV4Config
    block = DeepseekV4Block
    layerwise = False

    def _make_layers(self, rngs: nnx.Rngs) -> None:
        super()._make_layers(rngs)
        self.stream_head = HyperHead(self.config, rngs)

    def _entered(self, x_BTD: jax.Array) -> jax.Array:
        B, T, D = x_BTD.shape
        return spread(jnp.broadcast_to(x_BTD[:, :, None], (B, T, self.config.streams, D)))

    def _left(self, x: jax.Array) -> jax.Array:
        return residual(self.stream_head(x))

    def start_cache(
        self, batch: int, length: int, dtype: jax.typing.DTypeLike, encoder_length: int | None = None, spare: int = 0
    ) -> dense.Cache:
        """An empty cache: every layer has a state, of the compute dtype where keys and values would have 8 bits."""
        exact = self.config.dtype.value if jnp.dtype(dtype) == jnp.int8 else dtype
        of_kind = {
            kind: getattr(self.layers, self.config.attention_module(kind)).empty_state for kind in {*self.config.kinds}
        }
        of_layers = tuple(of_kind[kind](batch, length, exact) for kind in self.config.kinds)
        return {"lengths": jnp.zeros(batch, jnp.int32), "layers": of_layers}
