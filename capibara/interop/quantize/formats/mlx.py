"""MLX: weights as mlx-lm 0.32 writes them, with the values of mlx.core.dequantize (mlx 0.32).

Codes are a stream of bits along a row, the lowest first, in 32-bit words. Affine codes have a scale and a bias in each group of
inputs; product and sum are each rounded to the dtype of the scales. The other modes have 4-bit or 8-bit floats with a scale of
one byte in each group, and no bias.

Shape letters: O outputs, I inputs of a weight, G groups of inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from capibara.core import limits
from capibara.core.types import UserError
from capibara.interop.hf.layout.tensors import Shape
from capibara.interop.quantize.formats.words import unpacked
from capibara.interop.quantize.values import fp4
from capibara.interop.quantize.values.weights import (
    FLOATS,
    Blocks,
    Folder,
    Quantized,
    Weight,
    bases,
    check,
    check_keys,
    float8,
    powers,
    scaled,
)

CONFIG_KEY = "quantization"  # of config.json; newer folders have it as quantization_config, too
_WORD, _ROWS = 32, 256
_BITS = (1, 2, 3, 4, 5, 6, 8)
_GROUPS = (32, 64, 128)
_KEYS = frozenset(("group_size", "bits", "mode"))
# Of experts in one tensor: the name of the module in Hugging Face's layout, and those of its projections.
_EXPERTS = {
    ".block_sparse_moe.switch_mlp.": (
        ".block_sparse_moe.experts.",
        {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    ),
    ".mlp.switch_mlp.": (".mlp.experts.", {name: name for name in ("gate_proj", "up_proj", "down_proj")}),
}


class _Scheme(NamedTuple):
    """How the weights of a module are stored."""

    mode: str
    bits: int
    group_size: int


class _Mode(NamedTuple):
    """A mode with floats: its only group size and bits, and what makes values of codes and of scales."""

    group_size: int
    bits: int
    codes: Callable[[np.ndarray], np.ndarray]
    scales: Callable[[np.ndarray], np.ndarray]


def _floats4(words_OX: np.ndarray) -> np.ndarray:
    return fp4.values(words_OX.view(np.uint8))


def _floats8(words_OX: np.ndarray) -> np.ndarray:
    return float8(words_OX.view(np.uint8)).astype(np.float32)


def _scales8(bytes_OG: np.ndarray) -> np.ndarray:
    return float8(bytes_OG).astype(np.float32)


_MODES = {
    "mxfp4": _Mode(32, 4, _floats4, powers),
    "mxfp8": _Mode(32, 8, _floats8, powers),
    "nvfp4": _Mode(16, 4, _floats4, _scales8),
}


def is_mlx(about: object) -> bool:
    """Whether a part of config.json is mlx-lm's."""
    return isinstance(about, Mapping) and {"group_size", "bits"} <= about.keys() and "quant_method" not in about


def mlx(folder: Folder, about: Mapping[str, object]) -> Quantized:
    """The weights of a folder that mlx-lm has quantized."""
    modules = {path: value for path, value in about.items() if isinstance(value, Mapping | bool) and path not in _KEYS}
    check_keys({key: value for key, value in about.items() if key not in modules}, _KEYS, CONFIG_KEY)
    shapes = folder.shapes()
    for path, value in modules.items():
        if isinstance(value, Mapping):
            check_keys(value, _KEYS, f"{CONFIG_KEY}[{limits.shortened(path)}]")
            if f"{path}.scales" not in shapes:
                raise UserError(
                    f"{path}.scales is missing, and {CONFIG_KEY} says how it is stored: copy the folder again"
                )
    weights: dict[str, Weight] = {}
    parts: set[str] = set()
    # Experts of a layer are read one after the other, and are in one tensor.
    of_stack = functools.lru_cache(maxsize=3)(folder.stored)
    for base in bases(shapes, ".scales"):
        stated = modules.get(base, {})
        if stated is False:
            raise UserError(
                f"{base}.scales scales a module that {CONFIG_KEY} says is not quantized: copy the folder again"
            )
        if f"{base}.global_scale" in shapes:
            raise UserError(f"{base}.global_scale is not supported: convert the model without it")
        scheme = _scheme(base, {**about, **(stated if isinstance(stated, Mapping) else {})})
        names = [f"{base}.{part}" for part in ("weight", "scales", *(["biases"] if scheme.mode == "affine" else []))]
        *experts, outputs, inputs = _checked(folder, shapes, base, scheme)
        # Products of their codes and scales have at most eight bits.
        dtype = folder.dtype(f"{base}.scales") if scheme.mode == "affine" else "bfloat16"
        for index, name in enumerate(_names(base, experts)):
            at = (index,) if experts else ()
            values = functools.partial(_values, of_stack if experts else folder.stored, base, scheme, dtype, at)
            weights[name] = Weight((outputs, inputs), dtype, values)
        parts |= {*names}
    return Quantized(weights, parts)


def _scheme(base: str, about: Mapping[str, object]) -> _Scheme:
    mode, bits, size = about.get("mode", "affine"), about.get("bits"), about.get("group_size")
    if type(bits) is int and type(size) is int and isinstance(mode, str):  # 4.0 and True equal whole numbers
        if mode == "affine" and bits in _BITS and size in _GROUPS:
            return _Scheme(mode, bits, size)
        if (known := _MODES.get(mode)) is not None and (bits, size) == (known.bits, known.group_size):
            return _Scheme(mode, bits, size)
    raise UserError(
        f"{CONFIG_KEY} has mode = {limits.shortened(mode)}, bits = {limits.shortened(bits)} and group_size = "
        f"{limits.shortened(size)} for {base}, must be affine with 1 to 6 or 8 bits in groups of 32, 64 or 128, mxfp4 (4, 32), mxfp8 "
        "(8, 32) or nvfp4 (4, 16)"
    )


def _checked(folder: Folder, shapes: Mapping[str, Shape], base: str, scheme: _Scheme) -> Shape:
    """The shape of a weight: experts, if it has them, outputs and inputs."""
    name = f"{base}.weight"
    shape = shapes.get(name, ())
    if len(shape) not in (2, 3) or 0 in shape or shape[-1] * _WORD % scheme.bits:
        raise UserError(
            f"{name} has the shape {list(shape)}, must be a matrix of words of {scheme.bits} bits: copy it again"
        )
    *outer, words = shape
    inputs = words * _WORD // scheme.bits
    check(folder, shapes, name, shape, ("U32",))
    if inputs % scheme.group_size:
        raise UserError(
            f"{name} has {inputs} inputs of {scheme.bits} bits, must be whole groups of {scheme.group_size}: the config.json is another's"
        )
    grid = (*outer, inputs // scheme.group_size)
    check(folder, shapes, f"{base}.scales", grid, FLOATS if scheme.mode == "affine" else ("U8",))
    if scheme.mode == "affine":
        check(folder, shapes, f"{base}.biases", grid, (folder.kind(f"{base}.scales"),))
    return (*outer, inputs)


def _names(base: str, experts: list[int]) -> list[str]:
    """The names of a module's weights in Hugging Face's layout: one, or one for each expert."""
    if not experts:
        return [f"{base}.weight"]
    for part, (module, projections) in _EXPERTS.items():
        above, _, last = base.rpartition(part)
        if part in base and last in projections:
            return [f"{above}{module}{index}.{projections[last]}.weight" for index in range(experts[0])]
    raise UserError(
        f"{base}.weight has {experts[0]} matrices, as mlx-lm stores the experts of Mixtral, Qwen and DeepSeek alone: use the folder before "
        "quantization"
    )


def _values(
    stored: Callable[[str], np.ndarray], base: str, scheme: _Scheme, dtype: str, at: tuple[int, ...]
) -> np.ndarray:
    words_OX, scales_OG = (np.ascontiguousarray(stored(f"{base}.{part}")[at]) for part in ("weight", "scales"))
    outputs, inputs = len(words_OX), words_OX.shape[1] * _WORD // scheme.bits
    blocks = Blocks.of((outputs, inputs), 1, scheme.group_size)
    if scheme.mode != "affine":
        mode = _MODES[scheme.mode]
        return scaled(mode.codes(words_OX), mode.scales(scales_OG), blocks, dtype)
    products = scaled(_codes(words_OX, scheme.bits), scales_OG, blocks, dtype)
    biases_OG = stored(f"{base}.biases")[at]
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found where the tensor is used
        for row in range(outputs):  # float32 of a whole weight would be twice its memory
            biases_I = np.repeat(biases_OG[row].astype(np.float32), scheme.group_size)
            products[row] = (products[row].astype(np.float32) + biases_I).astype(products.dtype)
    return products


def _codes(words_OX: np.ndarray, bits: int) -> np.ndarray:
    """The codes [O, I] of rows of words, uint8."""
    if bits in (1, 2, 4, 8):
        return unpacked(words_OX, bits)
    bytes_OX = words_OX.view(np.uint8)
    codes_OI = np.empty((len(bytes_OX), bytes_OX.shape[1] * 8 // bits), np.uint8)
    for start in range(0, len(bytes_OX), _ROWS):  # a byte for each bit
        rows = slice(start, start + _ROWS)
        stream = np.unpackbits(bytes_OX[rows], axis=1, bitorder="little").reshape(-1, codes_OI.shape[1], bits)
        codes_OI[rows] = np.packbits(stream, axis=2, bitorder="little")[..., 0]
    return codes_OI
