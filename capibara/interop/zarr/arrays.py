"""Reads arrays of Zarr folders or of an OCDBT store, in a process with bounded memory."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np

from capibara.core import limits
from capibara.core.types import UserError

_READER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "reader.py")
_WAIT_S, _BYTES_S = 60.0, 20e6  # to wait for an answer, and additional time by its size
_ARRAYS, _CHUNKS, _DIMENSIONS, _SIZE, _ANSWER_BYTES = 200_000, 100_000, 8, 2**40, 64 << 20
_RATIO, _FREE_BYTES = 64, 64 << 20  # largest array: this multiple of its stored bytes, or this size
_COMPRESSORS = (None, "gzip", "zlib", "zstd", "blosc", "bz2")
_METADATA = {"/.zarray": "zarr", "/zarr.json": "zarr3"}  # the file of an array -> TensorStore's driver


class Broken(Exception):
    """An array that cannot be read; the message says why."""


class About(NamedTuple):
    """A store's description of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk_bytes: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@functools.lru_cache(maxsize=4)
def stored_in(root: str, begin: str) -> dict[str, dict[str, Any]]:
    """TensorStore's specs of the arrays in Orbax's OCDBT store whose names begin with `begin`; empty without a store.

    Raises:
      UserError: it cannot be read.
    """
    if not os.path.isfile(os.path.join(root, "manifest.ocdbt")):
        return {}
    _check_folder(root)
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": os.path.join(os.path.abspath(root), "")}}
    try:
        keys = Arrays(root)._asked({"list": store, "ends": [*_METADATA]})[0]["names"]
    except Broken as error:
        raise UserError(f"{root}/manifest.ocdbt cannot be read ({error}): copy the checkpoint again") from None
    if len(keys) > _ARRAYS:
        raise UserError(f"{root} has {len(keys):,} arrays, must have at most {_ARRAYS:,}")
    result = {}
    for key in keys:
        name, _, end = key.rpartition("/")
        if name.startswith(begin):
            result[name] = {"driver": _METADATA[f"/{end}"], "kvstore": store | {"path": f"{name}/"}}
    return result


@contextlib.contextmanager
def corruption_reported(root: str, name: str) -> Iterator[None]:
    """Errors of reading an array of a checkpoint as one line, a UserError."""
    try:
        yield
    except UserError:
        raise
    except (Broken, ValueError, KeyError, OSError, TypeError, ArithmeticError, MemoryError) as error:
        cause = limits.cause(error)
        raise UserError(f"{root}: {name} is missing or corrupted ({cause}): copy the checkpoint again") from error


class Arrays:
    """The arrays of a checkpoint's folder.

    Methods raise Broken if an array is missing, corrupted, or larger than its stored bytes can hold.
    """

    def __init__(self, root: str):
        self._root = os.path.abspath(root)
        self._process: subprocess.Popen[bytes] | None = None
        self._known: dict[str, About] = {}

    def about(self, spec: dict[str, Any]) -> About:
        """Shape and dtype of an array; `spec` is TensorStore's, with a path relative to the folder."""
        key = json.dumps(spec)
        if key not in self._known:
            stored = self._stored(spec)
            reply, _ = self._asked({"open": self._absolute(spec)})
            shape, chunk = tuple(reply["shape"]), reply["chunk"]
            if len(shape) > _DIMENSIONS or not all(0 <= size <= _SIZE for size in (*shape, *chunk)):
                raise Broken(f"it has the shape {list(shape)} in chunks of {chunk}")
            kind = np.dtype(reply["dtype"])
            result = About(shape, kind, math.prod(chunk) * kind.itemsize)
            if result.nbytes + result.chunk_bytes > max(_FREE_BYTES, _RATIO * stored):
                raise Broken(
                    f"it says {result.nbytes:,} bytes in chunks of {result.chunk_bytes:,}, {stored:,} are stored"
                )
            self._known[key] = result
        return self._known[key]

    def read(self, spec: dict[str, Any], axis: int = 0, layer: int | None = None) -> np.ndarray:
        """An array, or its slice at index `layer` of an axis."""
        about = self.about(spec)
        layer_bytes = about.nbytes if layer is None else about.nbytes // max(1, about.shape[axis])
        need = 3 * layer_bytes + 4 * about.chunk_bytes + min(about.nbytes, 256 << 20)
        request = {"read": self._absolute(spec), "index": None if layer is None else [axis, layer], "need": need}
        reply, data = self._asked(request, layer_bytes)
        return np.frombuffer(data, np.dtype(reply["dtype"])).reshape(reply["shape"])

    def _absolute(self, spec: dict[str, Any]) -> dict[str, Any]:
        if spec["kvstore"]["driver"] != "file":
            return spec
        path = os.path.join(self._root, spec["kvstore"]["path"], "")
        return spec | {"kvstore": {"driver": "file", "path": path}}

    def _stored(self, spec: dict[str, Any]) -> int:
        """The stored bytes of an array; raises if a chunk is missing, for which zarr would return zeros."""
        if spec["kvstore"]["driver"] != "file":
            return _check_folder(self._root)
        return _check_chunks(os.path.join(self._root, spec["kvstore"]["path"]))

    def _asked(self, request: dict[str, Any], expected: int = 0) -> tuple[dict[str, Any], bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", _READER],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env=dict(os.environ) | {"JAX_PLATFORMS": "cpu"},
            )  # fmt: skip
            weakref.finalize(self, _end, self._process)
        process = self._process
        asking, answers = _pipes(process)
        try:
            asking.write(json.dumps(request).encode() + b"\n")
            asking.flush()
            wait = _WAIT_S + expected / _BYTES_S
            size = int.from_bytes(_received(answers, 8, wait), "little")
            if size > _ANSWER_BYTES:
                raise Broken(f"its reader answers with {size:,} bytes")
            reply = json.loads(_received(answers, size, wait))
            if reply["bytes"] > expected + 4096:
                raise Broken(f"it has {reply['bytes']:,} bytes, must have {expected:,}")
            data = _received(answers, reply["bytes"], wait)
        except (OSError, EOFError, TimeoutError) as error:
            raise Broken(self._ended(process, error)) from None
        if "error" in reply:
            raise Broken(reply["error"])
        return reply, data

    def _ended(self, process: subprocess.Popen[bytes], error: BaseException) -> str:
        """Ends the reader; returns why it failed."""
        self._process = None
        if isinstance(error, TimeoutError):
            process.kill()
        code = process.wait()
        _end(process)
        if isinstance(error, TimeoutError):
            return f"its reader reports {error}"
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"its reader ends with {name}: it unpacks to more memory than its shape needs, or is corrupted"


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in _pipes(process):
        pipe.close()
    process.kill()
    process.wait()


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout


def _received(pipe: IO[bytes], size: int, wait: float) -> bytes:
    parts, left = [], size
    while left:
        if not select.select([pipe], [], [], wait)[0]:
            raise TimeoutError(f"no answer for {wait:.0f} s")
        part = os.read(pipe.fileno(), min(left, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _check_folder(root: str) -> int:
    """Total bytes of a store's files; links are rejected."""
    total = 0
    for folder, folders, files in itertools.islice(os.walk(root), _CHUNKS):
        for path in (os.path.join(folder, name) for name in (*folders, *files)):
            if os.path.islink(path):
                raise UserError(f"{path} is a link, must be a file or folder of the checkpoint: replace it by a copy")
        total += sum(limits.check_file(os.path.join(folder, name)) for name in files)
    return total


def _sizes(about: dict[str, Any], name: str, least: int) -> list[int]:
    values = about.get(name)
    if isinstance(values, list) and len(values) <= _DIMENSIONS:
        if all(type(size) is int and least <= size <= _SIZE for size in values):
            return values
    raise Broken(f"its .zarray has {name} = {limits.shortened(values)}")


def _check_chunks(folder: str) -> int:
    """Total bytes of an array's chunks; raises if one is missing, or the array's sizes are invalid."""
    path = os.path.join(folder, ".zarray")
    about = limits.parse_json(_read(path))
    if not isinstance(about, dict):
        raise Broken("its .zarray is no object")
    shape, chunks = _sizes(about, "shape", 0), _sizes(about, "chunks", 1)
    if len(shape) != len(chunks):
        raise Broken(f"its .zarray has the shape {shape} in chunks of {chunks}")
    compressor = about.get("compressor")
    kind = compressor.get("id") if isinstance(compressor, dict) else compressor
    if kind not in _COMPRESSORS or about.get("filters"):
        raise Broken(f"its .zarray has the compressor {limits.shortened(kind)}, or filters")
    separator = about.get("dimension_separator", ".")
    grid = [-(-size // chunk) for size, chunk in zip(shape, chunks)]
    if separator not in (".", "/") or math.prod(grid) > _CHUNKS:
        raise Broken(f"its .zarray says {math.prod(grid):,} chunks, must say at most {_CHUNKS:,}")
    total = 0
    for at in np.ndindex(*grid):
        chunk = separator.join(map(str, at)) or "0"
        try:
            total += limits.check_file(os.path.join(folder, chunk))
        except FileNotFoundError:
            raise Broken(f"its chunk {chunk} is missing") from None
    return total


def _read(path: str) -> bytes:
    try:
        return limits.read(path, limits.SMALL_BYTES)
    except FileNotFoundError:
        raise Broken(f"{path}: No such file or directory") from None
