"""Reads and writes PEFT's adapters for runs, and merges them into their base models."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from capibara.core import limits, tree
from capibara.core.types import Params, UserError
from capibara.interop import hub, open_model
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import folder as hf_folder
from capibara.interop.hf import model_card
from capibara.interop.open_model import LoadedModel
from capibara.interop.peft import fields, replication
from capibara.interop.peft import folder as peft
from capibara.interop.peft import modules as peft_modules
from capibara.interop.peft.variants import Weight
from capibara.models import api


def is_adapter(path: str) -> bool:
    """Whether a path is a PEFT folder."""
    return os.path.exists(os.path.join(path, peft.CONFIG))


def base_of(folder: str, base: str | None) -> str:
    """Path of an adapter's base model, of one that is named as on the Hub that of its copy.

    Args:
      folder: the adapter's.
      base: the user's path, which overrides the adapter's.

    Raises:
      UserError: it is neither here nor on the Hub, or an adapter itself.
    """
    named = base or fields.read(folder).get("base_model_name_or_path")
    try:
        path = hub.local_path(named) if isinstance(named, str) else ""
    except UserError as error:
        raise UserError(f"{folder} is an adapter of another model: {error}") from None
    if not path or not os.path.exists(path):
        raise UserError(
            f"{folder} is an adapter of {named!r}, which is not here: name its folder with --base=PATH of convert, or as "
            f"base_model_name_or_path in {peft.CONFIG}"
        )
    if is_adapter(path):
        raise UserError(
            f"{folder} is an adapter of {path}, which is an adapter itself, must be of a model: merge that first, capibara "
            f"convert --from={path} --to=NEW, and set base_model_name_or_path to NEW in {peft.CONFIG}"
        )
    return path


def merged(folder: str, model: api.Model, params: Params, like: Mapping[str, object]) -> tuple[api.Model, Params]:
    """A model with the adapters of a folder merged into its parameters.

    Args:
      folder: of PEFT.
      model, params: the base, on one device.
      like: the model's config.json.
    """
    config = fields.read(folder)
    model, params = replication.replicated(model, params, config["layer_replication"], folder)
    model_type = hf_config.to_hf(model.config, like)["model_type"]
    result = peft.read_adapted(folder, model, model_type, weights(params, model, model_type), config)
    joined = tree.joined(result.values, params)
    if result.lora is None:
        return result.model, joined
    adapted = api.build(dataclasses.replace(result.model.config, lora=result.lora))
    return result.model, jax.jit(adapted.merge)(joined)


def weights(params: Params, model: api.Model, model_type: str) -> Weight:
    """The tensors of a base by their names in a checkpoint, each joined when it is asked for.

    Args:
      params: of a model without adapters, on the host or on one device.
      model, model_type: as in folder.write_peft.
    """
    values = dict(zip(tree.path_names(params), jax.tree.leaves(params), strict=True))
    shapes = {path: tuple(value.shape) for path, value in values.items()}
    places = open_model.hf_rows(model, model_type)

    def read(name: str) -> np.ndarray:
        row, at = places[name]
        parts = {path: np.asarray(values[path][at], np.float32) for path in row.ours}
        value = row.join(parts, shapes)
        return value if peft_modules.is_outputs_first(row) else value.T

    return read


def foreign_weights(foreign: open_model.ForeignModel, model: api.Model, model_type: str) -> Weight:
    """The tensors of a foreign base by their names in a checkpoint, each read when it is asked for; see `weights`."""
    named = open_model.NamedTensors(foreign, model, model_type)
    places = open_model.hf_rows(model, model_type)

    def read(name: str) -> np.ndarray:
        row, _ = places[name]
        value = np.asarray(named.read(name), np.float32)
        return value if peft_modules.is_outputs_first(row) else value.T

    return read


def as_gguf(folder: str, target: str, model: api.Model, like: Mapping[str, object], weight: Weight) -> str:
    """Writes the adapters of a PEFT folder as a GGUF file; returns a line that describes the result.

    Args:
      folder: of PEFT.
      target: a new file.
      model: the base.
      like: the model's config.json.
      weight: tensors of the base.

    Raises:
      UserError: they cannot be read, or llama.cpp does not support them.
    """
    config = hf_config.to_hf(model.config, like)
    lora, values = peft.read_peft(folder, model, config["model_type"], weight)
    return _write_gguf(target, values, api.build(dataclasses.replace(model.config, lora=lora)), config)


def run_as_gguf(run: LoadedModel, target: str, base: str | None) -> str:
    """Like `as_gguf`, for a run with adapters; `base` as in `write_run`."""
    _, values = _base(run, base)
    return _write_gguf(target, run.model.trained(run.params), run.model, values)


def _write_gguf(target: str, values: Params, model: api.Model, config: Mapping[str, Any]) -> str:
    from capibara.interop.gguf import adapter as gguf_adapter

    count = gguf_adapter.write_adapter(target, config, peft.pairs(values, model, config["model_type"]))
    return f"{target}: adapters of {config['model_type']} for llama.cpp, of {count} tensors"


@dataclasses.dataclass(frozen=True)
class Loader:
    """Loads a run's initial parameters from a PEFT folder: a training.initialization.Adapted.

    Attributes:
      base: loads the base model.
      values: of the adapter, on the host.
      merged: its configuration, if it is merged into the base; None: the run continues to train it.
    """

    base: open_model.Loader
    values: Params
    merged: api.Lora | None = None

    def __call__(self, target: Params) -> Params:
        return self.base(target)

    def adapters(self, target: Params) -> Params:
        def placed(value: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
            return jax.make_array_from_callback(like.shape, like.sharding, lambda at: value[at].astype(like.dtype))

        return jax.tree.map(placed, self.values, target)

    @property
    def origin(self) -> dict[str, bytes]:
        """Files that came with the base's tensors."""
        return self.base.origin


def loader(path: str, model: api.Model, merge: bool = False) -> open_model.Loader | Loader:
    """The loader of a run's initial parameters from a foreign model or an adapter.

    Args:
      path: as in open_model.open_model, or a PEFT folder.
      model: of the run.
      merge: whether to merge an adapter into the base; else it initialises the run's own adapters.

    Raises:
      UserError: it belongs to another model, or the run's adapters differ.
    """
    if not is_adapter(path):
        return open_model.loader(path, model.plain)
    if model.config.lora is None and not merge:
        raise UserError(
            f"{path} is an adapter of PEFT, and {type(model.config).__name__}.lora is None: set it to @Lora() to go on with "
            "the adapter, or Trainer.init_with = 'merged' to train the model with it"
        )
    base = open_model.loader(base_of(path, None), model.plain)
    model_type = hf_config.to_hf(model.plain.config, base.foreign.config)["model_type"]
    lora, values = peft.read_peft(path, model.plain, model_type, foreign_weights(base.foreign, model.plain, model_type))
    if merge:
        return Loader(base, values, lora)
    _check_same(path, lora, model, values)
    return Loader(base, values)


def _check_same(path: str, theirs: api.Lora, model: api.Model, values: Params) -> None:
    field = _incompatible_field(theirs, model, values)
    if field:
        configured, result = limits.shortened(getattr(model.config.lora, field)), getattr(theirs, field)
        raise UserError(f"Lora.{field} is {configured}, {path} was trained with {result!r}: set it to that")


def _incompatible_field(theirs: api.Lora, model: api.Model, values: Params) -> str:
    """The field of a run's Lora that makes its adapters incompatible with these values; "": none."""
    ours, trained = model.config.lora, model.trained(model.abstract_params)
    assert ours is not None
    if ours.dora != theirs.dora:
        return "dora"
    if ours.trainable_tokens != theirs.trainable_tokens:
        return "trainable_tokens"
    named, trained_names = set(tree.path_names(values)), set(tree.path_names(trained))
    for end, field in (("_lora/b", "targets"), ("_lora/a", "fused"), ("", "modules_to_save")):
        if any(name.endswith(end) for name in named ^ trained_names):
            return field
    for name, leaf in zip(tree.path_names(trained), jax.tree.leaves(trained), strict=True):
        weight = name.removesuffix("_lora/b")
        if weight == name:
            continue
        layers = tree.layer_numbers(weight, model.config.module_layers, leaf.shape[0])
        (ranks, scales), (their_ranks, their_scales) = ours.of_layers(weight, layers), theirs.of_layers(weight, layers)
        if ranks != their_ranks:
            return "targets" if list(map(bool, ranks)) != list(map(bool, their_ranks)) else _of(ours, theirs, "rank")
        if scales != their_scales:
            return "rslora" if ours.rslora != theirs.rslora else _of(ours, theirs, "alpha")
    return ""


def _of(ours: api.Lora, theirs: api.Lora, field: str) -> str:
    return field if getattr(ours, field) != getattr(theirs, field) else f"{field}_pattern"


def write_run(
    run: LoadedModel,
    target: str,
    base: str | None,
    tokenizer: Callable[[str], Mapping[str, bytes]] | None = None,
    *,
    fused_experts: bool = False,
) -> str:
    """Writes the adapters of a run; returns a line that describes the result.

    Args:
      run: with unmerged adapters.
      target: a new folder.
      base: where PEFT finds the base model; None: the run's initial weights, or the name that came with them.
      tokenizer: the base's model type -> the files of the run's tokenizer, by name; None: none is written.
      fused_experts: as in folder.write_peft.

    Raises:
      UserError: the run has no adapters, PEFT does not support them, or their base is unknown.
    """
    base, values = _base(run, base)
    if base is None:
        raise UserError(
            "the base of these adapters is unknown, as the run started from random parameters: name the folder of the base "
            "model, --base=PATH"
        )
    model_type = values["model_type"]
    files = None if tokenizer is None else tokenizer(model_type)
    peft.write_peft(target, run.params, run.model, model_type, base, files, fused_experts=fused_experts)
    count = tree.param_count(run.model.trained(run.model.abstract_params))
    return f"{target}: adapters of {values['model_type']}, {count:,} parameters, of {base}"


def _base(run: LoadedModel, base: str | None) -> tuple[str | None, dict[str, Any]]:
    """Path or name of a run's base, None if unknown; and its config.json."""
    origin, training = run.origin, run.training
    initial = None if training is None else training.init_from
    if run.model.config.lora is None:
        raise UserError("--format=peft and gguf_lora are for runs with adapters, and this one has none: use hf")
    if base is None and initial is not None and is_adapter(initial):
        if training is not None and training.init_with == "merged":
            raise UserError(
                f"the run's base has the adapter {initial} merged: write that, capibara convert --from={initial} --to=NEW, and "
                "name it with --base=NEW"
            )
        base = base_of(initial, None)
    if base is None and initial is not None and os.path.exists(os.path.join(initial, hf_folder.CONFIG)):
        base = initial
    if base is not None and os.path.exists(base):  # else a name on the Hub
        base = os.path.abspath(base)
    # Names are those of the base's architecture: it may be another's with other tensors, such as Phi 3 and Llama.
    if base is not None and os.path.exists(os.path.join(base, hf_folder.CONFIG)):
        like = hf_folder.config_of(base)
    else:
        like = limits.parse_json(origin.get(hf_folder.CONFIG, b"{}"), unlimited=True)
    base = base or model_card.name_of(model_card.facts(origin.get(model_card.CARD, b"")), like) or initial
    return base, hf_config.to_hf(run.model.plain.config, like)
