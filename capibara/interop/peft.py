"""Folders of PEFT: adapter_config.json and adapter_model.safetensors, read and written.

Where Hugging Face has one tensor for several of our weights (query, key and value of GPT-2, GPT-NeoX and Phi-3, gate and
up of Phi-3), PEFT's adapter is of that tensor. One that is read becomes an adapter of each of our weights, all with the
same `a`. One that is written has one rank for them all: theirs added up, with zeros in `lora_B` where a rank is not a
weight's own, unless their `a` are the same. interop.peft_experts says how experts' are written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from capibara import extras, limits, tree
from capibara.interop import partial, peft_experts, safetensors_header, tables
from capibara.interop.tensors import Shape, Tensor
from capibara.models.api import Lora, Model
from capibara.types import Params, UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PARTS = {"a": ".lora_A.weight", "b": ".lora_B.weight", "magnitude": ".lora_magnitude_vector"}
_TASKS = {"causal": "CAUSAL_LM", "encoder_decoder": "SEQ_2_SEQ_LM"}
_NOT_OURS = ("layers_to_transform", "trainable_token_indices", "layer_replication")

_LARGEST, _PATTERNS, _CONFIG_VALUES, _RANK = 2**31, 4096, 200_000, 2**16

Values = dict[str, np.ndarray]


class _Module(NamedTuple):
    """The adapter of one of PEFT's modules, or of that module in every layer.

    Attributes:
      row: of the table, for its weight.
      rank, alpha: as PEFT counts them.
      values: "a", "b" and perhaps "magnitude" of each of our weights, by its name; `a` is the same for all of them.
    """

    row: Tensor
    rank: int
    alpha: float
    values: dict[str, Values]

    @property
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The parts, and each as a row of a table of its own."""
        inputs, outputs = _groups(self.row)
        if peft_experts.is_stacked(self.row):
            yield from ((part, peft_experts.stacked(self.row, part, inputs, outputs)) for part in "ab")
            return
        numbered, letters = self.row.numbered, self.row.layout[len(self.row.numbered) :]
        ours_in = "".join(letter for letter in letters if letter in inputs)
        ours_out = "".join(letter for letter in letters if letter in outputs)
        yield (
            "a",
            dataclasses.replace(
                self.row, dims=f"r {inputs}", layout=f"{numbered}{ours_in}r", ours=self.row.ours[:1], along=""
            ),
        )
        yield "b", dataclasses.replace(self.row, dims=f"{outputs} r", layout=f"{numbered}r{ours_out}")
        yield "magnitude", dataclasses.replace(self.row, dims=outputs, layout=f"{numbered}{ours_out}")

    def written(self) -> Iterator[tuple[str, np.ndarray]]:
        """PEFT's names and tensors."""
        for part, tensor in self.tensors:
            values = {path: self.values[path][part] for path in tensor.ours if part in self.values[path]}
            shapes = {path: value.shape for path, value in values.items()}
            for name, at in tensor.names(shapes) if values else ():
                joined = tensor.join({path: value[at] for path, value in values.items()}, shapes)
                yield _PREFIX + name.removesuffix(".weight") + _PARTS[part], joined


class Pair(NamedTuple):
    """The adapter of one tensor of a checkpoint: scale * b @ a is added to it.

    Attributes:
      name: of the tensor.
      a: [rank, inputs].
      b: [outputs, rank].
    """

    name: str
    a: np.ndarray
    b: np.ndarray
    scale: float


def pairs(params: Params, model: Model, model_type: str) -> Iterator[Pair]:
    """The adapters of a model as tensors of a checkpoint have them, those of experts one by one.

    Args:
      params: the adapters' at least.
      model, model_type: as in `write_peft`.

    Raises:
      UserError: they are more than pairs of matrices: with magnitudes, or parameters that were trained as they are.
    """
    lora, shapes = model.config.lora, _plain_shapes(model)
    rows = tables.of(model_type, shapes)
    trained = next((path for row in rows for path in row.ours if lora.trains(path)), None)
    if lora.dora or trained is not None:
        what = "Lora.dora has magnitudes" if lora.dora else f"Lora.modules_to_save trains {trained} as it is"
        raise UserError(f"{what}, which is more than pairs of matrices: write the merged model, --format=gguf")
    values = dict(zip(tree.path_names(params), jax.tree.leaves(params), strict=True))
    for row in rows:
        if any(f"{path}_lora/a" in values for path in row.ours):
            module = _module(row, values, shapes, lora)
            parts = dict(module.written())
            scale = module.alpha / (module.rank**0.5 if lora.rslora else module.rank)
            for name in [name for name in parts if name.endswith(_PARTS["a"])]:
                of = name.removesuffix(_PARTS["a"])
                yield Pair(f"{of.removeprefix(_PREFIX)}.weight", parts[name], parts[of + _PARTS["b"]], scale)


def write_peft(
    folder: str, params: Params, model: Model, model_type: str, base: str | None = None, *, fused_experts: bool = False
) -> None:
    """Writes the adapters of a model, and the other parameters that were trained, as PEFT does. Whole, or not at all.

    Args:
      folder: a new one.
      params: of a model with TransformerConfig.lora.
      model: theirs.
      model_type: Hugging Face's name of the architecture (interop.tables.NAMES).
      base: where PEFT finds the model without adapters; None: PEFT is told when it loads.
      fused_experts: adapters of the experts of a layer together, as PEFT has them with transformers 5; else of each by
        itself, which it reads with transformers 4 and 5.

    Raises:
      UserError: the folder is there, the model has no adapters, or PEFT has no such ones.
    """
    lora = model.config.lora
    if lora is None:
        raise UserError(f"{type(model.config).__name__}.lora is None: there is no adapter to write")
    if os.path.exists(folder):
        raise UserError(f"{folder} must be a new folder: it is there already, name another or remove it")
    values = dict(zip(tree.path_names(params), jax.tree.leaves(params), strict=True))
    shapes = _plain_shapes(model)
    rows = tables.of(model_type, shapes, fused_experts=fused_experts)
    held = [row for row in rows if any(f"{path}_lora/a" in values for path in row.ours)]
    if fused_experts and any(map(peft_experts.parameter, held)):
        peft_experts.check_fused(lora)
    modules = [_module(row, values, shapes, lora) for row in held]
    if not fused_experts:
        modules = peft_experts.loadable(modules, rows, shapes, lora, _Module)
    saved = dict(_saved(rows, values, shapes, lora))
    config = _config(modules, rows, lora, model, base, fused_experts) | {"modules_to_save": _modules_of(saved) or None}
    tensors = {name: value for module in modules for name, value in module.written()}
    tensors = peft_experts.wrapped(tensors) | {_PREFIX + name: value for name, value in saved.items()}
    extras.require("safetensors", why="PEFT folders")
    from safetensors.numpy import save_file

    with partial.whole(folder) as unfinished:
        config_path, weights_path = os.path.join(unfinished, CONFIG), os.path.join(unfinished, WEIGHTS)
        save_file(tensors, weights_path, metadata={"format": "pt"})
        with open(config_path, "w", encoding="utf-8") as file:
            file.write(json.dumps(config, indent=2) + "\n")
        shutil.copymode(config_path, weights_path)  # safetensors: its owner's alone


def read_peft(folder: str, model: Model, model_type: str) -> tuple[Lora, Params]:
    """The adapters of a folder, and the other parameters that it holds.

    Args:
      folder: with adapter_config.json and adapter_model.safetensors.
      model: without adapters, of the same sizes.
      model_type: as in `write_peft`.

    Returns:
      The TransformerConfig.lora that they belong to, and float32 arrays on the host: what Model.trained gives of its
      parameters.

    Raises:
      UserError: they cannot be read, are of another kind or another model.
    """
    config = read_config(folder)
    try:
        return _read(folder, config, model, model_type)
    except UserError:
        raise
    # Names and shapes of a foreign file in code that is written for whole ones: what they break is the file's fault.
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
        what = f"{type(error).__name__}: {limits.cause(error)}"
        raise UserError(
            f"{folder} is no adapter that can be read ({what}): name a folder that PEFT has written"
        ) from error


def _read(folder: str, config: Mapping[str, Any], model: Model, model_type: str) -> tuple[Lora, Params]:
    fused = peft_experts.is_fused(config, os.path.join(folder, CONFIG))
    stored = _read_tensors(folder, tables.NAMES[model_type])
    if fused:
        stored = peft_experts.named(stored, config["target_parameters"])
    shapes = _plain_shapes(model)
    rows = tables.of(model_type, shapes, fused_experts=fused)
    modules = [_read_module(row, stored, shapes, config, fused) for row in rows if _first(row, "a") in stored]
    saved: Values = {}
    for row in rows:
        if row.name.format(**dict.fromkeys(row.numbered, 0)) in stored:
            saved |= _read_saved(row, stored, shapes)
    if stored:
        raise UserError(f"{folder}: {next(iter(stored))} is of no weight that has adapters in this {model_type} model")
    if not modules:
        raise UserError(f"{folder}/{WEIGHTS} holds no adapter")
    values = {
        f"{path}_lora/{part}": value
        for module in modules
        for path, parts in module.values.items()
        for part, value in parts.items()
    }
    return _lora_of(modules, saved, config), _nested(values | saved)


def _plain_shapes(model: Model) -> dict[str, Shape]:
    plain = model.plain.abstract_params
    return {path: tuple(leaf.shape) for path, leaf in zip(tree.path_names(plain), jax.tree.leaves(plain), strict=True)}


def _groups(row: Tensor) -> tuple[str, str]:
    """The letters of a weight's inputs and of its outputs, in the checkpoint's order."""
    stacked = peft_experts.is_stacked(row)
    first = row.layout[_stacked(row)]
    groups = sorted(row.dims.split()[stacked:], key=lambda group: first not in group)
    return groups[0], groups[1]


def _stacked(row: Tensor) -> int:
    """Leading dimensions of our weights along which adapters are stacked: layers and experts."""
    return len(row.numbered) + peft_experts.is_stacked(row)


def _module(row: Tensor, values: Mapping[str, Any], shapes: Mapping[str, Shape], lora: Lora) -> _Module:
    """The adapters of our weights as one of PEFT's."""
    parts: dict[str, Values] = {path: {} for path in row.ours}
    for path in row.ours:
        for part in _PARTS:
            if f"{path}_lora/{part}" in values:
                parts[path][part] = np.asarray(values[f"{path}_lora/{part}"])
    held = [path for path in row.ours if parts[path]]
    scale, rank = lora.scale_of(held[0]), lora.rank_of(held[0])
    same = all(np.array_equal(parts[path].get("a"), parts[held[0]]["a"]) for path in row.ours)
    if not same or any(lora.scale_of(path) != scale for path in held):
        if lora.dora and len(held) < len(row.ours):
            raise UserError(
                f"PEFT has one adapter for {', '.join(row.ours)}, and with Lora.dora {held[0]} cannot have one alone: "
                "write the merged model"
            )
        rank = sum(lora.rank_of(path) for path in held)
        _widen(parts, held, rank, scale, row, shapes, lora)
    return _Module(row, rank, scale * (rank**0.5 if lora.rslora else rank), parts)


def _widen(parts: dict[str, Values], held: Sequence[str], rank: int, scale: float, row: Tensor, shapes, lora) -> None:
    """Gives all weights of a row the same `a`, which has the ranks of all, and each a `b` that uses its own."""
    a = np.concatenate([parts[path]["a"] for path in held], axis=-1)
    stacked, outputs = _stacked(row), len(_groups(row)[1])
    start = 0
    for path in row.ours:
        shape = shapes[path]
        b = np.zeros((*shape[:stacked], rank, *shape[len(shape) - outputs :]), np.float32)
        if path in held:
            own = parts[path]["b"]
            end = start + own.shape[stacked]
            b[(slice(None),) * stacked + (slice(start, end),)] = own * (lora.scale_of(path) / scale)
            start = end
        parts[path] |= {"a": a, "b": b}


def _saved(rows: Iterable[Tensor], values: Mapping[str, Any], shapes, lora: Lora) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors whose parameters were trained as they are."""
    for row in rows:
        trained = [path for path in row.ours if lora.trains(path)]
        if trained and len(trained) < len(row.ours):
            raise UserError(f"PEFT has {', '.join(row.ours)} together: Lora.modules_to_save must have all of them")
        for name, at in row.names(shapes) if trained else ():
            yield name, row.join({path: np.asarray(values[path])[at] for path in trained}, shapes).astype(np.float32)


def _modules_of(saved: Iterable[str]) -> list[str]:
    """PEFT's modules_to_save: the last part of every module's name."""
    return sorted({name.rpartition(".")[0].rpartition(".")[2] for name in saved})


def _config(
    modules: Sequence[_Module], rows: Sequence[Tensor], lora: Lora, model: Model, base: str | None, fused: bool
) -> dict:
    parameters = {m.row.name: peft_experts.parameter(m.row) for m in modules if fused and peft_experts.parameter(m.row)}
    names = {m.row.name: parameters.get(m.row.name) or _suffix(m.row, modules, rows) for m in modules}
    keys = {m.row.name: peft_experts.pattern_names(m.row, names[m.row.name]) for m in modules}
    rank, alpha = peft_experts.first(modules).rank, peft_experts.first(modules).alpha
    routed = any(peft_experts.is_routed(m.row) for m in modules)
    turned = routed or any(peft_experts.is_router(m.row) for m in modules)  # into parameters, by transformers 5
    more = {"target_parameters": list(parameters.values())} if parameters else {}
    return more | {
        "peft_type": "LORA",
        "task_type": _TASKS.get(model.config.objective),
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": [name for row, name in names.items() if row not in parameters],
        "rank_pattern": {key: m.rank for m in modules if m.rank != rank for key in keys[m.row.name]},
        "alpha_pattern": {key: m.alpha for m in modules if m.alpha != alpha for key in keys[m.row.name]},
        "use_rslora": lora.rslora and (fused or lora.dora or not routed),
        "use_dora": lora.dora,
        "lora_dropout": 0.0 if turned else lora.dropout,  # PEFT refuses another for parameters
        # GPT-2's layers have their weights the other way round.
        "fan_in_fan_out": any(m.row.dims.split()[0] == _groups(m.row)[0] for m in modules),
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _suffix(row: Tensor, modules: Sequence[_Module], rows: Sequence[Tensor]) -> str:
    """The shortest end of a module's name that no module without an adapter has."""
    chosen = {module.row.name for module in modules}
    others = [other.name for other in rows if other.name not in chosen and " " in other.dims]
    parts = row.name.removesuffix(".weight").split(".")
    for count in range(1, len(parts) + 1):
        end = ".".join(parts[-count:])
        if not any(f".{name}".endswith(f".{end}.weight") for name in others) and "{" not in end:
            return end
    raise UserError(f"PEFT cannot name {row.name} without others: give them an adapter too (Lora.targets)")


def read_config(folder: str) -> dict[str, Any]:
    """What adapter_config.json says.

    Raises:
      UserError: it cannot be read, says what PEFT does not write, or something that we do not have.
    """
    path = os.path.join(folder, CONFIG)
    try:
        config = limits.read_json(path, limits.SMALL_BYTES, values=_CONFIG_VALUES)
    except FileNotFoundError as error:
        raise UserError(f"{path} cannot be read (there is none): name a folder that PEFT has written") from error
    wrong = [name for name in _NOT_OURS if config.get(name)]
    for name, wanted in (("peft_type", "LORA"), ("bias", "none"), ("lora_bias", False), ("use_bdlora", None)):
        wrong += [name] if config.get(name, wanted) not in (wanted, None) else []
    if wrong:
        raise UserError(
            f"{path} has {wrong[0]} = {limits.shortened(config[wrong[0]])}, of which we have nothing: merge it with PEFT first"
        )
    for name, must, fine in (
        ("r", "a whole number of at least 1", lambda value: type(value) is int and 0 < value < _LARGEST),
        ("lora_alpha", "a number", _is_number),
        ("lora_dropout", "a number", lambda value: value is None or _is_number(value)),
        ("alpha_pattern", "an object of regular expressions with numbers", _is_pattern),
        ("base_model_name_or_path", "a name", lambda value: value is None or isinstance(value, str)),
    ):
        if not fine(config.get(name)):
            raise UserError(
                f"{path} has {name} = {limits.shortened(config.get(name))}, must be {must}: name a folder that PEFT wrote"
            )
    return config


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _LARGEST and math.isfinite(value)


def _is_pattern(values: Any) -> bool:
    if values is None:
        return True
    if not isinstance(values, dict) or len(values) > _PATTERNS or not all(map(_is_number, values.values())):
        return False
    with contextlib.suppress(re.error, limits.Refused, RecursionError, OverflowError):
        for pattern in values:
            limits.check_pattern(pattern, most=512)
            re.compile(pattern)
        return True
    return False


def _read_tensors(folder: str, names: tables.Names) -> Values:
    """The tensors by the names of the table: a module's, with the ending of the part, or a parameter's."""
    path = os.path.join(folder, WEIGHTS)
    extras.require("safetensors", why="PEFT folders")
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        safetensors_header.check(path)
        found = load_file(path)
    except UserError:
        raise
    # KeyError, TypeError: a dtype that numpy does not have.
    except (OSError, SafetensorError, limits.Refused, KeyError, TypeError, ValueError, MemoryError) as error:
        raise UserError(
            f"{path} cannot be read ({limits.cause(error)}): name a folder that PEFT has written"
        ) from error
    stored = {}
    for name, value in found.items():
        name = name.removeprefix(_PREFIX)
        end = next((end for end in _PARTS.values() if name.endswith(end)), "")
        weight = names.canonical(f"{name.removesuffix(end)}.weight" if end else name)
        stored[weight.removesuffix(".weight") + end if end and weight else weight or name] = value.astype(np.float32)
    return stored


def _first(row: Tensor, part: str) -> str:
    return row.name.format(**dict.fromkeys(row.numbered, 0)).removesuffix(".weight") + _PARTS[part]


def _read_module(
    row: Tensor, stored: Values, shapes: Mapping[str, Shape], config: Mapping[str, Any], fused: bool
) -> _Module:
    """The adapter of a module in every layer, whose tensors go out of `stored`."""
    count, inputs = _stacked(row), len(_groups(row)[0])
    rank = stored[_first(row, "a")].shape[0] // math.prod(shapes[row.ours[0]][len(row.numbered) : count])
    name = _first(row, "a").removesuffix(_PARTS["a"])
    name += ".weight" if fused and peft_experts.is_router(row) else ""
    alpha = next(
        (alpha for key, alpha in (config.get("alpha_pattern") or {}).items() if re.match(rf"(.*\.)?({key})$", name)),
        config["lora_alpha"],
    )
    if not 0 < rank <= _RANK:
        raise UserError(f"{_first(row, 'a')} has the rank {rank:,}, must be 1 to {_RANK:,}")
    module = _Module(row, rank, float(alpha), {path: {} for path in row.ours})
    for part, tensor in module.tensors:
        if _first(row, part) not in stored:
            continue
        wanted = {}
        for path in tensor.ours:
            leading, rest = shapes[path][:count], shapes[path][count:]
            of_part = {"a": (*rest[:inputs], rank), "b": (rank, *rest[inputs:]), "magnitude": rest[inputs:]}
            wanted[path] = (*leading, *of_part[part])
        for path, value in _taken(tensor, _PARTS[part], stored, wanted).items():
            for other in row.ours if part == "a" else (path,):
                module.values[other][part] = value
    return module


def _read_saved(row: Tensor, stored: Values, shapes: Mapping[str, Shape]) -> Values:
    return _taken(row, None, stored, {path: shapes[path] for path in row.ours})


def _taken(row: Tensor, end: str | None, stored: Values, wanted: Mapping[str, Shape]) -> Values:
    """Our parameters of these shapes, of tensors that go out of `stored`."""
    values = {path: np.empty(shape, np.float32) for path, shape in wanted.items()}
    for name, at in row.names(wanted):
        name = name if end is None else name.removesuffix(".weight") + end
        if name not in stored:
            raise UserError(f"{name} is missing in the adapter: ours are in every layer or in none")
        value = stored.pop(name)
        if value.shape != row.shape(wanted):
            raise UserError(
                f"{name} has the shape {list(value.shape)}, must be {list(row.shape(wanted))} in this model"
            )
        for path, part in row.split(value, wanted).items():
            values[path][at] = part
    return values


def _lora_of(modules: Sequence[_Module], saved: Iterable[str], config: Mapping[str, Any]) -> Lora:
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    return Lora(
        rank=rank,
        alpha=alpha,
        rslora=bool(config.get("use_rslora")),
        dora=bool(config.get("use_dora")),
        dropout=float(config.get("lora_dropout") or 0.0),
        targets=tuple(path for module in modules for path in module.row.ours),
        rank_pattern=tuple((path, m.rank) for m in modules for path in m.row.ours if m.rank != rank),
        alpha_pattern=tuple((path, m.alpha) for m in modules for path in m.row.ours if m.alpha != alpha),
        modules_to_save=tuple(saved),
    )


def _nested(values: Mapping[str, np.ndarray]) -> Params:
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *owners, last = name.split("/")
        inner = nested
        for owner in owners:
            inner = inner.setdefault(owner, {})
        inner[last] = value
    return nested
