"""Writes weights tensor by tensor, each rounded to nearest, as vLLM and transformers read them: NVFP4, FP8 and int4.

Scales cover the largest value of what shares them, by the arithmetic of compressed-tensors 0.20 (calculate_qparams) in float32.

Shape letters: O outputs, I inputs of a weight, A blocks of outputs, G groups or blocks of inputs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from capibara.core import projections
from capibara.core.types import UserError
from capibara.interop.hf.folder import DTYPES
from capibara.interop.hf.layout.tensors import Shape, Tensor, letters
from capibara.interop.quantize.grid import words
from capibara.interop.quantize.options import GROUP_SIZES, Method, Quantize
from capibara.interop.quantize.values import finite, fp4
from capibara.interop.quantize.values.weights import FP8_LARGEST, NVFP4_GROUP, Blocks

Rows = Mapping[str, tuple[Tensor, tuple[int, ...]]]  # tensor of a checkpoint -> row of the table, its numbers

_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_BLOCK = 128
_FP4_LARGEST, _INT4_LARGEST = 6.0, 7.5
_LEAST_SCALE = 0.125  # of groups of zeros in NVFP4
_HEAD = "lm_head"
_PROJECTIONS = (
    *(*projections.ATTENTION, projections.ATTENTION_GATE, *projections.MLP),
    *(*projections.EXPERTS, *projections.SHARED, *projections.LATENT),
)
# The weights that are quantized -> the projection that reads the same inputs.
_LINEAR = {projection.path: projection.reads_as for projection in _PROJECTIONS}
# Dimensions of their inputs, in the letters of interop.hf.tensors.
_INPUTS = {
    projection.path: letters(projection.in_axes) for projection in _PROJECTIONS if projection.in_axes != ("latent",)
}


class Form(Protocol):
    """How a weight is stored."""

    def parts(self, shape: Shape) -> dict[str, tuple[Shape, np.dtype]]:
        """Shapes and dtypes of the tensors of a weight, by the end of their name after "weight"."""

    def stored(self, weight_OI: np.ndarray, largest: float) -> dict[str, np.ndarray]:
        """The tensors of a float32 weight; `largest` is the largest magnitude of the weights that vLLM joins with it."""

    def config(self, ignored: list[str]) -> dict[str, Any]:
        """The quantization_config; `ignored` are the modules whose weights are floats."""

    @property
    def divides(self) -> Shape:
        """What the outputs and inputs of a weight must be multiples of."""


@dataclasses.dataclass(frozen=True)
class _Nvfp4:
    """4-bit floats: 16 inputs share an FP8 scale, the weight has one more."""

    divides: Shape = (1, NVFP4_GROUP)

    def parts(self, shape: Shape) -> dict[str, tuple[Shape, np.dtype]]:
        outputs, inputs = shape
        return {
            "_packed": ((outputs, inputs // 2), np.dtype(np.uint8)),
            "_scale": ((outputs, inputs // NVFP4_GROUP), _FLOAT8),
            "_global_scale": ((1,), np.dtype(np.float32)),
        }

    def stored(self, weight_OI: np.ndarray, largest: float) -> dict[str, np.ndarray]:
        divisor = np.float32(FP8_LARGEST * _FP4_LARGEST / largest if largest else 1)
        groups = weight_OI.reshape(len(weight_OI), -1, NVFP4_GROUP)
        scales = (divisor * (np.abs(groups).max(-1) / np.float32(_FP4_LARGEST))).astype(_FLOAT8)
        scales = np.where(scales == 0, _FLOAT8.type(_LEAST_SCALE), scales)
        steps = groups / (scales.astype(np.float32) / divisor)[..., None]
        codes = fp4.packed(steps.reshape(weight_OI.shape) + np.float32(0))  # -0 has the code of 0 there
        return {"_packed": codes, "_scale": scales, "_global_scale": divisor.reshape(1)}

    def config(self, ignored: list[str]) -> dict[str, Any]:
        arguments = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": NVFP4_GROUP}
        return _compressed_tensors("nvfp4-pack-quantized", arguments, None, ignored)


@dataclasses.dataclass(frozen=True)
class _Int4:
    """4-bit integers: a group of inputs shares a scale in the model's dtype."""

    group: int
    dtype: np.dtype

    @property
    def divides(self) -> Shape:
        return 1, self.group

    def parts(self, shape: Shape) -> dict[str, tuple[Shape, np.dtype]]:
        outputs, inputs = shape
        return {
            "_packed": ((outputs, inputs // 8), np.dtype(np.int32)),
            "_scale": ((outputs, inputs // self.group), self.dtype),
            "_shape": ((2,), np.dtype(np.int64)),
        }

    def stored(self, weight_OI: np.ndarray, largest: float) -> dict[str, np.ndarray]:
        groups = weight_OI.reshape(len(weight_OI), -1, self.group)
        scales = (np.abs(groups).max(-1) / np.float32(_INT4_LARGEST)).astype(self.dtype)
        scales = np.where(scales == 0, self.dtype.type(1), scales)
        codes = np.clip(np.rint(groups / scales.astype(np.float32)[..., None]), -8, 7) + 8
        packed = words(codes.astype(np.uint8).reshape(weight_OI.shape))
        return {"_packed": packed, "_scale": scales, "_shape": np.array(weight_OI.shape, np.int64)}

    def config(self, ignored: list[str]) -> dict[str, Any]:
        arguments = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": self.group}
        return _compressed_tensors("pack-quantized", arguments, None, ignored)


@dataclasses.dataclass(frozen=True)
class _Fp8:
    """8-bit floats: each output has a scale in the model's dtype; vLLM rounds each token's inputs to FP8."""

    dtype: np.dtype
    divides: Shape = (1, 1)

    def parts(self, shape: Shape) -> dict[str, tuple[Shape, np.dtype]]:
        return {"": (shape, _FLOAT8), "_scale": ((shape[0], 1), self.dtype)}

    def stored(self, weight_OI: np.ndarray, largest: float) -> dict[str, np.ndarray]:
        scales = (np.abs(weight_OI).max(1, keepdims=True) / np.float32(FP8_LARGEST)).astype(self.dtype)
        scales = np.where(scales == 0, self.dtype.type(1), scales)
        return {"": _eight_bits(weight_OI / scales.astype(np.float32)), "_scale": scales}

    def config(self, ignored: list[str]) -> dict[str, Any]:
        weights = {"type": "float", "num_bits": 8, "strategy": "channel"}
        activations = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
        return _compressed_tensors("float-quantized", weights, activations, ignored)


@dataclasses.dataclass(frozen=True)
class _Fp8Blocks:
    """8-bit floats: 128 x 128 values share a scale in float32, as DeepSeek V3 has them."""

    divides: Shape = (_BLOCK, _BLOCK)

    def parts(self, shape: Shape) -> dict[str, tuple[Shape, np.dtype]]:
        grid = (shape[0] // _BLOCK, shape[1] // _BLOCK)
        return {"": (shape, _FLOAT8), "_scale_inv": (grid, np.dtype(np.float32))}

    def stored(self, weight_OI: np.ndarray, largest: float) -> dict[str, np.ndarray]:
        grid = weight_OI.reshape(len(weight_OI) // _BLOCK, _BLOCK, -1, _BLOCK)
        scales = np.abs(grid).max((1, 3)) / np.float32(FP8_LARGEST)
        scales = np.where(scales == 0, np.float32(1), scales)
        blocks = Blocks.of(weight_OI.shape, _BLOCK, _BLOCK)
        steps = weight_OI / scales[blocks.row_O][:, blocks.column_I]
        return {"": _eight_bits(steps), "_scale_inv": scales}

    def config(self, ignored: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [_BLOCK, _BLOCK],
            "modules_to_not_convert": ignored,
        }


def _eight_bits(steps: np.ndarray) -> np.ndarray:
    return np.clip(steps, -FP8_LARGEST, FP8_LARGEST).astype(_FLOAT8)


def _compressed_tensors(
    form: str, weights: dict[str, Any], activations: dict[str, Any] | None, ignored: list[str]
) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": weights | {"symmetric": True, "dynamic": False}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme | {"input_activations": activations, "output_activations": None}},
        "ignore": ignored,
    }


@dataclasses.dataclass(frozen=True)
class Compressed:
    """A model whose layers' weights are stored in a form.

    Attributes:
      form: how.
      weights: names of the weights in it.
      shapes: of all tensors as they are stored, by name.
      exact: dtypes of the tensors that are not in the folder's dtype.
      config: the quantization_config.
    """

    form: Form
    weights: tuple[str, ...]
    shapes: Mapping[str, Shape]
    exact: Mapping[str, np.dtype]
    config: dict[str, Any]

    def tensors(
        self, tensors: Iterable[tuple[str, np.ndarray]], largest: Mapping[str, float]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """All tensors in the order of `shapes`.

        Args:
          tensors: of the model, in floats.
          largest: weight -> largest magnitude of the weights that vLLM joins with it.
        """
        weights = frozenset(self.weights)
        for name, value in tensors:
            if name not in weights:
                yield name, value
                continue
            weight = finite.check(name, np.asarray(value, np.float32))
            parts = self.form.stored(weight, largest.get(name, 0.0))
            yield from ((f"{name}{ending}", part) for ending, part in parts.items())


def compressed(shapes: Mapping[str, Shape], rows: Rows, how: Quantize, dtype: str) -> Compressed:
    """How a model is stored.

    Args:
      shapes: of its tensors, by name.
      rows: the rows of the table that they are of.
      how: the request.
      dtype: of the tensors that stay floats, and of scales.

    Raises:
      UserError: weights are stored in another way than vLLM reads, or do not divide into groups.
    """
    weights = tuple(name for name in shapes if _is_linear(name, rows[name][0], how))
    if not weights:
        raise UserError(
            f"--quantize={how.method} is for decoders whose layers have weights to multiply with: leave it out"
        )
    form = _form(how, [shapes[name] for name in weights], np.dtype(DTYPES[dtype]))
    stored: dict[str, Shape] = {}
    exact: dict[str, np.dtype] = {}
    for name, shape in shapes.items():
        if name not in weights:
            stored[name] = shape
            continue
        for length, divisor, side in zip(shape, form.divides, ("outputs", "inputs"), strict=True):
            if length % divisor:
                raise UserError(
                    f"{name} has {length} {side}, --quantize={how.method} needs a multiple of {divisor}: try fp8"
                )
        for ending, (part, kind) in form.parts(shape).items():
            stored[f"{name}{ending}"], exact[f"{name}{ending}"] = part, kind
    others = [name.removesuffix(".weight") for name, shape in shapes.items() if name not in weights and len(shape) == 2]
    ignored = sorted({_HEAD, *(name for name in others if f"{name}.weight" in shapes)})
    return Compressed(form, weights, stored, exact, form.config(ignored))


def joined_largest(names: Iterable[str], rows: Rows, tensors: Iterable[tuple[str, np.ndarray]]) -> dict[str, float]:
    """Weight -> the largest magnitude of the weights that read the same inputs: vLLM joins them, with one scale in NVFP4."""
    key = {name: (name.rsplit(".", 2)[0], _LINEAR[_path(rows[name][0])]) for name in names}
    largest: dict[tuple[str, str], float] = {}
    for name, value in tensors:
        if name in key:
            magnitude = float(np.abs(value.astype(np.float32)).max())
            largest[key[name]] = max(largest.get(key[name], 0.0), magnitude)
    return {name: largest[of] for name, of in key.items()}


def _form(how: Quantize, shapes: list[Shape], dtype: np.dtype) -> Form:
    match how.method:
        case Method.NVFP4:
            return _Nvfp4()
        case Method.FP8:
            return _Fp8(dtype)
        case Method.FP8_BLOCK:
            return _Fp8Blocks()
    inputs = math.gcd(*(shape[1] for shape in shapes))
    return _Int4(how.group_size or next((size for size in GROUP_SIZES if inputs % size == 0), GROUP_SIZES[-1]), dtype)


def _path(row: Tensor) -> str:
    """The projection that a row holds: "attention/query"."""
    return "/".join(row.ours[0].split("/")[-2:]).removeprefix("first_")


def _is_linear(name: str, row: Tensor, how: Quantize) -> bool:
    """Whether a tensor is the weight of a layer's product.

    Raises:
      UserError: it is, and has its inputs first, or holds all experts.
    """
    if not row.ours[0].startswith("layers/") or _path(row) not in _LINEAR:
        return False
    outputs, *inputs = row.dims.split()
    if len(inputs) != 1 or outputs == _INPUTS.get(_path(row)) or not name.endswith(".weight"):
        raise UserError(
            f"--quantize={how.method} is for weights [outputs, inputs] of one expert, and {name} is another: write a GGUF "
            "file with --dtype=q4_k_m"
        )
    return True
