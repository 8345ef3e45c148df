"""Writes a token into each row of a cache on TPU where it lies in HBM, by a Pallas kernel.

XLA believes that a scatter moves its whole operand, moves a cache that XLA's attention reads into the chip's memory before it
writes a token, and all of it back after (compiled for Llama 3 8B in 8 bits on v5e-4, 32 slots of 2048: half of the cache is
written in each step). Of a token the kernel reads and writes a tile.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from capibara import sharding

NAME = "append_tokens"
"""The kernel's name in compiled programs."""

_LANES = 128
_SUBLANES = {1: 32, 2: 16, 4: 8}  # of a tile, by the bytes of an element
_VMEM_BYTES = 2 * 2**20  # most of the tiles that are in VMEM at once


def supported(old_BKSH: jax.Array) -> bool:
    """Whether the kernel writes into this cache: one that XLA's attention reads on TPU, in whole tiles."""
    if sharding.platform() != "tpu" or old_BKSH.ndim != 4 or old_BKSH.dtype == jnp.float16:
        return False  # kernels load no float16
    in_lanes = old_BKSH.shape[3] % _LANES == 0
    if in_lanes and old_BKSH.dtype == jnp.bfloat16:
        return False  # it is read by a kernel, too, which leaves it in HBM (kernels/cached_attention/tpu.py)
    # Else XLA would turn it around for the kernel.
    return old_BKSH.shape[2] % (_SUBLANES[old_BKSH.dtype.itemsize] if in_lanes else _LANES) == 0


def append(old_BKSH: jax.Array, new_BKH: jax.Array, index_B: jax.Array) -> jax.Array:
    """Writes one token into each row at these indices; under the mesh of `sharding.active()`."""
    if (active := sharding.active()) is None:
        return _append(old_BKSH, new_BKH, index_B)
    mesh, rules = active
    rows = sharding.dividing(mesh, rules.batch, old_BKSH.shape[0])
    of_heads = P(rows, sharding.dividing(mesh, rules.act_kv_heads, old_BKSH.shape[1]))
    sharded = jax.shard_map(
        _append, mesh=mesh, in_specs=(of_heads, of_heads, P(rows)), out_specs=of_heads, check_vma=False
    )
    return sharded(old_BKSH, new_BKH, index_B)


def bytes_moved(rows: int, kv_heads: int, size: int, itemsize: int) -> float:
    """HBM traffic of one call on one device, for heads of this size."""
    tile = _LANES if size % _LANES else _SUBLANES[itemsize]
    return 2.0 * rows * kv_heads * tile * size * itemsize


def _append(old_BKSH: jax.Array, new_BKH: jax.Array, index_B: jax.Array) -> jax.Array:
    from jax.experimental import pallas as pl  # importing Pallas takes a second
    from jax.experimental.pallas import tpu as pltpu

    # A TPU stores tokens in lanes where that pads less.
    by_columns = old_BKSH.shape[3] % _LANES != 0
    tile = _LANES if by_columns else _SUBLANES[old_BKSH.dtype.itemsize]
    old = jnp.swapaxes(old_BKSH, 2, 3) if by_columns else old_BKSH  # moves nothing
    new = jnp.expand_dims(new_BKH, 3 if by_columns else 2)
    B, *of_token = new.shape
    of_tile = [size * tile if axis == (2 if by_columns else 1) else size for axis, size in enumerate(of_token)]
    most = max(1, _VMEM_BYTES // (math.prod(of_tile) * old.dtype.itemsize))
    together = next(count for count in range(min(B, most), 0, -1) if B % count == 0)
    call = pl.pallas_call(
        functools.partial(_write, tile, by_columns, together),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B // together,),
            in_specs=[
                pl.BlockSpec((together, *of_token), lambda step, index_ref: (step, 0, 0, 0)),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[pltpu.VMEM((together, *of_tile), old.dtype), pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct(old.shape, old.dtype),
        input_output_aliases={2: 0},
        name=NAME,
    )
    in_hbm = pltpu.with_memory_space_constraint(old, pltpu.HBM)  # the spaces of a kernel's blocks do not bind XLA
    written = call(index_B.astype(jnp.int32), new.astype(old.dtype), in_hbm)
    return jnp.swapaxes(written, 2, 3) if by_columns else written


def _write(
    tile: int, by_columns: bool, together: int,
    index_ref: Any, new_ref: Any, old_ref: Any, out_ref: Any, tiles_ref: Any, semaphore: Any,
) -> None:  # fmt: skip
    """The kernel: all tiles of some rows are on their way at once, since a copy takes a microsecond however small it is."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    del old_ref  # it is out_ref
    first = pl.program_id(0) * together

    def place(row: int) -> Any:
        index = index_ref[first + row]
        tokens = pl.ds(pl.multiple_of(index // tile * tile, tile), tile)
        return out_ref.at[first + row, :, :, tokens] if by_columns else out_ref.at[first + row, :, tokens, :]

    reads = [pltpu.make_async_copy(place(row), tiles_ref.at[row], semaphore) for row in range(together)]
    writes = [pltpu.make_async_copy(tiles_ref.at[row], place(row), semaphore) for row in range(together)]
    for copy in reads:
        copy.start()
    for copy in reads:
        copy.wait()
    wide = jnp.int32 if tiles_ref.dtype == jnp.int8 else jnp.float32  # a TPU selects 32 bits at a time
    token = jax.lax.broadcasted_iota(jnp.int32, tiles_ref.shape[1:], 2 if by_columns else 1)
    for row in range(together):
        here = token == index_ref[first + row] % tile
        values = jnp.where(here, new_ref[row].astype(wide), tiles_ref[row].astype(wide))
        tiles_ref[row] = values.astype(tiles_ref.dtype)
    for copy in writes:
        copy.start()
    for copy in writes:
        copy.wait()
