"""Writes checkpoints in T5X's own format, version 3: msgpack and zarr.

Layers are separate, as in its network `t5`. If each layer has its own relative positions, they are stacked, as in
`scalable_t5`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgpack
import numpy as np

from capibara.core.types import UserError
from capibara.interop.hf import folder as hf_folder
from capibara.interop.hf.layout.tensors import Shape
from capibara.interop.hf.tables import T5X_DECODER_TYPE
from capibara.interop.t5x import names as t5x_names
from capibara.interop.t5x import states as t5x_states
from capibara.interop.t5x.read import INDEX
from capibara.storage import partial

_VERSION = 3
_CHUNK_BYTES = 64 * 2**20
_IN_INDEX_BYTES = 2**20  # limit for arrays of the optimizer's state in the index
_FACTORED_SIZE = 128  # min_dim_size_to_factor of T5X's Adafactor
# Constants of T5X's network.
_FIXED = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6}


def save_t5x(
    folder: str,
    config: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    tensors: Iterable[tuple[str, np.ndarray]],
    tokenizer: Mapping[str, bytes],
    *,
    dtype: str,
    optimizer: t5x_states.Stored | None = None,
    computing: Mapping[str, Any] | None = None,
) -> None:
    """Writes the folder of a T5X run with one checkpoint, atomically.

    T5X cannot read a checkpoint without an optimizer state.

    The host holds one tensor, or those of all layers of one name if they are stacked.

    Args:
      folder: a new or empty one.
      config: for config.json.
      shapes: of all tensors, by Hugging Face's names.
      tensors: the tensors, in that order.
      tokenizer: files; T5X uses a SentencePiece model.
      dtype: of the stored tensors: "float32", "bfloat16" or "float16".
      computing: dtype and dropout_rate, for config.gin.
      optimizer: step and state of Adafactor; None: step 0, and the initial state of T5X's Adafactor.

    Raises:
      UserError: the model is no T5, the folder exists, or a value is too large for float16.
    """
    _check(config)
    scanned = config["model_type"] == "umt5"
    rows = {row.hf.name: row for row in t5x_names.rows_of(config).values()}
    of_layers = {row.theirs.name: row.theirs.dims for row in rows.values()}
    kind = np.dtype(hf_folder.DTYPES[dtype])
    gin = t5x_names.gin_text(config, computing or {}) + ("" if optimizer is None else optimizer.gin)
    files = {"config.gin": gin.encode()}
    files |= {name: content for name, content in tokenizer.items() if name.endswith(".model")}
    with partial.whole(folder) as unfinished:
        target: dict[str, Any] = {}
        states: dict[str, Any] = {}
        number = 0 if optimizer is None else optimizer.step
        step = os.path.join(unfinished, f"checkpoint_{number}")
        os.makedirs(step)
        for theirs, value in _named(tensors, shapes, rows, kind, config["num_heads"] if scanned else None):
            _put(target, theirs.split("/"), _written(step, f"target.{theirs.replace('/', '.')}", value))
            started = _initial_state(theirs, value.shape, of_layers) if optimizer is None else optimizer.moments[theirs]
            retained = {
                name: _stored_array(step, f"state.param_states.{theirs}/{name}", array)
                for name, array in started.items()
            }
            _put(states, theirs.split("/"), retained)
        state = {"step": _array(np.asarray(number, np.int32)), "param_states": states}
        contents = {"version": _VERSION, "optimizer": {"target": target, "state": state}}
        with open(os.path.join(step, INDEX), "wb") as file:
            file.write(msgpack.packb(contents, use_bin_type=True))
        for name, content in files.items():
            with open(os.path.join(unfinished, name), "wb") as file:
                file.write(content)


def _check(config: Mapping[str, object]) -> None:
    """Raises UserError if T5X has no such model."""
    if config["model_type"] not in ("t5", "umt5", T5X_DECODER_TYPE):
        raise UserError(
            f"T5X has only its T5 and its decoders with relative positions, and this model is a "
            f"{config['model_type']}: use hf or gguf"
        )
    for key, value in _FIXED.items():
        if config[key] != value:
            raise UserError(f"T5X's T5 has {key} = {value}, and this model {config[key]}: use hf or gguf")


def _named(
    tensors: Iterable[tuple[str, np.ndarray]],
    shapes: Mapping[str, Shape],
    rows: Mapping[str, t5x_names.Row],
    kind: np.dtype,
    scanned_heads: int | None,
) -> Iterator[tuple[str, np.ndarray]]:
    """T5X's names and arrays.

    With `scanned_heads`, for scanned layers, consecutive arrays of one name are stacked along the second dimension, and
    heads and their features are separate dimensions.
    """
    together = ""
    layers: list[np.ndarray] = []
    for name, value in tensors:
        assert value.shape == shapes[name], name
        row, layer = _row(name, rows)
        value = hf_folder.cast(name, value, kind).transpose(np.argsort(row.order))
        if scanned_heads is None or not layer:
            yield row.theirs.name.format(l=layer), value
            continue
        if (stack := t5x_names.scanned_name(row.theirs.name)) != together and layers:
            yield together, np.stack(layers, axis=1)
            layers = []
        together, layers = stack, [*layers, _with_heads(value, row.theirs.dims, scanned_heads)]
    if layers:
        yield together, np.stack(layers, axis=1)


def _initial_state(theirs: str, shape: Shape, of_layers: Mapping[str, str]) -> t5x_states.Moments:
    """A parameter's state before the first update; `of_layers`: the dimensions of each layer's parameters, by name."""
    side, _, rest = theirs.partition("/")
    dims = of_layers.get(f"{side}/layers_{{l}}/{rest.removeprefix(side + '/')}")
    shapes = _adafactor(shape, dims if rest.startswith(f"{side}/") else None)
    return {name: np.zeros(size, np.float32) for name, size in shapes.items()}


def _stored_array(folder: str, name: str, value: np.ndarray) -> msgpack.ExtType | dict[str, Any]:
    """Stores an array of the state: in the index, or separately if it is large."""
    return _array(value) if value.nbytes <= _IN_INDEX_BYTES else _written(folder, name.replace("/", "."), value)


def _adafactor(shape: Shape, stacked_dims: str | None) -> dict[str, Shape]:
    """The shapes of a parameter's state in T5X's Adafactor, by its standard_logical_factor_rules.

    Args:
      shape: of the parameter.
      stacked_dims: dimensions of one layer's, if layers are stacked along the second dimension: then every kernel is
        factored with "embed" as rows; else arrays with two large enough dimensions, with the larger one as columns.
    """
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    if stacked_dims is not None:
        letters = [letter for letter in stacked_dims if letter != " "]
        letters.insert(1, "l")
        if "d" in letters and len(letters) > 2:
            rows = (letters.index("d"),)
            columns = tuple(i for i, letter in enumerate(letters) if letter not in "dl")
    elif len(shape) == 2 and min(shape) >= _FACTORED_SIZE:
        row, column = (int(i) for i in np.argsort(shape))
        rows, columns = (row,), (column,)
    without = lambda dims: tuple(size for i, size in enumerate(shape) if i not in dims)  # noqa: E731
    if not rows:
        return {"m": (1,), "v": tuple(shape), "v_col": (1,), "v_row": (1,)}
    return {"m": (1,), "v": (1,), "v_col": without(rows), "v_row": without(columns)}


def _with_heads(value: np.ndarray, dims: str, heads: int) -> np.ndarray:
    shape: list[int] = []
    for size, group in zip(value.shape, dims.split(), strict=True):
        shape += [heads, size // heads] if group == "nh" else [size]
    return value.reshape(shape)


def _row(name: str, rows: Mapping[str, t5x_names.Row]) -> tuple[t5x_names.Row, str]:
    if name in rows:
        return rows[name], ""
    match = re.match(r"(\w+(?:\.block\.|/layers_))(\d+)([./].*)", name)
    assert match is not None, name
    begin, layer, end = match.groups()
    return rows[f"{begin}{{l}}{end}"], layer


def _put(tree: dict[str, Any], path: list[str], value: object) -> None:
    *owners, last = path
    for owner in owners:
        tree = tree.setdefault(owner, {})
    tree[last] = value


def _written(folder: str, name: str, value: np.ndarray) -> dict[str, Any]:
    """Writes an array; returns its specification, whose path is relative to the checkpoint."""
    import tensorstore

    spec = {
        "driver": "zarr",
        "dtype": value.dtype.name,
        "kvstore": {"driver": "file", "path": name},
        "metadata": {
            "shape": list(value.shape),
            "chunks": _chunks(value.shape, _CHUNK_BYTES // value.itemsize),
            "compressor": {"id": "gzip"},
        },
    }
    here = spec | {"kvstore": {"driver": "file", "path": os.path.join(folder, name, "")}}
    # Chunks of zeros are written too, so that a missing chunk is known to be lost.
    store = tensorstore.open(here | {"store_data_equal_to_fill_value": True}, create=True).result()
    store.write(np.ascontiguousarray(value)).result()
    return tensorstore.Spec(spec).to_json()


def _chunks(shape: Shape, most: int) -> list[int]:
    """The largest chunk up to `most` numbers whose sizes divide the shape's; splits the longest dimension first."""
    sizes = [[size for size in range(1, whole + 1) if whole % size == 0] for whole in shape]
    while int(np.prod([of[-1] for of in sizes], dtype=np.int64)) > most:
        max(sizes, key=lambda of: of[-1]).pop()
    return [of[-1] for of in sizes]


def _array(value: np.ndarray) -> msgpack.ExtType:
    """An array in Flax's encoding."""
    return msgpack.ExtType(1, msgpack.packb((value.shape, value.dtype.name, value.tobytes()), use_bin_type=True))
