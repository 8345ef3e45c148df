"""Stores optimizer moments in bfloat16 or 8 bits between updates; every update computes in float32.

This applies to the moments of matrices (see optim.base.decay_mask). Those of biases and norm scales, a thousandth of the
whole, stay float32.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from capibara.core.tree import is_axes
from capibara.core.types import Params, PyTree
from capibara.optim.matrices import Axes

Path = tuple[Any, ...]

_BLOCK = 128
_SMALLEST_BLOCK, _LARGEST_BLOCK = 16, 1024
_SIGNED, _UNSIGNED = 127, 255  # largest codes
_EMBED = ("embed", "expert_embed")


class StateDtype(enum.StrEnum):
    """How moments are stored between updates.

    float32: unchanged.

    bfloat16: rounded stochastically, so that the mean is exact. Rounding to nearest would lose the decay of a second
    moment: with b2 0.999 an update changes it by a thousandth, a quarter of bfloat16's resolution, so it would only grow.

    int8: blocks of about 128 values share a float32 scale, their largest magnitude (Dettmers et al. 2021,
    arXiv:2110.02861). A code is the signed fourth root of value / scale, which covers many orders of magnitude as their
    dynamic map does, with a similar error and without a table look-up per value. Codes are rounded stochastically, too;
    those of a second moment never to zero, which would make the update a division by zero (Li et al. 2023,
    arXiv:2309.01507).
    """

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"


class Blocks(NamedTuple):
    """A moment in 8 bits.

    Attributes:
      codes: int8, or uint8 where no value is negative; the moment's shape.
      scales: float32, the largest magnitude of each block; the moment's shape with one entry per block.
    """

    codes: jax.Array
    scales: jax.Array


class StoredState(NamedTuple):
    """State of `stored`: the number of updates, int32, and the inner state with its moments in the storage dtype."""

    count: jax.Array  # type: ignore[assignment]  # checkpoints have it by this name; no state is asked for tuple.count
    inner: optax.OptState


def stored(inner: optax.GradientTransformation, dtype: StateDtype, axes: PyTree) -> optax.GradientTransformation:
    """The same transformation with the moments of weights kept in `dtype` between updates.

    Args:
      inner: a transformation whose state has the moments as float32 trees like the parameters.
      dtype: the storage dtype.
      axes: tree like the parameters, of the logical axes of each weight whose moments are stored in `dtype`; None
        (no leaf) for all others.
    """
    if dtype is StateDtype.FLOAT32:
        return inner
    weights = dict(jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes))

    def init(params: Params) -> StoredState:
        state = inner.init(params)
        return StoredState(jnp.zeros((), jnp.int32), _encode(state, weights, _shapes(params), dtype, 0))

    def update(
        updates: optax.Updates, state: StoredState, params: Params | None = None
    ) -> tuple[optax.Updates, StoredState]:
        shapes = _shapes(updates)
        updates, new = inner.update(updates, _decode(state.inner), params)
        return updates, StoredState(state.count + 1, _encode(new, weights, shapes, dtype, state.count + 1))

    return optax.GradientTransformation(init, update)


def parameter_path(path: Path, parameters: Container[Path]) -> Path | None:
    """The path in `parameters` of the parameter to which a leaf of an optimizer's state belongs; None: to none.

    The state contains trees like the parameters, so a leaf's path ends with its parameter's path.
    """
    if path and getattr(path[-1], "name", None) in Blocks._fields:
        path = path[:-1]
    return next((path[i:] for i in range(len(path) + 1) if path[i:] in parameters), None)


def block_dimension(axes: tuple[str | None, ...]) -> int:
    """The dimension along which a weight is split into blocks: the last one that is not "embed".

    A block must be on one device, and "embed" is sharded over many (fsdp, context and expert together).
    """
    return next((i for i in reversed(range(len(axes))) if axes[i] not in _EMBED), len(axes) - 1)


def block_size(size: int) -> int | None:
    """The size of a block along a dimension of this size, a divisor of it; None: none is suitable."""
    if size <= _BLOCK:
        return size
    divisors = [d for d in range(_SMALLEST_BLOCK, _LARGEST_BLOCK + 1) if size % d == 0]
    return min(divisors, key=lambda d: max(d / _BLOCK, _BLOCK / d), default=None)


def quantize(x: jax.Array, dim: int, seed: jax.typing.ArrayLike, *, signed: bool) -> Blocks:
    """Rounds a float32 array stochastically to 8 bits in blocks along `dim`."""
    largest_code, smallest_code = (_SIGNED, 0) if signed else (_UNSIGNED, 1)
    size = block_size(x.shape[dim])
    blocked = x.reshape(*x.shape[:dim], -1, size, *x.shape[dim + 1 :])
    scales = jnp.max(jnp.abs(blocked), axis=dim + 1)
    share = (jnp.abs(blocked) / _divisor(scales, dim)).reshape(x.shape)
    below = jnp.clip(jnp.floor(jnp.sqrt(jnp.sqrt(share)) * largest_code), smallest_code, largest_code - 1)
    low, high = _share(below, largest_code), _share(below + 1, largest_code)
    codes = below + (_uniform(x.shape, seed) < (share - low) / (high - low))
    return Blocks((jnp.sign(x) * codes).astype(jnp.int8) if signed else codes.astype(jnp.uint8), scales)


def dequantize(blocks: Blocks) -> jax.Array:
    """The float32 values of `blocks`."""
    codes, scales = blocks
    dim = next((i for i in range(codes.ndim) if codes.shape[i] != scales.shape[i]), codes.ndim - 1)
    signed = codes.dtype == jnp.int8
    share = _share(codes.astype(jnp.float32), _SIGNED if signed else _UNSIGNED)
    blocked = share.reshape(*scales.shape[: dim + 1], -1, *scales.shape[dim + 1 :])
    values = (blocked * jnp.expand_dims(scales, dim + 1)).reshape(codes.shape)
    return jnp.sign(codes).astype(jnp.float32) * values if signed else values


def round_to_bfloat16(x: jax.Array, seed: jax.typing.ArrayLike) -> jax.Array:
    """Rounds a float32 array stochastically to bfloat16."""
    # bfloat16 is the upper half of float32: noise added to the lower half carries into it with the right probability.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + (_bits(x.shape, seed) >> 16)
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def _encode(
    state: optax.OptState,
    weights: Mapping[Path, Axes],
    shapes: Mapping[Path, tuple[int, ...]],
    dtype: StateDtype,
    count: jax.Array | int,
) -> PyTree:
    leaves, structure = jax.tree_util.tree_flatten_with_path(state)

    def encode_leaf(index: int, path: Path, leaf: jax.Array) -> jax.Array | Blocks:
        owner = parameter_path(path, weights)
        if owner is None or leaf.shape != shapes[owner]:
            return leaf
        seed = count * len(leaves) + index
        if dtype is StateDtype.BFLOAT16:
            return round_to_bfloat16(leaf, seed)
        dim = block_dimension(weights[owner])
        if block_size(leaf.shape[dim]) is None:
            return leaf
        second_moment = any(getattr(key, "name", None) == "nu" for key in path)
        return quantize(leaf, dim, seed, signed=not second_moment)

    return jax.tree.unflatten(structure, [encode_leaf(index, *item) for index, item in enumerate(leaves)])


def _decode(state: PyTree) -> PyTree:
    def decode_leaf(leaf: jax.Array | Blocks) -> jax.Array:
        if isinstance(leaf, Blocks):
            return dequantize(leaf)
        return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf

    return jax.tree.map(decode_leaf, state, is_leaf=lambda x: isinstance(x, Blocks))


def _divisor(scales: jax.Array, dim: int) -> jax.Array:
    return jnp.expand_dims(jnp.where(scales > 0, scales, 1.0), dim + 1)


def _share(codes: jax.Array, largest: int) -> jax.Array:
    return jnp.square(jnp.square(codes / largest))


def _uniform(shape: tuple[int, ...], seed: jax.typing.ArrayLike) -> jax.Array:
    """float32 in [0, 1)."""
    return (_bits(shape, seed) >> 8).astype(jnp.float32) * 2.0**-24


def _bits(shape: tuple[int, ...], seed: jax.typing.ArrayLike) -> jax.Array:
    """Uniform uint32: a hash of the element's index and the seed.

    Fused into the rounding it costs a few operations per value, while jax.random's threefry costs a hundred. Like that, it
    does not depend on the mesh.
    """
    index = jnp.zeros((), jnp.uint32)
    for dim, size in enumerate(shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
    return _mixed(index + _mixed(jnp.asarray(seed).astype(jnp.uint32) + jnp.uint32(0x9E3779B9)))


def _mixed(h: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3 (Appleby 2011): every bit of the result depends on every bit of `h`."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def _shapes(params: PyTree) -> dict[Path, tuple[int, ...]]:
    return {path: leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
