"""Reads a GGUF file's metadata and tensors; checks each number of its header against the file before use.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Supports what the gguf package's reader supports,
without an object per value, and rejects false counts, lengths and offsets, and nested arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
import os
import struct
from typing import Any, NamedTuple

import numpy as np

from capibara.core import limits
from capibara.interop.gguf.layout import tensors as gguf_tensors

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_TENSORS, _KEYS, _ELEMENTS = 200_000, 100_000, 4_000_000
_NAME_BYTES, _TEXT_BYTES, _DIMENSIONS, _ALIGNMENT = 1024, 16 << 20, 4, 1 << 20
_STRING, _ARRAY = 8, 9
# Type code -> its struct and numpy formats.
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_PLAIN = {"F16": np.float16, "F32": np.float32, "F64": np.float64, "I8": np.int8, "I16": np.int16, "I32": np.int32}

Value = bool | int | float | str | list[Any]


class _Info(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file.

    Attributes:
      name: in the file.
      shape: fastest dimension first.
      tensor_type: a type of the gguf package.
      n_elements: number of values.
    """

    name: str
    shape: tuple[int, ...]
    tensor_type: Any
    n_elements: int
    _content: Any
    _begin: int
    _bytes: int

    @functools.cached_property
    def data(self) -> np.ndarray:
        """The stored array, slowest dimension first; for types without a numpy dtype, the bytes of each row."""
        shape, kind = self.shape[::-1], _PLAIN.get(self.tensor_type.name)
        if kind is not None:
            return np.frombuffer(self._content, kind, self.n_elements, self._begin).reshape(shape)
        row = self._bytes // max(1, math.prod(shape[:-1]))
        return np.frombuffer(self._content, np.uint8, self._bytes, self._begin).reshape(*shape[:-1], row)


class GgufFile:
    """The header of a file.

    Attributes:
      values: metadata by key.
      tensors: in file order.

    Raises:
      limits.Refused: it is no GGUF file, truncated, over a limit, or inconsistent.
      UserError: it is no regular file.
      FileNotFoundError: it does not exist.
    """

    def __init__(self, path: str):
        with limits.opened(path) as file:
            magic = file.read(len(_MAGIC))
            if magic != _MAGIC:
                raise NoGguf(f"it begins with {magic!r}, must begin with {_MAGIC!r}")
            self._size = os.fstat(file.fileno()).st_size
            self._content = mmap.mmap(file.fileno(), self._size, access=mmap.ACCESS_READ)
        self._at, self._elements = len(_MAGIC), 0
        version = self._number("<u4", "its version")
        if version & 0xFFFF == 0:
            raise limits.Refused("it is a big-endian GGUF file: convert it with gguf-convert-endian first")
        if version not in _VERSIONS:
            raise limits.Refused(f"it is of version {version}, must be one of {', '.join(map(str, _VERSIONS))}")
        tensors = self._count("tensors", _TENSORS)
        keys = self._count("keys", _KEYS)
        self.values: dict[str, Value] = {}
        for _ in range(keys):
            key = self._text("a key", _NAME_BYTES)
            if key in self.values:
                raise limits.Refused(f"it has the key {limits.shortened(key)} twice")
            self.values[key] = self._value(key, self._number("<u4", key))
        infos = [self._info() for _ in range(tensors)]
        self.tensors = self._placed(infos)

    def _take(self, size: int, subject: str) -> int:
        begin = self._at
        if size > self._size - begin:
            raise limits.Refused(f"{subject} needs {size:,} bytes at {begin:,}, the file has {self._size:,}")
        self._at += size
        return begin

    def _number(self, kind: str, subject: str) -> Any:
        dtype = np.dtype(kind)
        value = np.frombuffer(self._content, dtype, 1, self._take(dtype.itemsize, subject))[0]
        return bool(value) if kind == "?" else value.item()

    def _count(self, subject: str, most: int) -> int:
        result = self._number("<u8", f"the number of {subject}")
        if result > most:
            raise limits.Refused(f"it says {result:,} {subject}, must have at most {most:,}")
        return result

    def _text(self, subject: str, most: int) -> str:
        if self._size - self._at < 8:
            raise limits.Refused(f"{subject} is cut off at {self._at:,}")
        (size,) = struct.unpack_from("<Q", self._content, self._at)
        self._at += 8
        if size > most:
            raise limits.Refused(f"{subject} has {size:,} bytes, must have at most {most:,}")
        begin = self._take(size, subject)
        try:
            return self._content[begin : begin + size].decode()
        except UnicodeDecodeError:
            raise limits.Refused(f"{limits.shortened(subject)[1:-1]} is no UTF-8 text: it is corrupted") from None

    def _value(self, key: str, kind: int) -> Value:
        if kind == _STRING:
            return self._text(key, _TEXT_BYTES)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise limits.Refused(f"{limits.shortened(key)} has a value of type {kind}, which GGUF does not have")
        return self._number(_SCALARS[kind], key)

    def _array(self, key: str) -> list[Any]:
        kind, count = self._number("<u4", key), self._number("<u8", key)
        self._elements += count
        if self._elements > _ELEMENTS:
            raise limits.Refused(f"{limits.shortened(key)} says {count:,} elements, a file has at most {_ELEMENTS:,}")
        if kind == _STRING:
            return [self._text(key, _TEXT_BYTES) for _ in range(count)]
        if kind not in _SCALARS:
            kinds = "arrays" if kind == _ARRAY else f"values of type {kind}"
            raise limits.Refused(f"{limits.shortened(key)} is an array of {kinds}, which no model has")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._content, dtype, count, self._take(count * dtype.itemsize, key)).tolist()

    def _info(self) -> _Info:
        name = self._text("a tensor's name", _NAME_BYTES)
        dimensions = self._number("<u4", name)
        if not 0 < dimensions <= _DIMENSIONS:
            raise limits.Refused(f"{limits.shortened(name)} has {dimensions} dimensions, must have 1 to {_DIMENSIONS}")
        shape = tuple(self._number("<u8", name) for _ in range(dimensions))
        return _Info(name, shape, self._number("<u4", name), self._number("<u8", name))

    def _placed(self, infos: list[_Info]) -> list[StoredTensor]:
        """The tensors, each checked to lie within the file without overlaps."""
        alignment = self.values.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= _ALIGNMENT or alignment & (alignment - 1):
            raise limits.Refused(f"general.alignment is {limits.shortened(alignment)}, must be a power of two")
        start = -(-self._at // alignment) * alignment
        tensors = [self._tensor(info, start, alignment) for info in infos]
        if len({info.name for info in infos}) < len(infos):
            raise limits.Refused("it has two tensors of one name")
        last = start
        for tensor in sorted(tensors, key=lambda tensor: tensor._begin):
            if tensor._begin < last:
                raise limits.Refused(f"{limits.shortened(tensor.name)} overlaps another tensor")
            last = tensor._begin + tensor._bytes
        return tensors

    def _tensor(self, info: _Info, start: int, alignment: int) -> StoredTensor:
        gguf = gguf_tensors.package()
        shown, count = limits.shortened(info.name), math.prod(info.shape)
        try:
            kind = gguf.GGMLQuantizationType(info.kind)
            block, size = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:  # ... is not a valid GGMLQuantizationType
            raise limits.Refused(f"{shown}: {error}, update the gguf package if it is a new one") from None
        if count == 0 or info.shape[0] % block:
            raise limits.Refused(f"{shown} has the shape {list(info.shape)}, which {kind.name} cannot have")
        if info.offset % alignment:
            raise limits.Refused(f"{shown} is at {info.offset:,}, must be at a multiple of {alignment}")
        begin, length = start + info.offset, count * size // block
        if begin + length > self._size:
            raise limits.Refused(f"{shown} ends at {begin + length:,}, the file has {self._size:,} bytes")
        return StoredTensor(info.name, info.shape, kind, count, self._content, begin, length)


class NoGguf(limits.Refused):
    """The file does not begin with GGUF's magic number."""
