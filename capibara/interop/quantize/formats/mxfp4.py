"""MXFP4: blocks of 32 4-bit numbers that share a power of two (OCP Microscaling Formats 1.0; gpt-oss's experts).

A block's scale is a byte, its exponent plus 127. Folders of transformers store two adjacent numbers in a byte, the first in
its low half; GGUF stores the first sixteen numbers of a block in the low halves and the others in the high ones.

Shape letters: X leading dimensions, G blocks, I = 32 G numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from capibara.core.types import UserError
from capibara.interop.hf.folder import DTYPES
from capibara.interop.hf.layout.tensors import Shape
from capibara.interop.quantize.values import finite, fp4
from capibara.interop.quantize.values.weights import Folder, Quantized, Weight, bases, check, check_keys

BLOCK = 32
_BIAS, _LARGEST_BYTE = 127, 254  # 255 is NaN
_KEYS = frozenset(("quant_method", "modules_to_not_convert", "dequantize"))
PARTS = ("_blocks", "_scales")
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
"""The quantization_config of a gpt-oss in MXFP4, as published."""


def values(blocks_XGB: np.ndarray, scales_XG: np.ndarray) -> np.ndarray:
    """The values of bytes in the layout of transformers' folders.

    Args:
      blocks_XGB: uint8 [..., G, 16].
      scales_XG: uint8 [..., G].

    Returns:
      float32 [..., I]; exact in bfloat16 unless the exponent is out of range.
    """
    pairs = fp4.values(blocks_XGB)
    result = np.ldexp(pairs, scales_XG[..., None].astype(np.int32) - _BIAS)
    return result.reshape(*blocks_XGB.shape[:-2], -1)


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
    steps = np.ldexp(blocks, _BIAS - scales[..., None].astype(np.int32))
    return fp4.packed(steps), scales


def mxfp4(folder: Folder, about: Mapping[str, object]) -> Quantized:
    """Weights of experts [E, I, O], stored as blocks [E, O, I / 32, 16]."""
    check_keys(about, _KEYS)
    shapes = folder.shapes()
    weights: dict[str, Weight] = {}
    parts: set[str] = set()
    for name in bases(shapes, PARTS[0]):
        of_name = [f"{name}{part}" for part in PARTS]
        shape = tuple(shapes[of_name[0]])
        if len(shape) != 4 or shape[3] != BLOCK // 2:
            raise UserError(f"{of_name[0]} has the shape {list(shape)}, must be [experts, outputs, blocks, 16]")
        for part, expected in zip(of_name, (shape, shape[:3])):
            check(folder, shapes, part, expected, ("U8",))
        parts.update(of_name)

        def read(of_name: list[str] = of_name, shape: Shape = shape) -> np.ndarray:
            blocks, scales = map(folder.stored, of_name)
            experts, outputs, groups = shape[:3]
            result = np.empty((experts, groups * BLOCK, outputs), DTYPES["bfloat16"])
            for expert in range(experts):  # one at a time in float32
                result[expert] = values(blocks[expert], scales[expert]).T
            return result

        weights[name] = Weight((shape[0], shape[2] * BLOCK, shape[1]), "bfloat16", read)
    return Quantized(weights, parts)


def shapes_in(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Names and shapes of a gpt-oss's tensors with its experts in MXFP4.

    Raises:
      UserError: their inputs do not divide into blocks of 32.
    """
    result: dict[str, Shape] = {}
    for name, shape in shapes.items():
        if not is_expert(name):
            result[name] = shape
            continue
        experts, inputs, outputs = shape
        if inputs % BLOCK:
            raise UserError(f"{name} has {inputs} inputs, mxfp4 needs a multiple of {BLOCK}: use bf16")
        blocks = (experts, outputs, inputs // BLOCK)
        result |= {f"{name}{PARTS[0]}": (*blocks, BLOCK // 2), f"{name}{PARTS[1]}": blocks}
    return result


def is_expert(name: str) -> bool:
    """Whether a tensor of gpt-oss is stored in MXFP4 in such a folder."""
    return name.endswith((".experts.gate_up_proj", ".experts.down_proj"))


def tensors_in(tensors: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """Converts experts' tensors to MXFP4; yields all tensors in the order of `shapes_in`."""
    for name, value in tensors:
        if not is_expert(name):
            yield name, value
            continue
        created = [packed(name, item.T) for item in value]
        yield from ((f"{name}{part}", np.stack(of_part)) for part, of_part in zip(PARTS, zip(*created)))
