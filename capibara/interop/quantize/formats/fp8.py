"""FP8 (E4M3) weights with a scale for each block, as DeepSeek V3 and Qwen3 publish them, or one for the whole weight.

The scale's name says that it is an inverse, and it is the factor that makes values of codes. The product is rounded once, to
the dtype in which the model computes, as transformers does.

Blocks have the size that config.json states, the last ones are cut off: transformers 5.24 divides a weight into as many
equal blocks as it has scales, which differs where the size does not divide the weight.

Shape letters: O outputs, I inputs of a weight, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from capibara.core import limits
from capibara.core.types import UserError
from capibara.interop.hf.folder import DTYPES
from capibara.interop.hf.layout.tensors import Shape
from capibara.interop.quantize.values.weights import (
    EXPONENTS,
    FLOATS,
    FP8,
    Blocks,
    Folder,
    Quantized,
    Weight,
    bases,
    check,
    check_keys,
    compute_dtype,
    float8,
    names,
    powers,
    scaled,
)

SCALE = "_scale_inv"
_ENDINGS = (SCALE, "_scale")  # the second one: of vLLM's older folders, for the whole weight
_ACTIVATIONS = ("input_scale", "activation_scale")
_KEYS = frozenset(
    """
quant_method activation_scheme weight_block_size modules_to_not_convert ignored_layers fmt scale_fmt expert_dtype dequantize
""".split()
)
# Keys of which only these values are known.
_VALUES = {
    "activation_scheme": (None, "dynamic", "static"),
    "fmt": (None, "e4m3"),
    "scale_fmt": (None, "float", "ue8m0"),
    "expert_dtype": (None, "fp8"),
}


def fp8(folder: Folder, about: Mapping[str, object]) -> Quantized:
    """The weights of a folder of transformers' or vLLM's quant_method fp8."""
    check_keys(about, _KEYS)
    for key, allowed in _VALUES.items():
        if about.get(key) not in allowed:
            shown = " or ".join(str(value) for value in allowed[1:])
            raise UserError(f"quantization_config.{key} is {limits.shortened(about[key])}, must be {shown}")
    block, skipped = _block(about), {*names(about, "modules_to_not_convert"), *names(about, "ignored_layers")}
    shapes = folder.shapes()
    weights: dict[str, Weight] = {}
    parts: set[str] = set()
    for name, scale in _scales(shapes):
        if name in weights:
            raise UserError(
                f"{name} has the scales {name}{SCALE} and {scale}, must have one of them: copy the folder again"
            )
        if not skipped.isdisjoint(_ends(name.removesuffix(".weight"))):
            raise UserError(f"{scale} scales a module that quantization_config does not convert: copy the folder again")
        weights[name] = _weight(folder, shapes, name, scale, block)
        parts |= {name, scale}
    activations = {name for name in shapes if name.endswith(_ACTIVATIONS) and _of(name, weights)}
    notes = ["activations in FP8, of fixed scales"] if activations else []
    return Quantized(weights, parts | activations, tuple(notes))


def fbgemm_fp8(folder: Folder, about: Mapping[str, object]) -> Quantized:
    """The weights of a folder of transformers' quant_method fbgemm_fp8: each output has a scale."""
    check_keys(about, frozenset(("quant_method", "activation_scale_ub", "modules_to_not_convert")))
    bound = about.get("activation_scale_ub")
    if bound is not None and not isinstance(bound, int | float):
        raise UserError(f"quantization_config.activation_scale_ub is {limits.shortened(bound)}, must be a number")
    return fp8(folder, {"quant_method": "fp8", "modules_to_not_convert": about.get("modules_to_not_convert")})


def _block(about: Mapping[str, object]) -> tuple[int, int] | None:
    """Outputs and inputs of a block; None: a weight has one scale."""
    block = about.get("weight_block_size")
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise UserError(
            f"quantization_config.weight_block_size is {limits.shortened(block)}, must be outputs and inputs of a block, "
            "[128, 128] for example"
        )
    return block[0], block[1]


def _ends(module: str) -> Iterator[str]:
    """The names by which a module may be skipped: its own, without its first parts, and without its last ones."""
    parts = module.split(".")
    for at in range(len(parts)):
        yield ".".join(parts[at:])
        yield ".".join(parts[: at + 1])


def _scales(shapes: Mapping[str, Shape]) -> Iterator[tuple[str, str]]:
    """The names of quantized weights and their scales."""
    for name in bases(shapes, SCALE):
        yield name, f"{name}{SCALE}"
    for base in bases(shapes, f".weight{_ENDINGS[1]}"):
        yield f"{base}.weight", f"{base}.weight{_ENDINGS[1]}"


def _of(name: str, weights: Mapping[str, Weight]) -> bool:
    """Whether the scale of an activation belongs to a quantized weight."""
    base = next(name.removesuffix(ending) for ending in _ACTIVATIONS if name.endswith(ending))
    return f"{base}weight" in weights or base.removesuffix("_") in weights


def _weight(
    folder: Folder, shapes: Mapping[str, Shape], name: str, scale: str, block: tuple[int, int] | None
) -> Weight:
    shape = tuple(shapes.get(name, ()))
    if len(shape) not in (2, 3) or 0 in shape:
        raise UserError(f"{name} must be a matrix, or one for each expert: the folder is incomplete, copy it again")
    check(folder, shapes, name, shape, (FP8,))
    leading, (outputs, inputs) = shape[:-2], shape[-2:]
    size = block or (outputs, inputs)
    expected: Shape = (*leading, -(-outputs // size[0]), -(-inputs // size[1]))
    if block is None and tuple(shapes[scale]) in ((outputs,), (outputs, 1)) and not leading:
        size, expected = (1, inputs), tuple(shapes[scale])
    elif block is None and np.prod(shapes[scale], dtype=int) == np.prod(leading, dtype=int):
        expected = tuple(shapes[scale])  # with or without dimensions of 1
    check(folder, shapes, scale, expected, (*FLOATS, *EXPONENTS))
    dtype = compute_dtype(folder.config)

    def values() -> np.ndarray:
        codes, scales = float8(folder.stored(name)), factors(folder, scale)
        blocks = Blocks.of((outputs, inputs), *size)
        codes_EOI = codes.reshape(-1, outputs, inputs)
        scales_EAG = scales.reshape(len(codes_EOI), -(-outputs // size[0]), -1)
        result = np.empty(codes_EOI.shape, DTYPES[dtype])
        for expert, codes_OI in enumerate(codes_EOI):
            result[expert] = scaled(codes_OI, scales_EAG[expert], blocks, dtype)
        return result.reshape(shape)

    return Weight(shape, dtype, values)


def factors(folder: Folder, name: str) -> np.ndarray:
    """Scales in float32, stored as floats or as bytes with exponents."""
    stored = folder.stored(name)
    return powers(stored) if folder.kind(name) in EXPONENTS else stored.astype(np.float32)
