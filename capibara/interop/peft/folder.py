"""Reads and writes PEFT folders: adapter_config.json and adapter_model.safetensors.

interop.peft.modules handles adapters of several weights in one tensor, and of some layers only; interop.peft.experts
handles those of experts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from capibara.core import extras, limits, tree
from capibara.core.types import Params, UserError
from capibara.interop.hf import safetensors_header, tables
from capibara.interop.hf.layout.rows import Names
from capibara.interop.hf.layout.tensors import Shape, Tensor
from capibara.interop.peft import ends, fields, variants
from capibara.interop.peft import experts as peft_experts
from capibara.interop.peft import modules as peft_modules
from capibara.interop.peft.modules import PARTS, PREFIX, Layer, Module, Values
from capibara.interop.peft.variants import Weight
from capibara.models import api
from capibara.models.api import Lora, Model
from capibara.storage import partial

CONFIG, WEIGHTS = fields.CONFIG, "adapter_model.safetensors"
_TASKS = {"causal": "CAUSAL_LM", "encoder_decoder": "SEQ_2_SEQ_LM"}
_RANK = 2**16
_ENDS = (f"{PARTS['magnitude']}.weight", *PARTS.values(), variants.BIAS, variants.DIAGONAL, *ends.EXTRA)


class Pair(NamedTuple):
    """The adapter of one tensor of a checkpoint: scale * b @ a is added to it.

    Attributes:
      name: of the tensor.
      a: [rank, inputs]; for a layer's experts together [experts, rank, inputs].
      b: [outputs, rank], or [experts, outputs, rank].
    """

    name: str
    a: np.ndarray
    b: np.ndarray
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[-2]


def pairs(params: Params, model: Model, model_type: str) -> Iterator[Pair]:
    """The adapters of a model by tensors of a checkpoint; those of experts one by one.

    Args:
      params: parameters that include the adapters.
      model, model_type: as in `write_peft`.

    Raises:
      UserError: they are more than pairs of matrices: they have magnitudes, or some parameters were trained in full.
    """
    lora, shapes = model.config.lora, _plain_shapes(model)
    assert lora is not None
    rows = tables.of(model_type, shapes, {})
    trained = next((path for row in rows for path in row.ours if lora.trains(path)), None)
    if lora.trainable_tokens:
        part = "Lora.trainable_tokens has rows of the embedding"
        raise UserError(f"{part}, which is more than pairs of matrices: write the merged model, --format=gguf")
    if lora.dora or trained is not None:
        part = "Lora.dora has magnitudes" if lora.dora else f"Lora.modules_to_save trains {trained} in full"
        raise UserError(f"{part}, which is more than pairs of matrices: write the merged model, --format=gguf")
    values = dict(zip(tree.path_names(params), jax.tree.leaves(params), strict=True))
    for row in rows:
        if any(f"{path}_lora/b" in values for path in row.ours):
            if peft_experts.is_stacked(row):
                yield from _stacked_pairs(row, values, lora)
                continue
            yield from _pairs(peft_modules.of_ours(row, values, shapes, lora), shapes, lora)


def _stacked_pairs(row: Tensor, values: Mapping[str, Any], lora: Lora) -> Iterator[Pair]:
    """The pairs of all experts of a layer together, gate and up separately, as in GGUF."""
    for path in row.ours:
        if f"{path}_lora/b" not in values:
            continue
        last = path.rpartition("/")[2]
        siblings = {other.rpartition("/")[2] for other in row.ours if f"{other}_lora/b" in values}
        first = f"{path.rpartition('/')[0]}/{lora.first_of(path, siblings)}"
        a_LEIR, b_LERO = (np.asarray(values[f"{item}_lora/{part}"]) for item, part in ((first, "a"), (path, "b")))
        for layer, (a_EIR, b_ERO) in enumerate(zip(a_LEIR, b_LERO, strict=True)):
            name = f"{row.name.format(l=layer).rpartition('.')[0]}.{last}_proj.weight"
            yield Pair(name, np.swapaxes(a_EIR, 1, 2), np.swapaxes(b_ERO, 1, 2), lora.scale_of(path))


def _pairs(module: Module, shapes: Mapping[str, Shape], lora: Lora) -> Iterator[Pair]:
    parts = dict(module.written())
    for name, at in module.row.names(shapes):
        layer = module.layers[at[0]] if module.layers else Layer(module.rank, module.alpha)
        if layer.rank:
            a, b = (parts[PREFIX + name.removesuffix(".weight") + PARTS[part]] for part in "ab")
            yield Pair(name, a, b, layer.alpha / (layer.rank**0.5 if lora.rslora else layer.rank))


def write_peft(
    folder: str,
    params: Params,
    model: Model,
    model_type: str,
    base: str | None = None,
    files: Mapping[str, bytes] | None = None,
    *,
    fused_experts: bool = False,
) -> None:
    """Writes a model's adapters and its other trained parameters in PEFT's format, atomically.

    Args:
      folder: a new one.
      params: of a model with TransformerConfig.lora.
      model: the model.
      model_type: Hugging Face's name of the architecture (interop.hf.tables.NAMES).
      base: where PEFT finds the base model; None: set when PEFT loads it.
      files: further ones, such as a tokenizer's, by name.
      fused_experts: whether a layer's experts share an adapter, as in PEFT with transformers 5; else each has its own,
        which PEFT reads with transformers 4 and 5.

    Raises:
      UserError: the folder exists, the model has no adapters, or PEFT does not support them.
    """
    lora = model.config.lora
    if lora is None:
        raise UserError(f"{type(model.config).__name__}.lora is None: there is no adapter to write")
    _check_widths(model, folder)
    if os.path.exists(folder):
        raise UserError(f"{folder} must be a new folder: it exists already, name another or remove it")
    values = dict(zip(tree.path_names(params), jax.tree.leaves(params), strict=True))
    shapes = _plain_shapes(model)
    rows = tables.of(model_type, shapes, {}, fused_experts=fused_experts)
    fused_experts = fused_experts or any(map(peft_experts.is_stacked, rows))
    held = [row for row in rows if any(f"{path}_lora/b" in values for path in row.ours)]
    if fused_experts and any(map(peft_experts.parameter, held)):
        peft_experts.check_fused(lora)
    modules = [peft_modules.of_ours(row, values, shapes, lora) for row in held]
    if not fused_experts:
        modules = peft_experts.loadable(modules, rows, shapes, lora, Module)
    saved = dict(_saved(rows, values, shapes, lora))
    biases = _biases(modules, rows, saved)
    shared = ends.sharing(saved, model, tables.NAMES[model_type].rows)
    saved |= shared
    whole = [name for name in saved if name not in biases.names]
    config = _config(modules, rows, lora, model, base, fused_experts)
    config |= {"bias": biases.kind, "modules_to_save": _modules_of(whole, tables.NAMES[model_type].rows) or None}
    tied = "output" not in model.abstract_params and model.config.data_kind != "encoder_decoder"
    config |= {"ensure_weight_tying": bool(shared) and tied}
    of_tokens, option = ends.written(values, rows, lora.trainable_tokens)
    saved, config = saved | of_tokens, config | option
    tensors = {name: value for module in modules for name, value in module.written()}
    tensors = peft_experts.wrapped(tensors) | {PREFIX + biases.written(name): x for name, x in saved.items()}
    _write(folder, tensors, config, files or {})


def _write(folder: str, tensors: dict[str, np.ndarray], config: dict[str, Any], files: Mapping[str, bytes]) -> None:
    extras.require("safetensors", why="PEFT folders")
    from safetensors.numpy import save_file

    with partial.whole(folder) as unfinished:
        config_path, weights_path = os.path.join(unfinished, CONFIG), os.path.join(unfinished, WEIGHTS)
        save_file(tensors, weights_path, metadata={"format": "pt"})
        with open(config_path, "w", encoding="utf-8") as file:
            file.write(json.dumps(config, indent=2) + "\n")
        for name, content in files.items():
            with open(os.path.join(unfinished, name), "wb") as copy:
                copy.write(content)
        shutil.copymode(config_path, weights_path)  # safetensors makes files readable only by their owner


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A folder as it is read for a base.

    Attributes:
      model: the base, untied where the adapter changes only one of embedding and head.
      lora: the adapters' TransformerConfig.lora; None: no layer has any.
      values: float32 arrays on the host in the structure of Model.trained, and whole parameters.
    """

    model: Model
    lora: Lora | None
    values: Params


def read_peft(folder: str, model: Model, model_type: str, weight: Weight | None = None) -> tuple[Lora, Params]:
    """The adapters of a folder, and the other parameters in it.

    Args:
      folder: with adapter_config.json and adapter_model.safetensors.
      model: without adapters, of the same sizes.
      model_type: as in `write_peft`.
      weight: tensors of the base (variants.Weight), of which some adapters are a change; None: they are not here.

    Returns:
      Their TransformerConfig.lora, and float32 arrays on the host in the structure of Model.trained.

    Raises:
      UserError: they cannot be read, are of another kind or of another model, or need another model than the base.
    """
    config = fields.read(folder)
    if config["layer_replication"]:
        raise UserError(
            f"{folder} has layer_replication = {limits.shortened(config['layer_replication'])}, which makes another model of "
            "the base: merge it, capibara convert --format=hf"
        )
    adapted = read_adapted(folder, model, model_type, weight, config)
    if adapted.model is not model:
        field = next((name for name in ("modules_to_save", ends.OPTION) if config[name]), "target_modules")
        raise UserError(
            f"{folder} has {field} = {limits.shortened(config[field])}, which changes one of embedding and head where the base "
            "ties them: merge it, capibara convert --format=hf"
        )
    if adapted.lora is None:
        raise UserError(f"{folder}/{WEIGHTS} holds no adapter of a layer: merge it, capibara convert --format=hf")
    return adapted.lora, adapted.values


def read_adapted(
    folder: str, model: Model, model_type: str, weight: Weight | None, config: Mapping[str, Any] | None = None
) -> Adapted:
    """A folder for a base that may become another one; the arguments and errors are those of `read_peft`.

    Args:
      model: with the folder's layer_replication in it (replication.replicated).
      config: the result of fields.read.
    """
    config = fields.read(folder) if config is None else config
    _check_widths(model, folder)
    try:
        return _read(folder, config, model, model_type, weight)
    except UserError:
        raise
    # Errors here are the file's fault: the code expects valid names and shapes.
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, ArithmeticError, re.error) as error:
        cause = f"{type(error).__name__}: {limits.cause(error)}"
        raise UserError(
            f"{folder} is no adapter that can be read ({cause}): name a folder that PEFT has written"
        ) from error


def _check_widths(model: Model, folder: str) -> None:
    """Checks that all layers have the same modules, of the same width.

    Raises:
      UserError: they differ.
    """
    if model.config.layer_widths is not None:
        raise UserError(
            f"{folder} is for a model whose layers differ in width (mlp_dims), which PEFT's adapters cannot have here: merge "
            "them, and write the whole model"
        )
    if model.config.module_layers:
        lacking = " and ".join(f"{len(numbers)} have {name}" for name, numbers in model.config.module_layers.items())
        raise UserError(
            f"{folder} is for a model whose layers differ ({lacking}), which PEFT's adapters cannot have here: merge them, and "
            "write the whole model"
        )
    if model.config.stateful:  # projections are fused along dimensions of several widths, or have other names in memory
        raise UserError(
            f"{folder} is for a model whose layers have states, which PEFT's adapters cannot have here: merge them, and write the "
            "whole model"
        )


def _read(folder: str, config: Mapping[str, Any], model: Model, model_type: str, weight: Weight | None) -> Adapted:
    fused = peft_experts.is_fused(config, os.path.join(folder, CONFIG))
    table = tables.NAMES[model_type]
    stored, names = _read_tensors(folder, table, config)
    if fused:
        stored = peft_experts.named(stored, config["target_parameters"])
    _check_targets(stored, names, config, folder)
    _check_extra(stored, config, folder)
    factors = variants.as_pairs(stored, names, config, weight, folder)
    shapes = _plain_shapes(model)
    rows = tables.of(model_type, shapes, {}, fused_experts=fused)
    if model.config.data_kind == "encoder_decoder":
        of_ends = ends.Read()
        ends.read_shared(stored, "output" not in shapes, config, folder)
    else:
        both = ends.of_rows(rows, table.rows, names)
        of_ends = ends.read(stored, both, config, shapes["embedding"][1], weight, folder)
    if of_ends.untied:
        model = untied(model)
        shapes = _plain_shapes(model)
        rows = tables.of(model_type, shapes, {}, fused_experts=fused)
    _check_complete(stored, names, rows, shapes, config, folder)
    if config["use_dora"] and weight is not None:
        _fill_magnitudes(stored, rows, shapes, weight)
    result = (_read_module(row, stored, shapes, _Alphas(config, names, factors)) for row in rows)
    modules = [module for module in result if module is not None]
    saved: Values = {}
    for row in rows:
        if any(name in stored for name, _ in row.names(shapes)):
            saved |= _read_saved(row, stored, shapes, weight)
    if stored:
        raise UserError(f"{folder}: {next(iter(stored))} belongs to no weight with adapters in this {model_type} model")
    if not modules:
        if not saved and not of_ends.tokens:
            raise UserError(f"{folder}/{WEIGHTS} holds no adapter")
        if of_ends.tokens:
            raise UserError(f"{folder} has {ends.OPTION} without adapters of layers: merge it with PEFT first")
        return Adapted(model, None, tree.nested(saved))
    values = {
        f"{path}_lora/{part}": value
        for module in modules
        for path, parts in module.values.items()
        for part, value in parts.items()
        if part != "a" or path == min(module.row.ours)  # the others share it
    }
    lora = dataclasses.replace(_lora_of(modules, saved, config), trainable_tokens=of_ends.tokens)
    return Adapted(model, lora, tree.nested(values | saved | dict(of_ends.values)))


def untied(model: Model) -> Model:
    """The model with a head of its own."""
    return api.build(dataclasses.replace(model.config, head=api.Head.SEPARATE))


def _plain_shapes(model: Model) -> dict[str, Shape]:
    plain = model.plain.abstract_params
    return {path: tuple(leaf.shape) for path, leaf in zip(tree.path_names(plain), jax.tree.leaves(plain), strict=True)}


def _saved(
    rows: Iterable[Tensor], values: Mapping[str, Any], shapes: Mapping[str, Shape], lora: Lora
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of the parameters that were trained in full."""
    for row in rows:
        trained = [path for path in row.ours if lora.trains(path)]
        if trained and len(trained) < len(row.ours):
            raise UserError(f"PEFT has {', '.join(row.ours)} in one tensor: Lora.modules_to_save must have all of them")
        for name, at in row.names(shapes) if trained else ():
            yield name, row.join({path: np.asarray(values[path])[at] for path in trained}, shapes).astype(np.float32)


class _Biases(NamedTuple):
    """Biases that are trained without the rest of their modules.

    Attributes:
      kind: value of LoraConfig.bias.
      names: of the tensors.
      adapted: the modules with adapters.
    """

    kind: str
    names: frozenset[str]
    adapted: frozenset[str]

    def written(self, name: str) -> str:
        """PEFT's name of a tensor."""
        module = name.removesuffix(".bias")
        return f"{module}.base_layer.bias" if name.endswith(".bias") and module in self.adapted else name


def _biases(modules: Sequence[Module], rows: Sequence[Tensor], saved: Mapping[str, np.ndarray]) -> _Biases:
    """Which biases are trained, in terms of LoraConfig.bias.

    Raises:
      UserError: PEFT cannot train this choice of biases.
    """
    layers = range(max(len(module.values[module.row.ours[0]]["b"]) for module in modules))
    names = lambda retained: {row.name.format(l=at, e=0) for row in rows if retained(row) for at in layers}  # noqa: E731
    adapted = {name.removesuffix(".weight") for name in names(lambda row: row in {m.row for m in modules})}
    alone = {name for name in saved if name.endswith(".bias") and f"{name.removesuffix('.bias')}.weight" not in saved}
    every = names(lambda row: row.name.endswith(".bias"))
    if not alone:
        return _Biases("none", frozenset(), frozenset(adapted))
    if alone == {name for name in every if name.removesuffix(".bias") in adapted}:
        return _Biases("lora_only", frozenset(alone), frozenset(adapted))
    if every <= saved.keys():
        return _Biases("all", frozenset(every), frozenset(adapted))
    raise UserError(
        f"PEFT trains the biases of all modules or of those with adapters, and Lora.modules_to_save has {min(alone)} but not "
        "all of either: add the others, or write the merged model"
    )


def _modules_of(saved: Iterable[str], rows: Sequence[Tensor]) -> list[str]:
    """PEFT's modules_to_save: ends of the modules' names with which no other module's name ends.

    Raises:
      UserError: PEFT cannot name a module without others.
    """
    numbered = {re.sub(r"\\\{\w\\\}", r"\\d+", re.escape(row.name)): row.name.rpartition(".")[0] for row in rows}
    modules = {
        next((module for pattern, module in numbered.items() if re.fullmatch(pattern, name)), name.rpartition(".")[0])
        for name in saved
    }
    every, result = set(numbered.values()), set()
    for module in modules:
        parts, others = module.split("."), every - modules
        ways = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        end = next((way for way in ways if "{" not in way and not any(x.endswith(way) for x in others)), None)
        if end is None:
            raise UserError(
                f"PEFT cannot name {module} without others of its modules: add these to Lora.modules_to_save, or write the "
                "merged model"
            )
        result.add(end)
    return sorted(result)


def _config(
    modules: Sequence[Module], rows: Sequence[Tensor], lora: Lora, model: Model, base: str | None, fused: bool
) -> dict:
    parameters = {m.row.name: peft_experts.parameter(m.row) for m in modules if fused and peft_experts.parameter(m.row)}
    names = {m.row.name: parameters.get(m.row.name) or _suffix(m.row, modules, rows) for m in modules}
    keys = {m.row.name: peft_experts.pattern_names(m.row, names[m.row.name]) for m in modules}
    rank, alpha = peft_experts.first(modules).rank, peft_experts.first(modules).alpha
    routed = any(peft_experts.is_routed(m.row) for m in modules)
    turned = routed or any(peft_experts.is_router(m.row) for m in modules)  # parameters in transformers 5
    more = {"target_parameters": list(parameters.values())} if parameters else {}
    return more | {
        "peft_type": "LORA",
        "task_type": _TASKS.get(model.config.data_kind),
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": [name for m in modules if m.row.name not in parameters for name in _targets(m, names)],
        "rank_pattern": {key: item.rank for m in modules for key, item in _each(m, keys) if item.rank != rank},
        "alpha_pattern": {key: item.alpha for m in modules for key, item in _each(m, keys) if item.alpha != alpha},
        "use_rslora": lora.rslora and (fused or lora.dora or not routed),
        "use_dora": lora.dora,
        "lora_dropout": 0.0 if turned else lora.dropout,  # PEFT rejects dropout for parameters
        # GPT-2's weights are transposed.
        "fan_in_fan_out": any(m.row.dims.split()[0] == peft_modules.groups(m.row)[0] for m in modules),
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _targets(module: Module, names: Mapping[str, str]) -> list[str]:
    """A module's entries in `target_modules`: a suffix of its name, or its names in the layers that have an adapter."""
    return [names[module.row.name]] if module.everywhere else [name for name, _ in module.names()]


def _each(module: Module, keys: Mapping[str, Sequence[str]]) -> list[tuple[str, Layer]]:
    """The pattern keys of a module, or of each layer if they differ, with rank and alpha."""
    whole = Layer(module.rank, module.alpha)
    return [*module.names()] if module.layers else [(key, whole) for key in keys[module.row.name]]


def _suffix(row: Tensor, modules: Sequence[Module], rows: Sequence[Tensor]) -> str:
    """The shortest suffix of a module's name that no module without an adapter has."""
    chosen = {module.row.name for module in modules}
    others = [other.name for other in rows if other.name not in chosen and " " in other.dims]
    parts = row.name.removesuffix(".weight").split(".")
    for count in range(1, len(parts) + 1):
        end = ".".join(parts[-count:])
        if not any(f".{name}".endswith(f".{end}.weight") for name in others) and "{" not in end:
            return end
    raise UserError(f"PEFT cannot name {row.name} without others: give them an adapter too (Lora.targets)")


def _read_tensors(folder: str, table: Names, config: Mapping[str, Any]) -> tuple[Values, dict[str, str]]:
    """The tensors by names of the table: a module's with the suffix of its part, or a parameter's.

    Returns:
      The tensors, and the modules of the table -> their names in PEFT's model.
    """
    stored: Values = {}
    names: dict[str, str] = {}
    for whole, value in variants.without_training(read_raw(folder), config).items():
        name = whole.removeprefix(PREFIX)
        if re.search(r"\.(modules_to_save|original_module)\.bias$", name):  # what `bias` has of modules_to_save, again
            continue
        end = next((end for end in _ENDS if name.endswith(end)), "")
        name = name.removesuffix(".weight") if name.endswith(f"{PARTS['magnitude']}.weight") else name
        name = name if end else re.sub(r"\.base_layer(?=\.(?:bias|weight)$)", "", name)  # if the module has an adapter
        end = PARTS["magnitude"] if end.startswith(PARTS["magnitude"]) else end
        module = name.removesuffix(end) if end else name.rpartition(".")[0]
        weight = table.canonical(f"{module}.weight" if end else name)
        key = weight.removesuffix(".weight") + end if end and weight else weight or name
        if key in stored and not np.array_equal(stored[key], value.astype(np.float32)):
            raise UserError(f"{folder} has {whole} twice, under two names: copy the adapter again")
        stored[key] = value.astype(np.float32)
        names[key.removesuffix(end) if end else key.rpartition(".")[0]] = module
    return stored, names


def _check_targets(stored: Values, names: Mapping[str, str], config: Mapping[str, Any], folder: str) -> None:
    """Checks that PEFT gives every module of the file an adapter.

    Raises:
      UserError: it would ignore one.
    """
    for key in stored:
        end = next((end for end in (variants.A, ends.EXTRA[0]) if key.endswith(end)), "")
        module = names.get(key.removesuffix(end), "") if end else ""
        if not module or (config["target_parameters"] and ".experts" in module):
            continue
        field = fields.targets(module, config)
        tied = ends.ensures("target_modules", config) and not re.search(r"\.\d+\.", module)  # one of both is enough
        if field and not (config["target_parameters"] or tied):
            raise UserError(
                f"{folder} has {field} = {limits.shortened(config[field])}, by which PEFT gives {module} no adapter, and the file "
                "has one: copy the adapter again"
            )


def _check_extra(stored: Values, config: Mapping[str, Any], folder: str) -> None:
    """Checks that each module has magnitudes with use_dora only, and then has them, and a bias of B with lora_bias only.

    Raises:
      UserError: PEFT would ignore a tensor of the file, or draw magnitudes that are not in it.
    """
    magnitude, starts = PARTS["magnitude"], (variants.A, ends.EXTRA[0])
    for key in stored:
        module = next((key.removesuffix(end) for end in starts if key.endswith(end)), None)
        if module is None:
            continue
        if config["use_dora"] and module + magnitude not in stored:
            raise UserError(f"{folder} has use_dora = True and no {module}{magnitude}: copy the adapter again")
        for end, field in ((magnitude, "use_dora"), (variants.BIAS, "lora_bias")):
            if module + end in stored and not config[field]:
                raise UserError(
                    f"{folder} has {field} = False, by which PEFT ignores {module}{end} of the file: copy the adapter again"
                )


def _check_complete(
    stored: Values, names: Mapping[str, str], rows: Sequence[Tensor], shapes: Mapping[str, Shape],
    config: Mapping[str, Any], folder: str,
) -> None:  # fmt: skip
    """Checks that every module of the model that PEFT gives an adapter has one in the file.

    Raises:
      UserError: one has none; PEFT would give it one without effect, or with random values.
    """
    if config["target_modules"] in (None, "all-linear") or any(key != name for key, name in names.items()):
        return
    kinds = {re.sub(r"\.\d+\.", ".{}.", key) for key in names if key + variants.A in stored}
    for row in rows:
        for name, _ in row.names(shapes) if row.name.endswith(".weight") and len(row.dims.split()) == 2 else ():
            module = name.removesuffix(".weight")
            missing = re.sub(r"\.\d+\.", ".{}.", module) in kinds and module + variants.A not in stored
            if missing and not fields.targets(module, config):
                raise UserError(
                    f"{folder} has no adapter of {module}, which target_modules names: copy the adapter again"
                )


def read_raw(folder: str) -> dict[str, np.ndarray]:
    """The tensors as they are stored.

    Raises:
      UserError: they cannot be read.
    """
    path = os.path.join(folder, WEIGHTS)
    extras.require("safetensors", why="PEFT folders")
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        safetensors_header.check(path)
        return load_file(path)
    except UserError:
        raise
    # KeyError, TypeError: numpy does not have the dtype.
    except (OSError, SafetensorError, limits.Refused, KeyError, TypeError, ValueError, MemoryError) as error:
        raise UserError(
            f"{path} cannot be read ({limits.cause(error)}): name a folder that PEFT has written"
        ) from error


def _fill_magnitudes(stored: Values, rows: Sequence[Tensor], shapes: Mapping[str, Shape], weight: Weight) -> None:
    """Gives modules that have DoRA in some layers one without effect in the others: Lora has it in all or none."""
    for row in rows:
        modules = [name.removesuffix(".weight") for name, _ in row.names(shapes)] if row.numbered == "l" else []
        like = next((module for module in modules if module + PARTS["magnitude"] in stored), None)
        if like is None:
            continue
        for module in modules:
            if module + variants.A not in stored:
                for part in (variants.A, variants.B):
                    stored[module + part] = np.zeros_like(stored[like + part])
                stored[module + PARTS["magnitude"]] = np.linalg.norm(weight(f"{module}.weight"), axis=1)


class _Alphas(NamedTuple):
    """The alphas of modules, from the fields of a folder.

    Attributes:
      config: the fields.
      names: of modules in the table -> in PEFT's model.
      factors: by module, where a rank has become larger (variants.as_pairs).
    """

    config: Mapping[str, Any]
    names: Mapping[str, str]
    factors: Mapping[str, float]

    def of(self, row: Tensor, layer: int) -> float:
        """That of a module in a layer."""
        module = row.name.format(l=layer, e=0).removesuffix(".weight")
        return fields.alpha_of(self.names.get(module, module), self.config) * self.factors.get(module, 1.0)


def _read_module(row: Tensor, stored: Values, shapes: Mapping[str, Shape], alphas: _Alphas) -> Module | None:
    """The adapter of a module in every layer, popped from `stored`; None: it has none."""
    ranks = peft_modules.layers_of(row, stored, shapes)
    if not any(ranks):
        return None
    layers = [Layer(rank, alphas.of(row, number) if rank else 0.0) for number, rank in enumerate(ranks)]
    count, inputs, rank = peft_modules.stacked(row), len(peft_modules.groups(row)[0]), max(ranks)
    name = row.name.format(l=ranks.index(rank), e=0).removesuffix(".weight")
    if rank > _RANK:
        raise UserError(f"{name} has an adapter of rank {rank:,}, must be 1 to {_RANK:,}")
    module = peft_modules.of_layers(row, layers, {path: {} for path in row.ours})
    for part, tensor in module.tensors:
        if name + PARTS[part] not in stored:
            continue
        targets = {}
        for path in tensor.ours:
            leading, rest = shapes[path][:count], shapes[path][count:]
            of_part = {"a": (*rest[:inputs], rank), "b": (rank, *rest[inputs:]), "magnitude": rest[inputs:]}
            targets[path] = (*leading, *of_part[part])
        for path, value in _taken(tensor, part, stored, targets, module).items():
            for other in row.ours if part == "a" else (path,):
                module.values[other][part] = value
    return module


def _read_saved(row: Tensor, stored: Values, shapes: Mapping[str, Shape], weight: Weight | None) -> Values:
    """Our parameters of a tensor that is trained in full in some layers; the base's in the others."""
    for name, _ in row.names(shapes):
        if weight is not None and name not in stored:
            value = weight(name)
            stored[name] = value if peft_modules.is_outputs_first(row) else value.T
    return _taken(row, "", stored, {path: shapes[path] for path in row.ours})


def _taken(row: Tensor, part: str, stored: Values, shapes: Mapping[str, Shape], module: Module | None = None) -> Values:
    """Our parameters of these shapes, popped from `stored`; padded with zeros where layers have smaller ones."""
    values = {path: np.zeros(shape, np.float32) for path, shape in shapes.items()}
    for name, at in row.names(shapes):
        rank = module.layers[at[0]].rank if module and module.layers else None
        if rank == 0:
            continue
        name = name.removesuffix(".weight") + PARTS[part] if part else name
        if name not in stored:
            raise UserError(f"{name} is missing in the adapter, which has it in another layer: copy the adapter again")
        value, shape = stored.pop(name), row.shape(shapes)
        if module is not None and rank is not None:
            value = peft_modules.padded(value, part, module.rank)
        if value.shape != shape:
            raise UserError(f"{name} has the shape {list(value.shape)}, must be {list(shape)} in this model")
        for path, piece in row.split(value, shapes).items():
            values[path][at] = piece
    return values


def _lora_of(modules: Sequence[Module], saved: Iterable[str], config: Mapping[str, Any]) -> Lora:
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    targets: list[str] = []
    ranks: list[tuple[str, int]] = []
    alphas: list[tuple[str, float]] = []
    for module in modules:
        for path in module.row.ours:
            names = [(path, Layer(module.rank, module.alpha))]
            if module.layers:
                names = [(Lora.numbered(path, at), layer) for at, layer in enumerate(module.layers) if layer.rank]
            targets += [path] if module.everywhere else [name for name, _ in names]
            ranks += [(name, layer.rank) for name, layer in names if layer.rank != rank]
            alphas += [(name, layer.alpha) for name, layer in names if layer.alpha != alpha]
    fused = {tuple(path.rpartition("/")[2] for path in m.row.ours): None for m in modules if len(m.row.ours) > 1}
    return Lora(
        rank=rank,
        alpha=alpha,
        rslora=bool(config.get("use_rslora")),
        dora=bool(config.get("use_dora")),
        dropout=float(config.get("lora_dropout") or 0.0),
        targets=tuple(targets),
        rank_pattern=tuple(ranks),
        alpha_pattern=tuple(alphas),
        fused=tuple(fused),
        modules_to_save=tuple(saved),
    )
