"""How much memory a TPU's arrays take: the compiler stores them in tiles, to which it pads two of their dimensions."""

from __future__ import annotations

import functools
import itertools
import math

LANES, SUBLANES = 128, 8  # of a tile of 32 bits; narrower elements are packed within it


@functools.lru_cache(maxsize=65536)
def padding(shape: tuple[int, ...]) -> float:
    """Bytes of an array in HBM over those of its elements, in the layout that the compiler gives a program's arguments.

    It makes those two dimensions the innermost that need the least padding: of [layers, 8192, 192] the 8192 are the
    lanes, of [layers, 192, 32, 96] the 96, padded to 128 (tests/planner/hardware/test_tiling.py asks libtpu).
    """
    dims = [size for size in shape if size > 1]
    if len(dims) < 2:
        return 1.0  # vectors and scalars are small
    pairs = itertools.permutations(dims, 2)
    return min(_up(rows, _rows(rows)) * _up(columns, LANES) / rows / columns for rows, columns in pairs)


def _rows(rows: int) -> int:
    """The rows of a tile: few rows have a lower one."""
    return SUBLANES if rows > SUBLANES // 2 else 2 ** math.ceil(math.log2(rows))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
