"""Merges models: the implementation of `capibara merge`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np

from capibara import __version__
from capibara.consensus.merging.assemblies import Mixture
from capibara.consensus.merging.method import Method, draw_of
from capibara.core.types import UserError
from capibara.interop import conversion
from capibara.interop.conversion import ModelReader, OurModel, Show
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import model_card, tables
from capibara.interop.hf.layout.tensors import Shape
from capibara.interop.merge import assembly, inputs
from capibara.interop.merge.assembly import Part
from capibara.interop.merge.inputs import Described, Tensors
from capibara.storage import outputs, partial

REPORT = "merge.json"
_FORMATS = ("hf", "pytorch", "gguf", "t5x", "capibara")


def _silent(topic: str, detail: str) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Merge:
    """What to merge.

    Attributes:
      models: paths of run folders, folders of PEFT, Hugging Face or T5X, or .gguf files.
      method: how.
      base: path of the model that they were fine-tuned from; None: there is none.
      tokenizer: path of the model whose tokenizer the result has; None: that of the first, and all must be the same.
      seed: of random masks.
    """

    models: tuple[str, ...]
    method: Method
    base: str | None = None
    tokenizer: str | None = None
    seed: int = 0


class MergedModel:
    """Models merged as they are read, tensor by tensor: an open_model.ForeignModel.

    Args:
      models: in the order of the method's settings.
      base: the base model; None: there is none.
      method: how.
      seed: of random masks.
      like: the result's configuration, tokenizer and cards.
      parts: where its tensors come from; those that are missing are new.
      stored: dtype of the result's tensors.
      show: reports the progress.
    """

    def __init__(
        self, models: Sequence[Tensors], base: Tensors | None, method: Method, seed: int, like: OurModel,
        parts: Mapping[str, Part], stored: str, show: Show,
    ):  # fmt: skip
        self.config, self.tokenizer, self.about = like.config, like.tokenizer, like.about
        self._models, self._base, self._method, self._seed = models, base, method, seed
        self._shapes, self._parts, self._stored, self._show = like.shapes(), parts, stored, show
        self._done: set[str] = set()

    def shapes(self) -> dict[str, Shape]:
        return dict(self._shapes)

    def dtype(self, name: str) -> str:
        return self._stored

    def read(self, name: str) -> np.ndarray:
        """A merged tensor, float32.

        Raises:
          UserError: a model has values that are not finite, the method finds no result, or tables of whole numbers differ.
        """
        self._done.add(name)
        self._show("merging", f"tensor {len(self._done)} of {len(self._shapes)}, {name}")
        if (part := self._parts.get(name)) is None:
            assert isinstance(self._method, Mixture), "others have no new tensors"
            return self._method.router(self._shapes[name], draw_of(self._seed, name))
        models = self._models if part.model is None else [self._models[part.model]]
        tensors, base = _Lazy(models, part.name), None
        if tables.numbers(self.config["model_type"], [name]):
            return _same(name, tensors)
        if part.model is not None:
            merged = self._method.alone(tensors[0])
        else:
            base = None if self._base is None else self._base.read(part.name)
            try:
                merged = self._method.merge(tensors, base, draw_of(self._seed, name))
            except UserError as error:
                raise UserError(f"{name}: {error}") from None
        if not np.isfinite(merged).all():  # the models' own values are: open_model has looked at them
            raise UserError(f"{part.name} of the result has values that are not finite: try smaller weights")
        return merged


def _same(name: str, tensors: Sequence[np.ndarray]) -> np.ndarray:
    """A table of whole numbers, which has no sum that means anything."""
    first = tensors[0]
    if not all(np.array_equal(first, tensor) for tensor in tensors):
        raise UserError(
            f"{name} has whole numbers that differ between the models, must be the same in all: merge models of one origin"
        )
    return first


class _Lazy(Sequence[np.ndarray]):
    """A tensor of each model, which is read when it is taken."""

    def __init__(self, models: Sequence[Tensors], name: str):
        self._models, self._name = models, name

    def __len__(self) -> int:
        return len(self._models)

    @overload
    def __getitem__(self, i: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, i: slice) -> list[np.ndarray]: ...
    def __getitem__(self, i: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(i, slice):
            return [model.read(self._name) for model in self._models[i]]
        return self._models[i].read(self._name)


def merge(
    merge: Merge, target: str, form: str | None, dtype: str | None, reader: ModelReader, show: Show = _silent
) -> str:
    """Merges models and writes the result; returns a line that describes it.

    The host holds one tensor of each model and what the written format needs; a run or an adapter is read whole once, and
    lies in a temporary folder beside the target in float32.

    Args:
      merge: the models and the method.
      target: a new folder or file; it gets a report of the merge, or x.gguf one beside it, x.merge.json.
      form: one of hf, pytorch, gguf, t5x and capibara; None: gguf if the target's name ends so, else hf.
      dtype: of the stored tensors, as in conversion.convert; None: that of the models if they have the same, else f32.
      reader: reads runs.
      show: reports the progress.

    Raises:
      UserError: models, settings or target do not fit; no model was read whole, unless its values are not finite.
    """
    form = form or ("gguf" if target.endswith(".gguf") else "hf")
    if form not in _FORMATS:
        raise UserError(f"--format={form} cannot hold a merged model, must be one of {', '.join(_FORMATS)}")
    conversion.check_target(target, form, dtype)
    if os.path.lexists(report := _report_path(target)):
        raise UserError(f"{report} exists already: name another --to, or remove it")
    merge.method.check(len(merge.models), has_base=merge.base is not None)
    paths = [*merge.models, *([merge.base] if merge.base is not None else [])]
    models = [inputs.described(path, merge.base if path != merge.base else None, reader) for path in paths]
    inputs.check_alike(models, tokenizer=merge.tokenizer, in_layers=not assembly.takes_layers(merge.method))
    if assembly.takes_layers(merge.method) and any(item.model.config.mtp_windows for item in models):
        raise UserError(
            f"--method={merge.method.name} takes single layers, and a model has modules for multi-token prediction, which follow "
            "the last one: write it without them first (num_nextn_predict_layers or mtp_num_hidden_layers = 0 in config.json)"
        )
    like = _like(models, merge)
    result_type = like.config["model_type"]
    parts = assembly.parts_of(merge.method, like.model, result_type, models[0])
    names = assembly.names_of(merge.method, models[0], result_type)
    with partial.scratch(os.path.abspath(target) + ".models") as spool:
        opened: dict[str, Tensors] = {}  # a model that is named twice is read once
        for i, item in enumerate(models):
            if item.path not in opened:
                opened[item.path] = _tensors(item, os.path.join(spool, str(i)), names, reader, show)
        tensors = [opened[model.path] for model in models]
        base = tensors[-1] if merge.base is not None else None
        of_models, stored = tensors[: len(merge.models)], _dtype(models)
        merged = MergedModel(of_models, base, merge.method, merge.seed, like, parts, stored, show)
        summary = conversion.write(merged, target, form, dtype, reader.save)
        outputs.save(report, json.dumps(_report(merge, tensors, merged), indent=1) + "\n")
    return f"{summary}; {merge.method.name} of {_count(merge.models)}, see {report}"


def _count(models: Sequence[str]) -> str:
    return f"{len(models)} model{'s' * (len(models) > 1)}"


def _report_path(target: str) -> str:
    return f"{target.removesuffix('.gguf')}.{REPORT}" if target.endswith(".gguf") else os.path.join(target, REPORT)


def _like(models: Sequence[Described], merge: Merge) -> OurModel:
    """The result without values: configuration made of the first model's, tokenizer of the named one, cards of all."""
    speaks = next(item for item in models if item.path == (merge.tokenizer or models[0].path))
    model = assembly.result_of(merge.method, models[: len(merge.models)])
    config = dict(inputs.config_of(models[0]))
    if model is not models[0].model:
        config = hf_config.to_hf(model.config, config)
    cards = {item.path: (item.source.about, item.source.config) for item in models}
    about = model_card.of_merged(cards, merge.method.name)
    return OurModel(model, model.abstract_params, config, dict(speaks.source.tokenizer), about)


def _dtype(models: Sequence[Described]) -> str:
    """The dtype that all models are stored in, or float32."""
    result = {conversion.stored(model.source) for model in models}
    return {"bf16": "bfloat16", "f16": "float16"}.get(result.pop() if len(result) == 1 else "", "float32")


def _tensors(described: Described, spool: str, names: str, reader: ModelReader, show: Show) -> Tensors:
    if isinstance(described.source, OurModel):
        os.makedirs(os.path.dirname(spool), exist_ok=True)
        source = inputs.read_whole(described, spool, reader, show)
    else:
        source = described.source
    return Tensors(described.path, source, described.model, names)


def _report(merge: Merge, tensors: Sequence[Tensors], merged: MergedModel) -> dict[str, Any]:
    settings: Mapping[str, Any] = dataclasses.asdict(merge.method)
    models = [{"path": tensor.path, "weights_hash": tensor.hash} for tensor in tensors]
    return {
        "method": merge.method.name,
        "settings": settings,
        "seed": merge.seed,
        "models": models[: len(merge.models)],
        "base": models[-1] if merge.base is not None else None,
        "tokenizer": merge.tokenizer or merge.models[0],
        "model_type": merged.config["model_type"],
        "tensors": len(merged.shapes()),
        "capibara": __version__,
    }
