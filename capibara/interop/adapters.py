"""PEFT's adapters from runs of ours, and merged into the models that they are of."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Protocol

import jax

from capibara import limits, tree
from capibara.interop import hf_config, hf_folder, peft
from capibara.models import api
from capibara.types import Params, UserError


class Run(Protocol):
    """What training.run_folder.load gives.

    Attributes:
      trainer: of the run.
      model: with adapters or without.
      params: its parameters.
    """

    trainer: Any
    model: api.Model
    params: Params


def is_adapter(path: str) -> bool:
    """Whether a path is a folder of PEFT."""
    return os.path.exists(os.path.join(path, peft.CONFIG))


def base_of(folder: str, given: str | None) -> str:
    """Where the model is that an adapter is of.

    Args:
      folder: the adapter's.
      given: by the user, before what the adapter names.

    Raises:
      UserError: it is not here.
    """
    named = given or peft.read_config(folder).get("base_model_name_or_path")
    if not named or not os.path.exists(named):
        raise UserError(f"{folder} is an adapter of {named!r}, which is not here: name its folder with --base=PATH")
    return named


def merged(folder: str, model: api.Model, params: Params, like: Mapping[str, Any]) -> tuple[api.Model, Params]:
    """A model with the adapters of a folder in its parameters.

    Args:
      folder: of PEFT.
      model, params: what they are of, on one device.
      like: the model's config.json.
    """
    lora, values = peft.read_peft(folder, model, hf_config.to_hf(model.config, like)["model_type"])
    adapted = api.build(dataclasses.replace(model.config, lora=lora))
    return model, jax.jit(adapted.merge)(tree.joined(values, params))


def as_gguf(folder: str, target: str, model: api.Model, like: Mapping[str, Any]) -> str:
    """Writes the adapters of a folder of PEFT as a GGUF file; returns a line that says what is there now.

    Args:
      folder: of PEFT.
      target: a new file.
      model: what they are of.
      like: the model's config.json.

    Raises:
      UserError: they cannot be read, or llama.cpp has no such ones.
    """
    config = hf_config.to_hf(model.config, like)
    lora, values = peft.read_peft(folder, model, config["model_type"])
    return _write_gguf(target, values, api.build(dataclasses.replace(model.config, lora=lora)), config)


def run_as_gguf(run: Run, target: str, base: str | None, origin: Mapping[str, bytes]) -> str:
    """As `as_gguf`, of a run with adapters; `base` and `origin` as in `write_run`."""
    _, values = _base(run, base, origin)
    return _write_gguf(target, run.model.trained(run.params), run.model, values)


def _write_gguf(target: str, values: Params, model: api.Model, config: Mapping[str, Any]) -> str:
    from capibara.interop import gguf_adapter

    count = gguf_adapter.write_adapter(target, config, peft.pairs(values, model, config["model_type"]))
    return f"{target}: adapters of {config['model_type']} for llama.cpp, of {count} tensors"


def write_run(
    run: Run, target: str, base: str | None, origin: Mapping[str, bytes], *, fused_experts: bool = False
) -> str:
    """Writes the adapters of a run; returns a line that says what is there now.

    Args:
      run: with adapters that are not merged.
      target: the folder, a new one.
      base: where PEFT finds the model without them; None: where the run began, if PEFT can read that.
      origin: what the run's initial weights came with, by name.
      fused_experts: as in peft.write_peft.

    Raises:
      UserError: the run has no adapters, or PEFT has no such ones.
    """
    base, values = _base(run, base, origin)
    peft.write_peft(target, run.params, run.model, values["model_type"], base, fused_experts=fused_experts)
    of = "a model that PEFT is told of when it loads" if base is None else base
    count = tree.param_count(run.model.trained(run.model.abstract_params))
    return f"{target}: adapters of {values['model_type']}, {count:,} parameters, of {of}"


def _base(run: Run, base: str | None, origin: Mapping[str, bytes]) -> tuple[str | None, dict[str, Any]]:
    """Where the base of a run's adapters is, None where nobody knows, and its config.json."""
    began = run.trainer.init_from
    if run.model.config.lora is None:
        raise UserError("--format=peft and gguf_lora are of a run with adapters, and this one has none: take hf")
    if base is None and began is not None and os.path.exists(os.path.join(began, hf_folder.CONFIG)):
        base = began
    if base is not None and os.path.exists(base):  # else a name of the Hub
        base = os.path.abspath(base)
    # Names are those of the base's architecture: some are another's with other tensors, Phi 3 is Llama so.
    if base is not None and os.path.exists(os.path.join(base, hf_folder.CONFIG)):
        like = hf_folder.config_of(base)
    else:
        like = limits.parse_json(origin.get(hf_folder.CONFIG, b"{}"))
    return base, hf_config.to_hf(run.model.plain.config, like)
