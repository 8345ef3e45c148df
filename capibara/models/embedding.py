"""Looking tokens up in an embedding table that is spread over the mesh."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from capibara import sharding
from capibara.sharding import Rules


def lookup(table_VD: jax.Array, tokens_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The rows of `table_VD` (axes vocab, embed) that the tokens name: [B, T, D] in `dtype`.

    Each device looks all tokens up in its own columns, then columns are exchanged for rows and places (an all-to-all):
    the table is never gathered, nor its gradient made whole. The partitioner left alone would replicate the result.
    """
    axes = _axes(table_VD, tokens_BT)
    if axes is None:
        return table_VD[tokens_BT].astype(dtype)
    mesh, kept, moved, time, vocab, embed = axes

    def local(table_VD, tokens_BT):
        index = tokens_BT
        if vocab:
            index = index - jax.lax.axis_index(vocab) * table_VD.shape[0]
        here = (index >= 0) & (index < table_VD.shape[0])
        x_BTD = table_VD[jnp.where(here, index, 0)].astype(dtype)
        if vocab:
            x_BTD = sharding.psum(jnp.where(here[..., None], x_BTD, 0), vocab)
        if time:
            x_BTD = jax.lax.all_to_all(x_BTD, time, split_axis=1, concat_axis=2, tiled=True)
        if moved:
            x_BTD = jax.lax.all_to_all(x_BTD, moved, split_axis=0, concat_axis=2, tiled=True)
        return x_BTD

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(vocab or None, embed or None), P(kept or None)),
        out_specs=P(kept + moved or None, time or None),
        axis_names=set(kept + moved + time + vocab),
        check_vma=False,
    )(table_VD, tokens_BT)


def _axes(
    table_VD: jax.Array, tokens_BT: jax.Array
) -> tuple[Mesh, tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]] | None:
    """Mesh axes of rows that stay, of rows and of places that columns are exchanged for, of the vocabulary, of columns.

    None where there is one device, or where rules or sizes do not allow the exchange.
    """
    mesh, rules = sharding.active() or (None, Rules())
    if mesh is None:
        return None
    used = lambda names: tuple(axis for axis in names if mesh.shape[axis] > 1)  # noqa: E731
    rows, embed, vocab = used(rules.batch), used(rules.embed), used(rules.vocab)
    time = used(axis for axis in rules.act_time if axis in embed)
    moved = tuple(axis for axis in rows if axis in embed)
    kept = tuple(axis for axis in rows if axis not in embed)
    count = lambda names: math.prod(mesh.shape[axis] for axis in names)  # noqa: E731
    (V, D), (B, T) = table_VD.shape, tokens_BT.shape
    divides = B % count(rows) == 0 and T % count(time) == 0 and V % count(vocab) == 0 and D % count(embed) == 0
    # Columns are sharded by the exchanged axes and no others, in the order in which they are put together again.
    in_order = embed == moved + time and rows == kept + moved and rows + time + vocab
    return (mesh, kept, moved, time, vocab, embed) if divides and in_order else None
