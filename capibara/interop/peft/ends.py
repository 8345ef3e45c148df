"""Adapters of the token embedding and of the head, in models that tie them and in others.

Beside layers PEFT has four ways to change these two: low-rank adapters, modules_to_save, trained rows
(trainable_token_indices), and tensors without any entry in the configuration, which replace the base's. In a tied model
each of them changes the embedding alone, the head alone, or both, as PEFT and its ensure_weight_tying have it. Here the
result is the two matrices, and a model that ties them is untied where they differ. Trained rows alone stay rows.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from capibara.core import limits
from capibara.core.types import UserError
from capibara.interop.hf.layout.tensors import Tensor
from capibara.interop.peft import fields
from capibara.interop.peft.modules import PARTS
from capibara.interop.peft.variants import Weight
from capibara.models.api import Model, trainable_tokens

OPTION, END = "trainable_token_indices", ".token_adapter.trainable_tokens_delta"
_A, _B = ".lora_embedding_A", ".lora_embedding_B"  # [r, vocabulary] and [embed, r]
EXTRA = (_A, _B, END)  # parts of modules beside those of layers
ROWS = trainable_tokens.NAME
_RENAMED = {"embed_out.weight": "lm_head.weight"}
_TIED_BY_NAME = ("embed_tokens", "lm_head")  # the names that ensure_weight_tying looks for in lists of modules


@dataclasses.dataclass(frozen=True)
class Ends:
    """The embedding and the head of a base.

    Attributes:
      embedding, head: names of the modules in the table.
      names: of modules in the table -> in PEFT's model.
      tied: whether the base has one matrix for both.
    """

    embedding: str
    head: str
    names: Mapping[str, str]
    tied: bool

    def name(self, module: str) -> str:
        return self.names.get(module, module)

    def named(self, key: str) -> str | None:
        """The module that a name in the configuration stands for; None: neither."""
        return next((module for module in (self.embedding, self.head) if self.name(module).endswith(key)), None)


@dataclasses.dataclass(frozen=True)
class Read:
    """What a folder has for the two.

    Attributes:
      tokens: ids of tokens whose rows of the embedding are trained, and of a tied head.
      values: our parameters for them.
      untied: whether a tied base must be untied for the tensors that were added to `stored`.
    """

    tokens: tuple[int, ...] = ()
    values: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    untied: bool = False


def of_rows(rows: Sequence[Tensor], every: Sequence[Tensor], names: Mapping[str, str]) -> Ends:
    """The ends of a model.

    Args:
      rows: the table of the model.
      every: the table of its architecture, with the head.
      names: of modules in the table -> in PEFT's model.
    """
    embedding = next(row for row in rows if row.ours == ("embedding",)).name.removesuffix(".weight")
    head = next((row.name for row in every if row.ours == ("output",)), "").removesuffix(".weight")
    return Ends(embedding, head, names, all(row.ours != ("output",) for row in rows))


def read(
    stored: dict[str, np.ndarray], ends: Ends, config: Mapping[str, Any], size: int, weight: Weight | None, folder: str
) -> Read:
    """Replaces what `stored` has for embedding and head by their matrices, unless it is rows alone.

    Args:
      stored: tensors by their names in the table; changed in place.
      ends: of the base.
      config: of the folder.
      size: embed_dim.
      weight: tensors of the base; None: they are not here.
      folder: for errors.

    Raises:
      UserError: the tensors do not fit, PEFT refuses their combination, or the base is needed and not here.
    """
    rows = _rows(stored, ends, config, size, folder)
    modules = (ends.embedding, ends.head)
    adapted = [module for module in modules if module + _A in stored or module + PARTS["a"] in stored]
    whole = [module for module in modules if f"{module}.weight" in stored]
    if rows and not adapted and not whole and list(rows) == (list(modules) if ends.tied else [ends.embedding]):
        ids, value = rows[ends.embedding]
        if value is rows.get(ends.head, (ids, value))[1]:
            return Read(ids, {ROWS: value})
    if not rows and not adapted and not (whole and ends.tied):
        return Read()  # tensors of the embedding and the head as of any other module
    if rows and (adapted or whole):
        raise UserError(f"{folder} has {OPTION} and more of the embedding or the head: merge it with PEFT first")
    if weight is None:
        field = OPTION if rows else "target_modules" if adapted else "modules_to_save"
        raise UserError(
            f"{folder} has {field} for {(adapted or whole or list(rows))[0]}, which is not read without the base: merge it, "
            "capibara convert --format=hf"
        )
    matrices = _stored(stored, ends, config, weight)
    for module, delta in _deltas(stored, ends, config).items():
        matrices[module] = _sum(stored, module, matrices[module], delta, module == ends.embedding)
    for module, (ids, value) in rows.items():
        matrices[module] = np.array(matrices[module], np.float32)
        matrices[module][list(ids)] = value
    untied = ends.tied and not np.array_equal(matrices[ends.embedding], matrices[ends.head])
    for module, value in matrices.items():
        if untied or not ends.tied or module == ends.embedding:
            stored[f"{module}.weight"] = value
    return Read(untied=untied)


def _rows(
    stored: dict[str, np.ndarray], ends: Ends, config: Mapping[str, Any], size: int, folder: str
) -> dict[str, tuple[tuple[int, ...], np.ndarray]]:
    """The trained rows of each end: their ids, and their values, popped from `stored`."""
    option = config[OPTION]
    of_names = option if isinstance(option, dict) else {ends.name(ends.embedding): option or []}
    ids: dict[str, list[int]] = {}
    for key, of_module in of_names.items():
        module = ends.named(key)
        if module is None or module in ids or len(set(of_module)) < len(of_module):
            raise UserError(
                f"{folder} has {OPTION} = {limits.shortened(option)}, must be tokens of {ends.embedding} or of the head, each "
                "once: merge it with PEFT first"
            )
        ids[module] = of_module
    both = ends.tied and ends.embedding in ids and ids.get(ends.head, ids[ends.embedding]) == ids[ends.embedding]
    if ends.tied and len(ids) > 1 and not both and config["ensure_weight_tying"]:
        raise UserError(
            f"{folder} has {OPTION} = {limits.shortened(option)}, must be the same tokens for both with ensure_weight_tying"
        )
    result = {}
    for module, of_module in {ends.embedding: ids[ends.embedding]}.items() if both else ids.items():
        value = stored.pop(module + END, np.zeros((0, size), np.float32) if not of_module else None)
        if value is None:
            raise UserError(f"{module}{END} is missing in the adapter: copy the adapter again")
        if value.shape != (len(of_module), size):
            shape = [len(of_module), size]
            raise UserError(f"{module}{END} has the shape {list(value.shape)}, must be {shape} in this model")
        if of_module:
            result[module] = tuple(of_module), value
    return result | ({ends.head: result[ends.embedding]} if both and result else {})


def _ties(field: str, ends: Ends, config: Mapping[str, object]) -> bool:
    """Whether PEFT ties what a field adds to the embedding and the head."""
    return ends.tied and ensures(field, config)


def ensures(field: str, config: Mapping[str, Any]) -> bool:
    """Whether ensure_weight_tying holds for what a field names."""
    names = config[field] or ()
    if not config["ensure_weight_tying"]:
        return False
    if isinstance(names, str):
        return any(re.fullmatch(names, name) for name in _TIED_BY_NAME)
    return any(name.rpartition(".")[2] in _TIED_BY_NAME for name in names)


def _stored(
    stored: dict[str, np.ndarray], ends: Ends, config: Mapping[str, object], weight: Weight
) -> dict[str, np.ndarray]:
    """The matrices before adapters, with tensors popped from `stored`."""
    modules = (ends.embedding, ends.head)
    weights = {module: value for module in modules if (value := stored.pop(f"{module}.weight", None)) is not None}
    saved = {module: value for module, value in weights.items() if fields.saves(ends.name(module), config)}
    if _ties("modules_to_save", ends, config) and weights:
        return dict.fromkeys(modules, weights[ends.head if ends.head in weights else ends.embedding])
    based = {module: value for module, value in weights.items() if module not in saved}
    if ends.tied and len(saved) < len(modules):  # the last one that PEFT loads is in both
        base = based.get(ends.head, based.get(ends.embedding))
        base = weight(f"{ends.embedding}.weight") if base is None else base
        return {module: saved.get(module, base) for module in modules}
    return {module: weights[module] if module in weights else weight(f"{module}.weight") for module in modules}


def _deltas(stored: dict[str, np.ndarray], ends: Ends, config: Mapping[str, object]) -> dict[str, np.ndarray]:
    """What the adapters add to each matrix [vocabulary, embed], popped from `stored`."""
    products = {}
    for module, (a, b) in {ends.embedding: (_A, _B), ends.head: (PARTS["a"], PARTS["b"])}.items():
        if module + a in stored:
            product = stored.pop(module + b) @ stored.pop(module + a)
            products[module] = product.T if module == ends.embedding else product
    if products and not _ties("modules_to_save", ends, config) and _ties("target_modules", ends, config):
        product = products[ends.head if ends.head in products else ends.embedding]
        products = {ends.embedding: product, ends.head: product}
    return {module: np.float32(fields.scale_of(ends.name(module), config)) * x for module, x in products.items()}


def _sum(
    stored: dict[str, np.ndarray], module: str, matrix: np.ndarray, delta: np.ndarray, is_embedding: bool
) -> np.ndarray:
    """A matrix [vocabulary, embed] with its adapter; DoRA's magnitudes are those of the columns of an embedding."""
    total = matrix + delta
    magnitude = stored.pop(module + PARTS["magnitude"], None)
    if magnitude is None:
        return total
    lengths = np.linalg.norm(total, axis=0 if is_embedding else 1, keepdims=True)
    return total * (magnitude.reshape(lengths.shape) / lengths)


def read_shared(stored: dict[str, np.ndarray], tied: bool, config: Mapping[str, object], folder: str) -> None:
    """Reads the embedding of an encoder-decoder, which PEFT saves for each of the modules that share it.

    What PEFT has for `shared` alone has no effect, as encoder and decoder look tokens up in modules of their own.

    Args:
      stored: tensors by their names in the table; changed in place.
      tied: whether the head shares it too.
      config: of the folder.
      folder: for errors.

    Raises:
      UserError: not all of them have the same values.
    """
    if config[OPTION]:
        raise UserError(f"{folder} has {OPTION}, which is for decoders: merge it with PEFT first")
    using = [f"{side}.embed_tokens.weight" for side in ("encoder", "decoder")] + (["lm_head.weight"] if tied else [])
    shared = stored.pop("shared.weight", None)
    values = [stored.pop(name, None) for name in using]
    if shared is None and all(value is None for value in values):
        return
    first = values[0]
    if first is None or not all(value is not None and np.array_equal(value, first) for value in values):
        raise UserError(
            f"{folder} has modules_to_save = {limits.shortened(config['modules_to_save'])}, must have one value for "
            f"{', '.join(using)}, as PEFT uses them and not shared.weight: merge it with PEFT first"
        )
    stored["shared.weight"] = first


def sharing(saved: Mapping[str, np.ndarray], model: Model, rows: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """The trained embedding under the names of the modules that share it, so that PEFT gives it to all of them.

    The head of GPT-NeoX is there under both of its names, as transformers 5 has another than 4.

    Args:
      saved: the tensors that were trained in full.
      model: of the run.
      rows: the table of its architecture, with the head.

    Raises:
      UserError: PEFT cannot have it in all of them.
    """
    embedding = next(row.name for row in rows if row.ours == ("embedding",))
    head = next(row.name for row in rows if row.ours == ("output",))
    renamed = {_RENAMED[head]: saved[head]} if head in saved and head in _RENAMED else {}
    if embedding not in saved:
        return renamed
    names = [head, *([_RENAMED[head]] if head in _RENAMED else [])] if "output" not in model.abstract_params else []
    if names and model.config.data_kind == "masked":
        raise UserError(
            "Lora.modules_to_save has embedding, which the head shares, and PEFT gives a masked model's head one of its own: "
            "set EncoderConfig.head = 'separate', or write the merged model"
        )
    if model.config.data_kind == "encoder_decoder":
        stem = embedding.removesuffix("shared.weight")
        names += [f"{stem}{side}.embed_tokens.weight" for side in ("encoder", "decoder")]
    return dict.fromkeys(names, saved[embedding]) | renamed


def written(
    values: Mapping[str, object], rows: Sequence[Tensor], ids: Sequence[int]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The trained rows by their name without PEFT's prefix, and their entry in adapter_config.json."""
    if not ids:
        return {}, {}
    module = next(row for row in rows if row.ours == ("embedding",)).name.removesuffix(".weight")
    return {module + END: np.asarray(values[ROWS], np.float32)}, {OPTION: {module.rpartition(".")[2]: list(ids)}}
