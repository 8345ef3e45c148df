"""Quantized weights of a folder: what every format gives, and how codes and scales become values.

Shape letters: O outputs, I inputs of a weight, A blocks of outputs, G blocks of inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import ml_dtypes
import numpy as np

from capibara.core import limits
from capibara.core.types import UserError
from capibara.interop.hf.folder import DTYPES
from capibara.interop.hf.layout.tensors import Shape

FLOATS = ("F16", "BF16", "F32")
FP8, FP8_LARGEST = "F8_E4M3", 448.0
NVFP4_GROUP = 16  # inputs that share an FP8 scale
EXPONENTS = ("U8", "F8_E8M0")  # a byte is the exponent of 2, plus 127
_BIAS = 127
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_VALUES = np.arange(256, dtype=np.uint8).view(_FLOAT8).astype(np.float32)  # of each byte
_ROWS = 1024  # dequantized at once: float32 takes four times the memory of codes


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

    def metadata(self) -> dict[str, str]: ...


@dataclasses.dataclass(frozen=True)
class Weight:
    """A quantized weight.

    Attributes:
      shape: of its values.
      dtype: of its values.
      values: reads and dequantizes it.
    """

    shape: Shape
    dtype: str
    values: Callable[[], np.ndarray]


class Quantized(NamedTuple):
    """The quantized weights of a folder.

    Attributes:
      weights: by name.
      parts: names of the tensors that they are made of.
      unused: what of the folder is for quantized activations and caches, and is not computed here.
    """

    weights: dict[str, Weight]
    parts: set[str]
    unused: tuple[str, ...] = ()


class Blocks(NamedTuple):
    """Which scale each value has: its row of the scales by output, and its column by input.

    Attributes:
      row_O, column_I: indices.
    """

    row_O: np.ndarray
    column_I: np.ndarray

    @classmethod
    def of(cls, shape: Shape, outputs: int, inputs: int) -> Blocks:
        """Blocks of this many outputs and inputs; the last ones may be smaller.

        Args:
          shape: of the weight, [O, I].
        """
        return cls(np.arange(shape[0]) // outputs, np.arange(shape[1]) // inputs)

    def spread(self, values_AG: np.ndarray, rows: slice) -> np.ndarray:
        """The value of each of these rows' outputs and inputs, float32, rows contiguous."""
        return np.take(values_AG[self.row_O[rows]].astype(np.float32), self.column_I, axis=1)


def scaled(
    codes_OI: np.ndarray, scales_AG: np.ndarray, blocks: Blocks, dtype: str, zeros_AG: np.ndarray | None = None
) -> np.ndarray:
    """`(code - zero) * scale` in float32, rounded once, to `dtype`."""
    values = np.empty(codes_OI.shape, DTYPES[dtype])
    for start in range(0, len(codes_OI), _ROWS):
        rows = slice(start, start + _ROWS)
        steps = _as_float32(codes_OI[rows])
        if zeros_AG is not None:
            steps -= blocks.spread(zeros_AG, rows)
        # NaN and values beyond float16 are found where the tensor is used.
        with np.errstate(over="ignore", invalid="ignore"):
            steps *= blocks.spread(scales_AG, rows)
            values[rows] = steps.astype(values.dtype)
    return values


def _as_float32(codes: np.ndarray) -> np.ndarray:
    # A table is six times as fast as the cast of 8-bit floats.
    return _VALUES[codes.view(np.uint8)] if codes.dtype == _FLOAT8 else codes.astype(np.float32)


def powers(exponents: np.ndarray) -> np.ndarray:
    """The float32 scales of bytes in E8M0 (OCP Microscaling Formats 1.0)."""
    return np.ldexp(np.float32(1), exponents.view(np.uint8).astype(np.int32) - _BIAS)


def float8(stored: np.ndarray) -> np.ndarray:
    """Bytes in E4M3, without infinities, as float8."""
    return stored.view(_FLOAT8)


def compute_dtype(config: Mapping[str, object], default: str = "bfloat16") -> str:
    """The dtype in which a folder's model computes; `default` if it says none."""
    stated = config.get("dtype", config.get("torch_dtype"))
    return stated if isinstance(stated, str) and stated in DTYPES else default


def bases(shapes: Mapping[str, Shape], ending: str) -> list[str]:
    """The names with this ending, without it."""
    return [name.removesuffix(ending) for name in shapes if name.endswith(ending)]


def matrix(shapes: Mapping[str, Shape], name: str) -> Shape:
    """The shape of a tensor that must be a matrix with values."""
    if 0 in shapes.get(name, ()):
        raise UserError(f"{name} has the shape {list(shapes[name])}, and no values: copy the folder again")
    if len(shapes.get(name, ())) != 2:
        raise UserError(f"{name} must be a matrix: the folder is incomplete, or its config.json is another's")
    return shapes[name]


def check(folder: Folder, shapes: Mapping[str, Shape], name: str, expected: Shape, kinds: tuple[str, ...]) -> None:
    """Raises UserError unless a tensor has this shape and one of these dtypes of safetensors."""
    shape = shapes.get(name)
    if shape is None:
        raise UserError(f"{name} is missing in the checkpoint: copy the folder again")
    if tuple(shape) != expected:
        raise UserError(f"{name} has the shape {list(shape)}, must be {list(expected)} by the weight beside it")
    if folder.kind(name) not in kinds:
        raise UserError(f"{name} is stored as {folder.kind(name)}, must be {' or '.join(kinds)}: copy the folder again")


def check_keys(values: Mapping[str, object], known: frozenset[str], where: str = "quantization_config") -> None:
    """Raises UserError for a key that says something and is not known: it may change the values."""
    for key, value in values.items():
        if key not in known and value not in (None, False, "", [], {}):
            raise UserError(
                f"{where} has {limits.shortened(key)} = {limits.shortened(value)}, which capibara does not know: use the "
                "folder before quantization"
            )


def whole(values: Mapping[str, object], key: str, default: int | None = None) -> int | None:
    """A whole number of a configuration, or None."""
    value = values.get(key, default)
    if value is not None and type(value) is not int:
        raise UserError(f"quantization_config.{key} is {limits.shortened(value)}, must be a whole number")
    return value


def names(values: Mapping[str, object], key: str) -> tuple[str, ...]:
    """A list of names of a configuration; empty: there is none."""
    value = values.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise UserError(f"quantization_config.{key} is {limits.shortened(value)}, must be a list of names")
    return tuple(value)
