"""The model families that GGUF files can hold, which gguf.catalog declares."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from capibara.core.types import UserError
from capibara.interop.gguf import catalog
from capibara.interop.gguf.layout.family import Family
from capibara.interop.hf import families as hf_families

FAMILIES: list[Family] = [
    family
    for module in pkgutil.iter_modules(catalog.__path__, f"{catalog.__name__}.")
    for family in importlib.import_module(module.name).FAMILIES
]
OWN = frozenset(family.model_type for family in FAMILIES)


def add(family: Family) -> None:
    """Registers a family of your own, whose files can then be written and read: see examples/extend/my_gguf_family.py.

    A file whose metadata fit several families with one architecture is read as the one that was registered first.

    Raises:
      UserError: capibara has a family of that model_type, or interop.hf has none.
    """
    if family.model_type in OWN:
        raise UserError(f"capibara has a GGUF family of model_type {family.model_type!r} already: choose another name")
    if family.model_type not in hf_families.FAMILIES:
        raise UserError(
            f"model_type {family.model_type!r} has no Hugging Face family: register it with capibara.interop.hf.families.add first"
        )
    FAMILIES[:] = [*(known for known in FAMILIES if known.model_type != family.model_type), family]


def of_config(config: Mapping[str, object]) -> Family:
    """The family of a config.json.

    Raises:
      UserError: none is known.
    """
    model_type = config.get("model_type")
    for family in FAMILIES:
        if family.model_type == model_type and (family.applies is None or family.applies(config)):
            return family
    known = ", ".join(dict.fromkeys(family.model_type for family in FAMILIES))
    raise UserError(
        f"model_type {model_type!r} has no GGUF form here, must be one of {known}; docs/extending.md says how to add one"
    )


def of_arch(arch: object, values: Mapping[str, object]) -> Family:
    """The family of a file, by its architecture and the metadata under it: some families share an architecture.

    Raises:
      UserError: none is known.
    """
    known = [family for family in FAMILIES if family.arch == arch]
    result = [family for family in known if family.when and values.get(family.when)]
    others = [family for family in known if not family.when]
    result += [
        family for family in others if all(values.get(key, same) == same for key, same in family.constants.items())
    ]
    result += others
    if not result:
        names = ", ".join(sorted({family.arch for family in FAMILIES}))
        raise UserError(f"general.architecture {arch!r} is not known here, must be one of {names}")
    return result[0]


def tied(config: Mapping[str, Any]) -> bool:
    """Whether the head is tied to the embedding; if config.json does not say, the default of its model_type."""
    return bool(config.get("tie_word_embeddings", hf_families.FAMILIES[config["model_type"]].tied))
