"""Decode attention on TPU by JAX's Pallas kernel of paged attention, which reads only the used part of each row.

The kernel copies pages from HBM one by one, up to the row's length; XLA's products read the whole capacity of every
slot. Its pages are [heads, pages, P, H], ours [pages, K, P, H] and whole rows [B, K, S, H]. Viewed as one head with K
times as many pages, and K rows of queries per row, ours need no copy.

Not JAX's ragged_paged_attention: it stores keys and values of all heads of a token side by side, so that our pages
would have to be transposed before every step.
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
"""The kernel's name in compiled programs."""

BLOCK = 512
"""Most tokens that it reads at a time; it reads a row's last block whole."""

_SCORES_BYTES = 32 * 2**20  # of a part of the queries: of 128 MiB of VMEM, with weights, keys and values
_MOST_PAGES = 2**17  # of all rows and heads on a device: their numbers fill half of its scalar memory
_LANES, _SUBLANES = 128, 16  # of a bfloat16 tile


def supported(q_BTNH: jax.Array, keys: jax.Array, spec: AttentionSpec, capacity: int, *, plain: bool) -> bool:
    """Whether the kernel computes this attention.

    Args:
      q_BTNH: queries.
      keys: pages [pages, K, P, H] or whole rows [B, K, S, H].
      spec: a window is supported only if it hides nothing.
      capacity: token capacity of a row.
      plain: whether scores have no bias and the cache is not in 8 bits.
    """
    T, H = q_BTNH.shape[1], q_BTNH.shape[3]
    # It multiplies in bfloat16, whatever the operands' dtype.
    fits = keys.dtype == jnp.bfloat16 and H % _LANES == 0 and keys.shape[2] % _SUBLANES == 0
    sees_all = spec.window is None or spec.window + spec.sink_tokens >= capacity
    if not (plain and T == 1 and fits and sees_all and sharding.platform() == "tpu"):
        return False
    page = _pages(capacity, whole_rows=True)[0] if keys.shape[2] == capacity else keys.shape[2]
    return _shards(q_BTNH.shape[0], keys.shape[1]) * _MOST_PAGES >= q_BTNH.shape[0] * keys.shape[1] * (capacity // page)


def attend(
    q_BTNH: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths_B: jax.Array,
    table_BM: jax.Array | None,
    spec: AttentionSpec,
) -> jax.Array:
    """`softmax(scores) v` of one query per row over the first tokens of the row; under the mesh of `sharding.active()`.

    Args:
      q_BTNH: queries, T = 1.
      keys, values: pages [pages, K, P, H], or whole rows [B, K, S, H].
      lengths_B: number of tokens in each row; a row with 0 yields 0.
      table_BM: the pages of each row; None: whole rows.
      spec: scale and soft cap.

    Returns:
      [B, 1, N, H] in the queries' dtype.
    """
    if (active := sharding.active()) is None:
        return _attend(q_BTNH, keys, values, lengths_B, table_BM, spec)
    mesh, rules = active
    rows, heads = _axes(mesh, rules, q_BTNH.shape[0], keys.shape[1])
    of_keys = P(rows if table_BM is None else None, heads)
    sharded = jax.shard_map(
        lambda q, k, v, lengths, table: _attend(q, k, v, lengths, table, spec),
        mesh=mesh,
        in_specs=(P(rows, None, heads), of_keys, of_keys, P(rows), P(rows)),
        out_specs=P(rows, None, heads),
        check_vma=False,
    )
    return sharded(q_BTNH, keys, values, lengths_B, table_BM)


def parts(q_BTNH: jax.Array, keys_BKSH: jax.Array) -> int:
    """Into how many parts to cut the queries of a prompt, so that XLA can leave the scores of each on the chip; 1 elsewhere.

    Scores of 512 queries over 2,560 keys of Llama 3.1 8B take 168 MB in each layer, more than VMEM: a part of a prompt on v6e-1 moved
    26.2 GB for 15.2 GB. Each part reads all keys and values: few queries of many rows, as drafts have, stay together, and so do those whose
    number has no divisors of that size.
    """
    (B, T, N, _), (_, K, S, H) = q_BTNH.shape, keys_BKSH.shape
    if sharding.platform() != "tpu" or T == 1:
        return 1
    scores = B * N * T * S * 4 // _shards(B, K)
    fewest = next((count for count in range(1, T + 1) if T % count == 0 and scores <= count * _SCORES_BYTES), T)
    # Bytes for each key: keys and values that are read again, and scores that HBM has four times, as scores and as weights.
    again, saved = (fewest - 1) * 2 * K * H * keys_BKSH.dtype.itemsize, 4 * N * T * 4
    return fewest if again < saved else 1


def _axes(
    mesh: sharding.ActiveMesh, rules: sharding.Rules, rows: int, kv_heads: int
) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """The axes of the mesh over which this many rows and heads are sharded."""
    return sharding.dividing(mesh, rules.batch, rows), sharding.dividing(mesh, rules.act_kv_heads, kv_heads)


def _shards(rows: int, kv_heads: int) -> int:
    """Number of devices along these axes."""
    if (active := sharding.active()) is None:
        return 1
    mesh, rules = active
    return math.prod(mesh.shape[axis] for axes in _axes(mesh, rules, rows, kv_heads) for axis in axes or ())


def _attend(
    q_BTNH: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths_B: jax.Array,
    table_BM: jax.Array | None,
    spec: AttentionSpec,
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention  # importing Pallas takes a second

    (B, _, N, H), (_, K, capacity, _) = q_BTNH.shape, keys.shape
    page, together = _pages(capacity, whole_rows=table_BM is None)
    if table_BM is None:
        indices = jnp.arange(B * K * (capacity // page), dtype=jnp.int32).reshape(B * K, -1)
    else:
        table_BM = jnp.pad(table_BM, ((0, 0), (0, -table_BM.shape[1] % together)))  # the last block may exceed the row
        indices = (table_BM[:, None] * K + jnp.arange(K, dtype=jnp.int32)[:, None]).reshape(B * K, -1)
    pages = (x.reshape(1, -1, page, H) for x in (keys, values))
    # It accumulates in the queries' dtype.
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


def _pages(capacity: int, whole_rows: bool) -> tuple[int, int]:
    """Tokens per page as the kernel sees pages (or whole rows) of `capacity`, and pages that it reads at a time."""
    if not whole_rows:
        return capacity, max(1, BLOCK // capacity)
    page = next(n for n in range(min(capacity, BLOCK), 0, -_SUBLANES) if capacity % n == 0)
    return page, next(n for n in range(BLOCK // page, 0, -1) if capacity // page % n == 0)


def bytes_moved(
    lengths: Sequence[int], capacity: int, heads: int, kv_heads: int, head_size: int, *, whole_rows: bool
) -> float:
    """HBM traffic of one call on one device: keys and values of rows of these lengths, queries and results.

    Args:
      lengths: of the device's rows.
      capacity: tokens of a page, or of a whole row.
      heads, kv_heads: query heads and key/value heads on the device.
      head_size: of a head.
      whole_rows: whether the cache is not paged.
    """
    page, together = _pages(capacity, whole_rows)
    block = page * together
    keys = sum(-(-length // block) * block for length in lengths) * 2 * kv_heads * head_size * 2
    return keys + len(lengths) * heads * (head_size + 2 * _LANES) * 4 + len(lengths) * heads * head_size * 4
