"""Reads a GGUF file, the format of llama.cpp, as the Hugging Face checkpoint that it was made of."""

from __future__ import annotations

import functools
import os
from typing import Any

import ml_dtypes
import numpy as np

from capibara.interop import gguf_config, gguf_names, gguf_rope, gguf_vocabulary
from capibara.interop.gguf_names import Shape, Tensor
from capibara.types import UserError

_MAGIC = b"GGUF"
# Tensors that are no parameters: what old files hold of rotary positions, and the factors that config.json tells.
_IGNORED = (gguf_rope.FACTORS, ".attn_rot_embd.weight", ".attn_rot_embd", "rope.freqs")


def open_gguf(path: str | os.PathLike[str]) -> GgufModel:
    """Opens a GGUF file; its tensors stay on the disk until they are read.

    Raises:
      UserError: it is not there, no GGUF file, cut short, one part of several, of an architecture that is not known
        here, or has other tensors than its architecture has.
    """
    path = os.fspath(path)
    reader = _reader(path)
    if reader.byte_order == "S":
        raise UserError(f"{path} is a big-endian GGUF file: convert it with gguf-convert-endian first")
    parts = _value(reader, "split.count") or 1
    if parts > 1:
        raise UserError(f"{path} is one of {parts} parts: join them with llama-gguf-split --merge first")
    return GgufModel(path, reader)


class GgufModel:
    """A GGUF file in the Hugging Face view.

    Attributes:
      config: what its config.json would say.
    """

    def __init__(self, path: str, reader: Any):
        self.path = path
        self._reader = reader
        self._stored = {tensor.name: tensor for tensor in reader.tensors}
        arch = _value(reader, "general.architecture")
        keys = [key for key in reader.fields if key.startswith(f"{arch}.")]
        values = {key.removeprefix(f"{arch}."): _value(reader, key) for key in keys}
        try:
            self.config = gguf_config.from_metadata(arch, values, self._stored_shapes(), self._factors())
            self._family = gguf_names.of_model_type(self.config["model_type"])
            self._tensors = {tensor.name: tensor for tensor in self._family.tensors(self.config)}
            self._check()
            self._matrices = max(self._stored.values(), key=lambda stored: stored.n_elements)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        for name in ("bos", "eos", "pad"):  # None too: where it is not said, transformers takes another model's
            self.config[f"{name}_token_id"] = _value(reader, f"tokenizer.ggml.{gguf_vocabulary.KEYS[name]}_token_id")

    @functools.cached_property
    def tokenizer(self) -> dict[str, bytes]:
        """The files tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja.

        Those that the file has what they need for; with a warning none for a tokenizer that is not known here.
        """
        keys = [key for key in self._reader.fields if key.startswith("tokenizer.")]
        values = {key.removeprefix("tokenizer."): _value(self._reader, key) for key in keys}
        return gguf_vocabulary.files(values, self.path)

    def shapes(self) -> dict[str, Shape]:
        """Checkpoint name -> shape."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def dtype(self, name: str) -> str:
        """Of its matrices: vectors, routers and positions are float32 in every GGUF file, whatever the model had."""
        stored = self._stored[self._tensors[name].stored]
        exact = len(stored.shape) == 1 or stored.name.endswith(gguf_names.EXACT)
        kind = (self._matrices if exact else stored).tensor_type.name
        return {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")

    def read(self, name: str) -> np.ndarray:
        """A tensor as it is stored (float32, float16, bfloat16), in float32 where it was quantised."""
        tensor = self._tensors[name]
        stored = self._stored[tensor.stored]
        data = stored.data if tensor.expert is None else stored.data[tensor.expert]
        value = self._plain(data, stored)
        return gguf_names.to_checkpoint(value, tensor.change, self._family.heads(self.config))

    def _plain(self, data: np.ndarray, stored: Any) -> np.ndarray:
        match stored.tensor_type.name:
            case "F32" | "F16":
                return data
            case "BF16":
                return data.view(ml_dtypes.bfloat16)
        try:
            return gguf_names.package().dequantize(data, stored.tensor_type)
        except NotImplementedError:
            kind = stored.tensor_type.name
            raise UserError(
                f"{self.path}: {stored.name} is quantised as {kind}, which the gguf package cannot undo: take another "
                "quantisation of this model, Q8_0 for example"
            ) from None

    def _stored_shapes(self) -> dict[str, Shape]:
        """Name in the file -> shape, slowest dimension first."""
        return {name: tuple(int(size) for size in reversed(stored.shape)) for name, stored in self._stored.items()}

    def _factors(self) -> np.ndarray | None:
        stored = self._stored.get(gguf_rope.FACTORS)
        return None if stored is None else self._plain(stored.data, stored)

    def _check(self) -> None:
        """Raises where the file has other tensors than the model."""
        shapes, experts = self._stored_shapes(), gguf_names.expert_count(self._tensors.values())
        for tensor in self._tensors.values():
            if tensor.stored not in shapes:
                raise UserError(f"the tensor {tensor.stored} is missing: the file is damaged, or no such model")
            want = stored_shape(tensor, experts)
            if shapes[tensor.stored] != want:
                raise UserError(f"{tensor.stored} has shape {shapes[tensor.stored]}, must have {want} by the metadata")
        known = {tensor.stored for tensor in self._tensors.values()}
        unknown = [name for name in shapes if name not in known and not name.endswith(_IGNORED)]
        if unknown:
            raise UserError(
                f"the tensor {unknown[0]} is not known in {self._family.model_type} models ({len(unknown)} such in all)"
            )


def stored_shape(tensor: Tensor, experts: int) -> Shape:
    """The shape in the file, slowest dimension first: experts are stacked."""
    shape = tensor.shape[::-1] if tensor.change is gguf_names.Change.TRANSPOSED else tensor.shape
    return shape if tensor.expert is None else (experts, *shape)


def _reader(path: str) -> Any:
    gguf = gguf_names.package()

    class Reader(gguf.GGUFReader):
        """Takes a third of the time: a slice of a numpy.memmap costs far more than a view of its memory."""

        def _get(self, offset, dtype, count=1, override_order=None):
            found = np.frombuffer(self.data, dtype, int(count), int(offset))
            return found.view(found.dtype.newbyteorder(override_order or self.byte_order))

    try:
        with open(path, "rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): name a .gguf file") from None
    if magic != _MAGIC:
        raise UserError(f"{path} is no GGUF file: it begins with {magic!r}, must begin with {_MAGIC!r}")
    try:
        return Reader(path)
    except (ValueError, KeyError, IndexError, OverflowError, MemoryError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"{path} is cut short or damaged ({why[:100]}): get it again") from None


def _value(reader: Any, key: str) -> Any:
    """A metadata value; None where there is none. A float32 becomes the shortest number that is the same in float32."""
    field = reader.fields.get(key)
    if field is None:
        return None
    try:
        value = field.contents()
    except UnicodeDecodeError:
        raise UserError(f"{key} of the GGUF file is no UTF-8 text: it is damaged") from None
    return gguf_rope.tidy(value) if isinstance(value, float) else value
