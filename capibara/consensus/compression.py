"""Outer gradients in few bits, for nodes that are far apart: blocks of integers with a float32 scale each.

What a round's rounding loses can be added to the next round's gradient (error feedback, Karimireddy et al. 2019): then
nothing is lost over the rounds but what the last one still holds.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from capibara.config import configurable
from capibara.core.types import PyTree, UserError

_WIDTHS = (4, 8)


class Encoded(NamedTuple):
    """An array in few bits.

    Attributes:
      codes: int8 [blocks, block], or for 4 bits uint8 [blocks, block / 2]: two values a byte, the first in its low half.
      scales: float32 [blocks, 1]; a value is its code times its block's scale.
    """

    codes: jax.Array
    scales: jax.Array


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Compression:
    """How a tree of gradients is sent.

    Attributes:
      bits: of a value, 8 or 4.
      block: values that share a scale, an even number.
      error_feedback: whether what was lost is added to the next gradient.
    """

    bits: int = 8
    block: int = 256
    error_feedback: bool = True

    def __post_init__(self) -> None:
        if self.bits not in _WIDTHS:
            raise UserError(f"Compression.bits is {self.bits}, must be 8 or 4: try 8")
        if self.block < 2 or self.block % 2:
            raise UserError(f"Compression.block is {self.block}, must be even and at least 2: try 256")

    def init(self, gradient: PyTree) -> PyTree:
        """What was lost before the first round: zeros, float32 in the gradient's shapes."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), gradient)

    def encode(self, gradient: PyTree, lost: PyTree) -> tuple[PyTree, PyTree]:
        """The gradient as a tree of Encoded, and what the rounding lost, for the next round.

        A block with a value that is not finite decodes to NaN, by which an aggregation masks its node; it loses nothing.

        Args:
          gradient: arrays of any shape and floating dtype.
          lost: of the round before, or `init`.
        """
        with_residual = jax.tree.map(lambda x, rest: x.astype(jnp.float32) + rest, gradient, lost)
        sent = jax.tree.map(self._encode, with_residual)
        if not self.error_feedback:
            return sent, lost
        got = self.decode(sent, with_residual)
        return sent, jax.tree.map(lambda x, y: jnp.where(jnp.isfinite(y), x - y, 0.0), with_residual, got)

    def decode(self, sent: PyTree, like: PyTree) -> PyTree:
        """The gradient, float32.

        Args:
          sent: of `encode`.
          like: a tree with the gradient's shapes.
        """
        return jax.tree.map(lambda x, item: self._decode(item, x.shape), like, sent)

    def bytes_of(self, like: PyTree) -> int:
        """The bytes that are sent for a tree with such shapes."""
        blocks = [math.ceil(math.prod(x.shape) / self.block) for x in jax.tree.leaves(like)]
        return sum(blocks) * (self.block * self.bits // 8 + 4)

    def _encode(self, x: jax.Array) -> Encoded:
        blocks = math.ceil(x.size / self.block)
        values = jnp.pad(x.reshape(-1), (0, blocks * self.block - x.size)).reshape(blocks, self.block)
        most = 2 ** (self.bits - 1) - 1
        scales = jnp.max(jnp.abs(values), axis=1, keepdims=True) / most
        scales = jnp.where(jnp.isfinite(scales), scales, jnp.nan)
        codes = jnp.round(values / jnp.where(scales > 0, scales, 1.0)).astype(jnp.int8)
        if self.bits == 8:
            return Encoded(codes, scales)
        low, high = (codes[:, at::2].astype(jnp.uint8) & 15 for at in (0, 1))
        return Encoded(low | high << 4, scales)

    def _decode(self, sent: Encoded, shape: tuple[int, ...]) -> jax.Array:
        codes = sent.codes
        if self.bits == 4:
            halves = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1).astype(jnp.int8)
            codes = jnp.where(halves > 7, halves - 16, halves)
        return (codes * sent.scales).reshape(-1)[: math.prod(shape)].reshape(shape)
