"""4-bit weights: how they are rounded, and how GGUF, GPTQ and AWQ files store them.

A weight is a matrix [O, I] of outputs and inputs. For each output, groups of adjacent inputs share a float16 scale and a
zero: value = scale * (code - zero), with codes from 0 to 15.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from capibara.interop.quantize.formats.words import AWQ_ORDER

_LAST = 15  # the largest code
_MIDDLE = 8  # the zero of a symmetric grid
# Ranges to try, as shares of the full one: clipping the largest values makes the steps of all others smaller.
_RANGES = tuple(float(share) for share in np.linspace(1.1, 0.6, 21))
_Q4_0 = 32  # values in a block of GGUF's Q4_0
_IN_A_WORD = 8  # codes in 32 bits


@dataclasses.dataclass(frozen=True)
class Grid:
    """A quantization grid.

    Attributes:
      group_size: number of inputs that share a scale.
      symmetric: whether the zero is always code 8; else each group has its own.
      signed: whether scales may be negative, so that code 0, the farthest from zero, can represent the largest value
        (Q4_0).
    """

    group_size: int
    symmetric: bool = True
    signed: bool = False

    def nearest(self, weight_OI: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scales and zeros [O, G] of round-to-nearest, which cover the full range of every group."""
        return _host(_scales(self, jnp.asarray(weight_OI), 1.0, 1.0))

    def nearest_values(self, weight_OI: jax.Array) -> jax.Array:
        """A weight [O, I] after round-to-nearest."""
        scales, zeros = (jnp.repeat(x, self.group_size, 1) for x in _scales(self, weight_OI, 1.0, 1.0))
        return _values(_codes(weight_OI, scales, zeros), scales, zeros)

    def fit(self, weight_OI: np.ndarray, importance_I: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scales and zeros [O, G] of the range with the least squared error, weighted by the inputs' importance."""
        return _host(_fit(self, jnp.asarray(weight_OI), jnp.asarray(importance_I, jnp.float32)))


def _host(arrays: tuple[jax.Array, jax.Array]) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(arrays[0]), np.asarray(arrays[1])


@functools.partial(jax.jit, static_argnums=0)
def _scales(grid: Grid, weight_OI: jax.Array, share: jax.Array, sign: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scales and zeros for a share of the range; `sign` is that of symmetric scales that may be negative."""
    groups = weight_OI.reshape(weight_OI.shape[0], -1, grid.group_size)
    if grid.symmetric:
        most = jnp.max(jnp.abs(groups), -1)
        largest = jnp.where(most == jnp.max(groups, -1), most, -most)
        scales = -largest / _MIDDLE * sign if grid.signed else 2 * most / _LAST
        scales = (scales * share).astype(jnp.float16)
        return scales, jnp.full(scales.shape, _MIDDLE, jnp.uint8)
    low, high = jnp.minimum(jnp.min(groups, -1), 0), jnp.maximum(jnp.max(groups, -1), 0)
    scales = ((high - low) * jnp.minimum(share, 1.0) / _LAST).astype(jnp.float16)
    step = scales.astype(jnp.float32)
    zeros = jnp.round(-low * jnp.minimum(share, 1.0) / jnp.where(step > 0, step, 1.0))
    return scales, jnp.clip(zeros, 0, _LAST).astype(jnp.uint8)


_Best = tuple[jax.Array, jax.Array, jax.Array]  # errors, scales and zeros


@functools.partial(jax.jit, static_argnums=0)
def _fit(grid: Grid, weight_OI: jax.Array, importance_I: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = (weight_OI.shape[0], -1, grid.group_size)
    groups, importance = weight_OI.reshape(shape), importance_I.reshape(1, -1, grid.group_size)

    def better(best: _Best, candidate: tuple[jax.Array, jax.Array]) -> tuple[_Best, None]:
        scales, zeros = _scales(grid, weight_OI, *candidate)
        rounded = _values(_codes(groups, scales[..., None], zeros[..., None]), scales[..., None], zeros[..., None])
        error = jnp.sum(importance * jnp.square(rounded - groups), -1)
        chosen = error < best[0]
        retained = [jnp.where(chosen, new, old) for new, old in zip((error, scales, zeros), best)]
        return (retained[0], retained[1], retained[2]), None

    signs = (1.0, -1.0) if grid.symmetric and grid.signed else (1.0,)
    candidates = jnp.asarray([(share, sign) for sign in signs for share in _RANGES], jnp.float32).T
    shares, their_signs = candidates
    first: _Best = (jnp.full(groups.shape[:2], jnp.inf), *_scales(grid, weight_OI, 1.0, 1.0))
    (_, scales, zeros), _ = jax.lax.scan(better, first, (shares, their_signs))
    return scales, zeros


def _codes(values: jax.Array, scales: jax.Array, zeros: jax.Array) -> jax.Array:
    scales = scales.astype(jnp.float32)
    share = values / jnp.where(scales != 0, scales, 1.0)
    return jnp.clip(jnp.round(share) + zeros, 0, _LAST)


def _values(codes: jax.Array, scales: jax.Array, zeros: jax.Array) -> jax.Array:
    return scales.astype(jnp.float32) * (codes - zeros.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Packed:
    """A 4-bit weight.

    Attributes:
      codes: uint8 [O, I].
      scales: float16 [O, G].
      zeros: uint8 [O, G].
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def values(self) -> np.ndarray:
        """The dequantized weight, float32 [O, I]."""
        scales, zeros = (np.repeat(x.astype(np.float32), self.group_size, 1) for x in (self.scales, self.zeros))
        return scales * (self.codes.astype(np.float32) - zeros)

    def moved(self, change: Callable[[np.ndarray], np.ndarray]) -> Packed:
        """The same weight with its outputs reordered.

        Args:
          change: matrix [O, I] -> matrix; it must keep inputs in their groups.
        """
        group = self.group_size
        wide = (np.repeat(x, group, 1) for x in (self.scales, self.zeros))
        return Packed(np.ascontiguousarray(change(self.codes)), *(change(x)[:, ::group] for x in wide))

    def q4_0(self) -> np.ndarray:
        """In GGUF's Q4_0, bytes [O, I / 32 * 18]: a block is its scale and 16 bytes of two codes each."""
        assert self.group_size % _Q4_0 == 0 and (self.zeros == _MIDDLE).all()
        outputs = len(self.codes)
        blocks = self.codes.reshape(outputs, -1, 2, _Q4_0 // 2)
        scales = np.repeat(self.scales, self.group_size // _Q4_0, 1)
        both = [scales.astype("<f2")[..., None].view(np.uint8), blocks[:, :, 0] | (blocks[:, :, 1] << 4)]
        return np.concatenate(both, -1).reshape(outputs, -1)

    def gptq(self, *, zero_offset: int) -> dict[str, np.ndarray]:
        """In GPTQ's format: a word has eight inputs of an output, or the zeros of eight outputs of a group.

        Args:
          zero_offset: subtracted from zeros: 1 in the format "gptq", 0 in "gptq_v2".
        """
        inputs = np.arange(self.codes.shape[1], dtype=np.int32)
        return {
            "qweight": np.ascontiguousarray(words(self.codes).T),
            "qzeros": words(np.ascontiguousarray(self.zeros.T) - np.uint8(zero_offset)),
            "scales": np.ascontiguousarray(self.scales.T),
            "g_idx": inputs // np.int32(self.group_size),
        }

    def awq(self) -> dict[str, np.ndarray]:
        """In AWQ's format ("gemm"): a word has eight outputs of an input, in a special order."""
        return {
            "qweight": words(np.ascontiguousarray(self.codes.T), AWQ_ORDER),
            "qzeros": words(np.ascontiguousarray(self.zeros.T), AWQ_ORDER),
            "scales": np.ascontiguousarray(self.scales.T),
        }


def rounded(weight_OI: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> Packed:
    """Rounds every value to its group's grid."""
    group = weight_OI.shape[1] // scales.shape[1]
    codes = _codes(jnp.asarray(weight_OI), *(jnp.repeat(jnp.asarray(x), group, 1) for x in (scales, zeros)))
    return Packed(np.asarray(codes.astype(jnp.uint8)), scales, zeros)


def words(codes: np.ndarray, order: tuple[int, ...] = tuple(range(_IN_A_WORD))) -> np.ndarray:
    """Packs eight 4-bit codes, neighbours along the last axis, into an int32, the first of `order` in its lowest bits."""
    codes = codes.reshape(len(codes), -1, _IN_A_WORD).astype(np.uint32)
    words = np.zeros(codes.shape[:2], np.uint32)
    for position, of_eight in enumerate(order):
        words |= (codes[..., of_eight] & np.uint32(_LAST)) << np.uint32(4 * position)
    return words.view(np.int32)
