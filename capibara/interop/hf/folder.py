"""Reads and writes folders of Hugging Face transformers: config.json, tensors and tokenizer files.

Tensors are in safetensors files or in files of torch.save.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from capibara.core import extras, limits
from capibara.core.types import UserError
from capibara.data.tokenizers import files as tokenizer_files
from capibara.interop.hf import keys, model_card, mtp, safetensors_header, tables, tied, torch_file, wrappers
from capibara.interop.hf.families import FAMILIES
from capibara.interop.hf.layout.rows import Cut, Names
from capibara.interop.hf.layout.tensors import Shape
from capibara.storage import partial

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
TORCH_WEIGHTS, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
_SHARD_BYTES = 5 * 10**9
_SAME = {
    "kimi_k2": "deepseek_v3"
}  # model types of files with code of their own -> transformers' with the same arithmetic
_MOST_FILES, _CONFIG_VALUES = 10_000, 200_000
_OF_A_FILE = ("format", "tensor_names")  # keys of metadata: the library of a file, and torchao's list of its tensors
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class HfFolder:
    """A model in a folder, read tensor by tensor: an open_model.ForeignModel.

    Raises:
      UserError: the folder has no config.json or no tensors, or they cannot be read.
    """

    def __init__(self, path: str):
        self._path = path
        self._safetensors = extras.require("safetensors", why="Hugging Face folders")
        self.config = config_of(path)
        self.tokenizer = tokenizer_files.carried(path)
        self.about = model_card.carried(path)
        self._opened: dict[str, Any] = {}
        self._ranges: dict[str, dict[str, tuple[int, int]]] = {}
        self._absent: dict[str, np.ndarray] = {}
        self._cuts: dict[str, Cut] = {}
        self._files = self._where()
        if not self._files:
            raise UserError(f"{path} holds no tensors: copy it again")
        self.config, note = mtp.with_stored(self.config, self._files)
        if note:
            logging.getLogger(__name__).warning("%s: %s", path, note)
        self.config = tied.with_stored_head(self.config, self._files.keys(), self.read)
        self._cuts = tied.cuts(self.config, self.shapes)
        self._absent = tied.absent(self.config, self._files)
        for note in keys.notes(self.config, self._files):
            logging.getLogger(__name__).warning("%s: %s", path, note)

    def shapes(self) -> dict[str, Shape]:
        stored = {name: tuple(self._slice(name).get_shape()) for name in self._files}
        stored |= {name: (cut.stop - cut.start, *stored[name][1:]) for name, cut in self._cuts.items()}
        return stored | {name: value.shape for name, value in self._absent.items()}

    def dtype(self, name: str) -> str:
        if self._count_of(name) is not None:
            return "float32"
        return _DTYPES.get(self.kind(next(iter(self._files)) if name in self._absent else name), "")

    def read(self, name: str) -> np.ndarray:
        if name in self._absent:
            return self._absent[name].astype(DTYPES[self.dtype(name)])
        stored = self.kind(name)
        if (key := self._count_of(name)) is not None:
            return self._numbers(name, stored, key)
        if stored not in _DTYPES:
            raise UserError(
                f"{self._path}: {name} is stored as {stored}, must be one of {', '.join(sorted(_DTYPES))}: "
                "quantized tensors are not supported"
            )
        if (cut := self._cuts.get(name)) is not None:
            return np.concatenate([self.stored(item) for item in cut.held_in])[cut.start : cut.stop]
        return self.stored(name)

    @functools.cached_property
    def _names(self) -> Names | None:
        """The tensors of its language model; None: the type is unknown."""
        return tables.NAMES.get(str(wrappers.text_part(self.config).get("model_type")))

    def _count_of(self, name: str) -> str | None:
        return None if self._names is None else self._names.count_of(name)

    def _numbers(self, name: str, stored: str, key: str) -> np.ndarray:
        """A tensor of whole numbers below the value of a key of config.json, as float32."""
        values, value = wrappers.text_part(self.config), self.stored(name)
        family = FAMILIES[values["model_type"]]
        count = {**family.defaults, **keys.canonical(values, family)}.get(key) or 0
        if not (value.dtype.kind in "iu" and value.size and 0 <= value.min() and value.max() < count):
            raise UserError(
                f"{self._path}: {name} is stored as {stored}, must be whole numbers from 0 to below {key} = {count}: copy the "
                "folder again"
            )
        return value.astype(np.float32)

    def stored(self, name: str) -> np.ndarray:
        """A tensor in its stored dtype, for parts of a quantized weight; one of 8-bit floats as bytes, uint8."""
        file, kind = self._files[name], self.kind(name)
        if kind.startswith(("F4", "F6")):
            raise UserError(f"{self._path}: {name} is stored as {kind}, must have a dtype of whole bytes")
        with self._corruption_reported(file):
            if kind.startswith("F8"):  # numpy has no such dtype, and safetensors takes only numpy's
                begin, end = self._ranges[file][name]
                with limits.opened(os.path.join(self._path, file)) as opened:
                    opened.seek(begin)
                    return np.frombuffer(opened.read(end - begin), np.uint8).reshape(self._slice(name).get_shape())
            return self._open(file).get_tensor(name)

    def kind(self, name: str) -> str:
        """The dtype's name in safetensors: I32, U8, F16, ..."""
        return self._slice(name).get_dtype()

    def metadata(self) -> dict[str, str]:
        """What the headers of the safetensors files say besides tensors.

        Raises:
          UserError: files differ in what they say of the model.
        """
        files = [file for file in dict.fromkeys(self._files.values()) if file in self._ranges]
        result: dict[str, str] = {}
        for file in files:
            for key, value in (self._open(file).metadata() or {}).items():
                if result.setdefault(key, value) != value and key not in _OF_A_FILE:
                    shown = limits.shortened(key)
                    raise UserError(
                        f"{self._path}/{file} has another {shown} in its metadata than other files: copy the folder again"
                    )
        return result

    def _where(self) -> dict[str, str]:
        """The file of every tensor."""
        for weights, index in ((WEIGHTS, INDEX), (TORCH_WEIGHTS, TORCH_INDEX)):
            has_index = os.path.exists(os.path.join(self._path, index))
            if os.path.exists(os.path.join(self._path, weights)):
                if has_index and {*self._indexed(index).values()} != {weights}:
                    logging.getLogger(__name__).warning(
                        "%s: %s is read, as by transformers, and not the files of %s", self._path, weights, index
                    )
                return dict.fromkeys(self._open(weights).keys(), weights)
            if has_index:
                return self._of_index(index)
        raise UserError(f"{self._path} has neither {WEIGHTS} nor {TORCH_WEIGHTS}, and no index of several")

    def _indexed(self, index: str) -> dict[str, str]:
        """The file that an index names for each tensor."""
        named = _json(os.path.join(self._path, index)).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
            raise UserError(f"{self._path}/{index} has no weight_map: copy it again")
        return named

    def _of_index(self, index: str) -> dict[str, str]:
        named = self._indexed(index)
        files = set(named.values())
        if len(files) > _MOST_FILES:
            raise UserError(f"{self._path}/{index} names {len(files):,} files, must name at most {_MOST_FILES:,}")
        for file in sorted(files):
            limits.inside(self._path, file, f"{self._path}/{index}")
        held = {file: frozenset(self._open(file).keys()) for file in sorted(files)}
        for name, file in named.items():
            if name not in held[file]:
                raise UserError(f"{self._path}/{file} has no {name}, which {index} says: copy the folder again")
        # transformers reads every tensor of the files, whatever the index says.
        for file, names in held.items():
            for name in names:
                if named.setdefault(name, file) != file and not self._are_equal(name, file, named[name]):
                    raise UserError(
                        f"{self._path}: {name} differs in {named[name]} and {file}, must be one tensor: copy the folder again"
                    )
        return named

    def _are_equal(self, name: str, *files: str) -> bool:
        first, second = (np.asarray(self._open(file).get_tensor(name)) for file in files)
        return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            path = os.path.join(self._path, file)
            with self._corruption_reported(file):
                if file.endswith(".bin"):
                    self._opened[file] = torch_file.TorchFile(path)
                else:
                    self._ranges[file] = safetensors_header.check(path)
                    self._opened[file] = self._safetensors.safe_open(path, framework="numpy")
        return self._opened[file]

    @contextlib.contextmanager
    def _corruption_reported(self, file: str) -> Iterator[None]:
        path = os.path.join(self._path, file)
        try:
            yield
        except FileNotFoundError:
            raise UserError(f"{path} is missing, the index names it: copy the folder again") from None
        except (self._safetensors.SafetensorError, torch_file.Refused, limits.Refused, OSError, MemoryError) as error:
            raise UserError(f"{path} is cut short or corrupted ({limits.cause(error)}): copy it again") from error

    def _slice(self, name: str) -> Any:
        return self._open(self._files[name]).get_slice(name)


def config_of(folder: str) -> dict[str, Any]:
    """The values of config.json in a folder.

    Raises:
      UserError: it does not exist, or cannot be read.
    """
    path = os.path.join(folder, CONFIG)
    try:
        values = limits.read_json(path, limits.SMALL_BYTES, values=_CONFIG_VALUES, unlimited=True)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: a Hugging Face folder has one") from None
    named = values.get("model_type")
    return values | {"model_type": _SAME[named]} if isinstance(named, str) and named in _SAME else values


def save_hf(
    folder: str,
    config: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    tensors: Iterable[tuple[str, np.ndarray]],
    others: Mapping[str, bytes],
    *,
    dtype: str = "bfloat16",
    shard_bytes: int = _SHARD_BYTES,
    state_dict: bool = False,
    exact: Mapping[str, np.dtype] | None = None,
) -> None:
    """Writes a folder for transformers; atomically: it is complete when this returns, or does not exist.

    The host holds one file's tensors, `shard_bytes`.

    Args:
      folder: a new or empty one.
      config: for config.json.
      shapes: of all tensors, by name, in the order of `tensors`.
      tensors: the tensors.
      others: further files, by name: tokenizer, model card and licence.
      dtype: of the stored tensors: "float32", "bfloat16" or "float16".
      shard_bytes: largest file; a larger model is split into several files with an index.
      state_dict: write pytorch_model.bin, as torch.save does for the model's state_dict(), instead of safetensors.
      exact: tensors that are stored in their own dtype, such as codes of quantized weights: name -> dtype.

    Raises:
      UserError: the folder exists, or a value is too large for float16.
    """
    with partial.whole(folder) as unfinished:
        tied = tables.aliases(config["model_type"], shapes) if state_dict else None
        exact = {name: np.dtype(np.int64) for name in tables.numbers(config["model_type"], shapes)} | dict(exact or {})
        _write_weights(unfinished, shapes, tensors, np.dtype(DTYPES[dtype]), shard_bytes, tied, exact)
        files = {CONFIG: _text(config), **others}
        files.setdefault(tokenizer_files.GENERATION_FILE, tokenizer_files.generation(config) or b"{}\n")
        for name, content in files.items():
            with open(os.path.join(unfinished, name), "wb") as file:
                file.write(content)
        for name in os.listdir(unfinished):  # safetensors makes files readable only by their owner
            shutil.copymode(os.path.join(unfinished, CONFIG), os.path.join(unfinished, name))


def _write_weights(
    folder: str,
    shapes: Mapping[str, Shape],
    tensors: Iterable[tuple[str, np.ndarray]],
    kind: np.dtype,
    shard_bytes: int,
    tied: Mapping[str, str] | None,
    exact: Mapping[str, np.dtype],
) -> None:
    """`tied`: additional names of tensors, for a state dict; None: writes safetensors. Others as in `save_hf`."""
    extras.require("safetensors", why="Hugging Face folders")
    from safetensors import numpy as safetensors

    sizes = {name: math.prod(shape) * exact.get(name, kind).itemsize for name, shape in shapes.items()}
    files = _planned(sizes, shard_bytes)
    arrays = iter(tensors)
    where: dict[str, str] = {}
    single, index = (WEIGHTS, INDEX) if tied is None else (TORCH_WEIGHTS, TORCH_INDEX)
    stem, ending = os.path.splitext(single)
    for number, names in enumerate(files, 1):
        file = single if len(files) == 1 else f"{stem}-{number:05}-of-{len(files):05}{ending}"
        held = {}
        for expected in names:
            name, value = next(arrays)
            assert name == expected and value.shape == shapes[name], (name, expected)
            held[name] = value.astype(exact[name]) if name in exact else cast(name, value, kind)
            assert held[name].dtype == exact.get(name, kind), (name, held[name].dtype)
        if tied is None:
            safetensors.save_file(held, os.path.join(folder, file), metadata={"format": "pt"})
        else:
            shared = {alias: name for alias, name in tied.items() if name in held}
            torch_file.save_torch(os.path.join(folder, file), held, shared)
            names = [*names, *shared]
        where |= dict.fromkeys(names, file)
    if len(files) > 1:
        with open(os.path.join(folder, index), "wb") as opened:
            opened.write(_text({"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}))


def _planned(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """The names of the tensors in each file."""
    files: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if files[-1] and used + size > limit:
            files.append([])
            used = 0
        files[-1].append(name)
        used += size
    return files


def cast(name: str, value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A tensor in the stored dtype.

    Raises:
      UserError: it has values beyond float16's range.
    """
    with np.errstate(over="ignore"):
        cast = np.asarray(value.astype(dtype, copy=False), order="C")  # a scalar keeps its shape
    if dtype == np.float16 and not np.isfinite(cast).all() and np.isfinite(value.astype(np.float32)).all():
        largest = float(np.abs(value.astype(np.float32)).max())
        raise UserError(f"{name} has values up to {largest:g}, float16 ends at 65504: try --dtype=bf16")
    return cast


def _json(path: str) -> dict[str, Any]:
    try:
        return limits.read_json(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: a Hugging Face folder has one") from None


def _text(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
