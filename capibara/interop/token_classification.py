"""Writes a model that scores steps as a token classification of transformers: two labels with the logits (0, score)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from capibara.core.types import UserError
from capibara.interop.hf.layout.tensors import Shape

FORMAT = "hf_token_classification"
_WEIGHT, _BIAS = "score.weight", "score.bias"
_LABELS = ("wrong", "right")


def check(shapes: Mapping[str, Shape]) -> None:
    """Raises UserError if a model has logits of tokens, not scores; `shapes`: of its tensors."""
    if _WEIGHT not in shapes:
        raise UserError(f"--format={FORMAT} is for process reward models, and this model has no scores: use hf")


def config_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json, of that of a sequence classification with one label."""
    (name,) = config["architectures"]
    labels = {"id2label": dict(enumerate(_LABELS)), "label2id": {label: i for i, label in enumerate(_LABELS)}}
    return {**config, **labels, "architectures": [name.replace("ForSequenceClassification", "ForTokenClassification")]}


def shapes_of(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Shapes of the tensors, of those of a sequence classification with one label."""
    return {**shapes, _WEIGHT: (len(_LABELS), shapes[_WEIGHT][1]), _BIAS: (len(_LABELS),)}


def tensors_of(tensors: Iterator[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors by their names, of those of a sequence classification with one label."""
    for name, value in tensors:
        if name == _WEIGHT:
            yield name, np.concatenate([np.zeros_like(value), value])
            yield _BIAS, np.zeros(len(_LABELS), value.dtype)
        else:
            yield name, value
