"""MXFP4: blocks of 32 4-bit numbers that share a power of two (OCP Microscaling Formats 1.0; gpt-oss's experts).

A number has a sign, two exponent bits and one mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4 or 6. A block's scale is a byte,
its exponent plus 127. Folders of transformers store two adjacent numbers in a byte, the first in its low half; GGUF
stores the first sixteen numbers of a block in the low halves and the others in the high ones.

Shape letters: X leading dimensions, G blocks, I = 32 G numbers.
"""

from __future__ import annotations

import numpy as np

from capibara.interop.quantize import finite

BLOCK = 32
_BIAS, _LARGEST_BYTE = 127, 254  # 255 is NaN
_LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_LEVELS, -_LEVELS])
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=-1)  # values of each byte: low half, high half


def values(blocks_XGB: np.ndarray, scales_XG: np.ndarray) -> np.ndarray:
    """The values of bytes in the layout of transformers' folders.

    Args:
      blocks_XGB: uint8 [..., G, 16].
      scales_XG: uint8 [..., G].

    Returns:
      float32 [..., I]; exact in bfloat16 unless the exponent is out of range.
    """
    pairs = _PAIRS[blocks_XGB].reshape(*blocks_XGB.shape[:-1], BLOCK)
    found = np.ldexp(pairs, scales_XG[..., None].astype(np.int32) - _BIAS)
    return found.reshape(*blocks_XGB.shape[:-2], -1)


def packed(name: str, values_XI: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inverse: blocks and scales, with each number rounded to nearest, ties to the even code.

    A block's scale is the largest for which its largest number is at least 4 steps; larger numbers than 6 steps become
    6. Results of `values` are converted back exactly.

    Raises:
      UserError: values are not finite, or exceed the range of a block.
    """
    blocks = finite.check(name, np.ascontiguousarray(values_XI, np.float32)).reshape(*values_XI.shape[:-1], -1, BLOCK)
    largest = np.abs(blocks).max(axis=-1)
    exponents = np.frexp(largest)[1] - 3
    scales = np.where(largest > 0, np.clip(exponents + _BIAS, 0, _LARGEST_BYTE), 0).astype(np.uint8)
    steps = np.abs(np.ldexp(blocks, _BIAS - scales[..., None].astype(np.int32)))
    codes = np.zeros(blocks.shape, np.uint8)
    for code, middle in enumerate((_LEVELS[1:] + _LEVELS[:-1]) / 2):
        codes += steps >= middle if code % 2 else steps > middle
    codes |= np.signbit(blocks).astype(np.uint8) << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales
