"""Rewires the experts of a model and writes the result: the implementation of `capibara experts`."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from typing import Any

import numpy as np

from capibara import __version__
from capibara.core import tree
from capibara.core.types import Params, UserError
from capibara.interop import conversion, hub, open_model
from capibara.interop import peft_runs as adapters
from capibara.interop.conversion import ModelReader, OurModel, Show
from capibara.interop.experts import statistics
from capibara.interop.experts.operation import PARAMETERS, ExpertOperation, Place
from capibara.interop.experts.statistics import ALL, Statistics
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import model_card, wrappers
from capibara.models import api
from capibara.models.api import DecoderConfig, TransformerConfig
from capibara.storage import outputs, stores

REPORT = "experts.json"
_FORMATS = ("hf", "pytorch", "gguf", "capibara")


def _silent(topic: str, detail: str) -> None: ...


def rewire(
    path: str,
    target: str,
    operation: ExpertOperation,
    statistics_path: str | None,
    form: str | None,
    dtype: str | None,
    reader: ModelReader,
    show: Show = _silent,
) -> str:
    """Writes a model with other experts; returns a line that describes it.

    The host holds the model and its result.

    Args:
      path: of a run folder, a folder of Hugging Face or PEFT (its adapters are merged), or a .gguf file.
      target: a new folder or file; it gets a report, REPORT, which says what each expert is made of.
      operation: how.
      statistics_path: the file of `capibara experts stats`; None: there is none.
      form: one of hf, pytorch, gguf and capibara; None: gguf if the target's name ends so, else hf.
      dtype: of the stored tensors, as in conversion.convert; None: that of the model.
      reader: reads runs.
      show: reports the progress.

    Raises:
      UserError: settings, statistics, model or target do not fit; before a large tensor is read.
    """
    form = form or ("gguf" if target.endswith(".gguf") else "hf")
    if form not in _FORMATS:
        raise UserError(f"--format={form} is not for models with experts, must be one of {', '.join(_FORMATS)}")
    conversion.check_target(target, form, dtype)
    outputs.check_writable(report := _report_path(target))
    use = _statistics(operation, statistics_path)
    path = hub.local_path(path)
    if not stores.of(path).has_local_paths and (path.endswith(".gguf") or not reader.is_run(path)):
        path = open_model.local_model(path)
    config = _checked(path, operation, use, statistics_path, reader)
    show("reading", path)
    opened = conversion.without_mtp(conversion.opened(path, None, reader), "their experts would be other ones")
    source = conversion.as_ours(opened)
    show("rewiring", f"{config.num_layers} layers")
    result, made_of = rewired(source, operation, use)
    summary = conversion.write(result, target, form, dtype, reader.save)
    values = _report(path, operation, statistics_path, result.model.config, made_of)
    outputs.save(report, json.dumps(values, indent=1) + "\n")
    return f"{summary}; {operation.name}, see {report}"


def rewired(
    source: OurModel, operation: ExpertOperation, use: Statistics | None
) -> tuple[OurModel, dict[int, list[list[int]]]]:
    """A model with other experts, and for each layer what its experts are made of.

    Args:
      source: the model; its parameters are whole on this host.
      operation: how.
      use: statistics of this model; None: there are none.
    """
    config = source.model.config
    assert isinstance(config, DecoderConfig), "it is checked before"
    result = operation.result(config)
    params, made_of = rewired_params(config, source.params, operation, use)
    about = model_card.of_fine_tuned(source.about, source.config)
    hf = hf_config.to_hf(result, source.config)
    return dataclasses.replace(source, model=api.build(result), params=params, config=hf, about=about), made_of


def rewired_params(
    config: DecoderConfig,
    params: Params,
    operation: ExpertOperation,
    use: Statistics | None,
) -> tuple[Params, dict[int, list[list[int]]]]:
    """The parameters of the result, and for each layer what its experts are made of.

    Args:
      config: of the model before.
      params: its parameters.
      operation, use: as for `rewired`.
    """
    layers = tree.branch(params, "layers")
    mlp, numbers = tree.branch(layers, "mlp"), config.module_layers.get("mlp", tuple(range(config.num_layers)))
    rest = {} if operation.of_dense else {name: value for name, value in mlp.items() if name not in PARAMETERS}
    new: dict[str, list[np.ndarray]] = {}
    made_of: dict[int, list[list[int]]] = {}
    for index, layer in enumerate(numbers):
        weights = {name: np.asarray(tree.leaf(mlp, name)[index], np.float32) for name in mlp if name in PARAMETERS}
        if "router" in weights:
            weights["router"] = weights["router"].T
        of_layer = None if use is None else use.use(index, operation.domain or ALL)
        place = Place(config.moe, of_layer, np.random.default_rng([operation.seed, layer]))
        changed, made_of[layer] = operation.layer(weights, place)
        for name, value in changed.items():
            dtype = tree.leaf(mlp, name if name in mlp else "up").dtype
            new.setdefault(name, []).append((value.T if name == "router" else value).astype(dtype))
    stacked: dict[str, Any] = {name: np.stack(values) for name, values in new.items()}
    return {**params, "layers": {**layers, "mlp": {**rest, **stacked}}}, made_of


def _statistics(operation: ExpertOperation, path: str | None) -> Statistics | None:
    if path is None and operation.needs_statistics:
        raise UserError(
            f"{operation.name} needs --statistics=FILE: write one with `capibara experts stats MODEL --out=experts.json`"
        )
    if path is not None and not operation.needs_statistics:
        raise UserError(f"--statistics={path} has no effect on {operation.name} with these settings: leave it out")
    return None if path is None else statistics.read(path)


def _checked(
    path: str, operation: ExpertOperation, use: Statistics | None, statistics_path: str | None, reader: ModelReader
) -> DecoderConfig:
    """The model's configuration, if the operation fits it and its family can say the result."""
    like = conversion.described(path, adapters.base_of(path, None) if adapters.is_adapter(path) else None, reader)
    config: TransformerConfig = like.model.config if isinstance(like, OurModel) else hf_config.from_hf(like.config)
    if type(config) is not DecoderConfig:
        raise UserError(
            f"{path} has the architecture {type(config).__name__}, `capibara experts {operation.name}` is for DecoderConfig alone"
        )
    values = wrappers.with_mtp(like.config, 0) if config.mtp_windows else like.config
    config = dataclasses.replace(config, mtp=None)  # its modules are left out, with a line
    result = operation.result(config)
    if use is not None:
        assert statistics_path is not None
        use.check(config, statistics_path)
        use.use(0, operation.domain or ALL)
    try:
        hf_config.to_hf(result, values)
    except UserError as error:
        cause = str(error).partition(": ")[2]
        raise UserError(
            f"{path} cannot be written after {operation.name}: transformers has no such architecture ({cause}); try other settings"
        ) from None
    if (caveat := operation.caveat(config)) is not None:
        logging.getLogger(__name__).warning("%s changes the function, so train the result: %s", operation.name, caveat)
    if config.moe is not None and config.moe.hints is not None:
        logging.getLogger(__name__).warning("%s has domain hints, which name experts: the result has none", path)
    return config


def _report_path(target: str) -> str:
    return f"{target.removesuffix('.gguf')}.{REPORT}" if target.endswith(".gguf") else os.path.join(target, REPORT)


def _report(
    path: str,
    operation: ExpertOperation,
    statistics_path: str | None,
    config: TransformerConfig,
    made_of: dict[int, list[list[int]]],
) -> dict[str, Any]:
    assert config.moe is not None
    return {
        "operation": operation.name,
        "settings": dataclasses.asdict(operation),
        "model": path,
        "statistics": statistics_path,
        "experts": config.moe.num_experts,
        "experts_per_token": config.moe.top_k,
        "made_of": made_of,
        "capibara": __version__,
    }
