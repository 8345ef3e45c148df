"""Checks a safetensors file's header against the file, before the library maps and reads it."""

from __future__ import annotations

import math
import os
import struct
from typing import Any

from capibara.core import limits

HEADER_BYTES = 32 << 20  # the largest known headers have a few million
_NAME_CHARACTERS = 1024
_SIZE, _DIMENSIONS = 2**40, 16  # limits of a dimension's size, and of their number
# Bits per value.
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


def check(path: str) -> dict[str, tuple[int, int]]:
    """Checks the header of a file; returns where in it each tensor begins and ends, in bytes.

    Raises:
      limits.Refused: it exceeds a limit, or its tensors do not cover the file's bytes exactly once.
      UserError: it is no regular file.
      FileNotFoundError: it does not exist.
    """
    with limits.opened(path) as file:
        total = os.fstat(file.fileno()).st_size
        if total < 8:
            raise limits.Refused(f"it has {total} bytes, and no header")
        (size,) = struct.unpack("<Q", file.read(8))
        if size > min(total - 8, HEADER_BYTES):
            raise limits.Refused(
                f"its header says {size:,} bytes, the file has {total:,} and {HEADER_BYTES:,} are allowed"
            )
        try:
            header = limits.parse_json(file.read(size))
        except ValueError as error:
            raise limits.Refused(f"its header cannot be read: {limits.cause(error)}") from None
    if not isinstance(header, dict):
        raise limits.Refused("its header is no JSON object")
    ranges = {name: _range(name, about) for name, about in header.items() if name != "__metadata__"}
    _check_ranges(ranges, total - 8 - size)
    return {name: (8 + size + begin, 8 + size + end) for name, (begin, end) in ranges.items()}


def _range(name: str, about: object) -> tuple[int, int]:
    """The byte range of a tensor."""
    shown = limits.shortened(name)
    if len(name) > _NAME_CHARACTERS:
        raise limits.Refused(f"the name {shown} has {len(name):,} characters")
    if not isinstance(about, dict) or not _numbers(about.get("shape")) or not _numbers(about.get("data_offsets"), 2):
        raise limits.Refused(f"{shown} has no shape and data_offsets of whole numbers")
    kind, shape, (begin, end) = about.get("dtype"), about["shape"], about["data_offsets"]
    if not isinstance(kind, str) or kind not in _BITS:
        raise limits.Refused(f"{shown} has the dtype {limits.shortened(kind)}, which safetensors does not have")
    if len(shape) > _DIMENSIONS or any(size > _SIZE for size in shape):
        raise limits.Refused(f"{shown} has the shape {limits.shortened(shape)}")
    bits = math.prod(shape) * _BITS[kind]
    if bits % 8 or end - begin != bits // 8:
        raise limits.Refused(f"{shown} has the shape {shape} in {kind} and {end - begin:,} bytes")
    return begin, end


def _numbers(values: Any, count: int | None = None) -> bool:
    whole = isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)
    return whole and count in (None, len(values))


def _check_ranges(ranges: dict[str, tuple[int, int]], size: int) -> None:
    last = 0
    for name, (begin, end) in sorted(ranges.items(), key=lambda item: item[1]):
        if begin != last:
            fault = "overlaps another tensor" if begin < last else "is not where the one before it ends"
            raise limits.Refused(f"{limits.shortened(name)} {fault}")
        last = end
    if last != size:
        raise limits.Refused(f"its tensors have {last:,} bytes, the file has {size:,} for them")
