"""Reads T5X's checkpoints of T5 as a Hugging Face T5, and those of its decoders, in T5X's own formats and in Orbax's.

checkpoint_N/checkpoint          msgpack: the state as a tree, with arrays inside it or references to them
checkpoint_N/target.encoder...   zarr: an array
checkpoint_N/state/...           Orbax: the same, or all arrays in one OCDBT store
checkpoint_N, or any name        msgpack: the whole state in one file
config.gin                       of the run, in this folder or its parent
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from capibara.core import limits
from capibara.core.types import PyTree, UserError
from capibara.interop.hf import folder as hf_folder
from capibara.interop.hf.layout.tensors import Shape
from capibara.interop.t5x import config, run_files
from capibara.interop.t5x import index as t5x_index
from capibara.interop.t5x import names as t5x_names
from capibara.interop.t5x import states as t5x_states
from capibara.interop.zarr import arrays as zarr_arrays

INDEX = "checkpoint"
_TF = b"model_checkpoint_path"  # the beginning of TensorFlow's file of this name
_LAYERS = 4096


def is_t5x(path: str) -> bool:
    """Whether a path is a T5X checkpoint, or the folder of a T5X run."""
    if os.path.isfile(path):
        return _is_bare(path)
    if not os.path.isdir(path) or os.path.exists(os.path.join(path, hf_folder.CONFIG)):
        return False
    return _root(path) is not None or bool(_steps(path))


class T5xModel:
    """A model of T5X: an open_model.ForeignModel.

    Attributes:
      config: the corresponding config.json, from config.gin, else from the shapes.
      tokenizer: the SentencePiece model that config.gin names or that lies beside it, if it exists.
      about: empty.
      computing: dtype and dropout_rate, as far as config.gin sets them.
      guessed: fields of the configuration that nothing here determines: defaults of T5 or T5 1.1.

    Raises:
      UserError: it cannot be read, or is none of T5X's networks.
    """

    def __init__(self, path: str):
        if (root := _root(path)) is None:
            root = _root(_steps(path)[-1])
        if root is None:
            raise UserError(f"{_steps(path)[-1]} is incomplete: it has no {INDEX} file and no arrays: copy it again")
        self.path = root
        self._folder = os.path.dirname(os.path.abspath(root)) if os.path.isfile(root) else os.path.abspath(root)
        self._arrays = zarr_arrays.Arrays(self._folder)
        self._leaves = _leaves(root)
        self._gated = any("/mlp/wi_0/" in name for name in self._leaves)
        self._is_decoder = "decoder/token_embedder/embedding" in self._leaves
        gin = run_files.gin_of(self._folder)
        text = None if gin is None else limits.read_text(gin)
        network = {} if text is None else t5x_names.network_of(text)
        self._layer_axis = network.get("param_scan_axis", 1)
        if type(self._layer_axis) is not int or self._layer_axis < 0:
            raise UserError(f"config.gin has T5Config.param_scan_axis = {self._layer_axis!r}, must be an axis, e.g. 1")
        self._each_positions = self._positions_of_layers()
        self._rows = t5x_names.decoder_rows(self._gated)
        if not self._is_decoder:
            self._rows = t5x_names.rows(self._gated, self._each_positions)
        self._tensors = self._located()
        recorded, self.computing = t5x_names.config_of(network), t5x_names.computing_of(network)
        unsaid = {
            "activation": "feed_forward_proj" not in recorded,
            "inputs_attention": self._is_decoder and text is None,
        }
        self.guessed = frozenset(name for name, guessed in unsaid.items() if guessed)
        result = self._from_shapes()
        self.config: dict[str, Any] = result | recorded
        if self._is_decoder and text is not None:
            self.config["inputs_attention"] = t5x_names.inputs_attention_of(text)
        self.tokenizer = run_files.vocabulary_of(self._folder, gin, text)
        self.about: dict[str, bytes] = {}

    def shapes(self) -> dict[str, Shape]:
        return {name: shape for name, (_, _, shape) in self._tensors.items()}

    def dtype(self, name: str) -> str:
        return self._dtype(self._tensors[name][0])

    def read(self, name: str) -> np.ndarray:
        stored, layer, _ = self._tensors[name]
        value = self._value(stored, layer)
        row = self._rows[_pattern(stored)[0]]
        return np.ascontiguousarray(value.reshape(t5x_names.grouped(value.shape, row.theirs.dims)).transpose(row.order))

    def optimizer(self, opt_state: PyTree, shapes: Mapping[str, Shape]) -> tuple[int, PyTree]:
        """The step of the checkpoint, and its optimizer state converted for our optimizer.

        Args:
          opt_state: of the run's optimizer, as jax.ShapeDtypeStructs.
          shapes: of the run's parameters, by name, in the order of their tree.

        Raises:
          UserError: there is no state, or the run's optimizer is another Adafactor.
        """
        leaves, scanned = _leaves(self.path, "state"), any(_scanned(name) for name in self._leaves)
        if "step" not in leaves or not any(name.startswith("param_states/") for name in leaves):
            raise UserError(
                f"{self.path} has no optimizer state: set Trainer.init_with = 'weights' to start from its parameters"
            )
        if scanned and self._layer_axis != 1:
            raise UserError(
                f"config.gin has T5Config.param_scan_axis = {self._layer_axis}, optimizer states need 1: "
                "set Trainer.init_with = 'weights'"
            )
        old = {_pattern_of_stack(name): name for name in self._leaves}

        def read(name: str, part: str) -> np.ndarray:
            stored = f"param_states/{old.get(name, name)}/{part}"
            if stored not in leaves:
                raise UserError(f"{self.path} has no {stored}: it is incomplete, or not of Adafactor")
            return self._read_leaf(leaves[stored], stored)

        step = self._read_leaf(leaves["step"], "step")
        if step.size != 1 or step.dtype.kind not in "iu" or not 0 <= (number := int(step.reshape(())[()])) < 2**31:
            raise UserError(f"{self.path} has the step {limits.shortened(step.tolist())}, must be an integer")
        locations = list(t5x_states.locations(shapes, self._rows, scanned=scanned))
        return number, t5x_states.from_t5x(opt_state, shapes, locations, read, number)

    def _read_leaf(self, leaf: t5x_index.Leaf, name: str) -> np.ndarray:
        if isinstance(leaf, np.ndarray):
            return leaf
        with zarr_arrays.corruption_reported(self.path, name):
            return self._arrays.read(leaf)

    def _value(self, stored: str, layer: int | None = None) -> np.ndarray:
        leaf, axis = self._leaves[stored], self._layer_axis
        self._dtype(stored)
        index = (slice(None),) if layer is None else (*(slice(None),) * axis, layer)
        if isinstance(leaf, np.ndarray):
            return leaf[index]
        with zarr_arrays.corruption_reported(self.path, stored):
            value = self._arrays.read(leaf, axis, layer)
        return value.view(ml_dtypes.bfloat16) if value.dtype == np.uint16 else value  # stored so by T5X's version 2

    def _dtype(self, stored: str) -> str:
        """The dtype of an array; raises UserError if it is not a weight's."""
        leaf = self._leaves[stored]
        kind = leaf.dtype if isinstance(leaf, np.ndarray) else self._about(stored).dtype
        if not isinstance(leaf, np.ndarray) and kind == np.uint16:
            return "bfloat16"
        if kind.name not in hf_folder.DTYPES:
            raise UserError(f"{self.path}: {stored} is stored as {kind}, must be one of {', '.join(hf_folder.DTYPES)}")
        return kind.name

    def _shape(self, stored: str) -> Shape:
        leaf = self._leaves[stored]
        return tuple(leaf.shape if isinstance(leaf, np.ndarray) else self._about(stored).shape)

    def _about(self, stored: str) -> zarr_arrays.About:
        leaf = self._leaves[stored]
        assert not isinstance(leaf, np.ndarray), "its shape and dtype are known already"
        with zarr_arrays.corruption_reported(self.path, stored):
            return self._arrays.about(leaf)

    def _located(self) -> dict[str, tuple[str, int | None, Shape]]:
        """Hugging Face's name -> (T5X's tensor, the layer in it, the shape of that in Hugging Face's order)."""
        rows = self._rows
        result: dict[str, tuple[str, int | None, Shape]] = {}
        if not self._is_decoder and not any(name.startswith("encoder/") for name in self._leaves):
            raise UserError(
                f"{self.path} has no encoder and no decoder/token_embedder: T5X's networks t5, scalable_t5 and "
                "decoder_only are supported"
            )
        for stored in self._leaves:
            pattern, number = _pattern(stored)
            shape = self._shape(stored)
            if pattern not in rows:
                result[stored] = (stored, None, shape)  # reported later as unexpected
                continue
            row, layers = rows[pattern], [number]
            if "{l}" in pattern and number is None:
                if len(shape) <= self._layer_axis:
                    raise UserError(f"{self.path}: {stored} has the shape {list(shape)}, which has no layers")
                if shape[self._layer_axis] > _LAYERS:
                    raise UserError(
                        f"{self.path}: {stored} has the shape {list(shape)}, must have at most {_LAYERS} layers"
                    )
                layers = list(range(shape[self._layer_axis]))
                shape = (*shape[: self._layer_axis], *shape[self._layer_axis + 1 :])
            flat = t5x_names.grouped(shape, row.theirs.dims)
            if flat is None:
                raise UserError(f"{self.path}: {stored} has the shape {list(shape)}, must have {row.theirs.dims!r}")
            for layer in layers:
                part = None if number is not None else layer
                result[row.hf.name.format(l=layer)] = (stored, part, tuple(flat[i] for i in row.order))
        return result

    def _from_shapes(self) -> dict[str, Any]:
        if self._is_decoder:
            return config.of_decoder(self.shapes(), self._gated, self.path)
        return config.of_encoder_decoder(self.shapes(), self._gated, self._each_positions, self.path)

    def _positions_of_layers(self) -> bool:
        """Whether layers have their own relative positions; if these are all equal, they become one table."""
        shared: dict[str, np.ndarray] = {}
        own_names: list[str] = []
        for side in ("encoder", "decoder"):
            each = re.compile(rf"{side}/(?:layers_\d+|layers|{side})/(?:relpos_bias|relative_posemb)/rel_embedding")
            names = [name for name in self._leaves if each.fullmatch(name)]
            tables = [self._value(name) for name in names]
            if len(tables) == 1 and tables[0].ndim == 3:
                tables = list(np.moveaxis(tables[0], self._layer_axis, 0))
            if any(not np.array_equal(table, tables[0]) for table in tables):
                return True
            own_names += names
            if tables:
                shared[f"{side}/relpos_bias/rel_embedding"] = tables[0]
        for name in own_names:
            del self._leaves[name]
        self._leaves |= shared
        return False


def _pattern(stored: str) -> tuple[str, int | None]:
    """A tensor's name with {l} for its layer, and the layer; None: it has no number."""
    stored = stored.replace("/relative_posemb/", "/relpos_bias/")  # the name in the first versions
    if match := re.fullmatch(r"(encoder|decoder)/layers_(\d+)/(.*)", stored):
        return f"{match[1]}/layers_{{l}}/{match[3]}", int(match[2])
    if match := re.fullmatch(r"(encoder|decoder)/(?:\1|layers)/(.*)", stored):
        return f"{match[1]}/layers_{{l}}/{match[2]}", None
    return stored, None


def _scanned(stored: str) -> bool:
    pattern, layer = _pattern(stored)
    return layer is None and "{l}" in pattern


def _pattern_of_stack(stored: str) -> str:
    """The current name of a parameter of all layers, from that of any version."""
    pattern, layer = _pattern(stored)
    return t5x_names.scanned_name(pattern) if layer is None else pattern.format(l=layer)


def _steps(path: str) -> list[str]:
    """The checkpoints of a T5X run, oldest first."""
    result = glob.glob(os.path.join(glob.escape(path), "checkpoint_*"))
    numbered = [(number, name) for name in result if (number := _number(name)) is not None]
    return [name for _, name in sorted(numbered)]


def _number(path: str) -> int | None:
    match = re.fullmatch(r"checkpoint_(\d+)", os.path.basename(path))
    return int(match[1]) if match else None


def _root(path: str) -> str | None:
    """The folder with a checkpoint's arrays, or the file that contains them; None: it is no checkpoint."""
    if os.path.isfile(path):
        return path if _is_bare(path) else None
    for folder in (path, os.path.join(path, "state")):
        index = os.path.join(folder, INDEX)
        if os.path.isfile(index):
            with limits.opened(index) as file:
                if file.read(len(_TF)) == _TF:
                    raise UserError(f"{index} is TensorFlow's: convert it to T5X's own format first")
            return folder
        if glob.glob(os.path.join(glob.escape(folder), "target.*")):
            return folder
        if os.path.isfile(os.path.join(folder, "manifest.ocdbt")) and zarr_arrays.stored_in(folder, "target."):
            return folder
    return None


def _is_bare(path: str) -> bool:
    """Whether a file begins like a T5X state in msgpack: with a map that has one of its names."""
    with limits.opened(path) as file:
        begin = file.read(16)
    first, names = begin[:1], ("target", "optimizer", "state", "version", "flax_mutables")
    size = 1 if first and 0x80 < first[0] <= 0x8F else 3 if first == b"\xde" else 0
    return bool(size) and any(begin[size:].startswith(bytes([0xA0 | len(n)]) + n.encode()) for n in names)


def _leaves(root: str, part: str = "target") -> dict[str, t5x_index.Leaf]:
    """The arrays of the model, by T5X's names; or those of the optimizer's `state`."""
    index, begin = root if os.path.isfile(root) else os.path.join(root, INDEX), f"{part}."
    if os.path.isfile(index):
        return t5x_index.leaves_of(index, part)
    if not (specs := zarr_arrays.stored_in(root, begin)):
        paths = glob.glob(os.path.join(glob.escape(root), f"{begin}*"))
        specs = {(name := os.path.basename(path)): t5x_index.zarr(name) for path in paths}
    return {name.removeprefix(begin).replace(".", "/"): specs[name] for name in sorted(specs)}
