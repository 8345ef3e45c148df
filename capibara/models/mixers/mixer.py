"""What a mixer is: a configuration that makes a layer's module and the state that it keeps of each row."""

from __future__ import annotations

import abc
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.kernels.matmul.quantized import Quantization
from capibara.models.cache.dense import LayerCache, PrefillInputs

STATE = "state"
"""The names of a state's arrays begin with it; those of cached keys and values do not."""


class Sizes(Protocol):
    """What a mixer reads of a model's configuration."""

    @property
    def embed_dim(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def norm_eps(self) -> float: ...

    @property
    def quantization(self) -> Quantization: ...


class Rows(NamedTuple):
    """What a mixer knows of the rows that it reads.

    Attributes:
      segment_ids: [B, T] documents, each of which begins with an empty state; None: each row goes on with one.
      state: what the rows have read before; None: nothing, and no state is wanted.
      counts: [B], the number of real tokens, the first of each row; None: all are real.
    """

    segment_ids: jax.Array | None = None
    state: LayerCache | None = None
    counts: jax.Array | None = None

    def real(self, x_BTx: jax.Array) -> jax.Array:
        """Replaces what is at tokens that are not real by 0."""
        if self.counts is None:
            return x_BTx
        real_BT = jnp.arange(x_BTx.shape[1], dtype=jnp.int32) < self.counts[:, None]
        return jnp.where(real_BT.reshape(*real_BT.shape, *(1,) * (x_BTx.ndim - 2)), x_BTx, 0)


class MixerLayer(nnx.Module):
    """A layer's mixer, in the place of parts.attention.Attention."""

    @abc.abstractmethod
    def mix(self, x_BTD: jax.Array, rows: Rows) -> tuple[jax.Array, LayerCache]:
        """The results [B, T, D], and the state after the last real token ({} if `rows` has none)."""

    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
        """The results for packed rows."""
        return self.mix(x_BTD, Rows(segment_ids_BT))[0]

    def cached(self, x_BTD: jax.Array, layer: LayerCache, now: PrefillInputs) -> tuple[jax.Array, LayerCache]:
        """The results for the next tokens of rows, and their updated state."""
        return self.mix(x_BTD, Rows(state=layer, counts=now.counts))


class Mixer(abc.ABC):
    """A mixer's configuration: a frozen dataclass that is bound by Gin."""

    @abc.abstractmethod
    def make(self, sizes: Sizes, rngs: nnx.Rngs) -> MixerLayer:
        """A layer's module."""

    @abc.abstractmethod
    def empty_state(self, sizes: Sizes, batch: int, dtype: jax.typing.DTypeLike) -> LayerCache:
        """The state of rows that have read nothing; `dtype` of what is stored as it was computed."""

    def narrower(self, factor: float) -> Mixer:
        """The mixer of a model whose width is multiplied by this factor, for emulation; numbers of heads stay."""
        return self

    @abc.abstractmethod
    def flops_per_token(self, sizes: Sizes) -> float:
        """FLOPs of a forward pass for each token beside those of the weights."""
