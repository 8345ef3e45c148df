"""Reads Hugging Face folders with quantized weights: GPTQ, AWQ, bitsandbytes and MXFP4, dequantized.

The layouts are those of GPTQModel (gptq and gptq_v2), AutoAWQ ("gemm"), bitsandbytes (nf4, fp4 and int8) and
transformers (mxfp4). Rounding follows their own dequantization: the product of scale and code is rounded once, to the
folder's compute dtype.

Shape letters: O outputs, I inputs of a weight, G groups of inputs, N values in the order of the weight.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from capibara.core import limits
from capibara.core.types import UserError
from capibara.interop.hf import config as hf_config
from capibara.interop.hf.folder import DTYPES
from capibara.interop.hf.layout.tensors import Shape
from capibara.interop.quantize import mxfp4
from capibara.interop.quantize.grid import AWQ_ORDER

_WORD = 32  # bits
_STATE_BYTES = 1 << 16  # limit of bitsandbytes' description of a weight
_INPUTS_FIRST = ("gpt2",)  # families whose weights are [I, O]
_INT8_STEP = np.float32(1 / 127)
_FLOATS = ("F16", "BF16", "F32")
_BYTES = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4}  # dtypes that can store 4-bit codes


class Folder(Protocol):
    """hf.folder.HfFolder: a model in a folder, and its tensors in their stored dtypes."""

    config: dict[str, object]
    tokenizer: dict[str, bytes]
    about: dict[str, bytes]

    def shapes(self) -> dict[str, Shape]: ...

    def dtype(self, name: str) -> str: ...

    def read(self, name: str) -> np.ndarray: ...

    def stored(self, name: str) -> np.ndarray: ...

    def kind(self, name: str) -> str: ...


@dataclasses.dataclass(frozen=True)
class _Weight:
    """A quantized weight.

    Attributes:
      shape: of its values.
      dtype: of its values.
      values: reads and dequantizes it.
    """

    shape: Shape
    dtype: str
    values: Callable[[], np.ndarray]


class _State(NamedTuple):
    """bitsandbytes' description of a weight; nested: that of its blocks' scales."""

    shape: Shape
    dtype: str
    block: int
    nested_block: int
    nested_offset: float


class QuantizedFolder:
    """A folder's model with every tensor in float16, bfloat16 or float32: an open_model.ForeignModel.

    Args:
      folder: whose config has a quantization_config.

    Raises:
      UserError: the quantization is not supported, or tensors contradict their names and sizes.
    """

    def __init__(self, folder: Folder):
        self._folder = folder
        about = folder.config["quantization_config"]
        self.config = {name: value for name, value in folder.config.items() if name != "quantization_config"}
        self.tokenizer, self.about = folder.tokenizer, folder.about
        method = about.get("quant_method") if isinstance(about, dict) else None
        method = method or ("bitsandbytes" if _is_bitsandbytes(about) else None)
        if not isinstance(about, dict) or method not in _READERS:
            raise UserError(
                f"config.json has quant_method = {limits.shortened(method)} in quantization_config, must be one of "
                f"{', '.join(_READERS)}: use the folder before quantization"
            )
        self._weights, parts = _READERS[method](folder, about)
        self._plain = {name: shape for name, shape in folder.shapes().items() if name not in parts}

    def shapes(self) -> dict[str, Shape]:
        return self._plain | {name: weight.shape for name, weight in self._weights.items()}

    def dtype(self, name: str) -> str:
        return self._weights[name].dtype if name in self._weights else self._folder.dtype(name)

    def read(self, name: str) -> np.ndarray:
        return self._weights[name].values() if name in self._weights else self._folder.read(name)


_Found = tuple[dict[str, _Weight], set[str]]  # the weights by name, and the tensors that they are made of


def _is_bitsandbytes(about: object) -> bool:
    return isinstance(about, dict) and bool(about.get("load_in_4bit") or about.get("load_in_8bit"))


# --- GPTQ and AWQ ----------------------------------------------------------------------------------------------------


def _gptq(folder: Folder, about: Mapping[str, object]) -> _Found:
    bits, form = about.get("bits"), about.get("checkpoint_format") or "gptq"
    if bits not in (2, 4, 8):
        raise UserError(f"quantization_config.bits is {limits.shortened(bits)}, must be 2, 4 or 8")
    if form not in ("gptq", "gptq_v2"):
        raise UserError(
            f"quantization_config.checkpoint_format is {limits.shortened(form)}, must be gptq or gptq_v2: save the model "
            "in one of these"
        )
    inputs_first = hf_config.text_part(folder.config).get("model_type") in _INPUTS_FIRST
    shapes = folder.shapes()
    weights: dict[str, _Weight] = {}
    parts: set[str] = set()
    for base in _bases(shapes, ".qweight"):
        words_I, outputs = _matrix(shapes, f"{base}.qweight")
        inputs, groups = words_I * (_WORD // bits), _matrix(shapes, f"{base}.scales")[0]
        _check(folder, shapes, f"{base}.qweight", shapes[f"{base}.qweight"], ("I32", "U32"))
        _check(folder, shapes, f"{base}.scales", (groups, outputs), _FLOATS)
        _check(folder, shapes, f"{base}.qzeros", (groups, outputs * bits // _WORD), ("I32", "U32"))
        indexed = f"{base}.g_idx" in shapes
        if indexed:
            _check(folder, shapes, f"{base}.g_idx", (inputs,), ("I32", "I64"))
            group_I = folder.stored(f"{base}.g_idx")
            if inputs and not 0 <= group_I.min() <= group_I.max() < groups:
                raise UserError(f"{base}.g_idx must be from 0 to {groups - 1}: copy the folder again")
        elif not groups or inputs % groups:
            raise UserError(f"{base}.scales has {groups} groups, must divide {inputs} inputs: copy the folder again")
        parts |= {f"{base}.{part}" for part in ("qweight", "scales", "qzeros", *(["g_idx"] if indexed else []))}

        def values(base: str = base, inputs: int = inputs, groups: int = groups, indexed: bool = indexed) -> np.ndarray:
            zeros = folder.stored(f"{base}.qzeros").view(np.uint32)
            if form == "gptq":  # it stores zeros minus 1, subtracted from whole words
                zeros = zeros + np.uint32(sum(1 << position for position in range(0, _WORD, bits)))
            group_I = folder.stored(f"{base}.g_idx") if indexed else np.arange(inputs) // (inputs // groups)
            codes_IO = np.ascontiguousarray(_codes(folder.stored(f"{base}.qweight").T.view(np.uint32), bits).T)
            weight_IO = _scaled(codes_IO, folder.stored(f"{base}.scales"), _codes(zeros, bits), group_I)
            return weight_IO if inputs_first else np.ascontiguousarray(weight_IO.T)

        shape = (inputs, outputs) if inputs_first else (outputs, inputs)
        weights[f"{base}.weight"] = _Weight(shape, folder.dtype(f"{base}.scales"), values)
    return weights, parts


def _awq(folder: Folder, about: Mapping[str, object]) -> _Found:
    bits, version = about.get("bits", 4), str(about.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise UserError(
            f"quantization_config has bits = {limits.shortened(bits)} and version = {limits.shortened(version)}, awq needs "
            "4 bits and version gemm: convert the model to these"
        )
    shapes = folder.shapes()
    weights: dict[str, _Weight] = {}
    parts: set[str] = set()
    for base in _bases(shapes, ".qweight"):
        inputs, words_O = _matrix(shapes, f"{base}.qweight")
        outputs, groups = words_O * 8, _matrix(shapes, f"{base}.scales")[0]
        _check(folder, shapes, f"{base}.qweight", shapes[f"{base}.qweight"], ("I32", "U32"))
        _check(folder, shapes, f"{base}.scales", (groups, outputs), _FLOATS)
        _check(folder, shapes, f"{base}.qzeros", (groups, words_O), ("I32", "U32"))
        if not groups or inputs % groups:
            raise UserError(f"{base}.scales has {groups} groups, must divide {inputs} inputs: copy the folder again")
        parts |= {f"{base}.{part}" for part in ("qweight", "scales", "qzeros")}

        def values(base: str = base, inputs: int = inputs, groups: int = groups) -> np.ndarray:
            codes, zeros = (
                _codes(folder.stored(f"{base}.{part}").view(np.uint32), 4, AWQ_ORDER) for part in ("qweight", "qzeros")
            )
            group_I = np.arange(inputs) // (inputs // groups)
            return np.ascontiguousarray(_scaled(codes, folder.stored(f"{base}.scales"), zeros, group_I).T)

        weights[f"{base}.weight"] = _Weight((outputs, inputs), folder.dtype(f"{base}.scales"), values)
    for name in shapes:  # divisors of activations in some families: already folded into the weights if they are 1
        if name.endswith(".act.scales"):
            parts.add(name)
            if not (folder.read(name) == 1).all():
                raise UserError(f"{name} is not 1: AWQ with scaled activations is not supported")
    return weights, parts


def _codes(words: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Unpacks codes from words along the last axis, the first one in the lowest bits; uint8."""
    count = _WORD // bits
    codes = np.empty((*words.shape, count), np.uint8)
    for position in range(count):
        codes[..., order[position] if order else position] = words >> np.uint32(bits * position) & np.uint32(
            (1 << bits) - 1
        )
    return codes.reshape(*words.shape[:-1], -1)


def _scaled(codes_IO: np.ndarray, scales_GO: np.ndarray, zeros_GO: np.ndarray, group_I: np.ndarray) -> np.ndarray:
    """`scale * (code - zero)`, rounded once, to the scales' dtype."""
    found = np.empty(codes_IO.shape, scales_GO.dtype)
    for start in range(0, len(codes_IO), 1024):  # inputs at once: float32 takes four times the memory of codes
        rows = slice(start, start + 1024)
        of = group_I[rows]
        steps = codes_IO[rows].astype(np.float32) - zeros_GO[of].astype(np.float32)
        found[rows] = (steps * scales_GO[of].astype(np.float32)).astype(scales_GO.dtype)
    return found


# --- bitsandbytes ----------------------------------------------------------------------------------------------------


def _bitsandbytes(folder: Folder, about: Mapping[str, object]) -> _Found:
    shapes = folder.shapes()
    weights: dict[str, _Weight] = {}
    parts: set[str] = set()
    for kind in ("nf4", "fp4"):
        mark = f".quant_state.bitsandbytes__{kind}"
        for name in _bases(shapes, mark):
            weights[name], of_it = _in_4_bits(folder, name, f"{name}{mark}", shapes)
            parts |= of_it
    stated = folder.config.get("dtype", folder.config.get("torch_dtype"))
    dtype = stated if stated in DTYPES else "float16"
    for base in _bases(shapes, ".SCB"):
        name = f"{base}.weight"
        outputs, _ = _matrix(shapes, name)
        _check(folder, shapes, name, shapes[name], ("I8",))
        _check(folder, shapes, f"{base}.SCB", (outputs,), ("F32",))
        layout = f"{base}.weight_format"
        if layout in shapes and (math.prod(shapes[layout]) != 1 or folder.stored(layout).any()):
            raise UserError(f"{layout} is not 0 (row-major): other layouts of bitsandbytes are not supported")

        def values(name: str = name, base: str = base) -> np.ndarray:
            largest_O = folder.stored(f"{base}.SCB")[:, None]
            return (folder.stored(name).astype(np.float32) * largest_O * _INT8_STEP).astype(DTYPES[dtype])

        weights[name] = _Weight(shapes[name], dtype, values)
        parts |= {name, f"{base}.SCB", layout}
    return weights, parts


def _in_4_bits(folder: Folder, name: str, mark: str, shapes: Mapping[str, Shape]) -> tuple[_Weight, set[str]]:
    """An nf4 or fp4 weight, and the tensors that it is made of."""
    state = _state(folder, mark, shapes)
    shape, dtype, block = state.shape, state.dtype, state.block
    count = math.prod(shape)
    blocks = -(-count // block)
    have = math.prod(shapes[name]) * _BYTES.get(folder.kind(name), 0) if name in shapes else 0
    if have != -(-count // 2):
        raise UserError(f"{name} has {have:,} bytes of codes, must have {-(-count // 2):,} by its shape: copy it again")
    _check(folder, shapes, f"{name}.quant_map", (16,), ("F32",))
    parts = {name, mark, f"{name}.absmax", f"{name}.quant_map"}
    nested = f"{name}.nested_absmax" in shapes
    _check(folder, shapes, f"{name}.absmax", (blocks,), ("U8",) if nested else _FLOATS)
    if nested:
        _check(folder, shapes, f"{name}.nested_absmax", (-(-blocks // state.nested_block),), ("F32",))
        _check(folder, shapes, f"{name}.nested_quant_map", (256,), ("F32",))
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
        largest, found = largest_of_blocks(), np.empty(2 * len(packed), DTYPES[dtype])
        step = block * 4096  # values at once, in whole blocks
        for start in range(0, count, step):
            both = packed[start // 2 : (start + step) // 2]
            codes = np.stack([both >> 4, both & 15], -1).reshape(-1)
            scales = np.repeat(largest[start // block : (start + step) // block], block)[: len(codes)]
            found[start : start + len(codes)] = (levels[codes] * scales).astype(found.dtype)
        return found[:count].reshape(shape)

    return _Weight(shape, dtype, values), parts


def _state(folder: Folder, mark: str, shapes: Mapping[str, Shape]) -> _State:
    """The checked description of a weight by bitsandbytes."""
    if math.prod(shapes[mark]) > _STATE_BYTES or folder.kind(mark) != "U8":
        raise UserError(f"{mark} must be at most {_STATE_BYTES:,} bytes of JSON: copy the folder again")
    try:
        found = limits.parse_json(folder.stored(mark).tobytes(), values=1000)
    except ValueError as error:
        raise UserError(f"{mark} cannot be read ({limits.cause(error)}): copy the folder again") from None
    found = found if isinstance(found, dict) else {}
    shape, dtype, block = found.get("shape"), found.get("dtype"), found.get("blocksize")
    nested, offset = found.get("nested_blocksize", 1), found.get("nested_offset", 0.0)
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


# --- MXFP4 -----------------------------------------------------------------------------------------------------------

MXFP4_PARTS = ("_blocks", "_scales")
MXFP4_ABOUT = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
"""The quantization_config of a gpt-oss in MXFP4, as published."""


def _mxfp4(folder: Folder, about: Mapping[str, object]) -> _Found:
    """Weights of experts [E, I, O], stored as blocks [E, O, I / 32, 16]."""
    shapes = folder.shapes()
    weights: dict[str, _Weight] = {}
    parts: set[str] = set()
    for name in _bases(shapes, MXFP4_PARTS[0]):
        of_name = [f"{name}{part}" for part in MXFP4_PARTS]
        shape = tuple(shapes[of_name[0]])
        if len(shape) != 4 or shape[3] != mxfp4.BLOCK // 2:
            raise UserError(f"{of_name[0]} has the shape {list(shape)}, must be [experts, outputs, blocks, 16]")
        for part, expected in zip(of_name, (shape, shape[:3])):
            _check(folder, shapes, part, expected, ("U8",))
        parts.update(of_name)

        def values(of_name: list[str] = of_name, shape: Shape = shape) -> np.ndarray:
            blocks, scales = map(folder.stored, of_name)
            experts, outputs, groups = shape[:3]
            found = np.empty((experts, groups * mxfp4.BLOCK, outputs), DTYPES["bfloat16"])
            for expert in range(experts):  # one at a time in float32
                found[expert] = mxfp4.values(blocks[expert], scales[expert]).T
            return found

        weights[name] = _Weight((shape[0], shape[2] * mxfp4.BLOCK, shape[1]), "bfloat16", values)
    return weights, parts


def mxfp4_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Names and shapes of a gpt-oss's tensors with its experts in MXFP4.

    Raises:
      UserError: their inputs do not divide into blocks of 32.
    """
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        if not is_mxfp4(name):
            found[name] = shape
            continue
        experts, inputs, outputs = shape
        if inputs % mxfp4.BLOCK:
            raise UserError(f"{name} has {inputs} inputs, mxfp4 needs a multiple of {mxfp4.BLOCK}: use bf16")
        blocks = (experts, outputs, inputs // mxfp4.BLOCK)
        found |= {f"{name}{MXFP4_PARTS[0]}": (*blocks, mxfp4.BLOCK // 2), f"{name}{MXFP4_PARTS[1]}": blocks}
    return found


def is_mxfp4(name: str) -> bool:
    """Whether a tensor of gpt-oss is stored in MXFP4 in such a folder."""
    return name.endswith((".experts.gate_up_proj", ".experts.down_proj"))


def in_mxfp4(tensors: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """Converts experts' tensors to MXFP4; yields all tensors in the order of `mxfp4_shapes`."""
    for name, value in tensors:
        if not is_mxfp4(name):
            yield name, value
            continue
        made = [mxfp4.packed(name, one.T) for one in value]
        yield from ((f"{name}{part}", np.stack(of_part)) for part, of_part in zip(MXFP4_PARTS, zip(*made)))


# --- names and sizes -------------------------------------------------------------------------------------------------

_READERS: dict[str, Callable[[Folder, Mapping[str, object]], _Found]] = {
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
}


def _bases(shapes: Mapping[str, Shape], ending: str) -> list[str]:
    return [name.removesuffix(ending) for name in shapes if name.endswith(ending)]


def _matrix(shapes: Mapping[str, Shape], name: str) -> Shape:
    if len(shapes.get(name, ())) != 2:
        raise UserError(f"{name} must be a matrix: the folder is incomplete, or its config.json is another's")
    return shapes[name]


def _check(folder: Folder, shapes: Mapping[str, Shape], name: str, expected: Shape, kinds: tuple[str, ...]) -> None:
    found = shapes.get(name)
    if found is None:
        raise UserError(f"{name} is missing in the checkpoint: copy the folder again")
    if tuple(found) != expected:
        raise UserError(f"{name} has the shape {list(found)}, must be {list(expected)} by the weight beside it")
    if folder.kind(name) not in kinds:
        raise UserError(f"{name} is stored as {folder.kind(name)}, must be {' or '.join(kinds)}: copy the folder again")
