"""NVIDIA ModelOpt: FP8 and NVFP4 weights, as vLLM 0.32 reads them.

In NVFP4 each 16 inputs of an output share an FP8 scale, and the weight has one more in float32: the product of the two, in
float32, scales the 4-bit codes, and the result is rounded to the dtype in which the model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from capibara.core import limits
from capibara.core.types import UserError
from capibara.interop.hf.layout.tensors import Shape
from capibara.interop.quantize.formats.fp8 import factors
from capibara.interop.quantize.values import fp4, patterns
from capibara.interop.quantize.values.weights import (
    FLOATS,
    FP8,
    NVFP4_GROUP,
    Blocks,
    Folder,
    Quantized,
    Weight,
    bases,
    check,
    check_keys,
    compute_dtype,
    float8,
    matrix,
    names,
    scaled,
    whole,
)

_MX_GROUP, _BLOCK = 32, 128
_KEYS = frozenset(
    """
quant_method quant_algo ignore exclude_modules group_size kv_cache_scheme kv_cache_quant_algo config_groups producer
quantized_layers quantization
""".split()
)
_CACHE = (".k_scale", ".v_scale", ".q_scale", ".k_proj.output_scale", ".v_proj.output_scale")
_MIXED = "MIXED_PRECISION"


def modelopt(folder: Folder, about: Mapping[str, object]) -> Quantized:
    """The weights of a folder of ModelOpt; the values of hf_quant_config.json may be in `quantization`."""
    inner = about.get("quantization") or {}
    if not isinstance(inner, dict):
        raise UserError(
            f"quantization is {limits.shortened(inner)} in ModelOpt's file, must be an object: copy it again"
        )
    about = {**about, **inner}
    check_keys(about, _KEYS)
    shapes = folder.shapes()
    texts = (*names(about, "ignore"), *names(about, "exclude_modules"))
    ignored = patterns.Globs(texts, "quantization_config.ignore")
    weights: dict[str, Weight] = {}
    parts: set[str] = set()
    for base in bases(shapes, ".weight_scale"):
        if ignored.first(base) is not None:
            raise UserError(
                f"{base}.weight_scale scales a module that quantization_config ignores: copy the folder again"
            )
        algorithm = _algorithm(about, base)
        if f"{base}.pre_quant_scale" in shapes:
            raise UserError(f"{base}.pre_quant_scale scales activations, which is not supported: use another folder")
        weight, names_of_parts = _ALGORITHMS[algorithm](folder, shapes, base)
        weights[f"{base}.weight"] = weight
        parts |= names_of_parts
    activations = {f"{base}.input_scale" for base in bases(shapes, ".input_scale") if f"{base}.weight" in weights}
    caches = {name for name in shapes if name.endswith(_CACHE)}
    notes = [f"activations in {about.get('quant_algo')}"] if activations else []
    notes += ["a key/value cache with scales"] if caches else []
    return Quantized(weights, parts | activations | caches, tuple(notes))


def _algorithm(about: Mapping[str, object], base: str) -> str:
    """The name of the algorithm of a module's weight."""
    stated, layers = about.get("quant_algo"), about.get("quantized_layers")
    layer = layers.get(base) if isinstance(layers, dict) else None
    layer = layer if isinstance(layer, dict) else {}
    if str(stated).upper() == _MIXED:
        stated = layer.get("quant_algo")
    elif str(layer.get("quant_algo", stated)).upper() != str(stated).upper():
        raise UserError(
            f"quantization_config.quant_algo is {limits.shortened(stated)}, and quantized_layers has "
            f"{limits.shortened(layer['quant_algo'])} for {base}: the config.json is another's"
        )
    if str(stated).upper() not in _ALGORITHMS:
        raise UserError(
            f"quantization_config.quant_algo is {limits.shortened(stated)} for {base}, must be one of "
            f"{', '.join(_ALGORITHMS)}, {_MIXED}: use another folder"
        )
    algorithm, size = str(stated).upper(), whole({**about, **layer}, "group_size")
    if "NVFP4" in algorithm and size not in (None, NVFP4_GROUP):
        raise UserError(f"quantization_config.group_size is {size}, must be {NVFP4_GROUP} in {algorithm}")
    return algorithm


_Part = tuple[Weight, set[str]]


def _fp8(
    folder: Folder, shapes: Mapping[str, Shape], base: str, block: Callable[[Shape], Shape], scale: Shape
) -> _Part:
    """A weight in FP8.

    Args:
      block: shape of the weight -> outputs and inputs that share a scale.
      scale: the shape of the scales, where it is not that of the grid of blocks; empty: a number.
    """
    name, of_scale = f"{base}.weight", f"{base}.weight_scale"
    outputs, inputs = matrix(shapes, name)
    check(folder, shapes, name, (outputs, inputs), (FP8,))
    size = block((outputs, inputs))
    check(folder, shapes, of_scale, scale, (*FLOATS, "U8") if size[1] == _MX_GROUP else FLOATS)
    dtype = compute_dtype(folder.config)

    def values() -> np.ndarray:
        scales_AG = factors(folder, of_scale).reshape(-(-outputs // size[0]), -1)
        return scaled(float8(folder.stored(name)), scales_AG, Blocks.of((outputs, inputs), *size), dtype)

    return Weight((outputs, inputs), dtype, values), {name, of_scale}


def _whole(folder: Folder, shapes: Mapping[str, Shape], base: str) -> _Part:
    scale = tuple(shapes[f"{base}.weight_scale"])
    return _fp8(folder, shapes, base, lambda shape: shape, scale if scale == (1,) else ())


def _channels(folder: Folder, shapes: Mapping[str, Shape], base: str) -> _Part:
    outputs, inputs = matrix(shapes, f"{base}.weight")
    of_columns = len(shapes[f"{base}.weight_scale"]) == 2
    return _fp8(folder, shapes, base, lambda shape: (1, shape[1]), (outputs, 1) if of_columns else (outputs,))


def _blocks(folder: Folder, shapes: Mapping[str, Shape], base: str) -> _Part:
    grid = tuple(-(-size // _BLOCK) for size in matrix(shapes, f"{base}.weight"))
    of_units = len(shapes[f"{base}.weight_scale"]) == 4
    return _fp8(folder, shapes, base, lambda shape: (_BLOCK, _BLOCK), (grid[0], 1, grid[1], 1) if of_units else grid)


def _mx(folder: Folder, shapes: Mapping[str, Shape], base: str) -> _Part:
    outputs, inputs = matrix(shapes, f"{base}.weight")
    return _fp8(folder, shapes, base, lambda shape: (1, _MX_GROUP), (outputs, -(-inputs // _MX_GROUP)))


def _nvfp4(folder: Folder, shapes: Mapping[str, Shape], base: str) -> _Part:
    name, of_groups, of_weight = f"{base}.weight", f"{base}.weight_scale", f"{base}.weight_scale_2"
    outputs, pairs = matrix(shapes, name)
    if 2 * pairs % NVFP4_GROUP:
        raise UserError(f"{name} has {2 * pairs} inputs, must have a multiple of {NVFP4_GROUP} in NVFP4")
    check(folder, shapes, name, (outputs, pairs), ("U8",))
    check(folder, shapes, of_groups, (outputs, 2 * pairs // NVFP4_GROUP), (FP8,))
    scalar = tuple(shapes.get(of_weight, ()))
    check(folder, shapes, of_weight, scalar if scalar == (1,) else (), ("F32",))
    dtype = compute_dtype(folder.config)

    def values() -> np.ndarray:
        scales_OG = float8(folder.stored(of_groups)).astype(np.float32) * folder.stored(of_weight).reshape(())
        blocks = Blocks.of((outputs, 2 * pairs), 1, NVFP4_GROUP)
        return scaled(fp4.values(folder.stored(name)), scales_OG, blocks, dtype)

    return Weight((outputs, 2 * pairs), dtype, values), {name, of_groups, of_weight}


_ALGORITHMS: dict[str, Callable[[Folder, Mapping[str, Shape], str], _Part]] = {
    "FP8": _whole,
    "FP8_PER_CHANNEL_PER_TOKEN": _channels,
    "FP8_PB_WO": _blocks,
    "NVFP4": _nvfp4,
    "W4A16_NVFP4": _nvfp4,
    "MXFP8": _mx,
}
