"""The small parts of every model. A parameter's shape, dtype, logical axes and initialiser stand in one place."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from capibara import sharding

Initializer = Callable[..., jax.Array]


def param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], init: Initializer) -> nnx.Param:
    """A float32 parameter that carries the logical names of its dimensions."""
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} and axes {axes} differ in length")
    return nnx.Param(init(rngs.params(), shape, jnp.float32), axes=axes)


def normal(std: float) -> Initializer:
    """Normal, cut at two standard deviations, with the standard deviation of what is left."""
    return jax.nn.initializers.truncated_normal(std / 0.87962566103423978)


def fan_in(*in_axes: int, scale: float = 1.0) -> Initializer:
    """Truncated normal of variance scale / fan-in, the fan-in being the product of `in_axes`."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        size = 1
        for axis in in_axes:
            size *= shape[axis]
        return normal((scale / size) ** 0.5)(key, shape, dtype)

    return init


zeros = jax.nn.initializers.zeros
ones = jax.nn.initializers.ones


def dense(x: jax.Array, weight: jax.Array, in_dims: int = 1) -> jax.Array:
    """Contracts the last `in_dims` dimensions of x with the first of the weight, in x's dtype.

    Written as one product of two matrices: a weight gradient that contracts batch and time as two dimensions costs
    XLA's CPU back end a transposed copy of the output gradient and its slower matmul.

    Args:
      x: [B, T, in ...].
      weight: [in ..., out ...].
      in_dims: how many dimensions `in ...` has.

    Returns:
      [B, T, out ...].
    """
    leading, inner, outer = x.shape[:-in_dims], x.shape[x.ndim - in_dims :], weight.shape[in_dims:]
    size = math.prod(inner)
    y = x.reshape(-1, size) @ weight.astype(x.dtype).reshape(size, -1)
    return y.reshape(*leading, *outer)


class NormKind(enum.StrEnum):
    RMS = "rms"
    LAYER = "layer"


class Norm(nnx.Module):
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm (Ba et al. 2016) over the last axis, computed in float32."""

    def __init__(self, size: int, *, kind: NormKind, eps: float, rngs: nnx.Rngs):
        self.kind = kind
        self.eps = eps
        self.scale = param(rngs, (size,), ("norm",), ones)
        if kind is NormKind.LAYER:
            self.bias = param(rngs, (size,), ("norm",), zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = x.dtype
        x = x.astype(jnp.float32)
        if self.kind is NormKind.LAYER:
            x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        x = x * self.scale[...]
        if self.kind is NormKind.LAYER:
            x = x + self.bias[...]
        return x.astype(dtype)


class Activation(enum.StrEnum):
    """SwiGLU and GeGLU (Shazeer 2020) are gated: two projections in; GELU has one."""

    SWIGLU = "swiglu"
    GEGLU = "geglu"
    GELU = "gelu"

    @property
    def gated(self) -> bool:
        return self is not Activation.GELU

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.silu(x) if self is Activation.SWIGLU else jax.nn.gelu(x, approximate=True)


def rope_angles(positions_BT: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Sines and cosines [B, T, 1, H / 2] of rotary position embedding (Su et al. 2021), once for all layers."""
    half = head_dim // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)

    def sin_cos(frequency: jax.Array) -> tuple[jax.Array, jax.Array]:
        angle = positions_BT[:, :, None, None].astype(jnp.float32) * frequency
        return jnp.sin(angle), jnp.cos(angle)

    if sharding.platform() != "cpu" or half % 2:
        return sin_cos(frequency)
    # XLA's CPU back end would compute sines and cosines anew in the fusions of every unrolled layer; what a loop has
    # computed it keeps (an optimization_barrier is removed before fusion).
    halves = jax.lax.map(sin_cos, frequency.reshape(2, -1))
    return tuple(jnp.concatenate([x[0], x[1]], axis=-1) for x in halves)


def rotate(x_BTNH: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the first half of head_dim against the second, as Llama checkpoints expect."""
    sin, cos = angles
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)
