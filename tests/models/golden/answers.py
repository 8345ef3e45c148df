"""Common parts of the scripts that write reference answers: sizes, weights, selected positions, the file format."""

from __future__ import annotations

import json
import pathlib
import zlib
from typing import Any

import numpy as np

VOCAB, ROWS, LENGTH = 96, 2, 24
POSITIONS, ENTRIES = range(2, LENGTH, 3), range(5, VOCAB, 12)


def some(logits: np.ndarray) -> list[list[float]]:
    """The selected ones of a row's logits [LENGTH, VOCAB]."""
    return [[round(float(x), 5) for x in row] for row in logits[np.ix_(POSITIONS, ENTRIES)]]


def write(name: str, head: dict[str, Any], answers: dict[str, Any]) -> None:
    """Writes a JSON file next to this one, a line for each entry."""
    head = head | {"positions": [*POSITIONS], "entries": [*ENTRIES]}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in (head | answers).items()]
    (pathlib.Path(__file__).resolve().parent / name).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor's value without a checkpoint, seeded by its name. Scales of norms and of layers are around 1."""
    values = 0.25 * np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    is_scale = name.endswith("weight") and ("norm" in name or ".ln_" in name) or name.endswith("layer_scalar")
    return np.asarray(values + is_scale, np.float32)


# Ends of the names of tensors of whole numbers -> the key of config.json with how many there are.
NUMBERS = {"tid2eid": "n_routed_experts"}


def drawn(name: str, shape: tuple[int, ...], config: dict[str, Any]) -> np.ndarray:
    """A tensor's value by its name, also of whole numbers."""
    key = next((key for end, key in NUMBERS.items() if name.endswith(end)), None)
    if key is None:
        return draw(name, shape)
    return np.random.default_rng(zlib.crc32(name.encode())).integers(0, config[key], shape)
