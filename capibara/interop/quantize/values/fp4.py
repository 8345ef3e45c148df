"""4-bit floats (E2M1): a sign, two exponent bits and one mantissa bit; 0, 0.5, 1, 1.5, 2, 3, 4 or 6.

Two neighbours share a byte, the first in its low half.
"""

from __future__ import annotations

import numpy as np

_LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_LEVELS, -_LEVELS])
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=-1)  # values of each byte: low half, high half


def values(bytes_XB: np.ndarray) -> np.ndarray:
    """The float32 values [..., 2 B] of bytes [..., B]."""
    return _PAIRS[bytes_XB.view(np.uint8)].reshape(*bytes_XB.shape[:-1], -1)


def packed(values_XI: np.ndarray) -> np.ndarray:
    """Bytes [..., I / 2] of float32 values [..., I], each rounded to nearest, ties to the even code; beyond 6 it is 6."""
    magnitudes = np.abs(values_XI)
    codes = np.zeros(values_XI.shape, np.uint8)
    for code, middle in enumerate((_LEVELS[1:] + _LEVELS[:-1]) / 2):
        codes += magnitudes >= middle if code % 2 else magnitudes > middle
    codes |= np.signbit(values_XI).astype(np.uint8) << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4
