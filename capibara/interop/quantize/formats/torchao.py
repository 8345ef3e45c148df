"""torchao: tensors of its classes, as transformers 5.24 saves them with torchao 0.18.

The metadata of the safetensors file say the class of each weight and its block, which shapes alone do not: scales of MX and NVFP4
weights may be swizzled, in tiles of 128 rows and 4 columns, in a tensor of another shape.

Shape letters: O outputs, I inputs of a weight, A blocks of outputs, G blocks of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from capibara.core import limits
from capibara.core.types import UserError
from capibara.interop.hf.folder import DTYPES
from capibara.interop.hf.layout.tensors import Shape
from capibara.interop.quantize.values import fp4
from capibara.interop.quantize.values.weights import (
    FLOATS,
    FP8,
    Blocks,
    Folder,
    Quantized,
    Weight,
    bases,
    check,
    check_keys,
    float8,
    matrix,
    powers,
    scaled,
)

_KEYS = frozenset(
    """
quant_method quant_type modules_to_not_convert include_input_output_embeddings untie_embedding_weights quant_type_kwargs
""".split()
)
_ATTRIBUTES = frozenset(
    """
block_size dtype orig_dtype elem_dtype target_dtype is_swizzled_scales act_quant_kwargs activation_quantization reduce_range
kernel_preference mm_config use_triton_kernel
""".split()
)
_ACTIVATIONS = ("act_quant_kwargs", "activation_quantization")  # attributes that say how activations are quantized
_TILE = (128, 4)  # rows and columns of scales
_BLOCKS = {"MXTensor": 32, "NVFP4Tensor": 16}  # inputs that share a scale


def torchao(folder: Folder, about: Mapping[str, object]) -> Quantized:
    """The weights of a folder of torchao."""
    check_keys(about, _KEYS)
    shapes, metadata = folder.shapes(), folder.metadata()
    weights: dict[str, Weight] = {}
    parts: set[str] = set()
    notes: set[str] = set()
    for base in bases(shapes, "_qdata"):
        module, _, parameter = base.rpartition(".")
        name = f"{module}.{parameter.removeprefix('_')}"
        tensor = _Tensor(folder, shapes, base, _attributes(name, metadata.get(name)))
        weights[name] = tensor.weight()
        parts |= tensor.parts
        notes |= {
            f"activations as torchao's {tensor.kind} has them" for key in _ACTIVATIONS if tensor.attributes.get(key)
        }
    return Quantized(weights, parts, tuple(sorted(notes)))


class _Described(NamedTuple):
    """What the metadata say of a tensor: the name of its class, its attributes, and the names of its stored tensors."""

    kind: str
    attributes: Mapping[str, object]
    stored: list[str]


def _attributes(name: str, text: str | None) -> _Described:
    try:
        about = None if text is None else limits.parse_json(text.encode())
    except ValueError:
        about = None
    kind = about.get("_type") if isinstance(about, dict) else None
    attributes = about.get("_data") if isinstance(about, dict) else None
    stored = about.get("_tensor_data_names") if isinstance(about, dict) else None
    names = stored if isinstance(stored, list) and all(isinstance(part, str) for part in stored) else None
    if not isinstance(kind, str) or not isinstance(attributes, dict) or names is None:
        raise UserError(f"{name} has no class of torchao in the metadata of its file: save it with torchao 0.18 again")
    return _Described(kind, attributes, names)


class _Tensor:
    """The stored tensors of a weight.

    Attributes:
      kind: the name of its class.
      attributes: of the class.
      parts: names of the tensors that the weight is made of.
    """

    def __init__(self, folder: Folder, shapes: Mapping[str, Shape], base: str, described: _Described):
        self._folder, self._shapes, self._base = folder, shapes, base
        self.kind, self.attributes, self._stored = described
        self._codes = f"{base}_qdata"
        check_keys(self.attributes, _ATTRIBUTES, f"{base} in the metadata")
        self.parts = {self._codes}
        stated = self.attributes.get("dtype", self.attributes.get("orig_dtype"))
        dtype = stated.get("_data") if isinstance(stated, dict) else None
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise UserError(f"{base} has the dtype {limits.shortened(stated)}, must be one of {', '.join(DTYPES)}")
        self._dtype = dtype
        if "act_pre_scale" in self._stored:
            raise UserError(f"{base}_act_pre_scale scales activations, which is not supported: use another folder")
        if unlisted := [
            name for name in shapes if name.startswith(f"{base}_") and name[len(base) + 1 :] not in self._stored
        ]:
            raise UserError(f"{unlisted[0]} is not listed in the metadata of {base}: copy the folder again")

    def weight(self) -> Weight:
        """The weight, after all shapes and dtypes are checked.

        Raises:
          UserError: its class is not supported, or tensors contradict it.
        """
        reader = _READERS.get(self.kind)
        if reader is None:
            raise UserError(
                f"{self._base} is of torchao's {limits.shortened(self.kind)}, must be one of {', '.join(_READERS)}: use the "
                "folder before quantization"
            )
        return reader(self)

    def integers(self) -> Weight:
        shape, blocks, scale = self._blocks(("I8",))
        zeros = ""
        if "zero_point" in self._stored:
            zeros = self._part("zero_point", tuple(self._shapes[scale]), ("I8",))

        def values() -> np.ndarray:
            stored = self._folder.stored
            zeros_AG = stored(zeros).astype(np.int16) if zeros else None
            return scaled(stored(self._codes), stored(scale), blocks, self._dtype, zeros_AG)

        return Weight(shape, self._dtype, values)

    def floats(self) -> Weight:
        shape, blocks, scale = self._blocks((FP8,))
        stored = self._folder.stored
        return Weight(
            shape, self._dtype, lambda: scaled(float8(stored(self._codes)), stored(scale), blocks, self._dtype)
        )

    def small_floats(self) -> Weight:
        """MX and NVFP4: groups of inputs share a scale, which may be swizzled."""
        size, is_nvfp4 = _BLOCKS[self.kind], self.kind == "NVFP4Tensor"
        outputs, width = matrix(self._shapes, self._codes)
        is_packed = self._folder.kind(self._codes) == "U8"
        check(self._folder, self._shapes, self._codes, (outputs, width), ("U8",) if is_nvfp4 else ("U8", FP8))
        elements = self.attributes.get("elem_dtype")
        stated = elements.get("_data") if isinstance(elements, dict) else None
        if not is_nvfp4 and stated != ("float4_e2m1fn_x2" if is_packed else "float8_e4m3fn"):
            raise UserError(f"{self._base} has elements of {limits.shortened(elements)}, must be E4M3 or E2M1")
        inputs = 2 * width if is_packed else width
        if self.attributes.get("block_size") != size or inputs % size:
            shown = limits.shortened(self.attributes.get("block_size"))
            raise UserError(
                f"{self._base} has the block_size {shown} and {inputs} inputs, must be {size} that divides them"
            )
        groups = (outputs, inputs // size)
        is_swizzled = bool(self.attributes.get("is_swizzled_scales"))
        tiles = [-(-count // tile) for count, tile in zip(groups, _TILE, strict=True)]
        expected = (32 * tiles[0], 16 * tiles[1]) if is_swizzled else groups
        scale = self._part("scale", expected, (FP8,) if is_nvfp4 else ("F8_E8M0", "U8"))
        whole = self._part("per_tensor_scale", (), ("F32",)) if "per_tensor_scale" in self._stored else ""

        def values() -> np.ndarray:
            stored = self._folder.stored
            scales = deswizzled(stored(scale), groups) if is_swizzled else stored(scale)
            scales_OG = float8(scales).astype(np.float32) if is_nvfp4 else powers(scales)
            if whole:
                scales_OG = scales_OG * stored(whole)
            codes = fp4.values(stored(self._codes)) if is_packed else float8(stored(self._codes))
            return scaled(codes, scales_OG, Blocks.of((outputs, inputs), 1, size), self._dtype)

        return Weight((outputs, inputs), self._dtype, values)

    def _part(self, part: str, shape: Shape, kinds: tuple[str, ...]) -> str:
        name = f"{self._base}_{part}"
        check(self._folder, self._shapes, name, shape, kinds)
        self.parts.add(name)
        return name

    def _blocks(self, kinds: tuple[str, ...]) -> tuple[Shape, Blocks, str]:
        """The shape of a weight with a code for each value, which scale each has, and the name of the scales."""
        shape = matrix(self._shapes, self._codes)
        check(self._folder, self._shapes, self._codes, shape, kinds)
        block = self.attributes.get("block_size")
        if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
            raise UserError(f"{self._base} has the block_size {limits.shortened(block)}, must be outputs and inputs")
        if shape[0] % block[0] or shape[1] % block[1]:
            raise UserError(f"{self._base} has blocks of {block}, must divide its shape {list(shape)}")
        expected = (shape[0] // block[0], shape[1] // block[1])
        return shape, Blocks.of(shape, block[0], block[1]), self._part("scale", expected, FLOATS)


_READERS: dict[str, Callable[[_Tensor], Weight]] = {
    "Int8Tensor": _Tensor.integers,
    "IntxUnpackedToInt8Tensor": _Tensor.integers,
    "Float8Tensor": _Tensor.floats,
    "MXTensor": _Tensor.small_floats,
    "NVFP4Tensor": _Tensor.small_floats,
}


def deswizzled(stored: np.ndarray, groups: Shape) -> np.ndarray:
    """Scales [O, G] of tiles in the order in which tensor cores read them.

    A tile of 128 rows and 4 columns is stored as 32 rows of 16: row r and column c lie in row r % 32, at 4 * (r // 32) + c.
    """
    rows, columns = (-(-count // tile) for count, tile in zip(groups, _TILE, strict=True))
    tiles = stored.reshape(rows, columns, 32, 4, 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(tiles.reshape(128 * rows, 4 * columns)[: groups[0], : groups[1]])
