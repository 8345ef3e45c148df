"""Reads MaxText's checkpoints of decoders as Hugging Face models.

RUN/checkpoints/STEP/items    an OCDBT store; its arrays params.params.* are the model's
RUN/config.yml                the settings of the run, as save_config_to_gcs writes them; also in the folders below
"""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

import numpy as np

from capibara.core import limits
from capibara.core.types import UserError
from capibara.interop.hf import folder as hf_folder
from capibara.interop.hf.layout.tensors import Shape
from capibara.interop.maxtext import config, names, settings
from capibara.interop.zarr import arrays as zarr_arrays

_PREFIX = "params.params."
_MOST_LAYERS, _MOST_EXPERTS, _MOST_TENSORS = 4096, 4096, 500_000


class _Tensor(NamedTuple):
    """One of Hugging Face's tensors: an array, the layer (along param_scan_axis) and the expert in it, and its name in a layer."""

    stored: str
    layer: int | None
    expert: int | None
    name: str
    shape: Shape


def is_maxtext(path: str) -> bool:
    """Whether a path is a checkpoint of MaxText, or the folder of a run of it."""
    return os.path.isdir(path) and not os.path.exists(os.path.join(path, hf_folder.CONFIG)) and _items(path) is not None


class MaxtextModel:
    """A model of MaxText: an open_model.ForeignModel.

    Attributes:
      config: the corresponding config.json, from config.yml and the shapes.
      tokenizer, about: empty.

    Raises:
      UserError: it cannot be read, or is of a decoder that is not supported.
    """

    def __init__(self, path: str):
        items = _items(path)
        assert items is not None, "is_maxtext(path) says so"
        self.path = items
        self._settings = settings.read(items, path)
        block = names.BLOCKS.get(str(self._settings["decoder_block"]))
        if block is None:
            raise UserError(
                f"{items} has decoder_block = {limits.shortened(self._settings['decoder_block'])}, must be one of "
                f"{', '.join(sorted(names.BLOCKS))}: convert others with MaxText's to_huggingface"
            )
        self._block = block
        axis = self._settings.get("param_scan_axis", 1)
        if type(axis) is not int or not 0 <= axis <= 1:
            raise UserError(f"config.yml has param_scan_axis = {limits.shortened(axis)}, must be 0 or 1")
        self._axis = axis
        self._arrays = zarr_arrays.Arrays(items)
        self._specs = {
            name.removeprefix(_PREFIX).replace(".", "/"): spec
            for name, spec in zarr_arrays.stored_in(items, _PREFIX).items()
        }
        self._tensors = self._located()
        self._settings |= self._decided()
        self._last: tuple[tuple[str, int | None], np.ndarray] | None = None
        self.config: dict[str, Any] = config.of_settings(block, self._settings, self.shapes(), items)
        self.tokenizer: dict[str, bytes] = {}
        self.about: dict[str, bytes] = {}

    def shapes(self) -> dict[str, Shape]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def dtype(self, name: str) -> str:
        stored = self._tensors[name].stored
        kind = self._about(stored).dtype.name
        if kind not in hf_folder.DTYPES:
            raise UserError(f"{self.path}: {stored} is stored as {kind}, must be one of {', '.join(hf_folder.DTYPES)}")
        return kind

    def read(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        self.dtype(name)
        value = self._value(tensor.stored, tensor.layer)
        if tensor.expert is not None:
            value = value[tensor.expert]
        return np.ascontiguousarray(self._as_theirs(tensor, value).reshape(tensor.shape).astype(value.dtype))

    def _as_theirs(self, tensor: _Tensor, value: np.ndarray) -> np.ndarray:
        """A tensor as Hugging Face means it; the arithmetic is in float32."""
        part = _part(tensor.name)
        wide = value.astype(np.float32)
        if tensor.name == names.EMBEDDING:
            divided = self._normalized() if tensor.layer == -1 else self._block.offset
            return wide / np.sqrt(np.float32(value.shape[1])) if divided else wide
        if part in names.ROTATED and config.interleaved(self._settings):
            wide = np.concatenate([wide[..., ::2], wide[..., 1::2]], axis=-1)
        if tensor.name.endswith("scale"):
            return wide - 1 if self._block.offset else wide
        if part == "query" and self._block.folded:
            wide = wide * np.sqrt(np.float32(value.shape[-1]))
        if tensor.name.endswith("bias"):
            return wide
        inputs = value.shape[0] if part in names.HEADS_OUT else value.size // value.shape[-1]
        return wide.reshape(inputs, -1).T

    def _value(self, stored: str, layer: int | None) -> np.ndarray:
        """An array or a layer of it; the last one is remembered, since experts are read one after another."""
        if self._last is None or self._last[0] != (stored, layer):
            with zarr_arrays.corruption_reported(self.path, stored):
                scanned = layer is not None and layer >= 0
                value = self._arrays.read(self._specs[stored], self._axis if scanned else 0, layer if scanned else None)
                self._last = (stored, layer), value
        return self._last[1]

    def _about(self, stored: str) -> zarr_arrays.About:
        with zarr_arrays.corruption_reported(self.path, stored):
            return self._arrays.about(self._specs[stored])

    def _located(self) -> dict[str, _Tensor]:
        """Hugging Face's name -> where it lies."""
        places = {stored: names.place(stored) for stored in self._specs}
        cycle = 1 + max((place.part or 0 for place in places.values() if place and not place.rest), default=0)
        repeats = max((self._repeats(stored, place) for stored, place in places.items() if place), default=0)
        result: dict[str, _Tensor] = {}
        for stored, place in places.items():
            if place is None or place.name not in self._block.names:
                name = names.ENDS.get(stored, stored)  # others are reported as unexpected
                self._add(result, {name: self._tensor(stored, None, None, stored, self._about(stored).shape)})
                continue
            begin = cycle * repeats if place.rest else 0
            for layer in range(self._repeats(stored, place)) if place.number is None else [place.number]:
                at = begin + cycle * layer + (place.part or 0)
                self._add(result, self._of_layer(stored, place, layer if place.number is None else None, at))
        tied = names.OUTPUT not in self._specs
        if settings.flag(self._settings, "logits_via_embedding", tied) != tied:
            raise UserError(
                f"config.yml has logits_via_embedding = {str(not tied).lower()}, {self.path} has "
                f"{'no' if tied else 'the array'} {names.OUTPUT}: copy the missing files, or the config.yml of this run"
            )
        if tied and names.EMBEDDING in self._specs and self._normalized() != self._block.offset:
            shape = self._about(names.EMBEDDING).shape
            result["lm_head.weight"] = self._tensor(names.EMBEDDING, -1, None, names.EMBEDDING, shape)
        return result

    def _add(self, tensors: dict[str, _Tensor], more: dict[str, _Tensor]) -> None:
        if double := tensors.keys() & more.keys():
            name = min(double)
            raise UserError(f"{self.path}: {tensors[name].stored} and {more[name].stored} are both {name}: remove one")
        tensors |= more
        if len(tensors) > _MOST_TENSORS:
            raise UserError(f"{self.path} has more than {_MOST_TENSORS:,} matrices: no decoder has as many")

    def _decided(self) -> dict[str, settings.Setting]:
        """What the arrays decide of the settings: head_dim, and that logits have no cap, which MaxText's head of its own ignores."""
        ours = [tensor for tensor in self._tensors.values() if tensor.name in self._block.names]
        stored = {tensor.stored for tensor in ours if _part(tensor.name) in names.HEADS_OUT}
        sizes = {self._about(name).shape[-1] for name in stored if len(self._about(name).shape) > 1}
        size = settings.whole(self._settings, "head_dim", max(sizes, default=1))
        if sizes and sizes != {size}:
            raise UserError(f"config.yml has head_dim = {size}, the arrays of {self.path} have {sorted(sizes)}")
        return {"head_dim": size} | ({"final_logits_soft_cap": None} if names.OUTPUT in self._specs else {})

    def _of_layer(self, stored: str, place: names.Place, scanned: int | None, at: int) -> dict[str, _Tensor]:
        shape = self._about(stored).shape
        if scanned is not None:
            shape = (*shape[: self._axis], *shape[self._axis + 1 :])
        theirs = f"model.layers.{at}.{self._block.names[place.name]}"
        if "{e}" not in theirs:
            return {theirs: self._tensor(stored, scanned, None, place.name, shape)}
        if len(shape) != 3 or shape[0] > _MOST_EXPERTS:
            raise UserError(
                f"{self.path}: {stored} has the shape {list(self._about(stored).shape)}, must be matrices of at most "
                f"{_MOST_EXPERTS:,} experts"
            )
        tensors = {}
        for expert in range(shape[0]):
            tensors[theirs.replace("{e}", str(expert))] = self._tensor(stored, scanned, expert, place.name, shape[1:])
        return tensors

    def _tensor(self, stored: str, layer: int | None, expert: int | None, name: str, shape: Shape) -> _Tensor:
        part = _part(name)
        if name.endswith("bias"):
            shape = (int(np.prod(shape)),)
        elif not name.endswith(("scale", "embedding")) and len(shape) > 1:
            inputs = shape[0] if part in names.HEADS_OUT else int(np.prod(shape[:-1]))
            shape = (int(np.prod(shape)) // max(1, inputs), inputs)
        return _Tensor(stored, layer, expert, name, shape)

    def _repeats(self, stored: str, place: names.Place) -> int:
        """Layers that are stacked in an array; of one that is numbered, those up to it."""
        if place.number is not None:
            return 0 if place.rest else place.number + 1
        shape = self._about(stored).shape
        if len(shape) <= self._axis or shape[self._axis] > _MOST_LAYERS:
            raise UserError(
                f"{self.path}: {stored} has the shape {list(shape)}, must have at most {_MOST_LAYERS:,} layers"
            )
        return shape[self._axis]

    def _normalized(self) -> bool:
        """Whether logits of the embedding are divided by the square root of its width."""
        return settings.flag(self._settings, "normalize_embedding_logits", True)


def _part(name: str) -> str:
    """The module of a parameter."""
    return name.split("/")[-2] if "/" in name else ""


def _items(path: str) -> str | None:
    """The folder of a checkpoint's arrays: the newest of a run's; None: there is none."""
    for folder in (path, os.path.join(path, "items")):
        if zarr_arrays.stored_in(folder, _PREFIX):
            return folder
    for folder in (path, os.path.join(path, "checkpoints")):
        steps = [name for name in os.listdir(folder) if re.fullmatch("[0-9]+", name)] if os.path.isdir(folder) else []
        for step in sorted(steps, key=int, reverse=True):
            items = os.path.join(folder, step, "items")
            if zarr_arrays.stored_in(items, _PREFIX):
                return items
    return None
