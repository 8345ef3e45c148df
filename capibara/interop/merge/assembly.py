"""Where the tensors of a model come from that is put together of parts of others: ranges of layers, experts of a mixture."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence

from capibara.consensus.merging.assemblies import Mixture, Passthrough
from capibara.consensus.merging.method import Method
from capibara.core.types import UserError
from capibara.interop import open_model
from capibara.interop.hf import config as hf_config
from capibara.interop.merge.inputs import Described
from capibara.models import api
from capibara.models.api import DecoderConfig, LayerKind, Moe

_ROUTER = "layers/mlp/router"
_AFTER = ("final_norm", "output", "transform")  # our parameters after the layers, by the beginnings of their names


@dataclasses.dataclass(frozen=True)
class Part:
    """Where a tensor of the result comes from.

    Attributes:
      name: of the tensor in the models.
      model: the index of the model that it is taken from; None: it is merged of all.
    """

    name: str
    model: int | None = None


def result_of(method: Method, models: Sequence[Described]) -> api.Model:
    """The result's architecture.

    Args:
      method: of the merge.
      models: without the base; all are alike, or differ in their layers if the method takes ranges of them.

    Raises:
      UserError: the method cannot put these models together.
    """
    first = models[0]
    if not isinstance(method, Mixture) and not takes_layers(method):
        return first.model
    configs = []
    for model in models:
        if type(model.model.config) is not DecoderConfig:
            raise UserError(
                f"{model.path} has the architecture {type(model.model.config).__name__}, must have DecoderConfig for {method.name} of "
                "parts: try --method=linear"
            )
        configs.append(model.model.config)
    if isinstance(method, Mixture):
        return api.build(_mixture(configs[0], len(models), method.top_k, first.path))
    assert isinstance(method, Passthrough)
    return api.build(_deeper(method.layers, configs, [item.path for item in models]))


def takes_layers(method: Method) -> bool:
    """Whether a method takes ranges of layers, so that the models may differ in their number."""
    return isinstance(method, Passthrough) and bool(method.layers)


def _mixture(config: DecoderConfig, count: int, top_k: int, path: str) -> DecoderConfig:
    if config.moe is not None:
        raise UserError(f"{path} has experts already, must have an MLP for --method=moe: try --method=linear")
    mixture = dataclasses.replace(config, moe=Moe(num_experts=count, top_k=top_k))
    try:
        hf_config.to_hf(mixture)
    except UserError as error:
        cause = str(error).partition(": ")[2]
        raise UserError(
            f"{path} cannot become a mixture, because transformers has none of its architecture ({cause}): --method=moe is for "
            "Llamas, and for models with norms of queries and keys and without windows, such as Qwen 3"
        ) from None
    return mixture


def _deeper(layers: Sequence[tuple[int, int]], configs: Sequence[DecoderConfig], paths: Sequence[str]) -> DecoderConfig:
    kinds: list[LayerKind] = []
    windows: dict[int | None, str] = {}
    for (start, end), config, path in zip(layers, configs, paths, strict=True):
        if config.module_layers:
            some = " and ".join(sorted(config.module_layers))
            raise UserError(
                f"{path} has layers that differ in their modules ({some} are in some of them), ranges are of layers that are "
                "alike: try --method=linear"
            )
        if end > config.num_layers:
            raise UserError(
                f"layers has {start}:{end}, must end at {config.num_layers}, the number of layers of {path}, or before"
            )
        pattern = config.layer_pattern
        of_layers = [pattern[layer % len(pattern)] for layer in range(start, end)]
        kinds += of_layers
        if config.rope != configs[0].rope:
            logging.getLogger(__name__).warning(
                "%s has another rope than %s: the result has that of %s", path, *[paths[0]] * 2
            )
        if "local" in of_layers:
            windows[config.window] = path
    if len(windows) > 1:
        (first, item), (second, other), *_ = windows.items()
        raise UserError(
            f"the window of {other} is {second}, must be {first} as of {item}: take ranges without layers that have windows, or "
            "models with the same"
        )
    shortest = next(n for n in range(1, len(kinds) + 1) if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
    window = next(iter(windows), None)
    pattern = tuple(kinds[:shortest])
    return dataclasses.replace(configs[0], num_layers=len(kinds), layer_pattern=pattern, window=window)


def names_of(method: Method, first: Described, model_type: str) -> str:
    """The model_type whose names the models' tensors have: `model_type`, or that of models with MLPs in place of experts."""
    return hf_config.to_hf(first.model.config)["model_type"] if isinstance(method, Mixture) else model_type


def parts_of(method: Method, result: api.Model, model_type: str, first: Described) -> Mapping[str, Part]:
    """Where each tensor of the result comes from; those that are missing are new.

    Args:
      method: of the merge.
      result: of `result_of`.
      model_type: of the result's tensors.
      first: one of the models.

    Raises:
      UserError: a tensor holds several layers.
    """
    rows = open_model.hf_rows(result, model_type)
    if isinstance(method, Passthrough) and takes_layers(method):
        return _of_layers(method.layers, rows, first)
    if not isinstance(method, Mixture):
        return {name: Part(name) for name in rows}
    stored = open_model.hf_rows(first.model, names_of(method, first, model_type))
    held = {row.ours: row for row, _ in stored.values()}
    parts = {}
    for name, (row, at) in rows.items():
        if row.ours != (_ROUTER,):
            numbers = dict(zip(row.numbered, at, strict=True))
            parts[name] = Part(held[row.ours].name.format(**numbers), numbers.get("e"))
    return parts


def _sources(layers: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The model's index and the layer's number in it, for each layer of the result."""
    return list(itertools.chain.from_iterable(
        ((model, layer) for layer in range(start, end)) for model, (start, end) in enumerate(layers)
    ))  # fmt: skip


def _of_layers(
    layers: Sequence[tuple[int, int]], rows: Mapping[str, tuple[open_model.Tensor, tuple[int, ...]]], first: Described
) -> dict[str, Part]:
    sources, parts = _sources(layers), {}
    for name, (row, at) in rows.items():
        numbers = dict(zip(row.numbered, at, strict=True))
        if "l" in numbers:
            model, layer = sources[numbers["l"]]
            parts[name] = Part(row.name.format(**numbers | {"l": layer}), model)
        elif "l" in row.layout:
            raise UserError(
                f"{name} of {first.path} holds all layers, ranges of them cannot be taken: try --method=linear"
            )
        else:
            parts[name] = Part(name, len(layers) - 1 if row.ours[0].startswith(_AFTER) else 0)
    return parts
