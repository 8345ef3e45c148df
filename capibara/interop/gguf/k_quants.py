"""llama.cpp's K-quants: 256 values share a float16 scale, and groups of 16 or 32 of them each have a small scale.

The same float32 operations in the same order as quantize_row_q3_K_ref, q4_K, q5_K and q6_K of ggml (src/ggml-quants.c),
so that the bytes equal llama.cpp's if its compiler does not fuse multiply-adds, as in every x86-64 build.

Shape letters: V values of a group, G groups (of all blocks), N blocks of 256 values. Sums over V add one value after
the other, which numpy does only along the first dimension.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
from collections.abc import Callable

import numpy as np

BLOCK = 256
_CHUNK = 256  # blocks processed at once: their arrays stay in a core's cache
_MAGIC = np.float32(1.5 * 2**23)  # added to a number, it rounds it to an integer in the low bits
_EXACT = np.float32(4e6)  # below 2**22, the limit of that trick
_TINY = np.float32(1e-15)
_F32 = np.float32


def quantize(value: np.ndarray, kind: str) -> np.ndarray:
    """The quantized bytes of a matrix.

    Args:
      value: [..., K], float32, finite, K a multiple of 256.
      kind: one of KINDS.

    Returns:
      [..., bytes of a row], uint8.
    """
    blocks_NK = value.reshape(-1, BLOCK)
    of_chunk, size = KINDS[kind]
    result = np.empty((len(blocks_NK), size), np.uint8)

    def work(start: int) -> None:
        with np.errstate(all="ignore"):
            result[start : start + _CHUNK] = of_chunk(blocks_NK[start : start + _CHUNK])

    starts = range(0, len(blocks_NK), _CHUNK)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with concurrent.futures.ThreadPoolExecutor(min(cores, max(1, len(starts)))) as pool:
        list(pool.map(work, starts))
    return result.reshape(*value.shape[:-1], -1)


def _nearest(x: np.ndarray) -> np.ndarray:
    """Rounds to int32, half to even; numbers beyond 2**22 round as in llama.cpp."""
    return ((x + _MAGIC).view(np.int32) & 0x7FFFFF) - 0x400000


def _sum(x_VG: np.ndarray) -> np.ndarray:
    return x_VG.sum(axis=0)


def _groups(blocks_NK: np.ndarray, values: int) -> np.ndarray:
    return np.ascontiguousarray(blocks_NK.reshape(-1, values).T)


def _levels(x_VG: np.ndarray, inverse_G: np.ndarray, low_G: np.ndarray, most: int, out: np.ndarray) -> np.ndarray:
    """Quantizes x on a scale that begins at `low`: integers from 0 to `most`, in float32."""
    np.subtract(x_VG, low_G, out=out)
    np.multiply(out, inverse_G, out=out)
    if out.max() < _EXACT and out.min() > -_EXACT:
        np.rint(out, out=out)
    else:
        out[:] = _nearest(out)
    np.maximum(out, 0, out=out)
    return np.minimum(out, most, out=out)


def _with_minimum(
    x_VG: np.ndarray, most: int, first: float, steps: int
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """The scale and the negated minimum of each group with the least error among the tried ones.

    Returns:
      Scales [G], minima [G], and the inverse scales and minima that produced their levels.
    """
    weight = np.abs(x_VG)
    weight += np.sqrt(_sum(x_VG * x_VG) / _F32(len(x_VG)))
    low, high = np.minimum(x_VG.min(0), _F32(0)), x_VG.max(0)
    sum_w, sum_x = _sum(weight), _sum(weight * x_VG)
    inverse = _F32(most) / (high - low)  # infinite if all values are equal; no step improves on that
    scale = _F32(1) / inverse
    level, product = np.empty_like(x_VG), np.empty_like(x_VG)
    _levels(x_VG, inverse, low, most, level)
    best, made_of = _error(level, scale, low, x_VG, weight, product), (inverse, low)
    for step in range(steps + 1):
        inverse = (_F32(first) + _F32(0.1) * _F32(step) + _F32(most)) / (high - low)
        _levels(x_VG, inverse, low, most, level)
        np.multiply(weight, level, out=product)
        sum_l = _sum(product)
        sum_xl = _sum(product * x_VG)
        np.multiply(product, level, out=product)
        sum_l2 = _sum(product)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        tried = (sum_w * sum_xl - sum_x * sum_l) / determinant
        tried_low = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        above = tried_low > 0
        tried, tried_low = np.where(above, sum_xl / sum_l2, tried), np.where(above, _F32(0), tried_low)
        error = _error(level, tried, tried_low, x_VG, weight, product)
        better = (determinant > 0) & (error < best)
        made_of = (np.where(better, inverse, made_of[0]), np.where(better, low, made_of[1]))
        best, scale, low = (
            np.where(better, error, best),
            np.where(better, tried, scale),
            np.where(better, tried_low, low),
        )
    return scale, -low, made_of


def _error(
    level: np.ndarray, scale: np.ndarray, low: np.ndarray, x: np.ndarray, weight: np.ndarray, out: np.ndarray
) -> np.ndarray:
    """The weighted squared error of the levels, [G]."""
    np.multiply(level, scale, out=out)
    np.add(out, low, out=out)
    np.subtract(out, x, out=out)
    np.multiply(out, out, out=out)
    np.multiply(weight, out, out=out)
    return _sum(out)


def _q4_q5(blocks_NK: np.ndarray, most: int, first: float, steps: int) -> np.ndarray:
    x_VG, count = _groups(blocks_NK, 32), len(blocks_NK)
    scale_G, low_G, made_of = _with_minimum(x_VG, most, first, steps)
    tops, small = [], []
    for values in (scale_G.reshape(count, 8), low_G.reshape(count, 8)):
        top = np.maximum(values.max(1), _F32(0))
        inverse = np.where(top > 0, _F32(63) / top, _F32(0))
        small.append(np.minimum(_nearest(inverse[:, None] * values) & 0xFF, 63).astype(np.uint8))
        tops.append((top / _F32(63)).astype(np.float16))
    step, offset = ((top[:, None].astype(_F32) * of.astype(_F32)).reshape(-1) for top, of in zip(tops, small))
    level = np.clip(_nearest((x_VG + offset) / step), 0, most).astype(np.uint8)
    if (vanished := step == 0).any():  # too small for float16: keeps the levels found first
        x = x_VG[:, vanished]
        level[:, vanished] = _levels(x, made_of[0][vanished], made_of[1][vanished], most, np.empty_like(x))
    levels = level.T.reshape(count, 8, 32)
    (scales, minima), high = small, levels >> 4
    parts = [
        *(top.view(np.uint8).reshape(count, 2) for top in tops),
        scales[:, :4] | (scales[:, 4:] >> 4) << 6,
        minima[:, :4] | (minima[:, 4:] >> 4) << 6,
        (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4,
    ]
    if most > 15:
        parts.append(_joined([high[:, group] for group in range(8)], 1))
    parts.append(((levels[:, 0::2] & 15) | (levels[:, 1::2] & 15) << 4).reshape(count, 128))
    return np.concatenate(parts, axis=1)


def _joined(parts: list[np.ndarray], bits: int) -> np.ndarray:
    """Packs parts with this many bits each into bytes, the first one lowest."""
    return functools.reduce(np.bitwise_or, (part << np.uint8(bits * i) for i, part in enumerate(parts)))


def _largest(x_VG: np.ndarray) -> np.ndarray:
    """The value of largest magnitude in each group, the first of several."""
    return np.take_along_axis(x_VG, np.abs(x_VG).argmax(0)[None], 0)[0]


def _q6(blocks_NK: np.ndarray) -> np.ndarray:
    x_VG, count = _groups(blocks_NK, 16), len(blocks_NK)
    scale_G, inverse_G = _symmetric(x_VG)
    scales = scale_G.reshape(count, 16)
    top = _largest(scales.T)
    none = np.abs(top) < _TINY
    inverse = _F32(-128) / top
    d = np.where(none, _F32(0), _F32(1) / inverse).astype(np.float16)
    small = np.where(none[:, None], 0, np.minimum(127, _nearest(inverse[:, None] * scales)))
    step = (d.astype(_F32)[:, None] * small.astype(_F32)).reshape(-1)
    level = np.clip(_nearest(x_VG / step), -32, 31)
    retained = np.where(inverse_G == 0, -32, np.clip(_nearest(inverse_G * x_VG), -32, 31))
    level = np.where(step == 0, retained, level) + 32
    levels = level.astype(np.uint8).T.reshape(count, 2, 4, 32)
    levels[none] = 0
    low = (levels[:, :, :2] & 15) | (levels[:, :, 2:] & 15) << 4
    high = _joined([levels[:, :, quarter] >> 4 for quarter in range(4)], 2)
    scales_bytes = small.astype(np.int8).view(np.uint8)
    return np.concatenate(
        [low.reshape(count, 128), high.reshape(count, 64), scales_bytes, d.view(np.uint8).reshape(count, 2)], axis=1
    )


def _symmetric(x_VG: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales [G] of levels from -32 to 31, the best of 19, and the inverse scales that produced the levels."""
    top, weight = _largest(x_VG), x_VG * x_VG
    none = np.abs(top) < _TINY
    top = np.where(none, _F32(1), top)
    weighted, level, product = weight * x_VG, np.empty_like(x_VG), np.empty_like(x_VG)
    best = scale = chosen = np.zeros_like(top)
    for step in (0, *range(-9, 0), *range(1, 10)):
        inverse = -(_F32(32) + _F32(0.1) * _F32(step)) / top
        np.multiply(inverse, x_VG, out=level)
        np.rint(level, out=level)
        np.maximum(level, -32, out=level)
        np.minimum(level, 31, out=level)
        sum_lx = _sum(np.multiply(weighted, level, out=product))
        np.multiply(weight, level, out=product)
        sum_l2 = _sum(np.multiply(product, level, out=product))
        better = (sum_l2 > 0) & (sum_lx * sum_lx > best * sum_l2) if step else np.ones_like(none)
        tried = np.where(sum_l2 == 0, _F32(0), sum_lx / sum_l2)
        scale, chosen = np.where(better, tried, scale), np.where(better, inverse, chosen)
        best = np.where(better, tried * sum_lx, best)
    return np.where(none, _F32(0), scale), np.where(none, _F32(0), chosen)


def _q3(blocks_NK: np.ndarray) -> np.ndarray:
    x_VG, count = _groups(blocks_NK, 16), len(blocks_NK)
    scale_G, result = _moved(x_VG)
    scales = scale_G.reshape(count, 16)
    top = _largest(scales.T)
    none = top == 0
    inverse = _F32(-32) / np.where(none, _F32(1), top)
    d = np.where(none, _F32(0), _F32(1) / inverse).astype(np.float16)
    small = np.clip(_nearest(inverse[:, None] * scales), -32, 31) + 32
    small[none] = 0
    step = (d.astype(_F32)[:, None] * (small - 32).astype(_F32)).reshape(-1)
    level = np.where(step == 0, result, np.clip(_nearest(x_VG / step), -4, 3)) + 4
    levels = level.astype(np.uint8).T.reshape(count, BLOCK)
    high, low = (levels >> 2).reshape(count, 8, 32), (levels & 3).reshape(count, 2, 4, 32)
    codes = small.astype(np.uint8)
    return np.concatenate(
        [
            _joined([high[:, group] for group in range(8)], 1),
            _joined([low[:, :, quarter] for quarter in range(4)], 2).reshape(count, 64),
            (codes[:, :8] & 15) | (codes[:, 8:] & 15) << 4,
            _joined([codes[:, start : start + 4] >> 4 for start in range(0, 16, 4)], 2),
            d.view(np.uint8).reshape(count, 2),
        ],
        axis=1,
    )


def _moved(x_VG: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales [G] and levels from -4 to 3 [V, G]; the levels are refined one by one, five times."""
    top, weight = _largest(x_VG), x_VG * x_VG
    none = np.abs(top) < _TINY
    weighted = weight * x_VG
    level = np.clip(_nearest(_F32(-4) / np.where(none, _F32(1), top) * x_VG), -4, 3).astype(_F32)
    sum_lx, sum_l2 = _sum(weighted * level), _sum(weight * level * level)
    for _ in range(5):
        for i, (x, w, wx) in enumerate(zip(x_VG, weight, weighted)):
            rest_lx, rest_l2 = sum_lx - wx * level[i], sum_l2 - w * level[i] * level[i]
            tried = np.clip(_nearest(x * rest_l2 / rest_lx), -4, 3).astype(_F32)
            may = (rest_lx > 0) & (tried != level[i])
            new_lx, new_l2 = rest_lx + wx * tried, rest_l2 + w * tried * tried
            better = may & (new_l2 > 0) & (new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2)
            level[i] = np.where(better, tried, level[i])
            sum_lx, sum_l2 = np.where(better, new_lx, sum_lx), np.where(better, new_l2, sum_l2)
    scale = np.where(none | ~(sum_l2 > 0), _F32(0), sum_lx / sum_l2)
    return scale, np.where(none, -4, level).astype(np.int32)


_OfChunk = Callable[[np.ndarray], np.ndarray]
# ggml type -> function that makes its blocks, and the bytes of a block.
KINDS: dict[str, tuple[_OfChunk, int]] = {
    "Q3_K": (_q3, 110),
    "Q4_K": (functools.partial(_q4_q5, most=15, first=-1.0, steps=20), 144),
    "Q5_K": (functools.partial(_q4_q5, most=31, first=-0.5, steps=15), 176),
    "Q6_K": (_q6, 210),
}
