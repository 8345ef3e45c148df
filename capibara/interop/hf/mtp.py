"""Modules that predict further tokens, as a folder's tensors have them: config.json alone does not say it.

transformers leaves their tensors out of the folders that it writes, and their number in config.json; published files of
Qwen3-Next have the tensors and not the number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import numpy as np

from capibara.core.types import UserError
from capibara.interop.hf import tables, wrappers
from capibara.interop.hf.families import FAMILIES

Values = Mapping[str, Any]


class ForeignTensors(Protocol):
    """A model's config.json, and its tensors by name."""

    @property
    def config(self) -> dict[str, Any]: ...
    def read(self, name: str) -> np.ndarray: ...


_DEDICATED = "mtp_use_dedicated_embeddings"


def with_stored(config: Values, stored: Collection[str]) -> tuple[dict[str, Any], str | None]:
    """A config.json with the number of modules that are read of a folder, and a line on what is not; None: all are.

    Args:
      config: contents of config.json.
      stored: names of the folder's tensors.
    """
    text = wrappers.text_part(config)
    model_type, layers = text.get("model_type"), text.get("num_hidden_layers")
    names = tables.NAMES.get(str(model_type))
    if names is None or names.mtp is None or not isinstance(layers, int):
        return dict(config), None
    declared = text.get(FAMILIES[str(model_type)].mtp_key)
    todays, first = {names.todays(name) for name in stored}, names.mtp.first_number(layers)
    norm = names.mtp.layer + "input_layernorm.weight"
    count = next(n for n in range(len(stored) + 1) if norm.format(l=first + n) not in todays)
    if not count and declared:
        line = f"config.json has {declared} layers for multi-token prediction, the folder has no tensors of them"
        return wrappers.with_mtp(config, 0), f"{line}: the model is read without them"
    if not count or declared == 0:  # with 0 they are a part that is not read
        return dict(config), None
    if count > names.mtp.most or text.get(_DEDICATED):
        why = f"it has {count}" if count > names.mtp.most else f"config.json has {_DEDICATED} = true"
        line = f"multi-token prediction of a {model_type} has one layer and the model's embeddings here, and {why}"
        return wrappers.with_mtp(config, 0), f"{line}: the model is read without it"
    return wrappers.with_mtp(config, count), None


def copies(config: Values) -> dict[str, str]:
    """Tensors of modules that are copies of the model's: name -> the model's own. A folder need not have them."""
    text = wrappers.text_part(config)
    names, key = tables.NAMES[text["model_type"]].mtp, FAMILIES[text["model_type"]].mtp_key
    if names is None or not (count := text.get(key)):
        return {}
    head, embedding = tables.ends(text["model_type"])
    first, sources = names.first_number(text["num_hidden_layers"]), {"embedding": embedding, "output": head}
    return {pattern.format(l=first + n): sources[ours] for pattern, ours in names.copies.items() for n in range(count)}


def check_copies(foreign: ForeignTensors, stored: Mapping[str, str]) -> None:
    """Compares copies with the model's own tensors, which are read in their place.

    Args:
      foreign: the model.
      stored: the table's names of tensors -> its own.

    Raises:
      UserError: two differ.
    """
    for name, of in copies(foreign.config).items():
        copy, original = stored.get(name), stored.get(of)
        if (
            copy is None
            or original is None
            or copy == original
            or np.array_equal(foreign.read(copy), foreign.read(original))
        ):
            continue
        text = wrappers.text_part(foreign.config)
        raise UserError(
            f"{copy} differs from {original}, and capibara's {text['model_type']} has one for both: set "
            f"{FAMILIES[text['model_type']].mtp_key} = 0 in config.json, which leaves multi-token prediction out"
        )
