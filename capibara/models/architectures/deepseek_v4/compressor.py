"""Entries that stand for windows of tokens: sums of what the tokens give, each dimension with weights of its own.

B rows, T new tokens, S tokens with those before them, J entries, W tokens that an entry is summed over, C size of an entry.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.core.projections import Projection
from capibara.kernels import rotary
from capibara.kernels.scans import convolution
from capibara.models.architectures.deepseek_v4.config import DeepseekV4Config
from capibara.models.cache.dense import STATE, LayerCache, PrefillInputs
from capibara.models.layers import layers, rope
from capibara.models.parts.kinds import LayerKind

_NEVER = 2**30  # the end of an entry that is not there


class Windows(NamedTuple):
    """The windows whose entries are computed.

    Attributes:
      ends: [B, J] the last token of each, by its index among the inputs.
      starts: [B, J] position of the first token after the window before in its document.
      are_there: [B, J] bool; the entries of others mean nothing.
    """

    ends: jax.Array
    starts: jax.Array
    are_there: jax.Array


class Entries(NamedTuple):
    """Entries that queries may see.

    Attributes:
      keys: [B, J, C].
      documents, ends: [B, J] their documents, and the places of their last tokens, as queries have them.
      index_keys: [B, J, I], by which an indexer chooses; None: queries see all.
    """

    keys: jax.Array
    documents: jax.Array
    ends: jax.Array
    index_keys: jax.Array | None


def windows_of_rows(segment_ids_BT: jax.Array, rate: int) -> Windows:
    """The windows of packed rows, each in its document; there are at most T // rate."""
    B, T = segment_ids_BT.shape
    positions = layers.counted(segment_ids_BT)
    index = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    ends_here = (positions % rate == rate - 1) & (segment_ids_BT > 0)
    ends = jnp.sort(jnp.where(ends_here, index, T), axis=1)[:, : T // rate]
    are_there, ends = ends < T, jnp.minimum(ends, T - 1)
    return Windows(ends, jnp.take_along_axis(positions, ends, axis=1) - (rate - 1), are_there)


def windows_of_cache(now: PrefillInputs, rate: int, before: int) -> Windows:
    """The windows that new tokens complete; their inputs have those of `before` tokens in front of them."""
    T = now.positions.shape[1]
    number = now.lengths[:, None] // rate + jnp.arange(-(-T // rate), dtype=jnp.int32)
    last = (number + 1) * rate - 1
    ends = jnp.clip(last - now.lengths[:, None] + before, 0, before + T - 1)
    return Windows(ends, number * rate, last < (now.lengths + now.counts)[:, None])


class Compressor(nnx.Module):
    """Makes entries.

    Where windows overlap, a token gives twice: to the entry of its window, and to the next one.
    """

    def __init__(
        self, config: DeepseekV4Config, kind: LayerKind, size: int, by: tuple[Projection, Projection], rngs: nnx.Rngs
    ):
        self.config, self.by, self.size, self.rate = config, by, size, config.rate_of(kind)
        self.series = 2 if kind is LayerKind.COMPRESSED_SPARSE else 1
        shape = (config.embed_dim, self.series * size)
        for item in by:
            setattr(self, item.name, layers.projection(rngs, item, shape))
        self.position_bias = layers.param(rngs, (self.rate, self.series * size), ("norm", "norm"), layers.zeros)
        self.norm = layers.Norm(size, kind=layers.NormKind.RMS, eps=config.norm_eps, rngs=rngs)

    @property
    def taps(self) -> int:
        """Tokens that an entry is summed over."""
        return self.series * self.rate

    def inputs(self, x_BTD: jax.Array) -> jax.Array:
        """What tokens give, and the logits of its weights: [B, T, 2, series * C]."""

        def dense(by: Projection) -> jax.Array:
            return layers.dense(
                x_BTD, getattr(self, by.name)[...], quantization=self.config.quantization,
                adapter=layers.adapter_of(self, by.name),
            )  # fmt: skip

        return jnp.stack([dense(by) for by in self.by], axis=2)

    def entries(self, inputs_BS2x: jax.Array, windows: Windows) -> jax.Array:
        """[B, J, C], turned by the positions of their windows."""
        C, W, rate = self.size, self.taps, self.rate
        index_BJW = windows.ends[..., None] + jnp.arange(1 - W, 1, dtype=jnp.int32)
        taken = jax.vmap(lambda row, index: row[index])(inputs_BS2x, jnp.maximum(index_BJW, 0))
        values, logits = taken[:, :, :, 0], taken[:, :, :, 1].astype(jnp.float32)
        logits = logits + jnp.tile(self.position_bias[...], (self.series, 1))
        if self.series == 2:  # of the window before the first series, of the window itself the second
            values, logits = (
                jnp.concatenate([x[:, :, :rate, :C], x[:, :, rate:, C:]], axis=2) for x in (values, logits)
            )
        is_before = (windows.starts == 0)[..., None] & (jnp.arange(W) < W - rate)
        shares = jax.nn.softmax(jnp.where(is_before[..., None], -jnp.inf, logits), axis=2)
        # What is before the document may be anything that is finite.
        entries = self.norm(jnp.sum(values * shares.astype(values.dtype), axis=2))
        angles = rope.angles(windows.starts, self.config.rope, self.config.head_size)
        return turned(entries[:, :, None], angles, self.config.rotary_pairs)[:, :, 0]

    def empty_state(self, name: str, batch: int, length: int, dtype: jax.typing.DTypeLike) -> LayerCache:
        """The state of rows of up to `length` tokens that have read nothing."""
        return {
            f"{STATE}_{name}_inputs": jnp.zeros((batch, self.taps - 1, 2, self.series * self.size), dtype),
            f"{STATE}_{name}_entries": jnp.zeros((batch, max(1, length // self.rate), self.size), dtype),
        }

    def cached(
        self, name: str, x_BTD: jax.Array, layer: LayerCache, now: PrefillInputs
    ) -> tuple[jax.Array, LayerCache]:
        """All entries of rows [B, J, C] with those of new tokens, by the numbers of their windows; and the state."""
        inputs, entries = (layer[f"{STATE}_{name}_{part}"] for part in ("inputs", "entries"))
        new = self.inputs(x_BTD)
        windows = windows_of_cache(now, self.rate, self.taps - 1)
        computed = self.entries(jnp.concatenate([inputs.astype(new.dtype), new], axis=1), windows)
        number = jnp.where(windows.are_there, windows.starts // self.rate, entries.shape[1])
        rows = jnp.arange(len(entries), dtype=jnp.int32)[:, None]
        entries = entries.at[rows, number].set(computed.astype(entries.dtype), mode="drop")
        state = {f"{STATE}_{name}_inputs": convolution.last_inputs(new, inputs, now.counts)}
        state |= {f"{STATE}_{name}_entries": entries}
        most = max(1, x_BTD.shape[1] // self.rate) if now.is_prefill else None  # others are not there yet
        return entries[:, :most], state


def ends_of_cache(entries_BJC: jax.Array, lengths_B: jax.Array, rate: int) -> jax.Array:
    """[B, J] the positions of the last tokens of a row's entries; far beyond all for those that are not there."""
    last_J = (jnp.arange(entries_BJC.shape[1], dtype=jnp.int32) + 1) * rate - 1
    return jnp.where(last_J < lengths_B[:, None], last_J, _NEVER)


def ends_of_rows(windows: Windows) -> jax.Array:
    """The same for packed rows, whose tokens are counted from the start of the row."""
    return jnp.where(windows.are_there, windows.ends, _NEVER)


def turned(x_BTNH: jax.Array, angles: rotary.Angles, pairs: rotary.Pairs, *, back: bool = False) -> jax.Array:
    """Rotates the last dimensions of heads, or turns them back."""
    sin, cos = angles
    plain, rest = jnp.split(x_BTNH, (x_BTNH.shape[-1] - 2 * sin.shape[-1],), axis=-1)
    return jnp.concatenate([plain, rotary.rotate(rest, (-sin if back else sin, cos), pairs)], axis=-1)
