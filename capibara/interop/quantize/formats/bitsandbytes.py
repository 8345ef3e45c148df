"""bitsandbytes: nf4 and fp4 with a table of 16 levels for blocks of values, and int8 with a scale for each output.

Rounding follows bitsandbytes: the product of level and scale is rounded once, to the dtype of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from capibara.core import limits
from capibara.core.types import UserError
from capibara.interop.hf.folder import DTYPES
from capibara.interop.hf.layout.tensors import Shape
from capibara.interop.quantize.values.weights import (
    FLOATS,
    Folder,
    Quantized,
    Weight,
    bases,
    check,
    check_keys,
    compute_dtype,
    matrix,
)

_STATE_BYTES = 1 << 16  # limit of the description of a weight
_INT8_STEP = np.float32(1 / 127)
_BYTES = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4}  # dtypes that can store 4-bit codes
# Every weight describes itself; these say how it was made, and how layers compute.
_KEYS = frozenset(
    """
quant_method load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_storage
bnb_4bit_quant_type bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight
llm_int8_skip_modules llm_int8_threshold
""".split()
)


class _State(NamedTuple):
    """bitsandbytes' description of a weight; nested: that of its blocks' scales."""

    shape: Shape
    dtype: str
    block: int
    nested_block: int
    nested_offset: float


def bitsandbytes(folder: Folder, about: Mapping[str, object]) -> Quantized:
    """The weights of a folder in bitsandbytes' formats."""
    check_keys(about, _KEYS)
    shapes = folder.shapes()
    weights: dict[str, Weight] = {}
    parts: set[str] = set()
    for kind in ("nf4", "fp4"):
        mark = f".quant_state.bitsandbytes__{kind}"
        for name in bases(shapes, mark):
            weights[name], of_it = _in_4_bits(folder, name, f"{name}{mark}", shapes)
            parts |= of_it
    dtype = compute_dtype(folder.config, "float16")
    for base in bases(shapes, ".SCB"):
        name = f"{base}.weight"
        outputs, _ = matrix(shapes, name)
        check(folder, shapes, name, shapes[name], ("I8",))
        check(folder, shapes, f"{base}.SCB", (outputs,), ("F32",))
        layout = f"{base}.weight_format"
        if layout in shapes and (math.prod(shapes[layout]) != 1 or folder.stored(layout).any()):
            raise UserError(f"{layout} is not 0 (row-major): other layouts of bitsandbytes are not supported")

        def values(name: str = name, base: str = base) -> np.ndarray:
            largest_O = folder.stored(f"{base}.SCB")[:, None]
            return (folder.stored(name).astype(np.float32) * largest_O * _INT8_STEP).astype(DTYPES[dtype])

        weights[name] = Weight(shapes[name], dtype, values)
        parts |= {name, f"{base}.SCB", layout}
    return Quantized(weights, parts)


def _in_4_bits(folder: Folder, name: str, mark: str, shapes: Mapping[str, Shape]) -> tuple[Weight, set[str]]:
    """An nf4 or fp4 weight, and the tensors that it is made of."""
    state = _state(folder, mark, shapes)
    shape, dtype, block = state.shape, state.dtype, state.block
    count = math.prod(shape)
    blocks = -(-count // block)
    have = math.prod(shapes[name]) * _BYTES.get(folder.kind(name), 0) if name in shapes else 0
    if have != -(-count // 2):
        raise UserError(f"{name} has {have:,} bytes of codes, must have {-(-count // 2):,} by its shape: copy it again")
    check(folder, shapes, f"{name}.quant_map", (16,), ("F32",))
    parts = {name, mark, f"{name}.absmax", f"{name}.quant_map"}
    nested = f"{name}.nested_absmax" in shapes
    check(folder, shapes, f"{name}.absmax", (blocks,), ("U8",) if nested else FLOATS)
    if nested:
        check(folder, shapes, f"{name}.nested_absmax", (-(-blocks // state.nested_block),), ("F32",))
        check(folder, shapes, f"{name}.nested_quant_map", (256,), ("F32",))
        parts |= {f"{name}.nested_absmax", f"{name}.nested_quant_map"}

    def largest_of_blocks() -> np.ndarray:
        stored = folder.stored(f"{name}.absmax")
        if not nested:
            return stored.astype(np.float32)
        levels = folder.stored(f"{name}.nested_quant_map").astype(np.float32)[stored]
        scales = np.repeat(folder.stored(f"{name}.nested_absmax").astype(np.float32), state.nested_block)
        return levels * scales[:blocks] + np.float32(state.nested_offset)

    def values() -> np.ndarray:
        packed = folder.stored(name).reshape(-1).view(np.uint8)
        levels = folder.stored(f"{name}.quant_map").astype(np.float32)
        largest, result = largest_of_blocks(), np.empty(2 * len(packed), DTYPES[dtype])
        step = block * 4096  # values at once, in whole blocks
        for start in range(0, count, step):
            both = packed[start // 2 : (start + step) // 2]
            codes = np.stack([both >> 4, both & 15], -1).reshape(-1)
            scales = np.repeat(largest[start // block : (start + step) // block], block)[: len(codes)]
            result[start : start + len(codes)] = (levels[codes] * scales).astype(result.dtype)
        return result[:count].reshape(shape)

    return Weight(shape, dtype, values), parts


def _state(folder: Folder, mark: str, shapes: Mapping[str, Shape]) -> _State:
    """The checked description of a weight by bitsandbytes."""
    if math.prod(shapes[mark]) > _STATE_BYTES or folder.kind(mark) != "U8":
        raise UserError(f"{mark} must be at most {_STATE_BYTES:,} bytes of JSON: copy the folder again")
    try:
        result = limits.parse_json(folder.stored(mark).tobytes(), values=1000)
    except ValueError as error:
        raise UserError(f"{mark} cannot be read ({limits.cause(error)}): copy the folder again") from None
    result = result if isinstance(result, dict) else {}
    shape, dtype, block = result.get("shape"), result.get("dtype"), result.get("blocksize")
    nested, offset = result.get("nested_blocksize", 1), result.get("nested_offset", 0.0)
    whole = lambda value, most: type(value) is int and 0 < value <= most  # noqa: E731
    if isinstance(shape, list) and len(shape) == 2 and all(whole(size, 2**31) for size in shape):
        if (
            isinstance(block, int)
            and whole(block, 2**16)
            and not block % 2
            and whole(nested, 2**16)
            and isinstance(offset, (int, float))
        ):
            if isinstance(dtype, str) and dtype in DTYPES:
                return _State(tuple(shape), dtype, block, nested, offset)
    raise UserError(f"{mark} does not say the shape, dtype and block size of a weight: copy the folder again")
