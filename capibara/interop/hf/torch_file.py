"""Reads and writes state dicts in files of torch.save, without torch and without executing their pickles.

The format follows torch/serialization.py and torch/_utils.py. Since PyTorch 1.6 a file is a zip archive: NAME/data.pkl,
in which a tensor is torch._utils._rebuild_tensor_v2 of a storage, and NAME/data/KEY with the bytes of each storage.
Older files are a sequence of pickles followed by the storages. Both are supported.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from capibara.core import limits
from capibara.core.types import UserError
from capibara.interop.hf import torch_pickle
from capibara.interop.hf.layout.tensors import Shape

# Storage class -> dtype in safetensors, and in numpy.
_KINDS = {
    "FloatStorage": ("F32", np.float32),
    "HalfStorage": ("F16", np.float16),
    "BFloat16Storage": ("BF16", ml_dtypes.bfloat16),
    "DoubleStorage": ("F64", np.float64),
    "LongStorage": ("I64", np.int64),
    "IntStorage": ("I32", np.int32),
    "ShortStorage": ("I16", np.int16),
    "CharStorage": ("I8", np.int8),
    "ByteStorage": ("U8", np.uint8),
    "BoolStorage": ("BOOL", np.bool_),
}
_STORAGES = {np.dtype(kind): name for name, (_, kind) in _KINDS.items()}
MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of files before 1.6
_ALIGNMENT = 64
_PICKLE_BYTES, _SMALL = 64 << 20, 4096
_RATIO = 64  # most compression accepted: torch.save compresses nothing
_MOST, _DIMENSIONS = 2**48, 64
_WRONG = (KeyError, IndexError, ValueError, TypeError, AttributeError, OverflowError, struct.error, NotImplementedError)


class Refused(Exception):
    """A file that is rejected; the message continues after its name."""


class _Storage(NamedTuple):
    kind: str
    key: str
    elements: int


class _Slice(NamedTuple):
    """A tensor in a file, with safetensors' interface of a slice."""

    storage: _Storage
    offset: int
    shape: Shape
    strides: tuple[int, ...]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return _KINDS[self.storage.kind][0]


class TorchFile:
    """A state dict in a file, read tensor by tensor; has the methods of safetensors' safe_open.

    Raises:
      Refused: it is truncated or corrupted, holds anything but tensors, or unpacks to more than its tensors need.
    """

    def __init__(self, path: str):
        self._path = path
        self._held: tuple[str, bytes] | None = None  # the storage that was read last: tensors may share one
        self._starts: dict[str, int] = {}  # offsets of the storages in a file before 1.6
        try:
            with limits.opened(path) as file:
                result = self._of_zip(file) if file.read(2) == b"PK" else self._of_pickles(file)
        except UserError:
            raise
        except torch_pickle.Broken as error:
            raise Refused(str(error)) from None
        # RuntimeError: it is encrypted, or its compression is unknown.
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, *_WRONG) as error:
            raise Refused(_cause(error)) from error
        strange = [name for name, value in result.items() if not isinstance(value, _Slice) or not isinstance(name, str)]
        if strange:
            value = result[strange[0]]
            raise Refused(f"it has {limits.shortened(strange[0])}, a {type(value).__name__}, must be only tensors")
        self._tensors: dict[str, _Slice] = dict(result)

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> _Slice:
        return self._tensors[name]

    def get_tensor(self, name: str) -> np.ndarray:
        storage, offset, shape, strides = self._tensors[name]
        kind = np.dtype(_KINDS[storage.kind][1])
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if 0 in shape:
            if math.prod(size or 1 for size in shape) > _MOST:
                raise Refused(f"{name} has the shape {limits.shortened(list(shape))}")
            return np.zeros(shape, kind)
        if not 0 <= offset <= last < storage.elements or min(strides, default=0) < 0:
            raise Refused(f"{name} is not within its storage")
        if math.prod(shape) > storage.elements:
            raise Refused(f"{name} has {math.prod(shape):,} values, its storage has {storage.elements:,}")
        data = np.frombuffer(self._bytes(storage), kind)
        steps = [stride * kind.itemsize for stride in strides]
        return np.lib.stride_tricks.as_strided(data[offset:], shape, steps, writeable=False)

    def _of_zip(self, file: BinaryIO) -> Mapping[str, Any]:
        with limits.zip_archive(file) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(names) != 1:
                raise Refused(f"it has {len(names)} files named data.pkl, must have one: it is no file of torch.save")
            self._prefix = names[0].removesuffix("data.pkl")
            order = f"{self._prefix}byteorder"
            if order in archive.namelist() and _member(archive, order, _SMALL) != b"little":
                raise Refused("it was written on a big-endian machine")
            return _state_dict(io.BytesIO(_member(archive, names[0], _PICKLE_BYTES)))

    def _of_pickles(self, file: BinaryIO) -> Mapping[str, Any]:
        file.seek(0)
        content = io.BytesIO(file.read(_PICKLE_BYTES))
        if _loaded(content) != MAGIC or _loaded(content) != _PROTOCOL:
            raise Refused("it is no file of torch.save")
        about = _loaded(content)
        if not isinstance(about, dict) or not about.get("little_endian", True):
            raise Refused("it was written on a big-endian machine")
        result = _state_dict(content)
        sizes = {value.storage.key: np.dtype(_KINDS[value.storage.kind][1]).itemsize for value in _slices(result)}
        end = os.fstat(file.fileno()).st_size
        keys = _loaded(content)
        if not isinstance(keys, list) or not all(isinstance(key, str) and key in sizes for key in keys):
            raise Refused("its list of storages is not that of its tensors")
        file.seek(content.tell())
        for key in keys:
            (count,) = struct.unpack("<q", file.read(8))
            self._starts[key] = file.tell()
            if count < 0 or file.tell() + count * sizes[key] > end:
                raise Refused("it ends before its tensors do")
            file.seek(count * sizes[key], os.SEEK_CUR)
        return result

    def _bytes(self, storage: _Storage) -> bytes:
        if self._held is None or self._held[0] != storage.key:
            size = storage.elements * np.dtype(_KINDS[storage.kind][1]).itemsize
            try:
                with limits.opened(self._path) as file:
                    content = self._read(file, storage.key, size)
            except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, *_WRONG) as error:
                raise Refused(_cause(error)) from error
            if len(content) < size:
                raise Refused("it ends before its tensors do")
            self._held = storage.key, content
        return self._held[1]

    def _read(self, file: BinaryIO, key: str, size: int) -> bytes:
        """A storage's bytes; checks the archive's declarations before reading."""
        if not self._starts:
            with limits.zip_archive(file) as archive:
                name = f"{self._prefix}data/{key}"
                declared = archive.getinfo(name).file_size
                if declared > size:
                    raise Refused(f"the storage {key} has {declared} bytes, its tensors have {size}")
                return _member(archive, name, size)
        file.seek(self._starts[key])
        if size > os.fstat(file.fileno()).st_size - self._starts[key]:
            raise Refused("it ends before its tensors do")
        return file.read(size)


def _member(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    """A file of an archive, with its checksum verified."""
    info = archive.getinfo(name)
    if info.file_size > most:
        raise Refused(f"{limits.shortened(name)} has {info.file_size:,} bytes, must have at most {most:,}")
    if info.file_size > _RATIO * max(info.compress_size, _SMALL):
        raise Refused(
            f"{limits.shortened(name)} unpacks to {info.file_size:,} bytes of {info.compress_size:,}: torch.save does not "
            "compress"
        )
    return archive.read(info)


def _state_dict(content: io.BytesIO) -> Mapping[str, Any]:
    result = _loaded(content)
    if not isinstance(result, Mapping):
        raise Refused(f"it holds a {type(result).__name__}, must be a state dict")
    return result


def _slices(header: Mapping[str, object]) -> list[_Slice]:
    return [value for value in header.values() if isinstance(value, _Slice)]


def _cause(error: BaseException) -> str:
    return limits.cause(error)


def _rebuild(storage: Any = None, offset: Any = None, shape: Any = None, strides: Any = None, *_: object) -> _Slice:
    if not isinstance(storage, _Storage):
        raise torch_pickle.Broken("a tensor without a storage")
    numbers = (offset, *_sizes(shape), *_sizes(strides))
    if len(shape) != len(strides) or len(shape) > _DIMENSIONS or min(shape, default=0) < 0:
        raise torch_pickle.Broken(f"a tensor with {len(shape)} dimensions, {len(strides)} strides")
    if any(type(number) is not int or abs(number) > _MOST for number in numbers):
        raise torch_pickle.Broken("a tensor whose sizes are no usual numbers")
    return _Slice(storage, offset, shape, strides)


def _sizes(values: object) -> tuple[int, ...]:
    if type(values) is not tuple or not all(type(value) is int for value in values):
        raise torch_pickle.Broken("a tensor whose sizes are no numbers")
    return values


def _ordered(*items: object) -> dict[Any, Any]:
    if items and items != ([],):
        raise torch_pickle.Broken("a dict that is made of arguments")
    return {}


def _parameter(tensor: object = None, *_: object) -> Any:
    return tensor


_CALLABLE: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): _ordered,
    ("torch._utils", "_rebuild_tensor"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch._utils", "_rebuild_parameter"): _parameter,
}


def _named(module: str, name: str) -> Any:
    if module == "torch" and name in _KINDS:
        return name  # calling it yields no tensor
    if (module, name) not in _CALLABLE:
        shown = limits.shortened(f"{module}.{name}")[1:-1]
        raise Refused(f"it would run {shown}, must hold only tensors: save its state_dict()")
    return torch_pickle.Named(module, name)


def _stored(pid: object) -> _Storage:
    if type(pid) is not tuple or len(pid) < 5:
        raise torch_pickle.Broken("a storage of another kind")
    tag, kind, key, _, count, *view = pid
    if tag != "storage" or type(kind) is not str or kind not in _KINDS or any(part is not None for part in view):
        raise torch_pickle.Broken("a storage of another kind")
    if type(key) is not str or type(count) is not int or not 0 <= count <= _MOST:
        raise torch_pickle.Broken("a storage whose size is no usual number")
    return _Storage(kind, key, count)


def _loaded(content: io.BytesIO) -> Any:
    """The next pickle in `content`."""
    return torch_pickle.load(content, _named, lambda *call: _CALLABLE[call[0], call[1]](*call[2]), _stored)


def save_torch(path: str, tensors: Mapping[str, np.ndarray], tied: Mapping[str, str]) -> None:
    """Writes a state dict that torch.load reads, also with weights_only.

    Args:
      tensors: by name.
      tied: additional names -> the tensor whose storage they share.
    """
    numbers = {name: str(number) for number, name in enumerate(tensors)}
    entries = [(name, name) for name in tensors] + list(tied.items())
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, "archive/data.pkl", _pickled([(name, numbers[of], tensors[of]) for name, of in entries]))
        _add(archive, "archive/byteorder", b"little")
        for name, value in tensors.items():
            _add(archive, f"archive/data/{numbers[name]}", np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        _add(archive, "archive/version", b"3\n")


def _add(archive: zipfile.ZipFile, name: str, content: Any) -> None:
    """Adds an entry whose bytes begin at a multiple of 64, as in torch."""
    info = zipfile.ZipInfo(name)  # without a date, so that equal models make equal files
    assert archive.fp is not None
    begin = archive.fp.tell() + 30 + len(name) + 4
    info.extra = b"FB" + struct.pack("<H", -begin % _ALIGNMENT) + b"Z" * (-begin % _ALIGNMENT)
    archive.writestr(info, content)


def _pickled(entries: list[tuple[str, str, np.ndarray]]) -> bytes:
    """A protocol-2 pickle of an OrderedDict of tensors: (name, storage's key, value)."""
    ordered = b"ccollections\nOrderedDict\n)R"  # a call without arguments
    parts = [b"\x80\x02", ordered, b"("]
    for name, key, value in entries:
        storage = _STORAGES[value.dtype].encode()
        strides = [stride // value.itemsize for stride in np.empty_like(value, subok=False).strides]
        parts += [_text(name), b"ctorch._utils\n_rebuild_tensor_v2\n", b"("]
        parts += [b"(", _text("storage"), b"ctorch\n" + storage + b"\n", _text(key), _text("cpu"), _int(value.size)]
        parts += [b"tQ", _int(0), _tuple(value.shape), _tuple(strides), b"\x89", ordered, b"tR"]
    return b"".join([*parts, b"u."])


def _text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _int(value: int) -> bytes:
    if value < 2**31:
        return b"J" + struct.pack("<i", value)
    encoded = value.to_bytes(8, "little", signed=True)
    return b"\x8a" + bytes([len(encoded)]) + encoded


def _tuple(values: Any) -> bytes:
    return b"(" + b"".join(map(_int, values)) + b"t"
