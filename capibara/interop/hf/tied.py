"""Tensors of a checkpoint that stand for another one: tied heads and embeddings. They are compared, never assumed equal."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from capibara.core.types import UserError
from capibara.interop.hf import families, keys, tables, wrappers
from capibara.interop.hf import values as hf_values
from capibara.interop.hf.layout.family import Kind
from capibara.interop.hf.layout.rows import Cut, Names
from capibara.interop.hf.layout.tensors import Shape
from capibara.interop.hf.values import LAYERS

Read = Callable[[str], np.ndarray]
_DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
_TOLERANCE = 1e-6  # what float32's functions of torch and numpy differ by, relative to a value and to the largest


def with_stored_head(config: Mapping[str, object], stored: Collection[str], read: Read) -> dict[str, Any]:
    """A config.json with the head that a checkpoint's tensors have.

    transformers 5.24 ties two tensors that are both in a checkpoint only if they are equal. Where they differ it keeps
    both, whatever tie_word_embeddings says.

    Args:
      config: contents of config.json.
      stored: names of the checkpoint's tensors.
      read: reads one of them.

    Raises:
      UserError: a tensor differs from the one that it stands for, and the family has no such model.
    """
    text = wrappers.text_part(config)
    model_type = text.get("model_type")
    if not isinstance(model_type, str) or model_type not in families.FAMILIES:
        return dict(config)
    family, names = families.FAMILIES[model_type], wrappers.names(config)
    by_name = {ours: name for name in stored if (ours := names.canonical(name)) is not None}
    todays = {names.todays(name): name for name in stored}
    for alias, target in tables.fixed_aliases(model_type).items():
        if alias in todays and target in by_name and not _equal(todays[alias], by_name[target], read):
            raise UserError(
                f"{todays[alias]} differs from {by_name[target]}, and capibara's {model_type} has one for both, whatever "
                "tie_word_embeddings says: take another model"
            )
    _check_constants(names, todays, {**family.defaults, **keys.canonical(text, family)}, read)
    head, embedding = tables.ends(model_type)
    of_t5 = family.kind == Kind.ENCODER_DECODER  # ties them whatever its config.json says
    if not {head, embedding} <= by_name.keys() or not (of_t5 or families.head(text, family) == "tied"):
        return families.with_head_of(config, stored)
    if _equal(by_name[head], by_name[embedding], read):
        return families.with_head_of(config, set(stored) - {by_name[head]})
    if not of_t5:
        return wrappers.untied(config)
    resolved = families.with_head_of(config, stored)
    if families.head(resolved, family) == "tied":
        raise UserError(
            f"{by_name[head]} differs from {by_name[embedding]}, and config.json has tie_word_embeddings = "
            f"{config.get('tie_word_embeddings', True)}: set it to false for the head as stored, or remove the head"
        )
    return resolved


def _check_constants(names: Names, todays: Mapping[str, str], values: Mapping[str, object], read: Read) -> None:
    """Raises UserError if a stored tensor of what our model computes has other values, up to the rounding of its dtype."""
    constants = {name: of for pattern, of in names.constants.items() for name in todays if re.search(pattern, name)}
    if constants:
        hf_values.check(values)
    for name, constant in constants.items():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        stored = read(todays[name])
        with _config_read():  # sizes first: a table of those in config.json may be larger than memory
            is_computed = stored.shape == constant.shape(values) and _rounded(
                stored, constant.value(values, int(layer[1]) if layer else 0)
            )
        if not is_computed:
            raise UserError(
                f"{todays[name]} has other values than capibara's {values['model_type']} computes: take another model"
            )


def _rounded(stored: np.ndarray, value: np.ndarray) -> bool:
    """Whether a tensor has these values in a dtype of files: its own, or a narrower one in which it was before."""
    stored = stored.astype(np.float32)
    smallest = _TOLERANCE * float(np.abs(value).max())
    for dtype in _DTYPES:
        of = ml_dtypes.finfo(dtype)
        relative, absolute = float(of.eps) / 2 + _TOLERANCE, float(of.smallest_subnormal) / 2 + smallest
        with np.errstate(over="ignore"):
            is_exact = np.array_equal(stored.astype(dtype).astype(np.float32), stored)
        if is_exact and np.allclose(stored, value, relative, absolute):
            return True
    return False


def absent(config: Mapping[str, object], stored: Collection[str]) -> dict[str, np.ndarray]:
    """The tensors that a checkpoint lacks and need not have, with transformers' values of them.

    Args:
      config: contents of config.json.
      stored: names of the checkpoint's tensors.
    """
    names = tables.NAMES.get(str(config.get("model_type")))
    if names is None or not names.absent:
        return {}
    known = {name for name in map(names.canonical, stored) if name is not None}
    modules = {name.rpartition(".")[0] for name in known}
    missing: dict[str, Callable[[Mapping[str, Any]], np.ndarray]] = {}
    for pattern, value in names.absent.items():
        of_layers = [pattern.format(l=layer) for layer in range(LAYERS)] if "{l}" in pattern else [pattern]
        there = of_layers if len(of_layers) == 1 else [name for name in of_layers if name.rpartition(".")[0] in modules]
        missing |= {name: value for name in there if name not in known}
    if not missing:
        return {}
    family = families.FAMILIES[str(config["model_type"])]
    values = {**family.defaults, **keys.canonical(config, family)}
    with _config_read():
        return {name: value(values) for name, value in missing.items()}


@contextlib.contextmanager
def _config_read() -> Iterator[None]:
    """Reports what a config.json, which is not checked yet, cannot be read for."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, MemoryError) as error:
        raise UserError(f"config.json cannot be read ({type(error).__name__}: {error}): copy the file again") from error


def cuts(config: Mapping[str, object], shapes: Callable[[], Mapping[str, Shape]]) -> dict[str, Cut]:
    """The tensors that a checkpoint holds in others, by name.

    Args:
      config: contents of config.json.
      shapes: reads those of the checkpoint's tensors.
    """
    names = tables.NAMES.get(str(config.get("model_type")))
    return {} if names is None or names.cuts is None else names.cuts(shapes())


def _equal(name: str, other: str, read: Read) -> bool:
    return np.array_equal(read(name), read(other))
