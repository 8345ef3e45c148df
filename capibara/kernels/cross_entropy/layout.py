"""How a mesh shards the loss: its rows and positions, the output projection ("head", [V, D]) and its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from capibara import sharding
from capibara.sharding import ActiveMesh, Rules


class Layout(NamedTuple):
    """The mesh axes that shard the rows, the positions and the head's D; without the first two all is local.

    `vocab_shards`: the number of devices that the vocabulary is sharded over (by the partitioner). `trains_head`:
    whether the head has a gradient.
    """

    mesh: ActiveMesh | None
    row_axes: tuple[str, ...]
    time_axes: tuple[str, ...]
    head_axes: tuple[str, ...]
    vocab_shards: int
    trains_head: bool

    @property
    def axes(self) -> tuple[str, ...]:
        return self.row_axes + self.time_axes

    @property
    def head_shards(self) -> int:
        """The number of devices that the head's D is sharded over."""
        return math.prod(self.mesh.shape[axis] for axis in self.head_axes) if self.mesh else 1

    def reduced(self, x: jax.Array) -> jax.Array:
        """[shards of the head's D, ...] -> the sum of all devices' [...] of its own shard."""
        others = tuple(axis for axis in self.axes if axis not in self.head_axes)
        x = jax.lax.psum(x, others) if others else x
        return (jax.lax.psum_scatter(x, self.head_axes, tiled=True) if self.head_axes else x)[0]


def layout_of(targets_BT: jax.Array, head_VD: jax.Array, trains_head: bool) -> Layout:
    """The layout on the active mesh."""
    row_axes, time_axes = _loss_axes(*targets_BT.shape)
    active = sharding.active()
    mesh = active[0] if active else None
    head_axes = _head_axes(*active, row_axes + time_axes, head_VD.shape[1]) if active else ()
    shards = math.prod(active[0].shape[axis] for axis in active[1].vocab) if active else 1
    return Layout(mesh, row_axes, time_axes, head_axes, shards if len(head_VD) % shards == 0 else 1, trains_head)


def _head_axes(mesh: ActiveMesh, rules: Rules, axes: tuple[str, ...], size: int) -> tuple[str, ...]:
    """Those axes of the loss that shard the head's D too."""
    retained = tuple(axis for axis in rules.embed if axis in axes)
    return retained if size % math.prod(mesh.shape[axis] for axis in retained) == 0 else ()


def _loss_axes(rows: int, length: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Mesh axes that shard the rows and the positions of the loss.

    The stages have finished all rows by then, so they share the rows too, where these divide evenly. Axes of one device
    are omitted: the partitioner fails on such a manual axis beside a tensor axis.
    """
    active = sharding.active()
    if active is None:
        return (), ()
    mesh, rules = active
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    row_axes = tuple(axis for axis in rules.batch if axis in sizes)
    stages = tuple(axis for axis in rules.act_stage if axis in sizes)
    if rows % math.prod(sizes[axis] for axis in row_axes + stages) == 0:
        row_axes += stages
    time_axes = tuple(axis for axis in rules.act_time if axis in sizes)
    return row_axes, time_axes if length % math.prod(sizes[axis] for axis in time_axes) == 0 else ()


def specs(layout: Layout) -> tuple[P, P, P]:
    """Specs of arrays [B, T, ...], of the head [V, D], and of results with one row for each shard."""
    return P(layout.row_axes or None, layout.time_axes or None), P(None, layout.head_axes or None), P(layout.axes)


def on_shards(local: Callable, layout: Layout, in_specs: tuple[P, ...], out_specs: object) -> Callable:
    """`local` on each shard of the loss; the partitioner handles the vocabulary's axes."""
    if not layout.axes:
        return local
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(layout.axes),
        check_vma=False,
    )


class Head(NamedTuple):
    """The whole head in the compute dtype, [V, D] or [D, V]; `vocabulary` is the axis of V."""

    matrix: jax.Array
    vocabulary: int

    @property
    def size(self) -> int:
        """The size of the vocabulary."""
        return self.matrix.shape[self.vocabulary]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[N, D] -> [N, V], float32."""
        return dot(hidden, self.matrix, 1, 1 - self.vocabulary)

    def gradient(self, dlogits: jax.Array) -> jax.Array:
        """The gradient with respect to the hidden states: [N, V] -> [N, D], float32."""
        return dot(dlogits, self.matrix, 1, self.vocabulary)


def gathered(head_VD: jax.Array, dtype: jnp.dtype, layout: Layout) -> Head:
    """The whole head on each device, cast before it is sent.

    A TPU puts the gathered dimension outermost: loops over blocks would make a second copy of a head [V, D]. A CPU
    would make one of a transposed head.
    """
    head, vocabulary = head_VD.astype(dtype), 0
    if sharding.platform() != "cpu":
        head, vocabulary = head.T, 1
    if layout.head_axes:
        head = jax.lax.all_gather(head, layout.head_axes, axis=1 - vocabulary, tiled=True)
    return Head(head, vocabulary)


def dot(a: jax.Array, b: jax.Array, contract_a: int, contract_b: int) -> jax.Array:
    """In float32."""
    return jax.lax.dot_general(a, b, (((contract_a,), (contract_b,)), ((), ())), preferred_element_type=jnp.float32)
