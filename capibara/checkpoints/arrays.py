"""Stores arrays as chunks in files (zarr 2): writes and hashes them in one pass; reads and verifies them in another.

A chunk is what one device holds of an array, or its share of that if other devices hold the same: its bytes in
row-major order, in a file named after its index, such as `state/params.layers.mlp.kernel/0.3`. Unencrypted arrays also
have Orbax's metadata, so that Orbax can read them.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, SingleDeviceSharding

from capibara.checkpoints import manifest
from capibara.checkpoints.encryption import Key
from capibara.checkpoints.manifest import Corrupted, File, Manifest
from capibara.core import limits, tree
from capibara.core.types import PyTree
from capibara.storage import hashing, stores, threads

FOLDER, LAYOUT = "state", ".zarray"
COMPRESSOR = {"id": "zstd", "level": 1}
_LAYOUT_BYTES = 1 << 16  # limit of a .zarray file
TOGETHER_BYTES = 4 << 30  # of arrays held in the host's memory at a time
_T = TypeVar("_T")
Bounds = tuple[tuple[int, int], ...]  # (start, stop) along each dimension


@dataclasses.dataclass(frozen=True)
class Layout:
    """How an array is divided into chunks.

    Attributes:
      shape: of the array.
      chunks: of a chunk; the last ones may extend beyond the array.
      dtype: of its elements.
      compressor: None: chunks are raw bytes.
    """

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype
    compressor: dict[str, Any] | None

    @classmethod
    def parse(cls, text: bytes) -> Layout:
        """Parses a `.zarray` file."""
        values = limits.parse_json(text)
        dtype, shape, sizes = values["dtype"], tuple(values["shape"]), tuple(values["chunks"])
        dtype = np.dtype(dtype) if dtype[:1] in "<>|" else jnp.dtype(dtype)
        if not all(type(size) is int and size >= 0 for size in (*shape, *sizes)) or len(shape) != len(sizes):
            raise ValueError("its shape and chunks are no sizes of the same dimensions")
        if not all(0 < size <= max(full, 1) for size, full in zip(sizes, shape)):
            raise ValueError("its chunks are not within its shape")
        if dtype.kind not in "biufc" and dtype.isbuiltin != 2:  # 2: those of ml_dtypes
            raise ValueError(f"its dtype is {dtype}")
        compressor = values.get("compressor")
        if compressor is not None and compressor.get("id") != COMPRESSOR["id"]:
            raise ValueError(f"its compressor is {limits.shortened(compressor)}")
        return cls(shape, sizes, dtype, compressor)

    def text(self) -> bytes:
        """The contents of the `.zarray` file."""
        dtype = self.dtype.str if self.dtype.isbuiltin == 1 else self.dtype.name  # "<f4", but "bfloat16"
        values = {
            "zarr_format": 2, "shape": self.shape, "chunks": self.chunks, "dtype": dtype, "order": "C",
            "compressor": self.compressor, "fill_value": None, "filters": None, "dimension_separator": ".",
        }  # fmt: skip
        return json.dumps(values).encode()

    def bounds(self, index: tuple[int, ...]) -> Bounds:
        """The part of the array in a chunk."""
        return tuple(
            (i * size, min((i + 1) * size, full)) for i, size, full in zip(index, self.chunks, self.shape, strict=True)
        )

    def touched(self, bounds: Bounds) -> Iterator[tuple[int, ...]]:
        """The chunks that overlap a part of the array."""
        return itertools.product(
            *(range(start // size, -(-stop // size)) for (start, stop), size in zip(bounds, self.chunks, strict=True))
        )


def name_of(index: tuple[int, ...]) -> str:
    """The name of a chunk's file."""
    return ".".join(map(str, index)) or "0"


def folder_of(array: str) -> str:
    """The folder of an array, relative to its step's folder."""
    return f"{FOLDER}/{array.replace('/', '.')}"


def layout(folder: epath.Path, listed: Manifest, array: str) -> Layout:
    """The layout of an array of a step.

    Raises:
      Corrupted: it is missing or invalid.
    """
    path = f"{folder_of(array)}/{LAYOUT}"
    if path not in listed.by_path:
        raise Corrupted(f"{path} is gone")
    if (size := listed.by_path[path].size) > _LAYOUT_BYTES:
        raise Corrupted(f"{path} has {size:,} bytes, must have at most {_LAYOUT_BYTES:,}")
    try:
        return Layout.parse(manifest.contents(folder, listed.by_path[path]).tobytes())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupted(f"{path} cannot be read ({manifest.one_line(error)})") from error


def read(
    folder: epath.Path, manifest: Manifest, target: PyTree, *, check: bool = True, key: Key | None = None
) -> PyTree:
    """Reads arrays of a step onto this process's devices.

    Args:
      folder: of the step.
      manifest: its manifest.
      target: ShapeDtypeStructs with the wanted shardings and dtypes, which may differ from the saved ones.
      check: whether to compare each chunk with its hash.
      key: of an encrypted step.

    Raises:
      Corrupted: data that this process needs is corrupted.
    """
    names, leaves = tree.path_names(target), jax.tree.leaves(target)
    arrays = threads.each(
        lambda pair: _Array(folder, manifest, *pair, check, key), list(zip(names, leaves, strict=True))
    )
    placed = []
    for together in _by_bytes(arrays, lambda array: array.bytes):
        threads.each(lambda job: job[0].read(job[1]), [(array, index) for array in together for index in array.needed])
        placed += [array.placed() for array in together]
    return jax.tree.unflatten(jax.tree.structure(target), placed)


def write(folder: epath.Path, arrays: PyTree, *, key: Key | None = None, compress: bool = False) -> list[File]:
    """Writes all arrays to `folder`/state, from all devices of the run; every process must call it, in any thread.

    Args:
      folder: of the step.
      arrays: jax.Array leaves that do not change meanwhile.
      key: encrypts the chunks, not their layouts; None: no encryption.
      compress: whether to compress chunks with zstd.

    Returns:
      The chunks whose contents this process holds, hashed in memory, whichever process writes them; with encryption,
      which is not deterministic, only those that it wrote.

    Raises:
      Corrupted: a compressed chunk does not decompress to its contents.
    """
    first = jax.process_index() == 0
    layouts: dict[epath.Path, bytes] = {}
    jobs: list[_Chunk] = []
    for name, leaf in zip(tree.path_names(arrays), jax.tree.leaves(arrays), strict=True):
        cut = Layout(leaf.shape, _chunk_shape(leaf), np.dtype(leaf.dtype), COMPRESSOR if compress else None)
        inner = folder / folder_of(name)
        stores.of(inner).make_folder(inner)
        if first:
            layouts[inner / LAYOUT] = cut.text()
        jobs += _held(name, leaf, cut)
    if first and key is None:
        layouts |= {folder / FOLDER / name: text for name, text in _orbax_metadata(arrays).items()}
    stores.of(folder).make_folder(folder / FOLDER)
    threads.each(
        lambda file: stores.of(folder).write_hashed(file[0], np.frombuffer(file[1], np.uint8)), layouts.items()
    )
    together = _by_bytes(jobs, lambda job: job.host_bytes(key))
    files = [file for group in together for file in threads.each(lambda job: job.write(folder, key), group)]
    return [file for file in files if file is not None]


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A chunk that this process holds.

    Attributes:
      array: name of the array.
      cut: the array's layout.
      index: index of the chunk.
      shard: the shard that contains it, on a device or in the host's memory.
      part: the chunk's part of the shard.
      is_ours: whether this process writes it; else another one that holds it too.
    """

    array: str
    cut: Layout
    index: tuple[int, ...]
    shard: jax.Array
    part: tuple[slice, ...]
    is_ours: bool

    def host_bytes(self, key: Key | None) -> int:
        """Host memory used while it is written: raw, encrypted, in segments and joined."""
        size = math.prod(self.cut.chunks) * self.cut.dtype.itemsize
        return size if key is None else 3 * size

    def write(self, folder: epath.Path, key: Key | None) -> File | None:
        """Writes the chunk if this process shall; returns its manifest entry, or None if another process reports it."""
        plain = np.asarray(self.shard)[self.part]
        inner = f"{folder_of(self.array)}/{name_of(self.index)}"
        if key is None and self.cut.compressor is None:
            content = _bytes(plain)
            digest = self._written(folder / inner, content)
            return File(inner, content.nbytes, digest, array=self.array, chunk=self.index)
        if key is not None and not self.is_ours:
            return None
        data, digest = _bytes(plain), content_hash(plain, key)
        if self.cut.compressor is not None:
            data = np.frombuffer(encode(plain, self.cut), np.uint8)
        if key is not None:
            data = np.frombuffer(key.seal(data.data, _seal(int(folder.name), inner)), np.uint8)
        on_disk = self._written(folder / inner, data)
        file = File(inner, data.nbytes, on_disk, array=self.array, chunk=self.index, content=digest)
        if key is None and content_hash(decode(data, self.cut, file), None) != digest:
            raise Corrupted(f"{file.describe()} does not hold what was to be saved")
        return file

    def _written(self, path: epath.Path, data: np.ndarray) -> str:
        return stores.of(path).write_hashed(path, data) if self.is_ours else hashing.hash_of(data)


def _chunk_shape(array: jax.Array) -> tuple[int, ...]:
    """One device's shard, divided among devices with the same data along the first axis that divides."""
    shard = array.sharding.shard_shape(array.shape)
    shards = math.prod(full // size for full, size in zip(array.shape, shard, strict=True) if size)
    replicas = array.sharding.num_devices // shards
    axis = next((axis for axis, size in enumerate(shard) if size % replicas == 0), None)
    return tuple(max(1, size // replicas if i == axis else size) for i, size in enumerate(shard))


def _held(name: str, array: jax.Array, cut: Layout) -> list[_Chunk]:
    """This process's chunks, each once; of n devices with the same shard, the i-th writes the i-th part."""
    if not array.size:
        return []
    result: dict[tuple[int, ...], _Chunk] = {}
    for shard in array.addressable_shards:
        starts = [axis.start or 0 for axis in shard.index]
        whole = [(start, start + size) for start, size in zip(starts, shard.data.shape, strict=True)]
        inside = list(cut.touched(tuple(whole)))
        for number, index in enumerate(inside):
            is_ours = shard.replica_id == (number if len(inside) > 1 else 0)
            if is_ours or index not in result:
                bounds = zip(cut.bounds(index), starts, strict=True)
                part = tuple(slice(begin - start, end - start) for (begin, end), start in bounds)
                result[index] = _Chunk(name, cut, index, shard.data, part, is_ours)
    return list(result.values())


def _orbax_metadata(arrays: PyTree) -> dict[str, bytes]:
    """The two metadata files that Orbax needs to read the arrays beside them, in its version 0.12's format."""
    values, shardings = {}, {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays, is_leaf=_is_empty):
        names = [jax.tree_util.keystr((key,), simple=True) for key in path]
        kinds = [1 if isinstance(key, jax.tree_util.SequenceKey) else 2 for key in path]
        about = {"value_type": "jax.Array", "skip_deserialize": False}
        if isinstance(leaf, jax.Array):
            about["write_shape"] = _chunk_shape(leaf)
            if (sharding := _orbax_sharding(leaf.sharding)) is not None:
                shardings[base64.b64encode(".".join(names).encode()).decode()] = json.dumps(sharding)
        else:
            kind = "None" if leaf is None or hasattr(leaf, "_fields") else type(leaf).__name__.title()
            about = {"value_type": kind, "skip_deserialize": True}
        keys = [{"key": name, "key_type": kind} for name, kind in zip(names, kinds, strict=True)]
        values[str(tuple(names))] = {"key_metadata": keys, "value_metadata": about}
    whole = {"tree_metadata": values, "use_ocdbt": False, "use_zarr3": False}
    whole |= {"store_array_data_equal_to_fill_value": True, "custom_metadata": None}
    return {"_METADATA": json.dumps(whole).encode(), "_sharding": json.dumps(shardings).encode()}


def _is_empty(node: object) -> bool:
    return node is None or isinstance(node, (tuple, list, dict)) and not node


def _orbax_sharding(sharding: jax.sharding.Sharding) -> dict[str, Any] | None:
    """Orbax's description of a sharding; None: it has none."""
    if isinstance(sharding, SingleDeviceSharding):
        return {"sharding_type": "SingleDeviceSharding", "device_str": str(next(iter(sharding.device_set)))}
    if not isinstance(sharding, NamedSharding):
        return None
    mesh = sharding.mesh
    ids = np.vectorize(lambda device: {"id": device.id}, otypes=[object])(mesh.devices)
    return {
        "sharding_type": "NamedSharding", "shape": [*mesh.devices.shape], "axis_names": [*mesh.axis_names],
        "axis_types": [f"AxisType.{kind.name}" for kind in mesh.axis_types], "partition_spec": [*sharding.spec],
        "device_mesh": {"mesh": ids.tolist()},
    }  # fmt: skip


def opened(content: np.ndarray, manifest: Manifest, file: File, key: Key | None) -> np.ndarray:
    """The bytes of a file of a step, decrypted if necessary."""
    if manifest.encryption is None or file.path.endswith(LAYOUT):
        return content
    assert key is not None, "who reads an encrypted step has its key"
    at = manifest.step if file.step is None else file.step
    return np.frombuffer(key.open(content.data, _seal(at, file.path)), np.uint8)


def seal_run(step: int, content: bytes, key: Key) -> bytes:
    """A step's run.json, encrypted."""
    return key.seal(content, _seal(step, manifest.RUN))


def content_hash(array: np.ndarray, key: Key | None) -> str:
    """The hash of a chunk's uncompressed contents."""
    return hashing.hash_of(_bytes(array)) if key is None else key.content_hash(_bytes(array))


def region(array: jax.Array, bounds: Bounds) -> np.ndarray | None:
    """A part of an array that lies within one of this process's shards; None: it does not."""
    for shard in array.addressable_shards:
        offsets = [part.start or 0 for part in shard.index]
        ends = [offset + size for offset, size in zip(offsets, shard.data.shape, strict=True)]
        inside = all(o <= start and stop <= end for o, end, (start, stop) in zip(offsets, ends, bounds, strict=True))
        if inside and (math.prod(shard.data.shape) or not shard.data.ndim):
            local = tuple(slice(start - o, stop - o) for o, (start, stop) in zip(offsets, bounds, strict=True))
            return np.asarray(shard.data)[local]
    return None


def encode(chunk: np.ndarray, cut: Layout) -> bytes:
    """Compresses a chunk to the contents of its file."""
    store, kvstore, name = _in_memory(cut, None)
    store.write(chunk).result()
    return kvstore.read(name).result().value


def decode(data: np.ndarray, cut: Layout, file: File) -> np.ndarray:
    """Decompresses the contents of a chunk's file.

    Raises:
      Corrupted: they are invalid.
    """
    try:
        store, _, _ = _in_memory(cut, data.tobytes())
        return store.read().result()
    except ValueError as error:
        raise Corrupted(f"{file.describe()} cannot be decoded ({manifest.one_line(error)})") from error


class _Array:
    """An array that is being read: the parts for this process's devices, filled chunk by chunk."""

    def __init__(
        self,
        folder: epath.Path,
        manifest: Manifest,
        name: str,
        target: jax.ShapeDtypeStruct,
        check: bool,
        key: Key | None,
    ):
        self._folder, self._manifest, self._name, self._check, self._key = folder, manifest, name, check, key
        self._target, self._cut = target, layout(folder, manifest, name)
        if self._cut.shape != tuple(target.shape):
            raise Corrupted(f"array {name} is of {self._cut.shape}, must be of {tuple(target.shape)}")
        parts = target.sharding.addressable_devices_indices_map(target.shape).values()
        self._parts: dict[Bounds, np.ndarray | None] = dict.fromkeys(_bounds(part, target.shape) for part in parts)
        self.needed = sorted({index for part in self._parts for index in self._cut.touched(part)})
        for part in self._parts:
            if not (self._cut.compressor is None and manifest.encryption is None and self._is_chunk(part)):
                self._parts[part] = self._empty([stop - start for start, stop in part])

    @functools.cached_property
    def bytes(self) -> int:
        """Host memory that it uses."""
        return sum(math.prod(stop - start for start, stop in part) for part in self._parts) * self._cut.dtype.itemsize

    def read(self, index: tuple[int, ...]) -> None:
        """Reads a chunk into all parts that it overlaps."""
        path = f"{folder_of(self._name)}/{name_of(index)}"
        file = self._manifest.by_path.get(path)
        if file is None:
            raise Corrupted(f"{path} (array {self._name}) is gone")
        self._check_bytes(file)
        content = opened(manifest.contents(self._folder, file, check=self._check), self._manifest, file, self._key)
        chunk = self._decoded(content, file)
        if self._check and file.content is not None and content_hash(chunk, self._key) != file.content:
            raise Corrupted(f"{file.describe()} does not hold what was saved")
        at = self._cut.bounds(index)
        if self._parts.get(at, 0) is None:  # the whole of a part: taken as it is
            self._parts[at] = chunk
            return
        for part, values in self._parts.items():
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(part, at, strict=True)]
            if values is not None and all(start < stop for start, stop in common):
                into = tuple(slice(start - p, stop - p) for (start, stop), (p, _) in zip(common, part, strict=True))
                out = tuple(slice(start - c, stop - c) for (start, stop), (c, _) in zip(common, at, strict=True))
                values[into] = chunk[out]

    def placed(self) -> jax.Array:
        """The array on the devices; may be called once."""
        parts, self._parts = self._parts, {}
        shape, sharding, dtype = self._target.shape, self._target.sharding, self._target.dtype

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "of a part of this process"
            values = parts[_bounds(index, shape)]
            assert values is not None, "all its chunks were read"
            return values.astype(dtype, copy=False)

        return jax.make_array_from_callback(shape, sharding, part)

    def _check_bytes(self, file: File) -> None:
        """Checks a chunk's size before it is read; compressed or encrypted chunks may be slightly longer."""
        whole = math.prod(self._cut.chunks) * self._cut.dtype.itemsize
        if file.size > 2 * whole + _LAYOUT_BYTES:
            raise Corrupted(f"{file.describe()} has {file.size:,} bytes, and is of {whole:,}")

    def _decoded(self, content: np.ndarray, file: File) -> np.ndarray:
        if self._cut.compressor is not None:
            return decode(content, self._cut, file)
        if len(content) != math.prod(self._cut.chunks) * self._cut.dtype.itemsize:
            raise Corrupted(f"{file.describe()} is not a chunk of {self._cut.chunks} {self._cut.dtype}")
        return content.view(self._cut.dtype).reshape(self._cut.chunks)

    def _is_chunk(self, part: Bounds) -> bool:
        sizes = zip(part, self._cut.chunks, strict=True)
        return all(start % size == 0 and stop - start == size for (start, stop), size in sizes)

    def _empty(self, shape: list[int]) -> np.ndarray:
        return hashing.empty(math.prod(shape) * self._cut.dtype.itemsize).view(self._cut.dtype).reshape(shape)


def _by_bytes(items: Iterable[_T], size: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Groups items so that each group fits in the host's memory."""
    group: list[_T] = []
    held = 0
    for item in items:
        if group and held + size(item) > TOGETHER_BYTES:
            yield group
            group, held = [], 0
        group.append(item)
        held += size(item)
    yield group


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _seal(step: int, path: str) -> str:
    """The name that an encrypted file is bound to."""
    return f"{path} of step {step}"


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _in_memory(cut: Layout, data: bytes | None) -> tuple[Any, Any, str]:
    """A TensorStore of one chunk in memory, its key-value store, and the chunk's key in it."""
    import tensorstore as ts

    context, name = ts.Context(), name_of((0,) * len(cut.chunks))
    kvstore = ts.KvStore.open({"driver": "memory"}, context=context).result()
    if data is not None:
        kvstore.write(name, data).result()
    values = json.loads(dataclasses.replace(cut, shape=cut.chunks).text())
    spec = {"driver": "zarr", "kvstore": {"driver": "memory"}, "metadata": values, "create": True, "open": True}
    return ts.open(spec, context=context).result(), kvstore, name
