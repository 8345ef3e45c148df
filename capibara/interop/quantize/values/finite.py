"""Refuses weights that are NaN or infinite: a model that has them answers nonsense without a word."""

from __future__ import annotations

import numpy as np

from capibara.core.types import UserError

# A floating-point number is NaN or infinite where all bits of its exponent are set: integers are quicker to compare
# than floats, and bfloat16 has no quick comparison in numpy.
_EXPONENTS = {"float32": (np.uint32, 0x7F800000), "bfloat16": (np.uint16, 0x7F80), "float16": (np.uint16, 0x7C00)}
_CHUNK = 1 << 18  # numbers, which fit a core's cache


def check(name: str, value: np.ndarray) -> np.ndarray:
    """A tensor of a checkpoint, unchanged.

    Args:
      name: of the tensor.
      value: in float32, bfloat16 or float16; of another dtype it is not looked at.

    Raises:
      UserError: it has values that are NaN or infinite.
    """
    if value.dtype.name not in _EXPONENTS or not value.size:
        return value
    integer, exponent = _EXPONENTS[value.dtype.name]
    numbers = np.ascontiguousarray(value).reshape(-1).view(integer)
    for start in range(0, len(numbers), _CHUNK):
        if ((numbers[start : start + _CHUNK] & integer(exponent)) == exponent).any():
            floats = value.astype(np.float32)
            raise UserError(
                f"{name} has values that are not finite, {int(np.isnan(floats).sum()):,} NaN and "
                f"{int(np.isinf(floats).sum()):,} infinite of {value.size:,}: copy the file again, or take another checkpoint"
            )
    return value
