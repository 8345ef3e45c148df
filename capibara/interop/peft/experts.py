"""PEFT's adapters of experts, in two layouts.

With transformers 4 each expert is a module of its own ("experts.3.w1"), with an adapter like any other. With
transformers 5 the experts of a layer are one parameter, `gate_up_proj` or `down_proj`, and the router's weight is a
parameter too. PEFT names them in `target_parameters` and has one adapter for all experts, with the rows of `lora_A`
sorted by expert and the columns of `lora_B` by rank; it supports neither DoRA nor dropout for them. PEFT with
transformers 5 also loads the first layout, if gate, up and down all have adapters of the rank and alpha outside the
patterns, without rsLoRA: they are written so, with zeros for missing adapters.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from capibara.core.types import UserError
from capibara.interop.hf.layout.tensors import Shape, Tensor, own_letters
from capibara.models.api import Lora

_GATE_UP, _DOWN, _ROUTER = "gate_up_proj", "down_proj", "gate.weight"
_ROUTERS = (_ROUTER, "router.weight")  # the latter of gpt-oss
_INNER, _OUTER = re.compile(r"(?<=\.experts)\.base_layer(?=\.lora_)"), re.compile(r"(?<=\.experts)(?=\.lora_)")
_PAIR, _LAST = ("layers/mlp/gate", "layers/mlp/up"), "layers/mlp/down"


def is_stacked(row: Tensor) -> bool:
    """Whether a row of a table is one tensor for a layer's experts."""
    return row.layout[len(row.numbered) :].startswith("e")


def is_routed(row: Tensor) -> bool:
    """Whether a row belongs to experts, in either layout."""
    return "e" in row.layout and not is_router(row)


def is_router(row: Tensor) -> bool:
    """Whether a row is a router's."""
    return row.ours == ("layers/mlp/router",)


def stacked(row: Tensor, part: str, inputs: str, outputs: str) -> Tensor:
    """The part "a" or "b" of the adapter of an is_stacked row, as a row of its own."""
    if part == "a":
        return dataclasses.replace(
            row, dims=f"er {inputs}", layout=f"{row.numbered}e{inputs}r", ours=row.ours[:1], along=""
        )
    return dataclasses.replace(row, dims=f"{outputs} re", layout=f"{row.numbered}er{own_letters(outputs)}")


def parameter(row: Tensor) -> str:
    """The name, in `target_parameters` and patterns, of a row that is a parameter in transformers 5; "": a module."""
    if is_router(row):
        return _router_name(row)
    return row.name.rpartition(".")[2] if is_stacked(row) else ""


def _router_name(row: Tensor) -> str:
    return _ROUTERS[row.name.endswith(_ROUTERS[1])]


def is_fused(config: Mapping[str, Any], path: str) -> bool:
    """Whether a PEFT folder has the layout of transformers 5.

    Args:
      config: of the folder.
      path: of the folder, for errors.

    Raises:
      UserError: it has adapters of other parameters.
    """
    named = config.get("target_parameters") or ()
    ends = tuple(f".{end}" for end in (_GATE_UP, _DOWN, *_ROUTERS))
    of_experts = [name for name in named if f".{name}".endswith(ends)]
    strange = [name for name in named if name not in of_experts and not name.endswith(".weight")]
    if strange:
        raise UserError(
            f"{path} has target_parameters = {strange!r}, which are not supported: merge it with PEFT first"
        )
    return bool(of_experts)


def named(values: Mapping[str, np.ndarray], targets: Sequence[str]) -> dict[str, np.ndarray]:
    """The tensors of a folder in the layout of transformers 5, with the parameters' names in theirs.

    PEFT wraps a layer's experts once per parameter, so that names tell only the nesting depth: gate_up_proj is the
    inner one if there are both.
    """
    both = any(_INNER.search(name) for name in values)
    alone = _DOWN if both or any(name.endswith(_DOWN) for name in targets) else _GATE_UP
    return {_OUTER.sub(f".{alone}", _INNER.sub(f".{_GATE_UP}", name)): value for name, value in values.items()}


def wrapped(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inverse of `named`."""
    both = all(any(f".experts.{part}.lora_" in name for name in values) for part in (_GATE_UP, _DOWN))
    inner = ".base_layer" if both else ""
    return {
        re.sub(r"(?<=\.experts)\.\w+(?=\.lora_)", lambda m: inner if m[0] == f".{_GATE_UP}" else "", name): value
        for name, value in values.items()
    }


def check_fused(lora: Lora) -> None:
    """Checks that adapters can be written in the layout of transformers 5.

    Raises:
      UserError: PEFT does not support them in that layout.
    """
    if lora.dora:
        raise UserError(
            "Lora.dora is set, and PEFT has no DoRA of parameters, as experts and routers are in transformers 5: use "
            "--format=peft, which PEFT reads with transformers 4, or write the merged model"
        )


def loadable(modules: list, rows: Sequence[Tensor], shapes: Mapping[str, Shape], lora: Lora, new: Callable) -> list:
    """Equivalent adapters in the layout of transformers 4 that PEFT also loads with transformers 5.

    Args:
      modules: of the whole model.
      rows: the model's table.
      shapes: of our parameters.
      lora: the adapters' configuration.
      new: (row, rank, alpha, values) -> a module.

    Returns:
      The modules without rsLoRA's scale; with DoRA, which PEFT supports only with transformers 4, unchanged.
    """
    if lora.dora or not any(is_routed(module.row) for module in modules):
        return modules
    if lora.rslora:
        modules = [_without_rslora(module) for module in modules]
    held = {module.row.ours[0]: module for module in modules if module.row.ours[0] in _PAIR}
    if not held:
        return modules
    base = next(iter(held.values()))
    rank, scale = max(module.rank for module in held.values()), base.alpha / base.rank
    rest = {module.row.ours[0]: module for module in modules if module.row.ours[0] not in _PAIR}
    for row in rows:
        (path, *_), module = row.ours, held.get(row.ours[0])
        if path not in (*_PAIR, _LAST) or path in rest:
            continue
        *experts, inputs, outputs = shapes[path]
        a, b = np.zeros((*experts, inputs, rank), np.float32), np.zeros((*experts, rank, outputs), np.float32)
        if module is not None:
            a[..., : module.rank] = module.values[path]["a"]
            b[..., : module.rank, :] = module.values[path]["b"] * (module.alpha / module.rank / scale)
        rest[path] = new(row, rank, scale * rank, {path: {"a": a, "b": b}})
    return list(rest.values())


def _without_rslora(module: Any) -> Any:
    """A module whose scale is alpha / rank."""
    layers = tuple(layer._replace(alpha=layer.alpha * layer.rank**0.5) for layer in module.layers)
    return module._replace(alpha=module.alpha * module.rank**0.5, layers=layers)


def first(modules: Sequence[Any]) -> Any:
    """The module whose rank and alpha are the defaults outside the patterns."""
    return next((module for module in modules if is_routed(module.row) and module.row.ours[0] in _PAIR), modules[0])


def pattern_names(row: Tensor, name: str) -> tuple[str, ...]:
    """The names of a module in patterns: with transformers 4, and as the parameter that PEFT makes of it with 5."""
    if is_router(row):
        return tuple(dict.fromkeys((name, _router_name(row))))
    return (name, _DOWN) if is_routed(row) and row.ours == (_LAST,) and name != _DOWN else (name,)
