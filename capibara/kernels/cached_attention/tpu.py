"""Attention of one new token of each row on TPU, by JAX's Pallas kernel of paged attention: it reads what a row has, no more.

The kernel copies one page after another from HBM, up to the row's length; XLA's products read every place of every slot.
Its pages are [heads, pages, P, H], ours [pages, K, P, H] and whole rows [B, K, S, H]: seen as one head with K times as
many pages, and K rows of queries for each row, all of them lie where they are and nothing is copied.

Not JAX's ragged_paged_attention: its pages hold the keys and values of all heads of a token side by side, so that a page
of ours would have to be turned before every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from capibara import sharding
from capibara.kernels.attention.spec import AttentionSpec

NAME = "paged_attention"
"""Of the kernel in compiled programs."""

BLOCK = 512
"""Places that it reads at a time, at most: of a row's last block it reads all."""

_MOST_PAGES = 2**17  # of all rows and heads of a device: half of its scalar memory has their numbers
_LANES, _SUBLANES = 128, 16  # of a tile of bfloat16


def supported(q_BTNH: jax.Array, keys: jax.Array, spec: AttentionSpec, places: int, *, plain: bool) -> bool:
    """Whether the kernel computes this attention.

    Args:
      q_BTNH: queries.
      keys: pages [pages, K, P, H] or whole rows [B, K, S, H].
      spec: a window must not hide anything that is there.
      places: of a row.
      plain: nothing is added to the scores, and there are no numbers in 8 bits.
    """
    T, H = q_BTNH.shape[1], q_BTNH.shape[3]
    # It multiplies in bfloat16, whatever it is given.
    fits = keys.dtype == jnp.bfloat16 and H % _LANES == 0 and keys.shape[2] % _SUBLANES == 0
    sees_all = spec.window is None or spec.window >= places
    if not (plain and T == 1 and fits and sees_all and sharding.platform() == "tpu"):
        return False
    page = _pages(places, whole_rows=True)[0] if keys.shape[2] == places else keys.shape[2]
    return _shards(q_BTNH.shape[0], keys.shape[1]) * _MOST_PAGES >= q_BTNH.shape[0] * keys.shape[1] * (places // page)


def attend(
    q_BTNH: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths_B: jax.Array,
    table_BM: jax.Array | None,
    spec: AttentionSpec,
) -> jax.Array:
    """`softmax(scores) v` of one query a row over the first places of its row; under the mesh of `sharding.active()`.

    Args:
      q_BTNH: queries, T = 1.
      keys, values: pages [pages, K, P, H], or whole rows [B, K, S, H].
      lengths_B: how many places each row has; of a row with 0 the result is 0.
      table_BM: the pages of each row; None: of whole rows.
      spec: scale and cap.

    Returns:
      [B, 1, N, H] in the dtype of the queries.
    """
    if sharding.active() is None:
        return _attend(q_BTNH, keys, values, lengths_B, table_BM, spec)
    mesh, _ = sharding.active()
    rows, heads = _axes(q_BTNH.shape[0], keys.shape[1])
    of_keys = P(rows if table_BM is None else None, heads)
    sharded = jax.shard_map(
        lambda q, k, v, lengths, table: _attend(q, k, v, lengths, table, spec),
        mesh=mesh,
        in_specs=(P(rows, None, heads), of_keys, of_keys, P(rows), P(rows)),
        out_specs=P(rows, None, heads),
        check_vma=False,
    )
    return sharded(q_BTNH, keys, values, lengths_B, table_BM)


def _axes(rows: int, kv_heads: int) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """The axes of the active mesh over which so many rows and heads lie."""
    mesh, rules = sharding.active()
    return sharding.dividing(mesh, rules.batch, rows), sharding.dividing(mesh, rules.act_kv_heads, kv_heads)


def _shards(rows: int, kv_heads: int) -> int:
    """Devices that share them."""
    if sharding.active() is None:
        return 1
    mesh, _ = sharding.active()
    return math.prod(mesh.shape[axis] for axes in _axes(rows, kv_heads) for axis in axes or ())


def _attend(q_BTNH, keys, values, lengths_B, table_BM, spec: AttentionSpec) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention  # Pallas takes a second to import

    (B, _, N, H), (_, K, places, _) = q_BTNH.shape, keys.shape
    page, together = _pages(places, whole_rows=table_BM is None)
    if table_BM is None:
        indices = jnp.arange(B * K * (places // page), dtype=jnp.int32).reshape(B * K, -1)
    else:
        table_BM = jnp.pad(table_BM, ((0, 0), (0, -table_BM.shape[1] % together)))  # of what a block has beyond a row
        indices = (table_BM[:, None] * K + jnp.arange(K, dtype=jnp.int32)[:, None]).reshape(B * K, -1)
    pages = (x.reshape(1, -1, page, H) for x in (keys, values))
    # It keeps sums in the dtype of the queries.
    q = (q_BTNH.astype(jnp.float32) * spec.scale).reshape(B * K, N // K, H)
    with jax.numpy_dtype_promotion("standard"):  # it multiplies float32 and bfloat16
        y = paged_attention(
            q,
            *pages,
            jnp.repeat(lengths_B, K),
            indices,
            attn_logits_soft_cap=spec.soft_cap,
            pages_per_compute_block=together,
        )
    return y.reshape(q_BTNH.shape).astype(q_BTNH.dtype)


def _pages(places: int, whole_rows: bool) -> tuple[int, int]:
    """Places of a page as the kernel sees pages, or whole rows, of so many; and how many it reads at a time."""
    if not whole_rows:
        return places, max(1, BLOCK // places)
    page = next(n for n in range(min(places, BLOCK), 0, -_SUBLANES) if places % n == 0)
    return page, next(n for n in range(BLOCK // page, 0, -1) if places // page % n == 0)


def bytes_moved(
    lengths: Sequence[int], places: int, heads: int, kv_heads: int, head_size: int, *, whole_rows: bool
) -> float:
    """Of one call on one device in HBM: keys and values of rows of these lengths, queries and results.

    Args:
      lengths: of the device's rows.
      places: of a page, or of a whole row.
      heads, kv_heads: of queries, and of keys and values, on the device.
      head_size: of a head.
      whole_rows: whether there are no pages.
    """
    page, together = _pages(places, whole_rows)
    block = page * together
    keys = sum(-(-length // block) * block for length in lengths) * 2 * kv_heads * head_size * 2
    return keys + len(lengths) * heads * (head_size + 2 * _LANES) * 4 + len(lengths) * heads * head_size * 4
