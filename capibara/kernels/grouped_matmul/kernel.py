"""What every way of multiplying groups offers: the signature stands here once."""

from __future__ import annotations

from typing import Protocol

import jax


class StoredWeight(Protocol):
    """A weight [G, K, N] without a gradient, in a form of its own: in blocks of 4 bits, say."""

    def astype(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Its numbers, [G, K, N]."""


class GroupedKernel(Protocol):
    """A way: a module with these two functions. Letters as in dispatch.py."""

    def matmul(
        self, x_MK: jax.Array, w_GKN: jax.Array, sizes_G: jax.Array, tile: int, *, transposed: bool
    ) -> jax.Array:
        """Each group times its matrix, [M, N]; `transposed`: [M, N] times the matrices transposed, [M, K]."""

    def weight_gradient(self, x_MK: jax.Array, dy_MN: jax.Array, sizes_G: jax.Array, tile: int) -> jax.Array:
        """Each group's x^T dy: [G, K, N], in float32 or the dtype of x."""
