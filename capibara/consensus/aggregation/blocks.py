"""How the values of all nodes come together, a block of coordinates at a time.

`Stacked` has them in one array; with `Exchanged` each device along a mesh axis has those of one node. In both, a block is
read as an array [N, C] of the same coordinates of all nodes, and combined coordinates go back where their leaf's are. Only
a block is ever in float32, or on a device that is not its node's. Shape letters as in points.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp

_MOST = 2**20  # values of a block, of all nodes together
_LEAST = 2**12
_PARTS = 16  # blocks of a leaf at least, if they are not smaller than _LEAST
Axes = tuple[str, ...]
Carry = TypeVar("Carry")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """Elements of a leaf.

    Attributes:
      start: index of the first.
      count: how many.
      done: the elements before this index were in earlier blocks.
    """

    start: jax.Array | int
    count: int
    done: jax.Array | int


class Layout(Protocol):
    """Where the values of the nodes are."""

    @property
    def nodes(self) -> int:
        """How many there are."""

    @property
    def span(self) -> int:
        """Elements of a leaf, on a device, that one coordinate of a block stands for."""

    def size(self, leaf: jax.Array) -> int:
        """Elements S of a leaf."""

    def has_bad(self, leaf: jax.Array) -> jax.Array:
        """A device's part of the counts [N] of nodes with a value that is not finite."""

    def read(self, leaf: jax.Array, block: Block) -> jax.Array:
        """The values [N, C] of a block, float32, with zeros at the end."""

    def read_reference(self, leaf_S: jax.Array, block: Block) -> jax.Array:
        """The same coordinates [C] of the reference."""

    def is_new(self, block: Block) -> jax.Array:
        """Which coordinates [C] of a block were in none before it."""

    def gather(self, combined_C: jax.Array) -> jax.Array:
        """The elements that `read` took, from combined coordinates."""

    def total(self, parts: Sequence[tuple[jax.Array, Axes]]) -> jax.Array:
        """The sum over leaves and devices of parts, each with the mesh axes over which its leaf is sharded."""


@dataclasses.dataclass(frozen=True)
class Stacked:
    """Leaves [N, S]."""

    nodes: int

    @property
    def span(self) -> int:
        return 1

    def size(self, leaf: jax.Array) -> int:
        return leaf.shape[1]

    def has_bad(self, leaf: jax.Array) -> jax.Array:
        return jnp.any(~jnp.isfinite(leaf), axis=1).astype(jnp.int32)

    def read(self, leaf: jax.Array, block: Block) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(leaf, block.start, block.count, axis=1).astype(jnp.float32)

    def read_reference(self, leaf_S: jax.Array, block: Block) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(leaf_S, block.start, block.count).astype(jnp.float32)

    def is_new(self, block: Block) -> jax.Array:
        return block.start + jnp.arange(block.count) >= block.done

    def gather(self, combined_C: jax.Array) -> jax.Array:
        return combined_C

    def total(self, parts: Sequence[tuple[jax.Array, Axes]]) -> jax.Array:
        return sum((part for part, _ in parts[1:]), parts[0][0])


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """Leaves [S], a node's shard on each device along `axis`; this code runs inside shard_map.

    Attributes:
      nodes: devices along the axis.
      axis: name of the mesh axis.
    """

    nodes: int
    axis: str

    @property
    def span(self) -> int:
        return self.nodes

    def size(self, leaf: jax.Array) -> int:
        return leaf.shape[0]

    def has_bad(self, leaf: jax.Array) -> jax.Array:
        is_bad = jnp.any(~jnp.isfinite(leaf)).astype(jnp.int32)
        return jnp.zeros(self.nodes, jnp.int32).at[jax.lax.axis_index(self.axis)].set(is_bad)

    def read(self, leaf: jax.Array, block: Block) -> jax.Array:
        rows_NC = self._rows(leaf, block)
        return jax.lax.all_to_all(rows_NC, self.axis, 0, 0, tiled=True).astype(jnp.float32)

    def read_reference(self, leaf_S: jax.Array, block: Block) -> jax.Array:
        rows_NC = self._rows(leaf_S, block)
        return jax.lax.dynamic_index_in_dim(rows_NC, jax.lax.axis_index(self.axis), keepdims=False).astype(jnp.float32)

    def is_new(self, block: Block) -> jax.Array:
        width = -(-block.count // self.nodes)
        return block.start + jax.lax.axis_index(self.axis) * width + jnp.arange(width) >= block.done

    def gather(self, combined_C: jax.Array) -> jax.Array:
        return jax.lax.all_gather(combined_C, self.axis, tiled=True)

    def total(self, parts: Sequence[tuple[jax.Array, Axes]]) -> jax.Array:
        by_axes: dict[Axes, jax.Array] = {}
        for part, axes in parts:
            by_axes[axes] = by_axes[axes] + part if axes in by_axes else part
        sums = [jax.lax.psum(part, (self.axis, *axes)) for axes, part in by_axes.items()]
        return sum(sums[1:], sums[0])

    def _rows(self, leaf: jax.Array, block: Block) -> jax.Array:
        """Elements as an array [N, C]: row i is what device i combines."""
        taken = jax.lax.dynamic_slice_in_dim(leaf, block.start, block.count)
        return jnp.pad(taken, (0, -block.count % self.nodes)).reshape(self.nodes, -1)


def sweep(layout: Layout, size: int, step: Callable[[Carry, Block], Carry], carry: Carry) -> Carry:
    """Goes through the elements of a leaf in blocks of one size, each of which changes what is carried.

    The last block begins early enough to be whole, so that the step is compiled once; what it repeats is not new in it.
    """
    share = -(-size * layout.nodes // (layout.span * _PARTS))
    count = max(min(max(share, _LEAST), _MOST) // layout.nodes, 1) * layout.span
    if size <= count:
        return step(carry, Block(start=0, count=size, done=0))

    def body(index: jax.Array, carry: Carry) -> Carry:
        done = index * count
        return step(carry, Block(start=jnp.minimum(done, size - count), count=count, done=done))

    return jax.lax.fori_loop(0, -(-size // count), body, carry)
