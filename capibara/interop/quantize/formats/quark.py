"""AMD Quark: integers of 4 and 8 bits, FP8 and MXFP4, as Quark 0.13 exports and reads them.

Words of 4-bit codes have eight outputs of an input, in AWQ's order ("reorder") or as they come ("order").

Shape letters: O outputs, I inputs of a weight, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from capibara.core import limits
from capibara.core.types import UserError
from capibara.interop.hf.layout.tensors import Shape
from capibara.interop.quantize.formats import words
from capibara.interop.quantize.values import fp4, patterns
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
    matrix,
    names,
    powers,
    scaled,
    whole,
)

_KEYS = frozenset(
    """
quant_method version quant_mode export exclude global_quant_config layer_quant_config layer_type_quant_config
kv_cache_quant_config kv_cache_post_rope algo_config weight_merge_groups softmax_quant_spec
""".split()
)
# Of a weight's scheme: keys that say how its codes are stored, and those that say how they were made; not is_scale_quant.
_SCHEME_KEYS = frozenset(
    """
dtype qscheme ch_axis group_size scale_format symmetric scale_type scale_calculation_mode zero_point_type round_method
observer_cls is_dynamic block_size mx_element_dtype enable_buffer_reuse max_input_numel
""".split()
)
_FOLDED = ("awq", "gptq", "gptaq", "smooth", "autosmoothquant", "qronos")  # what they do to weights is in the weights
_ACTIVATIONS, _CACHES = ("input_tensors", "output_tensors"), ("kv_cache_quant_config", "softmax_quant_spec")
_SCALES_OF_ACTIVATIONS = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale", ".prob_output_scale")
_MX_GROUP = 32


def quark(folder: Folder, about: Mapping[str, object]) -> Quantized:
    """The weights of a folder of Quark."""
    check_keys(about, _KEYS)
    _check_algorithms(about.get("algo_config"))
    packing, schemes, shapes = _packing(about.get("export")), _Schemes(about), folder.shapes()
    excluded = patterns.Globs(names(about, "exclude"), "quantization_config.exclude")
    weights: dict[str, Weight] = {}
    parts: set[str] = set()
    for base in bases(shapes, ".weight_scale"):
        if excluded.first(base) is not None:
            raise UserError(f"{base}.weight_scale scales a module that quantization_config excludes: copy it again")
        module = _Module(folder, shapes, base, schemes.of(base), packing)
        weights[f"{base}.weight"] = module.weight()
        parts |= module.parts
    unused = {name for name in shapes if name.endswith(_SCALES_OF_ACTIVATIONS)}
    whole_model = about.get("global_quant_config")
    scheme = whole_model if isinstance(whole_model, dict) else {}
    notes = ["activations and caches as Quark has them"] if unused or any(
        [*(scheme.get(key) for key in _ACTIVATIONS), *(about.get(key) for key in _CACHES)]
    ) else []  # fmt: skip
    return Quantized(weights, parts | unused, tuple(notes))


def _check_algorithms(algorithms: object) -> None:
    """Raises UserError for what changes weights or activations in ways that are not in the weights."""
    for algorithm in algorithms if isinstance(algorithms, list) else [algorithms] if algorithms else []:
        name = algorithm.get("name") if isinstance(algorithm, dict) else None
        if name not in _FOLDED:
            raise UserError(
                f"quantization_config.algo_config has {limits.shortened(algorithm)}, must be one of {', '.join(_FOLDED)}: use "
                "the folder before quantization"
            )


def _packing(export: object) -> str:
    """The order of 4-bit codes in words."""
    if not isinstance(export, dict | None):
        raise UserError(f"quantization_config.export is {limits.shortened(export)}, must be an object: copy it again")
    packing = (export or {}).get("pack_method", "reorder")
    if packing not in ("reorder", "order"):
        raise UserError(f"export.pack_method is {limits.shortened(packing)}, must be reorder or order")
    return str(packing)


class _Schemes:
    """How the weights of modules are quantized: the first pattern of layer_quant_config that is a name counts.

    Raises:
      UserError: the configuration is malformed.
    """

    def __init__(self, about: Mapping[str, object]):
        layers = about.get("layer_quant_config") or {}
        if not isinstance(layers, dict) or about.get("layer_type_quant_config"):
            raise UserError(
                "quantization_config of Quark must have layer_quant_config by names, and no layer_type_quant_config: use another folder"
            )
        self._layers, self._all = layers, about.get("global_quant_config")
        self._patterns = patterns.Globs(layers, "quantization_config.layer_quant_config")

    def of(self, module: str) -> Mapping[str, object]:
        """The scheme of a module with scales.

        Raises:
          UserError: there is none, or it says something that is not known.
        """
        text = self._patterns.first(module)
        config = self._all if text is None else self._layers[text]
        scheme = config.get("weight") if isinstance(config, dict) else None
        if not isinstance(scheme, dict):
            raise UserError(f"{module} has scales, and quantization_config does not say how its weight is stored")
        check_keys(scheme, _SCHEME_KEYS, f"quantization_config for {module}")
        return scheme


class _Module:
    """The tensors of a module with a quantized weight.

    Attributes:
      parts: names of the tensors that its weight is made of.
    """

    def __init__(
        self, folder: Folder, shapes: Mapping[str, Shape], base: str, scheme: Mapping[str, object], packing: str
    ):
        self._folder, self._shapes, self._scheme, self._packing = folder, shapes, scheme, packing
        self._codes, self._scale = f"{base}.weight", f"{base}.weight_scale"
        self._zeros = f"{base}.weight_zero_point"
        self.parts = {self._codes, self._scale, *([self._zeros] if self._zeros in shapes else [])}
        self._dtype = folder.dtype(self._scale) or compute_dtype(folder.config)

    def weight(self) -> Weight:
        """The weight, after all shapes and dtypes are checked.

        Raises:
          UserError: tensors contradict the scheme, or it is not supported.
        """
        dtype = self._scheme.get("dtype")
        reader = _READERS.get(dtype) if isinstance(dtype, str) else None
        if reader is None:
            raise UserError(
                f"quantization_config has the dtype {limits.shortened(dtype)} for {self._codes}, must be one of "
                f"{', '.join(_READERS)}: use the folder before quantization"
            )
        return reader(self)

    def bytes(self) -> Weight:
        """FP8 and 8-bit integers, with a scale for the weight or for each output."""
        is_float = self._scheme.get("dtype") == "fp8_e4m3"
        shape = matrix(self._shapes, self._codes)
        check(self._folder, self._shapes, self._codes, shape, (FP8,) if is_float else ("I8",))
        scheme = self._scheme.get("qscheme")
        if scheme not in ("per_tensor", "per_channel") or scheme == "per_channel" and self._scheme.get("ch_axis") != 0:
            raise UserError(
                f"quantization_config has qscheme = {limits.shortened(scheme)} and ch_axis = "
                f"{limits.shortened(self._scheme.get('ch_axis'))} for {self._codes}, must be per_tensor, or per_channel and 0"
            )
        block = shape if scheme == "per_tensor" else (1, shape[1])
        expected: Shape = () if scheme == "per_tensor" else (shape[0],)
        self._check_scale(expected if expected or self._shapes[self._scale] != (1,) else (1,))
        zeros = self._zeros in self._shapes
        if zeros:
            check(self._folder, self._shapes, self._zeros, tuple(self._shapes[self._scale]), ("I8", "I32"))

        def values() -> np.ndarray:
            stored = self._folder.stored
            codes = float8(stored(self._codes)) if is_float else stored(self._codes)
            zeros_A1 = stored(self._zeros).reshape(-1, 1).astype(np.int32) if zeros else None
            return scaled(codes, stored(self._scale).reshape(-1, 1), Blocks.of(shape, *block), self._dtype, zeros_A1)

        return Weight(shape, self._dtype, values)

    def four_bits(self) -> Weight:
        """4-bit integers in words, [I, O / 8], and zero points that are packed alike."""
        inputs, words_O = matrix(self._shapes, self._codes)
        check(self._folder, self._shapes, self._codes, (inputs, words_O), ("I32",))
        outputs, size = words_O * 8, whole(self._scheme, "group_size")
        if self._scheme.get("qscheme") != "per_group" or not size or size < 1 or inputs % size:
            raise UserError(
                f"quantization_config has qscheme = {limits.shortened(self._scheme.get('qscheme'))} and group_size = {size} for "
                f"{self._codes}, must be per_group, which divides {inputs} inputs"
            )
        order = words.AWQ_ORDER if self._packing == "reorder" else None
        groups, is_signed = inputs // size, self._scheme.get("dtype") == "int4"
        self._check_scale((groups, outputs))
        check(self._folder, self._shapes, self._zeros, (groups, words_O), ("I32",))

        def numbers(name: str) -> np.ndarray:
            codes = words.unpacked(self._folder.stored(name).view(np.uint32), 4, order).astype(np.int8)
            return codes - np.int8(16) * (codes > 7) if is_signed else codes

        def values() -> np.ndarray:
            blocks, scales_GO = Blocks.of((inputs, outputs), size, 1), self._folder.stored(self._scale)
            result = scaled(numbers(self._codes), scales_GO, blocks, self._dtype, numbers(self._zeros))
            return np.ascontiguousarray(result.T)

        return Weight((outputs, inputs), self._dtype, values)

    def mxfp4(self) -> Weight:
        outputs, width = matrix(self._shapes, self._codes)
        check(self._folder, self._shapes, self._codes, (outputs, width), ("U8",))
        size, form = whole(self._scheme, "group_size"), self._scheme.get("scale_format")
        if size != _MX_GROUP or form != "e8m0" or 2 * width % _MX_GROUP:
            raise UserError(
                f"quantization_config has group_size = {size} and scale_format = {limits.shortened(form)} for {self._codes} of "
                f"{2 * width} inputs, must be {_MX_GROUP}, which divides them, and e8m0"
            )
        check(self._folder, self._shapes, self._scale, (outputs, 2 * width // _MX_GROUP), EXPONENTS)
        dtype, stored = compute_dtype(self._folder.config), self._folder.stored
        blocks = Blocks.of((outputs, 2 * width), 1, _MX_GROUP)
        return Weight(
            (outputs, 2 * width),
            dtype,
            lambda: scaled(fp4.values(stored(self._codes)), powers(stored(self._scale)), blocks, dtype),
        )

    def _check_scale(self, shape: Shape) -> None:
        check(self._folder, self._shapes, self._scale, shape, FLOATS)


_READERS: dict[str, Callable[[_Module], Weight]] = {
    "fp8_e4m3": _Module.bytes,
    "int8": _Module.bytes,
    "int4": _Module.four_bits,
    "uint4": _Module.four_bits,
    "fp4": _Module.mxfp4,
}
