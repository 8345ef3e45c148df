"""Codes of a few bits in a dense stream, the first in the lowest bits: bytes, or words of several bytes."""

from __future__ import annotations

import numpy as np


def unpacked(stored: np.ndarray, bits: int, count: int | None = None) -> np.ndarray:
    """Codes along the last axis, uint8 [..., count].

    Args:
      stored: integers of whole bytes, in which a code may lie in two.
      bits: of a code, at most 8.
      count: how many codes to read; None: all that are whole.
    """
    stream = np.ascontiguousarray(stored).view(np.uint8)
    count = stream.shape[-1] * 8 // bits if count is None else count
    if bits == 8:
        return stream[..., :count]
    if 8 % bits == 0:
        mask = np.uint8((1 << bits) - 1)
        codes = np.stack([stream >> np.uint8(shift) & mask for shift in range(0, 8, bits)], axis=-1)
        return codes.reshape(*stream.shape[:-1], -1)[..., :count]
    digits = np.unpackbits(stream, axis=-1, count=count * bits, bitorder="little")
    return np.packbits(digits.reshape(*stream.shape[:-1], count, bits), axis=-1, bitorder="little")[..., 0]
