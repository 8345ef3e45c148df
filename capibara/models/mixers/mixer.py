"""What a mixer is: a configuration that makes a layer's module and the state that it keeps of each row."""

from __future__ import annotations

import abc
import enum
import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.core.projections import Projection
from capibara.core.types import UserError
from capibara.kernels.matmul.quantized import Quantization
from capibara.kernels.scans import convolution
from capibara.models.cache.dense import STATE, LayerCache, PrefillInputs
from capibara.models.layers import layers

_FIRST_STEPS = (0.001, 0.1)  # of a new model


class MixerBias(enum.StrEnum):
    """Which parts of a mixer have biases: its convolution, its projections from and to the model's width, both, or none."""

    NONE = "none"
    CONV = "conv"
    PROJECTIONS = "projections"
    ALL = "all"

    @property
    def of_conv(self) -> bool:
        return self in (MixerBias.CONV, MixerBias.ALL)

    @property
    def of_projections(self) -> bool:
        return self in (MixerBias.PROJECTIONS, MixerBias.ALL)


class Sizes(Protocol):
    """What a mixer reads of a model's configuration."""

    @property
    def embed_dim(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def mlp_dim(self) -> int: ...

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
      number: of the layer in the model, for mixers that are `numbered`.
    """

    segment_ids: jax.Array | None = None
    state: LayerCache | None = None
    counts: jax.Array | None = None
    number: jax.Array | int = 0

    @property
    def before(self) -> jax.Array | None:
        """The recurrence's own state; None: nothing was read before."""
        return None if self.state is None else self.state[STATE]

    def after(self, state: LayerCache, recurrent: jax.Array) -> LayerCache:
        """The state of the layer with this of its recurrence; {} where none is wanted."""
        return state if self.state is None else state | {STATE: recurrent}

    def are_real(self, length: int) -> jax.Array | None:
        """[B, T], whether a token is real; None: all are."""
        return None if self.counts is None else jnp.arange(length, dtype=jnp.int32) < self.counts[:, None]

    def real(self, x_BTx: jax.Array) -> jax.Array:
        """Replaces what is at tokens that are not real by 0."""
        if (real_BT := self.are_real(x_BTx.shape[1])) is None:
            return x_BTx
        return jnp.where(real_BT.reshape(*real_BT.shape, *(1,) * (x_BTx.ndim - 2)), x_BTx, 0)


class MixerLayer(nnx.Module):
    """A layer's mixer, in the place of parts.attention.Attention.

    A projection's weight is an attribute of its name. Its bias and its convolution, where it has them, are NAME_bias,
    NAME_conv and NAME_conv_bias.

    Attributes:
      sizes: the model's.
      bias: which parts have biases.
    """

    sizes: Sizes
    bias: MixerBias = MixerBias.NONE

    @abc.abstractmethod
    def mix(self, x_BTD: jax.Array, rows: Rows) -> tuple[jax.Array, LayerCache]:
        """The results [B, T, D], and the state after the last real token ({} if `rows` has none)."""

    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array, number: jax.Array | int = 0) -> jax.Array:
        """The results for packed rows, in the layer of this number."""
        return self.mix(x_BTD, Rows(segment_ids_BT, number=number))[0]

    def cached(
        self, x_BTD: jax.Array, layer: LayerCache, now: PrefillInputs, number: jax.Array | int = 0
    ) -> tuple[jax.Array, LayerCache]:
        """The results for the next tokens of rows, in the layer of this number, and their updated state."""
        return self.mix(x_BTD, Rows(state=layer, counts=now.counts, number=number))

    def project(self, by: Projection, x: jax.Array) -> jax.Array:
        """The product with the projection's weight, plus its bias."""
        weight, adapter = getattr(self, by.name)[...], layers.adapter_of(self, by.name)
        y = layers.dense(x, weight, len(by.in_axes), self.sizes.quantization, adapter)
        biased = self.bias.of_projections and "embed" in by.axes
        return y + getattr(self, f"{by.name}_bias")[...].astype(y.dtype) if biased else y

    def convolve(self, x: jax.Array, rows: Rows, weight: jax.Array, inputs: str) -> tuple[jax.Array, LayerCache]:
        """The convolution, and the inputs of it that the next tokens need.

        Args:
          x: [B, T, ...] its inputs.
          rows: whose they are.
          weight: [..., K].
          inputs: their name in the state, without STATE.
        """
        name = f"{STATE}_{inputs}"
        before = None if rows.state is None else rows.state[name]
        y = convolution.convolve(x, weight, rows.segment_ids, before)
        if before is None or rows.counts is None:
            return y, {}
        return y, {name: convolution.last_inputs(x, before, rows.counts)}

    def convolved(
        self,
        projections: tuple[Projection, ...],
        x_BTD: jax.Array,
        rows: Rows,
        activation: Callable[[jax.Array], jax.Array] | None = jax.nn.silu,
    ) -> tuple[list[jax.Array], LayerCache]:
        """What these project, after their convolutions and the activation, and the inputs that the next tokens need."""
        convolved: list[jax.Array] = []
        state: LayerCache = {}
        for by in projections:
            weight = getattr(self, f"{by.name}_conv")[...]
            y, last = self.convolve(self.project(by, x_BTD), rows, weight, by.name)
            if self.bias.of_conv:
                y = y + getattr(self, f"{by.name}_conv_bias")[...].astype(y.dtype)
            convolved.append(y if activation is None else activation(y))
            state |= last
        return convolved, state


class Mixer(abc.ABC):
    """A mixer's configuration: a frozen dataclass that is bound by Gin.

    Attributes:
      taps: tokens that a convolution of it sees, the current one included; None: it has none.
      numbered: whether layers differ by their numbers.
    """

    taps: int | None = None
    numbered: ClassVar[bool] = False

    def check(self, *sizes: str, multiple: tuple[str, str] | None = None) -> None:
        """Refuses sizes below 1, a first of two sizes that is no multiple of the second, and convolutions of one token."""
        name = type(self).__name__
        for size in sizes:
            if getattr(self, size) < 1:
                raise UserError(f"{name}.{size} is {getattr(self, size)}, must be at least 1")
        if self.taps is not None and self.taps < 2:
            raise UserError(f"{name}.taps is {self.taps}, must be at least 2: try {type(self).taps}")
        if multiple is None:
            return
        of, divisor = (getattr(self, size) for size in multiple)
        if of % divisor:
            raise UserError(
                f"{name}.{multiple[0]} ({of}) must be a multiple of {multiple[1]} ({divisor}): try "
                f"{max(1, round(of / divisor)) * divisor}"
            )

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


def log_of_rates(least: float) -> layers.Initializer:
    """Logarithms of rates from this one to 16, as the published models begin."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return jnp.log(jax.random.uniform(key, shape, dtype, least, 16.0))

    return init


def inverse_of_steps(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """What softplus makes steps of that are spread evenly over their logarithms."""
    least, most = map(math.log, _FIRST_STEPS)
    step = jnp.exp(jax.random.uniform(key, shape, dtype, least, most))
    return step + jnp.log(-jnp.expm1(-step))
