"""Opens loaded and foreign models of all formats through one interface, and loads tensors onto our mesh."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import math
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from capibara.checkpoints.policy import Checkpointing
from capibara.core import limits, tree
from capibara.core.types import Params, PyTree, UserError
from capibara.data.dataset import Dataset
from capibara.data.tokenizers import files as tokenizer_files
from capibara.data.tokenizers.vocabulary import Vocabulary
from capibara.interop import hub
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import mtp, tables, wrappers
from capibara.interop.hf.layout.tensors import Shape, Tensor
from capibara.interop.quantize.values import finite
from capibara.models.api import Adapter, Head, Model, with_head, with_value_head, without_mtp, without_streaming
from capibara.optim import OptimizerConfig
from capibara.storage import copies

# Size of the buffers that are filled at a time. A shard is never split, so a larger one is filled by itself.
BUFFER_BYTES = 4 * 2**30
_OTHER_HEADS = ("score.", "classifier.", "classification_head.", "qa_outputs.", "v_head.")  # of transformers and TRL
_MOST_MISSING = 100_000  # most names that are generated to report missing tensors

Index = tuple[slice, ...]


class ForeignModel(Protocol):
    """A model as Hugging Face transformers would describe it, from any format.

    Attributes:
      config: contents of config.json.
      tokenizer: tokenizer files by name, as far as they exist: tokenizer.json, tokenizer_config.json,
        chat_template.jinja, generation_config.json and so on.
      about: model card and licence files, by name.
    """

    config: dict[str, Any]

    @property
    def tokenizer(self) -> dict[str, bytes]: ...

    @property
    def about(self) -> dict[str, bytes]: ...

    def shapes(self) -> dict[str, Shape]:
        """The shape of every tensor, by its name in a Hugging Face checkpoint."""

    def dtype(self, name: str) -> str:
        """Dtype of the result of `read`: float32, float16 or bfloat16; anything else cannot be read."""

    def read(self, name: str) -> np.ndarray:
        """A tensor on the host, in f32, f16 or bf16: as stored, or dequantized."""


class Described(Protocol):
    """A model's description without its tensors."""

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def about(self) -> dict[str, bytes]: ...


@dataclasses.dataclass(frozen=True)
class Training:
    """The run that trained a model.

    Attributes:
      init_from, init_with: where its initial weights came from, and what was taken from there, as in Trainer.
      optimizer, steps: the run's.
      checkpointing: how its checkpoints are read.
    """

    init_from: str | None
    init_with: str
    optimizer: OptimizerConfig
    steps: int
    checkpointing: Checkpointing


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model that is ready for inference or conversion, loaded from a run folder or a foreign format.

    Attributes:
      model: with its configuration (`config`); its adapters are merged, except for conversion (conversion.ModelReader).
      params: its parameters.
      dataset: its tokenizer, chat template and row lengths.
      path: where it was loaded from.
      step: the run's checkpoint step; None: the model is foreign.
      weights: "ema" or "raw" for a run, "stored" for a foreign model.
      origin: files that came with the run's initial weights, by name, config.json among them; empty: they were random.
      like: the config.json of the model, or of the run's initial weights; empty: there is none.
      training: the run that trained it; None: the model is foreign.
      adapters: unmerged adapters that requests can name (capibara.loading.adapters).
      paths: adapter name -> where it was loaded from.
    """

    model: Model
    params: Params
    dataset: Dataset
    path: str
    step: int | None
    weights: str
    origin: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    like: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    training: Training | None = None
    adapters: tuple[Adapter, ...] = ()
    paths: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def tokenizer(self) -> Vocabulary:
        """Encodes and decodes text."""
        return self.dataset.get_vocabulary()

    @property
    def about(self) -> dict[str, Any]:
        """Path, step, weights and adapters, as JSON values."""
        about = {"model": self.path, "step": self.step, "weights": self.weights}
        return about | ({"adapters": dict(self.paths)} if self.paths else {})


@runtime_checkable
class HasOptimizer(Protocol):
    """A model with an optimizer state: T5X's."""

    def optimizer(self, opt_state: PyTree, shapes: Mapping[str, Shape]) -> tuple[int, PyTree]:
        """The step, and a state like `opt_state`; `shapes` are those of our parameters, by name."""


def open_model(path: str) -> ForeignModel:
    """Opens a Hugging Face folder, a checkpoint of T5X or MaxText, or a .gguf file; does not read large tensors yet.

    Raises:
      UserError: it is none of them, or cannot be read.
    """
    path = local_model(path)
    if path.endswith(".gguf"):
        from capibara.interop.gguf import read as gguf_read

        return gguf_read.open_gguf(path)
    from capibara.interop.hf import folder as hf_folder
    from capibara.interop.maxtext import read as maxtext_read
    from capibara.interop.quantize import folder as quantized_folder
    from capibara.interop.t5x import read as t5x_read

    if not os.path.exists(path):
        raise UserError(
            f"{path} does not exist: name a run folder, a Hugging Face folder, a checkpoint of T5X or MaxText, or a .gguf file"
        )
    if os.path.exists(os.path.join(path, "adapter_config.json")):
        raise UserError(f"{path} is an adapter of PEFT: merge it first, capibara convert --from={path} --to=NEW")
    if t5x_read.is_t5x(path):
        return t5x_read.T5xModel(path)
    if maxtext_read.is_maxtext(path):
        return maxtext_read.MaxtextModel(path)
    if os.path.isfile(path):
        raise UserError(
            f"{path} is a file, and neither a .gguf nor a state of T5X in msgpack: name a folder, or one of these"
        )
    if os.path.exists(os.path.join(path, "_CHECKPOINT_METADATA")) or os.path.exists(os.path.join(path, "_METADATA")):
        raise UserError(f"{path} is an Orbax checkpoint without a T5X state (target): use the program that wrote it")
    folder = hf_folder.HfFolder(path)
    return quantized_folder.opened(folder, path)


@functools.cache
def local_model(path: str) -> str:
    """The local path of a foreign model's folder or file; downloads it from a bucket (gs://) or by its name from the Hub.

    Raises:
      UserError: it does not exist, cannot be read, or does not fit the disk.
    """
    path = hub.local_path(path)
    return copies.local_file(path) if path.endswith(".gguf") else copies.local_folder(path)


@dataclasses.dataclass(frozen=True)
class Loader:
    """Loads a run's initial parameters from a foreign model: maps ShapeDtypeStructs with shardings to arrays.

    Attributes:
      foreign: the model, whose tensors are read when this is called.
      model: of the run, without adapters, and without heads of scores and values that the foreign model lacks.
    """

    foreign: ForeignModel
    model: Model

    def __call__(self, target: Params) -> Params:
        dtype = jax.numpy.result_type(*{leaf.dtype for leaf in jax.tree.leaves(target)})  # the widest one
        target = {name: target[name] for name in self.model.abstract_params}
        shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
        params = load_params(self.foreign, self.model, shardings, dtype=dtype)
        return jax.tree.map(lambda x, like: x.astype(like.dtype), params, target)

    def optimizer(self, opt_state: PyTree) -> tuple[int, PyTree]:
        """The step of the stored model, and its optimizer state converted for the run's optimizer.

        Args:
          opt_state: of the run's optimizer, as jax.ShapeDtypeStructs.

        Returns:
          the step, and a tree like `opt_state` of numpy arrays.

        Raises:
          UserError: the model has no optimizer state, or that of another optimizer.
        """
        if not isinstance(self.foreign, HasOptimizer):
            raise UserError(
                "Trainer.init_with is 'state', and Trainer.init_from has only parameters: set 'weights', or name a T5X "
                "checkpoint"
            )
        return self.foreign.optimizer(opt_state, _shapes(self.model))

    @property
    def origin(self) -> dict[str, bytes]:
        """Files that came with the tensors, by name, for the run folder."""
        return origin_of(self.foreign)


def origin_of(foreign: Described) -> dict[str, bytes]:
    """The config.json of a model, its model card and licence files, by name."""
    text = json.dumps(foreign.config, indent=2) + "\n"
    return foreign.about | {tokenizer_files.MODEL_FILE: text.encode()}


def loader(path: str, model: Model) -> Loader:
    """The loader of a run that starts from a foreign model.

    Checks the configuration and the tensors' names and shapes now; reads the tensors when it is called.

    Args:
      path: as in open_model.
      model: of the run, without adapters.

    Raises:
      UserError: it is another model. Only its reach (RoPE, windows) may differ, with a warning.
    """
    foreign = open_model(path)
    ignored = set()
    if model.config.value_head:
        model = with_value_head(model, False)  # values begin anew
    model = without_streaming(model)  # gates begin at 1
    foreign, model = _with_same_mtp(foreign, model, path)
    if model.config.head is Head.SCORE and hf_config.from_hf(foreign.config).head is not Head.SCORE:
        model, ignored = with_head(model, Head.TIED), {"head"}  # the scores begin anew
    guessed: Container[str] = getattr(foreign, "guessed", frozenset())
    for name, (ours, theirs) in hf_config.differences(foreign.config, model.config).items():
        if name in guessed or name in ignored:
            continue
        if name in ("rope", "window", "layer_pattern"):
            logging.getLogger(__name__).warning("%s was trained with another %s than this run's", path, name)
            continue
        class_name = type(model.config).__name__
        raise UserError(
            f"{class_name}.{name} is {_plain(ours)}, {path} was trained with {_plain(theirs)}: set it to that"
        )
    _matched(foreign, _shapes(model), model)
    return Loader(foreign, model)


def _with_same_mtp(foreign: ForeignModel, model: Model, path: str) -> tuple[ForeignModel, Model]:
    """Both without modules that predict further tokens where one has none, with a line: the run's begin anew."""
    theirs = hf_config.from_hf(foreign.config).mtp_windows
    log, name = logging.getLogger(__name__), type(model.config).__name__
    if model.config.mtp_windows and not theirs:
        log.warning("%s has no modules for multi-token prediction: those of %s.mtp begin anew", path, name)
        return foreign, without_mtp(model)
    if theirs and not model.config.mtp_windows:
        log.warning("%s has %d modules for multi-token prediction, %s.mtp is None: left out", path, len(theirs), name)
        foreign.config = wrappers.with_mtp(foreign.config, 0)
    return foreign, model


def _plain(value: object) -> str:
    return repr(str(value) if isinstance(value, str) else value)


def load_params(foreign: ForeignModel, model: Model, shardings: PyTree, *, dtype: Any = None) -> Params:
    """The parameters of a foreign model, each read, cast and placed on its devices.

    The host holds the buffers of some shards (4 GiB or one shard) and one tensor of the file, never the model. If a
    parameter's shards on this host are larger, its tensors are read once for each 4 GiB.

    Args:
      foreign: a model of the same configuration.
      model: ours: api.build(hf_config.from_hf(foreign.config)).
      shardings: the sharding of each parameter, in the structure of model.abstract_params.
      dtype: of the parameters, but for tables of whole numbers; None: float32, as training wants them.

    Raises:
      UserError: tensors are missing, unexpected, or have other shapes.
    """
    shapes = _shapes(model)
    targets = dict(zip(shapes, jax.tree.leaves(shardings), strict=True))
    rows, stored = _matched(foreign, shapes, model)
    foreign = _padded(foreign, model, rows, shapes, stored)
    _check_memory(shapes, targets, np.dtype(dtype or np.float32))
    mtp.check_copies(foreign, stored)
    params: dict[str, jax.Array] = {}
    for row in rows:
        if row.ours[0] in params:
            continue  # a copy
        kind = np.float32 if row.ours[0] in model.config.tables else dtype or np.float32
        params |= _assembled(row, foreign, stored, shapes, targets, np.dtype(kind))
    return tree.map_with_names(lambda path, _: params[path], model.abstract_params)


def check(foreign: ForeignModel, model: Model) -> None:
    """Compares names and shapes of all tensors without reading them; raises like load_params."""
    _matched(foreign, _shapes(model), model)


def hf_tensors(params: Params, model: Model, model_type: str) -> Iterator[tuple[str, np.ndarray]]:
    """Our parameters as the tensors of a Hugging Face checkpoint, one at a time, in their own dtype.

    The host holds the parameters of one row of the table and one tensor.

    Args:
      params: host or device arrays, complete on this host.
      model_type: of hf_config.to_hf(model.config).
    """
    values = dict(zip(tree.path_names(params), jax.tree.leaves(params), strict=True))
    shapes = {path: tuple(value.shape) for path, value in values.items()}
    for row in tables.of(model_type, shapes, model.config.module_layers):
        ours = {path: np.asarray(values[path]) for path in row.ours}
        for name, at in row.names(shapes):
            value = row.join({path: value[at] for path, value in ours.items()}, shapes)
            yield name, value[tuple(map(slice, _stored_shape(model, row, value.shape, at)))]


def foreign_tensors(foreign: ForeignModel, model: Model, model_type: str) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a foreign model under the names and in the order of `hf_shapes`, in their stored dtypes.

    Args:
      foreign: a model of the same configuration.
      model: api.build(hf_config.from_hf(foreign.config)).
      model_type: of the tensors.

    Raises:
      UserError: as in load_params.
    """
    named = NamedTensors(foreign, model, model_type)
    for name in named.names:
        yield name, named.read(name)


class NamedTensors:
    """A foreign model's tensors by the names of `hf_shapes`, read one at a time in their stored dtypes.

    Args:
      foreign, model, model_type: as in `foreign_tensors`.

    Attributes:
      names: in the order of `hf_shapes`.

    Raises:
      UserError: as in load_params.
    """

    def __init__(self, foreign: ForeignModel, model: Model, model_type: str):
        self._foreign, self._shapes = foreign, _shapes(model)
        self._rows, self._stored = _matched(foreign, self._shapes, model)
        self._as_stored = self._rows == tables.of(model_type, self._shapes, model.config.module_layers)
        self._places = hf_rows(model, model_type)
        self.names = tuple(self._places)
        self._last = ("", np.zeros(0))  # a tensor that holds several

    def dtype(self, name: str) -> str:
        """Dtype of the stored tensor, as in ForeignModel."""
        if self._as_stored:
            return self._foreign.dtype(self._stored[name])
        row, at = self._places[name]
        source = self._sources(row)[0]
        deeper = (0,) * (len(source.numbered) - len(at))
        return self._foreign.dtype(self._stored[source.named((*at, *deeper))])

    def read(self, name: str) -> np.ndarray:
        """A tensor on the host."""
        if self._as_stored:
            return finite.check(self._stored[name], self._foreign.read(self._stored[name]))
        row, at = self._places[name]
        parts: dict[str, np.ndarray] = {}
        for source in self._sources(row):
            parts |= self._parts(source, at)
        return row.join({path: parts[path] for path in row.ours}, self._shapes)

    def _sources(self, row: Tensor) -> list[Tensor]:
        """The rows of the stored tensors that hold the same parameters."""
        return [other for other in self._rows if set(other.ours) & set(row.ours)]

    def _parts(self, source: Tensor, at: tuple[int, ...]) -> dict[str, np.ndarray]:
        """What stored tensors hold of parameters at these numbers; a layer's experts may be one of them, or several."""
        depth = len(source.numbered)
        if depth <= len(at):
            return {path: part[at[depth:]] for path, part in self._split(source, at[:depth]).items()}
        extent = self._shapes[source.ours[0]][len(at) : depth]
        each = [self._split(source, (*at, *inner)) for inner in np.ndindex(*extent)]
        return {
            path: np.stack([parts[path] for parts in each]).reshape(*extent, *each[0][path].shape)
            for path in source.ours
        }

    def _split(self, source: Tensor, at: tuple[int, ...]) -> dict[str, np.ndarray]:
        stored = self._stored[source.named(at)]
        if stored != self._last[0]:
            self._last = stored, finite.check(stored, self._foreign.read(stored))
        return source.split(self._last[1], self._shapes)


def stored_dtype(foreign: ForeignModel) -> str:
    """The dtype that holds every value of a model's tensors: float32, float16 or bfloat16."""
    names = wrappers.names(foreign.config)
    floats = (name for name in foreign.shapes() if names.canonical(name) is not None and names.count_of(name) is None)
    result = set(map(foreign.dtype, floats))
    return result.pop() if result in ({"bfloat16"}, {"float16"}) else "float32"


def hf_shapes(model: Model, model_type: str) -> dict[str, Shape]:
    """Names and shapes of the tensors of `hf_tensors`."""
    shapes = _shapes(model)
    rows = tables.of(model_type, shapes, model.config.module_layers)
    return {name: _stored_shape(model, row, row.shape(shapes), at) for row in rows for name, at in row.names(shapes)}


def hf_rows(model: Model, model_type: str) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """For each tensor of `hf_tensors` the row of the table that it is of, and its numbers (`Tensor.numbered`)."""
    shapes = _shapes(model)
    return {
        name: (row, at)
        for row in tables.of(model_type, shapes, model.config.module_layers)
        for name, at in row.names(shapes)
    }


def _stored_shape(model: Model, row: Tensor, shape: Shape, at: tuple[int, ...]) -> Shape:
    """A tensor's shape in a checkpoint if the layers' MLPs differ in width."""
    if model.config.layer_widths is None or "f" not in row.layout or row.numbered[:1] != "l":
        return shape
    width = model.config.layer_widths[at[0]]
    return tuple(width if letters == "f" else size for letters, size in zip(row.dims.split(), shape, strict=True))


class _PaddedModel:
    """A foreign model whose narrower layers are padded with zeros; a ForeignModel as far as reading tensors."""

    def __init__(self, foreign: ForeignModel, shapes: Mapping[str, Shape]):
        self.config, self.tokenizer, self.about = foreign.config, foreign.tokenizer, foreign.about
        self._foreign, self._shapes = foreign, {**foreign.shapes(), **shapes}

    def shapes(self) -> dict[str, Shape]:
        return dict(self._shapes)

    def dtype(self, name: str) -> str:
        return self._foreign.dtype(name)

    def read(self, name: str) -> np.ndarray:
        value = self._foreign.read(name)
        return np.pad(value, [(0, size - extent) for size, extent in zip(self._shapes[name], value.shape, strict=True)])


def _padded(
    foreign: ForeignModel,
    model: Model,
    rows: tuple[Tensor, ...],
    shapes: Mapping[str, Shape],
    stored: Mapping[str, str],
) -> ForeignModel:
    if model.config.layer_widths is None:
        return foreign
    return _PaddedModel(foreign, {stored[name]: row.shape(shapes) for row in rows for name, _ in row.names(shapes)})


def _shapes(model: Model) -> dict[str, Shape]:
    """Shapes of the model's parameters, by name, in the order of the tree."""
    abstract = model.abstract_params
    return dict(zip(tree.path_names(abstract), (leaf.shape for leaf in jax.tree.leaves(abstract)), strict=True))


def _matched(
    foreign: ForeignModel, shapes: Mapping[str, Shape], model: Model
) -> tuple[tuple[Tensor, ...], dict[str, str]]:
    """The rows of the table that the model uses, and the stored name of each of their tensors, by our name."""
    model_type = hf_config.text_part(foreign.config)["model_type"]
    names, result = wrappers.names(foreign.config), foreign.shapes()
    stored: dict[str, str] = {}
    for name in result:
        if (ours := names.canonical(name)) is None:
            continue
        other = stored.setdefault(ours, name)
        if other != name and not np.array_equal(foreign.read(other), foreign.read(name)):
            raise UserError(f"{other} and {name} differ, and both are {ours} of the model: remove one of them")
    stored |= {
        name: stored[of] for name, of in mtp.copies(foreign.config).items() if name not in stored and of in stored
    }
    of_mtp = tables.of_mtp(model_type, model.config.num_layers, stored)
    fused, fused_mtp = tables.is_fused(stored.keys() - of_mtp), tables.is_fused(of_mtp)
    rows = tables.of(model_type, shapes, model.config.module_layers, fused_experts=fused, fused_mtp=fused_mtp)
    if foreign.config["model_type"] == "qwen3_vl_moe":
        rows = tables.turned(rows, shapes, {name: tuple(result[at]) for name, at in stored.items()})
    _check_missing(rows, shapes, stored)
    expected = {
        name: _stored_shape(model, row, row.shape(shapes), at) for row in rows for name, at in row.names(shapes)
    }
    # Some checkpoints store a tied head as well, which hf.tied has compared with the embedding.
    head = set() if "output" in shapes else {tables.ends(model_type)[0]}
    _check_names(expected, stored, tables.unused(rows, shapes) | head)
    for name, shape in expected.items():
        if tuple(result[stored[name]]) != shape:
            raise UserError(
                f"{stored[name]} has the shape {list(result[stored[name]])}, must be {list(shape)} by its configuration"
            )
    return rows, stored


def _check_missing(rows: tuple[Tensor, ...], shapes: Mapping[str, Shape], stored: Mapping[str, str]) -> None:
    """Runs before all names are generated: a configuration may imply more tensors than a file could name."""
    promised = sum(math.prod(shapes[row.ours[0]][: len(row.numbered)]) for row in rows)
    if promised <= len(stored):
        return
    names = (name for row in rows for name, _ in row.names(shapes) if name not in stored)
    missing = list(itertools.islice(names, 3))
    if promised - len(stored) > _MOST_MISSING:
        raise UserError(
            f"{', '.join(missing)} and more are missing in the checkpoint: its configuration says {promised:,} tensors, "
            f"it has {len(stored):,}"
        )


def _check_memory(shapes: Mapping[str, Shape], targets: Mapping[str, jax.sharding.Sharding], dtype: np.dtype) -> None:
    """Raises if this host's memory cannot hold its shards; otherwise the system would kill the process."""
    need = 0
    for path, shape in shapes.items():
        devices: Iterable[jax.Device] = targets[path].addressable_devices
        if all(device.platform == "cpu" for device in devices):
            shard = math.prod(targets[path].shard_shape(shape)) * dtype.itemsize
            need += shard * len(targets[path].addressable_devices)
    if need > (have := limits.host_bytes()):
        raise UserError(
            f"the model needs {need / 2**30:,.1f} GiB, this host has {have / 2**30:,.1f}: take a larger one"
        )


def _check_names(expected: Mapping[str, Shape], stored: Mapping[str, str], passed_over: set[str]) -> None:
    missing = [name for name in expected if name not in stored]
    unexpected = [stored[name] for name in stored if name not in expected and name not in passed_over]
    heads = [name for name in unexpected if name.startswith(_OTHER_HEADS)]
    if heads:
        raise UserError(
            f"{_list_names(heads)} of a classification or scoring head, which is not supported: use the language model "
            "that it was made from"
        )
    if missing:
        raise UserError(
            f"{_list_names(missing)} missing in the checkpoint: it is not whole, or config.json is not its own"
        )
    if unexpected:
        raise UserError(f"{_list_names(unexpected)} in the checkpoint, not in the model that config.json describes")


def _list_names(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{shown} {'is' if len(names) == 1 else 'are'}"


def _assembled(
    row: Tensor,
    foreign: ForeignModel,
    stored: Mapping[str, str],
    shapes: Mapping[str, Shape],
    targets: Mapping[str, jax.sharding.Sharding],
    dtype: np.dtype,
) -> dict[str, jax.Array]:
    """The parameters that a row's tensors hold, by name."""
    placed: dict[str, list[jax.Array]] = {path: [] for path in row.ours}
    for group in _groups(_shards(row, shapes, targets), shapes, dtype):
        buffers = [np.empty(_extent(index, shapes[path]), dtype) for path, index, _ in group]
        for name, at in row.names(shapes):
            held = [i for i, (_, index, _) in enumerate(group) if all(map(_within, at, index))]
            if not held:
                continue
            parts = row.split(finite.check(stored[name], foreign.read(stored[name])), shapes)
            for i in held:
                path, index, _ = group[i]
                place = tuple(number - (part.start or 0) for number, part in zip(at, index))
                buffers[i][place] = parts[path][index[len(at) :]]
        for buffer, (path, _, devices) in zip(buffers, group):
            placed[path] += jax.block_until_ready([jax.device_put(buffer, device) for device in devices])
    return {
        path: jax.make_array_from_single_device_arrays(shapes[path], targets[path], arrays)
        for path, arrays in placed.items()
    }


Shard = tuple[str, Index, list[jax.Device]]  # parameter, part of it, and the devices that hold it


def _shards(row: Tensor, shapes: Mapping[str, Shape], targets: Mapping[str, jax.sharding.Sharding]) -> Iterator[Shard]:
    """The distinct shards on this host."""
    for path in row.ours:
        holders: dict[tuple[tuple[int, int], ...], Shard] = {}
        parts: Mapping[jax.Device, Index | None] = targets[path].addressable_devices_indices_map(shapes[path])
        for device, index in parts.items():
            assert index is not None, "an array's sharding has an index for each device"
            key = tuple(part.indices(size)[:2] for part, size in zip(index, shapes[path], strict=True))
            holders.setdefault(key, (path, index, []))[2].append(device)
        yield from holders.values()


def _groups(shards: Iterator[Shard], shapes: Mapping[str, Shape], dtype: np.dtype) -> Iterator[list[Shard]]:
    """Groups shards whose buffers are filled together."""
    group: list[Shard] = []
    size = 0
    for shard in shards:
        shard_bytes = math.prod(_extent(shard[1], shapes[shard[0]])) * dtype.itemsize
        if group and size + shard_bytes > BUFFER_BYTES:
            yield group
            group, size = [], 0
        group.append(shard)
        size += shard_bytes
    yield group


def _extent(index: Index, shape: Shape) -> Shape:
    return tuple(len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True))


def _within(number: int, part: slice) -> bool:
    return (part.start or 0) <= number and (part.stop is None or number < part.stop)
