"""Gemma's own format: integers of 2, 4 and 8 bits with a scale for each output, and embeddings in blocks.

Codes of 2 and 4 bits share a byte, the first in its lowest bits, and are stored without a sign. Codes and scales are first rounded
to the dtype in which the model computes, and so is their product, as transformers 5.24 does.

Shape letters: O outputs, I inputs of a weight, G blocks of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from capibara.core import limits
from capibara.core.types import UserError
from capibara.interop.hf.folder import DTYPES
from capibara.interop.hf.layout.tensors import Shape
from capibara.interop.quantize.values import patterns, streams
from capibara.interop.quantize.values.weights import (
    FLOATS,
    Blocks,
    Folder,
    Quantized,
    Weight,
    bases,
    check,
    check_keys,
    compute_dtype,
    matrix,
    names,
)

_KEYS = frozenset(("quant_method", "num_bits", "quantize_embeddings", "module_quant_configs", "modules_to_not_convert"))
_BITS = (2, 4, 8)
_LINEAR, _EMBEDDING = (".weight", ".weight_scale"), (".embedding_quantized", ".embedding_scale")
_ACTIVATIONS = (".input_activation_scale", ".output_activation_scale")
_CACHES = (".k_cache_scale", ".v_cache_scale")


def gemma(folder: Folder, about: Mapping[str, object]) -> Quantized:
    """The weights of a folder of quantized Gemma."""
    check_keys(about, _KEYS)
    names(about, "modules_to_not_convert")
    widths, shapes = _Widths(about), folder.shapes()
    weights: dict[str, Weight] = {}
    parts: set[str] = set()
    for codes, scales in (_LINEAR, _EMBEDDING):
        for base in bases(shapes, scales):
            bits = widths.of(base)
            weights[f"{base}.weight"] = _weight(folder, shapes, f"{base}{codes}", f"{base}{scales}", bits)
            parts |= {f"{base}{codes}", f"{base}{scales}"}
    unused = {name for name in shapes if name.endswith((*_ACTIVATIONS, *_CACHES))}
    notes = ["activations and key/value caches of fixed scales"] if unused else []
    return Quantized(weights, parts | unused, tuple(notes))


class _Widths:
    """The bits of modules: of the first pattern in module_quant_configs that is in the name, and else num_bits.

    Raises:
      UserError: the configuration is malformed.
    """

    def __init__(self, about: Mapping[str, object]):
        self._default = _checked(about.get("num_bits", 4))
        modules = about.get("module_quant_configs") or {}
        if not isinstance(modules, dict) or not all(isinstance(value, dict) for value in modules.values()):
            raise UserError(
                f"quantization_config.module_quant_configs is {limits.shortened(modules)}, must be patterns and their options"
            )
        for options in modules.values():
            check_keys(options, frozenset(("num_bits",)), "quantization_config.module_quant_configs")
        self._bits = {text: _checked(options.get("num_bits", self._default)) for text, options in modules.items()}
        self._patterns = patterns.compiled(modules, "quantization_config.module_quant_configs")

    def of(self, module: str) -> int:
        """The bits of a module's codes."""
        matching = (self._bits[text] for text, pattern in self._patterns.items() if pattern.search(module))
        return next(matching, self._default)


def _checked(bits: object) -> int:
    if type(bits) is not int or bits not in _BITS:
        raise UserError(f"quantization_config.num_bits is {limits.shortened(bits)}, must be 2, 4 or 8")
    return bits


def _weight(folder: Folder, shapes: Mapping[str, Shape], codes: str, scales: str, bits: int) -> Weight:
    outputs, stored_inputs = matrix(shapes, codes)
    check(folder, shapes, codes, (outputs, stored_inputs), ("I8",) if bits == 8 else ("U8",))
    inputs, groups = stored_inputs * 8 // bits, matrix(shapes, scales)[1]
    check(folder, shapes, scales, (outputs, groups), FLOATS)
    if inputs % groups:
        raise UserError(f"{scales} has {groups} blocks, must divide {inputs} inputs: copy the folder again")
    dtype = compute_dtype(folder.config)

    def values() -> np.ndarray:
        stored = folder.stored(codes)
        steps = stored if bits == 8 else streams.unpacked(stored, bits).astype(np.int8) - np.int8(1 << (bits - 1))
        blocks = Blocks.of((outputs, inputs), 1, inputs // groups)
        rounded = folder.stored(scales).astype(DTYPES[dtype])
        return steps.astype(DTYPES[dtype]) * np.take(rounded[blocks.row_O], blocks.column_I, axis=1)

    return Weight((outputs, inputs), dtype, values)
