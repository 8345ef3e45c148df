"""Writes a model in the Hugging Face view as a GGUF file for llama.cpp."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, BinaryIO

import numpy as np

from capibara.core.types import UserError
from capibara.interop.gguf import names as gguf_names
from capibara.interop.gguf import types as gguf_types
from capibara.interop.gguf import vocabulary as gguf_vocabulary
from capibara.interop.gguf.layout import metadata as gguf_metadata
from capibara.interop.gguf.layout import rope as gguf_rope
from capibara.interop.gguf.layout import tensors as gguf_tensors
from capibara.interop.gguf.layout.family import Family
from capibara.interop.gguf.layout.tensors import Change, Tensor
from capibara.interop.hf import model_card
from capibara.interop.quantize.grid import Packed
from capibara.storage import outputs, partial


def write_gguf(
    path: str | os.PathLike[str],
    config: Mapping[str, object],
    tensors: Iterable[tuple[str, np.ndarray | Packed]],
    tokenizer: Mapping[str, bytes],
    about: Mapping[str, bytes] | None = None,
    *,
    dtype: str = "f16",
    show: Callable[[str, str], None] = lambda topic, detail: None,
) -> None:
    """Writes a model tensor by tensor; atomically: `path` is either complete or unchanged.

    Args:
      path: ends in .gguf.
      config: config.json.
      tensors: all tensors of the checkpoint, in any order, in any floating-point dtype, or quantized on a q4_0 grid.
      tokenizer: tokenizer files; without tokenizer.json llama.cpp can process only token ids.
      about: model card and licence files, by name; the file names model and licence.
      dtype: one of gguf.types.DTYPES, for matrices. Vectors, routers and learned positions stay f32; with q4_0,
        embedding and head are q8_0; K-quants (q4_k_m, ...) are llama-quantize's mixtures. Matrices whose rows are not a
        multiple of a block (32 values) are f16.
      show: reports the current tensor.

    Raises:
      UserError: llama.cpp does not support the model or tokenizer, a tensor is missing, unknown, has another shape or
        exceeds the dtype's range, or the file cannot be written.
    """
    if dtype not in gguf_types.DTYPES:
        known = ", ".join(gguf_types.DTYPES)
        raise UserError(f"dtype {dtype!r} is not supported for GGUF files, must be one of {known}")
    family = gguf_names.of_config(config)
    named = family.tensors(config)
    if dtype == "mxfp4" and family.model_type != "gpt_oss":
        raise UserError(f"dtype 'mxfp4' is for the experts of gpt_oss, not for {family.model_type}: try q4_0")
    values = {f"{family.arch}.{key}": value for key, value in gguf_metadata.write(config, family).items()}
    values |= {f"general.{key}": value for key, value in model_card.general(about or {}, config).items()}
    values |= {f"tokenizer.{key}": value for key, value in gguf_vocabulary.metadata(tokenizer, config).items()}
    with outputs.unwritable_told(path), partial.scratch(os.fspath(path)) as unfinished:
        _File(unfinished, family, config, named, values, gguf_types.Types.of(dtype, config, family, named)).write(
            tensors, show
        )
        os.replace(unfinished, path)


class _File:
    """A GGUF file whose tensors arrive in any order: their offsets are fixed in advance."""

    def __init__(
        self,
        path: str,
        family: Family,
        config: Mapping[str, Any],
        tensors: list[Tensor],
        values: Mapping[str, Any],
        types: gguf_types.Types,
    ):
        gguf = gguf_tensors.package()
        self._gguf, self._family, self._heads = gguf, family, family.heads(config)
        self._wanted: dict[str, list[Tensor]] = {}  # the parts of each of the checkpoint's
        for tensor in tensors:
            self._wanted.setdefault(tensor.name, []).append(tensor)
        self._tied = gguf_names.tied(config)
        self._writer = gguf.GGUFWriter(path, family.arch)
        self._types: dict[str, Any] = {}
        self._offsets: dict[str, int] = {}
        shapes = {tensor.stored: tensor.stored_shape for tensor in tensors if not tensor.listed}
        lists = {tensor.stored: [0.0] * tensor.stack for tensor in tensors if tensor.listed}
        values = {**values, **lists}  # numbers that come with the tensors
        self._unread = family.unread(config)
        shapes |= {name: shape for name, (shape, _) in self._unread.items()}
        factors = gguf_rope.factors(config, family)
        self._factors = None if factors is None else factors.astype(np.float32)
        if factors is not None:
            shapes[gguf_rope.FACTORS] = factors.shape
        self._add_values(values, types)
        offset = 0
        for name, shape in shapes.items():
            kind = types.type(name, shape)
            size = _bytes_of(gguf, shape, kind)
            self._types[name], self._offsets[name] = kind, offset
            self._writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kind)
            offset += gguf.GGUFWriter.ggml_pad(size, self._writer.data_alignment)
        self._size = offset

    def write(self, tensors: Iterable[tuple[str, np.ndarray | Packed]], show: Callable[[str, str], None]) -> None:
        """Writes the file."""
        writer, missing = self._writer, dict(self._wanted)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            file: BinaryIO = writer.fout[0]
            header = file.tell()
            start = self._gguf.GGUFWriter.ggml_pad(header, writer.data_alignment)
            file.truncate(start + self._size)
            if self._factors is not None:
                file.seek(start + self._offsets[gguf_rope.FACTORS])
                file.write(self._factors.tobytes())
            for name, (shape, filling) in self._unread.items():
                file.seek(start + self._offsets[name])
                file.write(gguf_types.quantized(np.full(shape, filling, np.float32), self._types[name]).data)
            for name, value in tensors:
                if name == "lm_head.weight" and self._tied:
                    continue  # some checkpoints store the embedding twice
                parts = missing.pop(name, None)
                if parts is None:
                    why = "came twice" if name in self._wanted else f"is unknown in {self._family.model_type} models"
                    raise UserError(f"the tensor {name} {why}: it cannot be written to a GGUF file")
                done = len(self._wanted) - len(missing)
                for tensor in parts:
                    if tensor.listed:
                        self._write_listed(file, header, tensor, np.asarray(value))
                        continue
                    show("writing", f"tensor {done} of {len(self._wanted)}, {tensor.stored}")
                    data = self._data(tensor, value)
                    file.seek(start + self._offsets[tensor.stored] + (tensor.index or 0) * data.nbytes)
                    file.write(data.data)
            if missing:
                raise UserError(
                    f"the tensor {next(iter(missing))} is missing ({len(missing)} in all): the model is incomplete"
                )
        finally:
            if writer.fout is not None:
                writer.close()

    def _write_listed(self, file: BinaryIO, header: int, tensor: Tensor, value: np.ndarray) -> None:
        """Writes a number into the list of the metadata that has it."""
        key = tensor.stored.encode()
        file.flush()
        with open(file.name, "rb") as written:
            place = written.read(header).index(len(key).to_bytes(8, "little") + key)
        begin = place + 8 + len(key) + 4 + 4 + 8  # behind the types of an array and of its numbers, and their count
        file.seek(begin + 4 * (tensor.index or 0))
        file.write(value.astype("<f4").reshape(1).tobytes())

    def _data(self, tensor: Tensor, value: np.ndarray | Packed) -> np.ndarray:
        """A tensor in the file's format, in one contiguous array."""
        if isinstance(value, Packed) and not tensor.is_exact:
            value = value.values()
        if isinstance(value, Packed):
            turned = tensor.change is Change.TRANSPOSED  # to outputs first, which it already is
            change = Change.NONE if turned else tensor.change
            value = value.moved(lambda x: gguf_tensors.to_gguf(x, change, self._heads))
            return (
                value.q4_0() if self._types[tensor.stored].name == "Q4_0" else self._quantized(tensor, value.values())
            )
        value = np.asarray(value)
        if value.shape != tensor.shape:
            raise UserError(f"{tensor.name} has shape {value.shape}, must have {tensor.shape} by config.json")
        value = tensor.take.of(tensor.scaled(value))
        if tensor.rows is not None:  # tokens missing in the table get the row of token 0
            value = np.concatenate([value, np.repeat(value[:1], tensor.rows - len(value), axis=0)])
        value = gguf_tensors.to_gguf(value, tensor.change, self._heads)
        return self._quantized(tensor, value.reshape(tensor.stored_shape[tensor.index is not None :]))

    def _quantized(self, tensor: Tensor, value: np.ndarray) -> np.ndarray:
        """Converts a tensor in the file's order to its type."""
        value = np.ascontiguousarray(value, dtype=np.float32)
        kind = self._types[tensor.stored]
        most = gguf_types.MOST.get(kind.name)
        if most is not None and not np.abs(value).max(initial=0) <= most:
            raise UserError(f"{tensor.name} has values beyond {most:g}, {kind.name} cannot hold them: try bf16 or f32")
        return gguf_types.quantized(value, kind)

    def _add_values(self, values: Mapping[str, object], types: gguf_types.Types) -> None:
        """Adds the metadata: Python floats become float32, integers uint32."""
        writer = self._writer
        writer.add_type("model")
        writer.add_file_type(types.file_type)
        if types.blocks:
            writer.add_quantization_version(self._gguf.GGML_QUANT_VERSION)
        for key, value in values.items():
            match value:
                case bool():
                    writer.add_bool(key, value)
                case int():
                    writer.add_uint32(key, value)
                case float():
                    writer.add_float32(key, value)
                case str():
                    writer.add_string(key, value)
                case _:
                    writer.add_array(key, value)


def _bytes_of(gguf: Any, shape: tuple[int, ...], kind: Any) -> int:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return int(np.prod(shape)) // block * size
