"""PEFT's trainable_token_indices: trained rows of the token embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from capibara.core import limits
from capibara.core.types import UserError
from capibara.interop.hf.tensors import Tensor
from capibara.models.api import trainable_tokens

OPTION, END = "trainable_token_indices", ".token_adapter.trainable_tokens_delta"
NAME = trainable_tokens.NAME


def read(
    stored: dict[str, np.ndarray],
    rows: Sequence[Tensor],
    config: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
) -> tuple[tuple[int, ...], dict[str, np.ndarray]]:
    """The tokens and the values of our parameter, popped from `stored`; both empty: there are none.

    Args:
      stored: tensors by the names of the table.
      rows: the table.
      config: adapter_config.json.
      shapes: of the plain model's parameters.

    Raises:
      UserError: the tensor is missing or has another shape, or rows of something else are trained.
    """
    module = next(row for row in rows if row.ours == ("embedding",)).name.removesuffix(".weight")
    ids = _ids(config.get(OPTION), module, "output" not in shapes)
    if not ids:
        return (), {}
    value = stored.pop(module + END, None)
    if value is None:
        raise UserError(f"{module}{END} is missing in the adapter: copy the adapter again")
    expected = (len(ids), shapes["embedding"][1])
    if value.shape != expected:
        raise UserError(f"{module}{END} has the shape {list(value.shape)}, must be {list(expected)} in this model")
    return ids, {NAME: value}


def _ids(option: Any, module: str, tied: bool) -> tuple[int, ...]:
    """The token ids of the embedding."""
    of_modules = option if isinstance(option, dict) else {module: option or []}
    found = [ids for name, ids in of_modules.items() if f".{module}".endswith(f".{name}")]
    # Those of a tied head are the embedding's.
    others = [
        name for name, ids in of_modules.items() if ids not in found or not (tied or f".{module}".endswith(f".{name}"))
    ]
    if others or not all(isinstance(ids, list) for ids in found):
        raise UserError(
            f"{OPTION} is {limits.shortened(option)}, must be tokens of {module} alone: merge it with PEFT first"
        )
    return tuple(found[0]) if found else ()


def written(
    values: Mapping[str, Any], rows: Sequence[Tensor], ids: Sequence[int]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensor by its name without PEFT's prefix, and its entry in adapter_config.json."""
    if not ids:
        return {}, {}
    module = next(row for row in rows if row.ours == ("embedding",)).name.removesuffix(".weight")
    return {module + END: np.asarray(values[NAME], np.float32)}, {OPTION: {module.rpartition(".")[2]: list(ids)}}
