"""Reads a GGUF file, llama.cpp's format, as the Hugging Face checkpoint that it was made from."""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import numpy as np

from capibara.core import limits
from capibara.core.types import UserError
from capibara.interop.gguf import file as gguf_file
from capibara.interop.gguf import names as gguf_names
from capibara.interop.gguf import values as gguf_values
from capibara.interop.gguf import vocabulary as gguf_vocabulary
from capibara.interop.gguf.layout import metadata as gguf_metadata
from capibara.interop.gguf.layout import rope as gguf_rope
from capibara.interop.gguf.layout import tensors as gguf_tensors
from capibara.interop.gguf.layout.tensors import Shape, Tensor
from capibara.interop.hf import model_card

_SCALES = ("scale", "input_scale")  # beside a weight in NVFP4; the second one is for quantized activations: not used
# Architectures that have no other head than the embedding.
_TIED, _HEAD = ("gemma", "gemma2", "gemma3n"), "output.weight"
# Tensors that are no parameters: rotary tables of old files, and factors that config.json already contains.
_IGNORED = (gguf_rope.FACTORS, ".attn_rot_embd.weight", ".attn_rot_embd", "rope.freqs")


def open_gguf(path: str | os.PathLike[str]) -> GgufModel:
    """Opens a GGUF file; its tensors stay on disk until they are read.

    Raises:
      UserError: it does not exist, is no GGUF file, truncated, one part of several, an adapter, of an unknown
        architecture, or has other tensors than its architecture.
    """
    path = os.fspath(path)
    file = _read(path)
    parts = _value(file, "split.count") or 1
    if parts != 1:
        shown = limits.shortened(parts)
        raise UserError(f"{path} is one of {shown} parts: join them with llama-gguf-split --merge first")
    if _value(file, "general.type") == "adapter":
        raise UserError(
            f"{path} holds adapters, not a model: pass it to llama.cpp beside its base, or name the base's file"
        )
    return GgufModel(path, file)


class GgufModel:
    """A GGUF file as a Hugging Face model.

    Attributes:
      config: the corresponding config.json.
      about: a model card with its name, licence and so on.
    """

    def __init__(self, path: str, file: gguf_file.GgufFile):
        self.path = path
        self._file = file
        self._stored = {tensor.name: tensor for tensor in file.tensors}
        arch = _value(file, "general.architecture")
        values = self._values(f"{arch}.")
        try:
            self._family = gguf_names.of_arch(arch, values)
            self.config = gguf_metadata.read(values, self._stored_shapes(), self._factors(), self._family)
            self._heads = self._family.heads(self.config)
            self._lists: dict[str, list[float]] = {}  # of numbers that are tensors of the checkpoint
            self._check_head()
            self._check_tokens(values.get("vocab_size"))
            self._tensors: dict[str, list[Tensor]] = {}  # the parts of each of the checkpoint's
            for tensor in self._family.tensors(self.config):
                self._tensors.setdefault(tensor.name, []).append(tensor)
            self._check(gguf_metadata.left_out(values, self._family))
            self._matrices = max(self._stored.values(), key=lambda stored: stored.n_elements)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        # Errors here are the file's fault: the code expects consistent metadata.
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
            cause = f"{type(error).__name__}: {limits.cause(error)}"
            raise UserError(f"{path}: its metadata contradict themselves ({cause}): get it again") from error
        for name in ("bos", "eos", "pad"):  # None too: transformers would use another model's default
            self.config[f"{name}_token_id"] = _value(file, f"tokenizer.ggml.{gguf_vocabulary.KEYS[name]}_token_id")

    @functools.cached_property
    def about(self) -> dict[str, bytes]:
        return model_card.of_general(self._values("general."))

    def _values(self, prefix: str) -> dict[str, Any]:
        """The metadata whose keys have this prefix, without it."""
        return {
            key.removeprefix(prefix): _value(self._file, key) for key in self._file.values if key.startswith(prefix)
        }

    @functools.cached_property
    def tokenizer(self) -> dict[str, bytes]:
        """The files tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja.

        Contains those that can be derived from the file; warns and omits tokenizer.json for an unknown tokenizer.
        """
        return gguf_vocabulary.files(self._values("tokenizer."), self.path)

    def shapes(self) -> dict[str, Shape]:
        """Checkpoint name -> shape."""
        return {name: parts[0].shape for name, parts in self._tensors.items()}

    def dtype(self, name: str) -> str:
        """Dtype of its matrices: vectors, routers and positions are float32 in every GGUF file."""
        stored = self._stored.get(self._tensors[name][0].stored, self._matrices)  # or a number of a list
        exact = len(stored.shape) == 1 or stored.name.endswith(gguf_tensors.EXACT)
        kind = (self._matrices if exact else stored).tensor_type.name
        return {"F16": "float16", "BF16": "bfloat16", "MXFP4": "bfloat16"}.get(kind, "float32")

    def read(self, name: str) -> np.ndarray:
        """A tensor in its stored dtype (float32, float16, bfloat16), or dequantized to float32 (MXFP4: bfloat16)."""
        tensors = self._tensors[name]
        parts = [self._part(tensor) for tensor in tensors]
        if tensors[0].take.indices is None:
            return parts[0]
        whole = np.empty(tensors[0].shape, parts[0].dtype)
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.take.put(part, whole)
        return whole

    def _part(self, tensor: Tensor) -> np.ndarray:
        if tensor.listed:
            return np.full(tensor.shape, self._lists[tensor.stored][tensor.index or 0], np.float32)
        stored = self._stored[tensor.stored]
        data = stored.data if tensor.index is None else stored.data[tensor.index]
        value = self._plain(data, stored)
        if (scale := self._stored.get(_companion(stored.name, _SCALES[0]))) is not None:
            value = value * scale.data[tensor.index or 0]
        return gguf_tensors.to_checkpoint(value, tensor.change, self._heads).reshape(tensor.part_shape)

    def _plain(self, data: np.ndarray, stored: Any) -> np.ndarray:
        try:
            return gguf_values.of(data, stored.tensor_type)
        except NotImplementedError:
            kind = stored.tensor_type.name
            raise UserError(
                f"{self.path}: {stored.name} is quantized as {kind}, which the gguf package cannot dequantize: use another "
                "quantization of this model, Q8_0 for example"
            ) from None

    def _stored_shapes(self) -> dict[str, Shape]:
        """Name in the file -> shape, slowest dimension first."""
        return {name: tuple(int(size) for size in reversed(stored.shape)) for name, stored in self._stored.items()}

    def _factors(self) -> np.ndarray | None:
        stored = self._stored.get(gguf_rope.FACTORS)
        return None if stored is None else self._plain(stored.data, stored)

    def _check(self, left_out: tuple[str, ...]) -> None:
        """Raises if the file has other tensors than the model, but for those whose names begin so."""
        shapes, tensors = self._stored_shapes(), [part for parts in self._tensors.values() for part in parts]
        for tensor in tensors:
            if tensor.listed:
                self._check_listed(tensor)
                continue
            if tensor.stored not in shapes:
                raise UserError(f"the tensor {tensor.stored} is missing: the file is corrupted, or another model")
            want = tensor.stored_shape
            if _plain(shapes[tensor.stored]) != _plain(want):
                raise UserError(f"{tensor.stored} has shape {shapes[tensor.stored]}, must have {want} by the metadata")
        known = {tensor.stored for tensor in tensors} | self._family.unread(self.config).keys()
        for name, shape in self._scales().items():
            if name in shapes and (shapes[name] != shape or self._stored[name].tensor_type.name != "F32"):
                raise UserError(f"{name} must be {shape[0]} numbers in F32, one for each matrix that it scales")
            known.add(name)
        known |= {_HEAD} if self._family.arch in _TIED else set()
        unknown = [name for name in shapes if name not in known and not name.endswith(_IGNORED)]
        if further := [name for name in unknown if name.startswith(left_out)] if left_out else []:
            count = len(further)
            warnings.warn(
                f"{self.path}: {count} tensors of layers that predict several tokens are left out", stacklevel=3
            )
            unknown = [name for name in unknown if name not in further]
        if unknown:
            raise UserError(
                f"the tensor {unknown[0]} is not known in {self._family.model_type} models ({len(unknown)} such in all)"
            )

    def _check_listed(self, tensor: Tensor) -> None:
        """Raises unless the metadata have a list with a number for each layer."""
        value = self._file.values.get(tensor.stored)
        if isinstance(value, list) and len(value) == tensor.stack and all(type(number) is float for number in value):
            self._lists[tensor.stored] = value
        else:
            raise UserError(
                f"{tensor.stored} is {limits.shortened(value)}, must be a list with a number for each of {tensor.stack} "
                "layers: take another file"
            )

    def _scales(self) -> dict[str, Shape]:
        """The shapes of scales that may be beside weights in NVFP4: of their values, and of activations in FP4."""
        return {
            _companion(name, part): tuple(stored.shape[2:]) or (1,)
            for name, stored in self._stored.items()
            for part in _SCALES
            if stored.tensor_type.name == "NVFP4"
        }

    def _check_head(self) -> None:
        """Raises if a model whose head is its embedding has another head; an equal one stands for the embedding."""
        head, embedding = self._stored.get(_HEAD), self._stored.get("token_embd.weight")
        if self._family.arch not in _TIED or head is None or embedding is None:
            return
        if head.tensor_type != embedding.tensor_type or not np.array_equal(head.data, embedding.data):
            raise UserError(
                f"{_HEAD} differs from token_embd.weight, and the head of {self._family.model_type} models is their "
                "embedding: remove it, or take another file"
            )
        self.config["tie_word_embeddings"] = True

    def _check_tokens(self, size: int | None) -> None:
        """Raises unless every token has a row; without tokens the metadata's size of the vocabulary must be that of rows."""
        tokens, rows = self._file.values.get("tokenizer.ggml.tokens"), self.config["vocab_size"]
        count = len(tokens) if isinstance(tokens, list) else rows if size is None else size
        if count != rows:
            raise UserError(
                f"its tokenizer has {count} tokens, must have {rows}, one for each row of token_embd.weight"
            )


def _plain(shape: Shape) -> Shape:
    """A shape without first dimensions of 1, which ggml does not tell from none."""
    return shape[1:] if len(shape) > 1 and shape[0] == 1 else shape


def _companion(name: str, part: str) -> str:
    """The name of a tensor beside a weight."""
    return f"{name.removesuffix('weight')}{part}"


def _read(path: str) -> gguf_file.GgufFile:
    try:
        return gguf_file.GgufFile(path)
    except FileNotFoundError:
        raise UserError(f"{path} cannot be read (No such file or directory): name a .gguf file") from None
    except gguf_file.NoGguf as error:
        raise UserError(f"{path} is no GGUF file: {error}") from None
    except (limits.Refused, OSError) as error:
        raise UserError(f"{path} is cut short or corrupted ({limits.cause(error)}): get it again") from None


def _value(file: gguf_file.GgufFile, key: str) -> Any:
    """A metadata value, or None; a float32 is rounded to the shortest decimal that is equal in float32."""
    value = file.values.get(key)
    return gguf_rope.tidy(value) if isinstance(value, float) else value
