"""Chooses how to compute attention to a cache: the TPU's kernel, the CPU's loops, or the reference."""

from __future__ import annotations

import jax

from capibara import sharding
from capibara.kernels.attention.spec import AttentionSpec
from capibara.kernels.cached_attention import cpu, reference, tpu
from capibara.kernels.cached_attention.reference import Pages, Rows, Visibility, gathered

__all__ = ["Pages", "Rows", "Visibility", "attend_pages", "attend_rows", "gathered"]


def attend_rows(q_BTNH: jax.Array, rows: Rows, seen: Visibility, spec: AttentionSpec) -> jax.Array:
    """`softmax(scores) v` over the rows of a cache; softmax in float32.

    Args:
      q_BTNH: queries; query head n uses key/value head n // (N / K).
      rows: keys and values.
      seen: which of them each query sees.
      spec: scale and soft cap; its mask is contained in `seen`.

    Returns:
      [B, T, N, H] in the queries' dtype.
    """
    plain = seen.bias_BNTS is None and seen.sinks_N is None and rows.scales is None
    capacity = rows.k_BKSH.shape[2]
    if rows.slots_R is not None and (q_BTNH.shape[1] > 1 or cpu.block_size(capacity) is None):
        rows = rows.selected
    if seen.first_B is not None and tpu.supported(q_BTNH, rows.k_BKSH, spec, capacity, plain=plain):
        return tpu.attend(q_BTNH, rows.k_BKSH, rows.v_BKSH, seen.first_B, None, spec)
    on_cpu, (B, T, *_) = sharding.platform() == "cpu", q_BTNH.shape
    if T == 1 and _one_by_one() and cpu.block_size(capacity) is not None:
        return cpu.attend_blocks(q_BTNH, rows, seen, spec)
    if (parts := tpu.parts(q_BTNH, rows.k_BKSH)) > 1:
        return reference.attend_in_parts(q_BTNH, rows, seen, spec, parts)
    return (cpu.attend_one if on_cpu and B == T == 1 else reference.attend_rows)(q_BTNH, rows, seen, spec)


def attend_pages(q_BTNH: jax.Array, pages: Pages, seen: Visibility, spec: AttentionSpec) -> jax.Array:
    """Like `attend_rows`, for pages."""
    plain = seen.bias_BNTS is None and seen.sinks_N is None and pages.scales is None
    capacity = pages.written_BS.shape[1]
    if seen.first_B is not None and tpu.supported(q_BTNH, pages.keys, spec, capacity, plain=plain):
        return tpu.attend(q_BTNH, pages.keys, pages.values, seen.first_B, pages.table_BM, spec)
    if _one_by_one():
        return cpu.attend_pages(q_BTNH, pages, seen, spec)
    return attend_rows(q_BTNH, reference.rows_of(pages), seen._replace(first_B=None), spec)


def _one_by_one() -> bool:
    """Whether a loop over pages is faster than one gather."""
    return sharding.platform() == "cpu" and not sharding.active()
