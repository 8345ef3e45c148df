"""Embedding lookup in a table that is sharded over the mesh."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from capibara import sharding
from capibara.sharding import ActiveMesh, Rules

# Of one all-to-all: TPUs reserve three times this size for it during the whole step.
EXCHANGED_BYTES = 64 * 2**20


def lookup(table_VD: jax.Array, tokens_BT: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The rows of `table_VD` (axes vocab, embed) for the tokens: [B, T, D] in `dtype`.

    Each device looks up all tokens in its own columns, then an all-to-all exchanges columns for rows and positions.
    Neither the table nor its gradient is ever gathered; the partitioner by itself would replicate the result. If the
    residual stream is also sharded along the vocabulary's axis, partial rows are reduce-scattered into it. The result
    for tokens outside the vocabulary is undefined (zeros on a mesh, some row on one device).
    """
    axes = _axes(table_VD, tokens_BT)
    if axes is None:
        return table_VD[tokens_BT].astype(dtype)
    mesh, retained, moved, time, vocab, embed, scattered = axes

    def block(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        V = len(table_VD)
        index = tokens_BT - (jax.lax.axis_index(vocab) * V if vocab else 0)
        # Zeros for rows of other devices, without a mask [B, T, D] that the backward pass would have to save.
        index = jnp.where((index >= 0) & (index < V), index, V)
        x_BTD = table_VD.at[index].get(mode="fill", fill_value=0).astype(dtype)
        if time:
            x_BTD = jax.lax.all_to_all(x_BTD, time, split_axis=1, concat_axis=2, tiled=True)
        if scattered:
            x_BTD = sharding.psum_scatter(x_BTD, vocab, 1)
        elif vocab:
            x_BTD = sharding.psum(x_BTD, vocab)
        if moved:
            x_BTD = jax.lax.all_to_all(x_BTD, moved, split_axis=0, concat_axis=2, tiled=True)
        return x_BTD

    def local(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        from_devices = math.prod(mesh.shape[axis] for axis in moved)
        rows, T = len(tokens_BT) // from_devices, tokens_BT.shape[1]
        exchanged = tokens_BT.size * table_VD.shape[1] * jnp.dtype(dtype).itemsize
        exchanged //= math.prod(mesh.shape[axis] for axis in vocab) if scattered else 1
        blocks = next(
            n for n in range(1, rows + 1) if rows % n == 0 and (exchanged <= n * EXCHANGED_BYTES or n == rows)
        )
        if blocks == 1:
            return block(table_VD, tokens_BT)
        # Each block has some rows of every device.
        tokens = jnp.moveaxis(tokens_BT.reshape(from_devices, blocks, -1, T), 1, 0).reshape(blocks, -1, T)
        x = jax.lax.map(lambda tokens: block(table_VD, tokens), tokens)
        return x.reshape(rows, *x.shape[2:])

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(vocab or None, embed or None), P(retained or None)),
        out_specs=P(retained + moved or None, time + (vocab if scattered else ()) or None),
        axis_names=set(retained + moved + time + vocab),
        check_vma=False,
    )(table_VD, tokens_BT)


class _LookupAxes(NamedTuple):
    """Mesh axes of a lookup.

    Attributes:
      mesh: the active mesh.
      sharded: axes of the rows that do not shard columns.
      moved, time: axes of rows and of positions, which also shard columns; the exchange moves columns to them.
      vocab, embed: axes of the table's rows and columns.
      scattered: whether positions of the result are also sharded along the vocabulary's axes.
    """

    mesh: ActiveMesh
    sharded: tuple[str, ...]
    moved: tuple[str, ...]
    time: tuple[str, ...]
    vocab: tuple[str, ...]
    embed: tuple[str, ...]
    scattered: bool


def _axes(table_VD: jax.Array, tokens_BT: jax.Array) -> _LookupAxes | None:
    """The axes for a lookup on the active mesh.

    None on one device, or if rules or sizes do not allow the exchange.
    """
    mesh, rules = sharding.active() or (None, Rules())
    if mesh is None:
        return None
    used = lambda names: tuple(axis for axis in names if mesh.shape[axis] > 1)  # noqa: E731
    rows, embed, vocab = used(rules.batch), used(rules.embed), used(rules.vocab)
    time = used(axis for axis in rules.act_time if axis in embed)
    moved = tuple(axis for axis in rows if axis in embed)
    retained = tuple(axis for axis in rows if axis not in embed)
    count = lambda names: math.prod(mesh.shape[axis] for axis in names)  # noqa: E731
    (V, D), (B, T) = table_VD.shape, tokens_BT.shape
    divides = B % count(rows) == 0 and T % count(time) == 0 and V % count(vocab) == 0 and D % count(embed) == 0
    # Columns are sharded by exactly the exchanged axes, in the order in which they are concatenated again.
    in_order = embed == moved + time and rows == retained + moved and rows + time + vocab
    scattered = bool(vocab) and used(rules.act_residual) == time + vocab and T % count(time + vocab) == 0
    return _LookupAxes(mesh, retained, moved, time, vocab, embed, scattered) if divides and in_order else None
