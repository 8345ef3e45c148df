"""Files of torch.save that hold a state dict, read and written without torch; nothing of what they pickle is run.

Facts: torch/serialization.py and torch/_utils.py. Since PyTorch 1.6 a file is a zip archive: NAME/data.pkl, in which a tensor
is torch._utils._rebuild_tensor_v2 of a storage, and NAME/data/KEY, the bytes of each storage. Before, it was pickles one
after the other and the storages after them. Both are read.
"""

from __future__ import annotations

import collections
import os
import pickle
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from capibara.interop.tensors import Shape

# Storage -> what safetensors calls its dtype, and that.
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
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of the files before 1.6
_ALIGNMENT = 64


class Refused(Exception):
    """A file that is not read; says why, in words that go on after its name."""


class _Storage(NamedTuple):
    kind: str
    key: str
    count: int


class _Slice(NamedTuple):
    """A tensor in a file, as safetensors gives one."""

    storage: _Storage
    offset: int
    shape: Shape
    strides: tuple[int, ...]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return _KINDS[self.storage.kind][0]


class TorchFile:
    """A state dict in a file, read tensor by tensor; with the methods of safetensors' safe_open.

    Raises:
      Refused: it is cut short or damaged, or holds other than tensors.
    """

    def __init__(self, path: str):
        self._path = path
        self._held: tuple[str, bytes] | None = None  # the storage that was read last: tensors may share one
        self._starts: dict[str, int] = {}  # of the storages of a file before 1.6
        try:
            with open(path, "rb") as file:
                found = self._of_zip(file) if file.read(2) == b"PK" else self._of_pickles(file)
        except (Refused, OSError):
            raise
        except Exception as error:  # a damaged pickle can come to anything
            raise Refused(_cause(error)) from error
        strange = [name for name, value in found.items() if not isinstance(value, _Slice) or not isinstance(name, str)]
        if strange:
            raise Refused(f"it has {strange[0]!r}, a {type(found[strange[0]]).__name__}, must be tensors alone")
        self._tensors: dict[str, _Slice] = dict(found)

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> _Slice:
        return self._tensors[name]

    def get_tensor(self, name: str) -> np.ndarray:
        storage, offset, shape, strides = self._tensors[name]
        kind = np.dtype(_KINDS[storage.kind][1])
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if 0 in shape:
            return np.zeros(shape, kind)
        if not 0 <= offset <= last < storage.count or min(strides, default=0) < 0:
            raise Refused(f"{name} is not within its storage")
        data = np.frombuffer(self._bytes(storage), kind)
        steps = [stride * kind.itemsize for stride in strides]
        return np.lib.stride_tricks.as_strided(data[offset:], shape, steps, writeable=False)

    def _of_zip(self, file: BinaryIO) -> Mapping[str, Any]:
        with zipfile.ZipFile(file) as archive:
            (index,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            self._prefix = index.removesuffix("data.pkl")
            if (
                f"{self._prefix}byteorder" in archive.namelist()
                and archive.read(f"{self._prefix}byteorder") != b"little"
            ):
                raise Refused("it was written on a big-endian machine")
            with archive.open(index) as content:
                return _state_dict(content)

    def _of_pickles(self, file: BinaryIO) -> Mapping[str, Any]:
        file.seek(0)
        if _loaded(file) != _MAGIC or _loaded(file) != _PROTOCOL:
            raise Refused("it is no file of torch.save")
        if not _loaded(file).get("little_endian", True):
            raise Refused("it was written on a big-endian machine")
        found = _state_dict(file)
        sizes = {value.storage.key: np.dtype(_KINDS[value.storage.kind][1]).itemsize for value in _slices(found)}
        end = os.fstat(file.fileno()).st_size
        for key in _loaded(file):
            (count,) = struct.unpack("<q", file.read(8))
            self._starts[key] = file.tell()
            if file.seek(count * sizes[key], os.SEEK_CUR) > end:
                raise Refused("it ends before its tensors do")
        return found

    def _bytes(self, storage: _Storage) -> bytes:
        if self._held is None or self._held[0] != storage.key:
            size = storage.count * np.dtype(_KINDS[storage.kind][1]).itemsize
            try:
                with open(self._path, "rb") as file:
                    if self._starts:
                        file.seek(self._starts[storage.key])
                        content = file.read(size)
                    else:
                        with zipfile.ZipFile(file) as archive:
                            content = archive.read(f"{self._prefix}data/{storage.key}")  # compares its checksum
            # RuntimeError: it is encrypted, or compressed in a way that is not known.
            except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, OSError, RuntimeError) as error:
                raise Refused(_cause(error)) from error
            if len(content) < size:
                raise Refused("it ends before its tensors do")
            if len(content) > size:
                raise Refused(f"the storage {storage.key} has {len(content)} bytes, its tensors have {size}")
            self._held = storage.key, content
        return self._held[1]


def _state_dict(file: BinaryIO) -> Mapping[str, Any]:
    found = _loaded(file)
    if not isinstance(found, Mapping):
        raise Refused(f"it holds a {type(found).__name__}, must be a state dict")
    return found


def _slices(found: Mapping[str, Any]) -> list[_Slice]:
    return [value for value in found.values() if isinstance(value, _Slice)]


def _cause(error: BaseException) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


def _rebuild(storage: _Storage, offset: int, shape: Shape, strides: tuple[int, ...], *_: Any) -> _Slice:
    if not isinstance(storage, _Storage):
        raise pickle.UnpicklingError("a tensor without a storage")
    if len(shape) != len(strides) or min(map(int, shape), default=0) < 0:
        raise pickle.UnpicklingError(f"a tensor with {len(shape)} dimensions, {len(strides)} strides")
    return _Slice(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))


_CALLABLE = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
}


def _loaded(file: BinaryIO) -> Any:
    """The next pickle of a file, after a look at it: a large index makes the memory for all below it, 16 times as large."""
    begin = file.tell()
    for opcode, argument, at in pickletools.genops(file):
        if "PUT" in opcode.name and argument > at - begin:
            raise Refused(f"its pickle has place for {argument} values and fewer bytes")
    file.seek(begin)
    return _Unpickler(file).load()


class _Unpickler(pickle.Unpickler):
    """Reads pickles in which tensors are; whatever else one names is refused, not imported."""

    def __init__(self, file: BinaryIO):
        super().__init__(file, encoding="utf-8")

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _KINDS:
            return name  # no tensor comes of calling it
        if (module, name) not in _CALLABLE:
            raise Refused(f"it would run {module}.{name}, must hold tensors alone: save its state_dict()")
        call = _CALLABLE[module, name]
        # A pickle may set attributes of what it names (BUILD): of a function it gets one of its own.
        return call if isinstance(call, type) else lambda *given: call(*given)

    def persistent_load(self, pid: Any) -> _Storage:
        what, kind, key, _, count, *view = pid
        if what != "storage" or kind not in _KINDS or any(part is not None for part in view):
            raise pickle.UnpicklingError(f"a storage of another kind, {str(pid)[:60]}")
        return _Storage(kind, str(key), int(count))


def save_torch(path: str, tensors: Mapping[str, np.ndarray], tied: Mapping[str, str]) -> None:
    """Writes a state dict that torch.load reads, with weights_only too.

    Args:
      tensors: by name.
      tied: further names -> the tensor whose storage they share.
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
    """An entry whose bytes begin at a multiple of 64, as torch has them."""
    info = zipfile.ZipInfo(name)  # without a date: the same model makes the same file
    begin = archive.fp.tell() + 30 + len(name) + 4
    info.extra = b"FB" + struct.pack("<H", -begin % _ALIGNMENT) + b"Z" * (-begin % _ALIGNMENT)
    archive.writestr(info, content)


def _pickled(entries: list[tuple[str, str, np.ndarray]]) -> bytes:
    """The pickle, of protocol 2, of an OrderedDict of tensors: (name, storage's key, value)."""
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
