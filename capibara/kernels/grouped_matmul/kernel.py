"""The signature of grouped products, declared once for all implementations."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax


class StoredWeight(Protocol):
    """A frozen weight [G, K, N] in its own storage format, for example in blocks of 4 bits."""

    def astype(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Its numbers, [G, K, N]."""


class Transposed(NamedTuple):
    """A weight that is stored with its outputs first.

    Attributes:
      w_GNK: [G, N, K].
    """

    w_GNK: jax.Array


class GroupedKernel(Protocol):
    """An implementation: a module with these two functions. Shape letters as in dispatch.py."""

    def matmul(
        self, x_MK: jax.Array, w_GKN: jax.Array, sizes_G: jax.Array, tile: int, *, transposed: bool
    ) -> jax.Array:
        """Multiplies each group by its matrix, [M, N]; `transposed`: by its transposed matrix, [M, K]."""

    def weight_gradient(self, x_MK: jax.Array, dy_MN: jax.Array, sizes_G: jax.Array, tile: int) -> jax.Array:
        """x^T dy of each group: [G, K, N], in float32 or x's dtype."""
