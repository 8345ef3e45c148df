"""The models of a merge: described and compared before any is read whole, then read tensor by tensor."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np

from capibara.core import fields
from capibara.core.types import UserError
from capibara.interop import conversion, hub, open_model
from capibara.interop import peft_runs as adapters
from capibara.interop.conversion import ModelReader, OurModel, Show
from capibara.interop.hf import config as hf_config
from capibara.interop.merge import tokenizers
from capibara.interop.open_model import ForeignModel
from capibara.interop.peft import fields as peft_fields
from capibara.models import api
from capibara.storage import hashing, stores

# How far a model sees: it may differ between models whose tensors fit.
_REACH = ("rope", "window", "layer_pattern", "max_length")
# What models may differ in whose ranges of layers become one; assembly.py compares the layers that are taken.
_OF_LAYERS = ("num_layers", "layer_pattern", "window", "rope")


@dataclasses.dataclass(frozen=True)
class Described:
    """A model of which no large tensor has been read.

    Attributes:
      path: as the user named it.
      source: the foreign model; or a run or an adapter with its base, without values.
      model: its architecture.
      base: of an adapter; None: it is none.
    """

    path: str
    source: ForeignModel | OurModel
    model: api.Model
    base: str | None = None


def described(path: str, base: str | None, reader: ModelReader) -> Described:
    """Opens a model.

    Args:
      path: of a run folder, a folder of PEFT, Hugging Face or T5X, or a .gguf file.
      base: the base model of an adapter whose own is not here.
      reader: reads runs.

    Raises:
      UserError: it cannot be read.
    """
    path = hub.local_path(path)
    if not stores.of(path).has_local_paths and (path.endswith(".gguf") or not reader.is_run(path)):
        path = open_model.local_model(path)
    base_folder = None
    if adapters.is_adapter(path):
        named = peft_fields.read(path).get("base_model_name_or_path")
        base_folder = adapters.base_of(path, None if named and os.path.exists(named) else base)
    source = conversion.described(path, base_folder, reader)
    if isinstance(source, OurModel):
        return Described(path, source, source.model, base_folder)
    model = api.build(hf_config.from_hf(source.config))
    open_model.check(source, model)
    return Described(path, source, model)


def check_alike(models: Sequence[Described], *, tokenizer: str | None = None, in_layers: bool = True) -> None:
    """Compares architectures, and tokenizers unless one is named.

    Args:
      models: the base included.
      tokenizer: path of the model whose tokenizer the result has; None: all are the same.
      in_layers: whether they must have as many layers, of the same kinds.

    Raises:
      UserError: two models differ.
    """
    first = models[0]
    tokens = {model.path: tokenizers.tokens_of(model.source.tokenizer, model.path) for model in models}
    if tokenizer is not None and tokenizer not in tokens:
        raise UserError(
            f"--tokenizer={tokenizer} is none of the models{fields.did_you_mean(tokenizer, tokens, 'models')}"
        )
    for other in models[1:]:
        _check_architecture(first, other, () if in_layers else _OF_LAYERS)
        if tokenizer is None and (how := tokenizers.difference(tokens[first.path], tokens[other.path])):
            raise UserError(
                f"{other.path} has another tokenizer than {first.path}: {how}; merge models of one tokenizer, or set "
                f"--tokenizer={first.path} if its tokens are meant all the same"
            )


def _check_architecture(first: Described, other: Described, but_for: Container[str]) -> None:
    if type(first.model.config) is not type(other.model.config):
        kinds = [type(item.model.config).__name__ for item in (other, first)]
        raise UserError(f"{other.path} is a {kinds[0]}, {first.path} a {kinds[1]}: merge models of one architecture")
    ours, theirs = hf_config.resolved(first.model.config), hf_config.resolved(other.model.config)
    different = [name for name in ours if ours[name] != theirs.get(name) and name not in but_for]
    for name in different:
        if name in _REACH:
            logging.getLogger(__name__).warning(
                "%s has another %s than %s: the result has that of %s", other.path, name, first.path, first.path
            )
            continue
        raise UserError(
            f"{name} of {other.path} is {fields.short(theirs.get(name))}, must be {fields.short(ours[name])} as of "
            f"{first.path}: merge models of one architecture"
        )


class Tensors:
    """The tensors of a model, by the names that the result has; hashes those that are read.

    Attributes:
      names: of all tensors.
    """

    def __init__(self, path: str, source: ForeignModel, model: api.Model, model_type: str):
        self.path = path
        self._named = open_model.NamedTensors(source, model, model_type)
        self.names = self._named.names
        self._hashes: dict[str, str] = {}

    def read(self, name: str) -> np.ndarray:
        """A tensor in float32."""
        try:
            value = self._named.read(name)
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None
        if name not in self._hashes:
            self._hashes[name] = hashing.hash_of(np.ascontiguousarray(value).view(np.uint8).reshape(-1))
        return np.asarray(value, np.float32)

    @property
    def hash(self) -> str:
        """Of the names and stored bytes of all tensors that were read, whatever file they are in."""
        return hashing.hash_of("".join(f"{name} {self._hashes[name]}\n" for name in sorted(self._hashes)).encode())


def read_whole(described: Described, target: str, reader: ModelReader, show: Show) -> ForeignModel:
    """Writes a run, or an adapter merged into its base, to a new folder in float32, to be read tensor by tensor."""
    show("reading", described.path)
    source = conversion.opened(described.path, described.base, reader)
    if isinstance(source, OurModel) and described.base is not None:
        for field in ("head", "num_layers"):
            if getattr(source.model.config, field, None) != getattr(described.model.config, field, None):
                raise UserError(
                    f"{described.path} is an adapter with which its base has another {field}: write that model first, capibara "
                    f"convert --from={described.path}, and name it"
                )
    conversion.write(source, target, "hf", "f32", reader.save)
    return open_model.open_model(target)


def config_of(described: Described) -> Mapping[str, Any]:
    """The config.json that transformers would have for a model."""
    if isinstance(described.source, OurModel):
        return described.source.config
    return hf_config.to_hf(described.model.config, described.source.config)
