"""Patterns of streaming heads in files: made of trained gates, read by configurations, and exchanged with DuoAttention."""

from __future__ import annotations

import io
import json
import os
from typing import Any

import numpy as np

from capibara.config import configurable
from capibara.core import limits
from capibara.core.types import UserError
from capibara.models.parts.streaming import StreamingHeads

FILE = "streaming_heads.json"
GATES_FILE = "full_attention_heads.tsv"
"""Of the DuoAttention project: gates, one line for each layer, tabs between heads; config.json beside it has the sizes."""


@configurable
def read_streaming_heads(path: str) -> StreamingHeads:
    """The pattern in a file of `capibara prepare streaming_heads`.

    Args:
      path: the file.

    Raises:
      UserError: there is no such file, or it is no pattern.
    """
    values = _json(path)
    if {"heads", "sink_tokens", "recent_window"} - values.keys():
        raise UserError(
            f"{path} must have heads, sink_tokens and recent_window: name a file of `capibara prepare streaming_heads`"
        )
    heads, sizes = values["heads"], (values["sink_tokens"], values["recent_window"])
    rows = isinstance(heads, list) and all(isinstance(row, list) for row in heads)
    if not rows or not all(type(number) is int for number in [*sizes, *(head for row in heads for head in row)]):
        raise UserError(f"{path} must have lists of heads' numbers for each layer, and whole sizes: write it anew")
    try:
        return StreamingHeads(heads=tuple(map(tuple, heads)), sink_tokens=sizes[0], recent_window=sizes[1])
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def written(pattern: StreamingHeads, gates_LK: np.ndarray) -> str:
    """The text of a pattern's file; `gates_LK` are those that it is made of."""
    values: dict[str, Any] = {
        "sink_tokens": pattern.sink_tokens,
        "recent_window": pattern.recent_window,
        "heads": [list(row) for row in pattern.heads or ()],
        "gates": [[None if np.isnan(gate) else round(float(gate), 4) for gate in row] for row in gates_LK],
    }
    return json.dumps(values, allow_nan=False) + "\n"


def written_gates(pattern: StreamingHeads, gates_LK: np.ndarray) -> dict[str, str]:
    """The files of DuoAttention's own form, by name.

    Raises:
      UserError: a head has no gate, which the form cannot say.
    """
    if np.isnan(gates_LK).any():
        layer = int(np.isnan(gates_LK).any(1).argmax())
        raise UserError(
            f"layer {layer} has a window or no attention, and no gates, which --duo_attention needs: leave it out"
        )
    lines = ["\t".join(f"{float(gate):.4f}" for gate in row) for row in gates_LK]
    sizes = {"sink_size": pattern.sink_tokens, "recent_size": pattern.recent_window}
    return {GATES_FILE: "\n".join(lines) + "\n", "config.json": json.dumps(sizes) + "\n"}


def read_gates(path: str) -> tuple[np.ndarray, StreamingHeads]:
    """The gates [L, K] of a folder in DuoAttention's own form, and the sizes that they were trained with.

    Raises:
      UserError: the folder has no such files, or they cannot be read.
    """
    values = _json(os.path.join(path, "config.json"))
    name = os.path.join(path, GATES_FILE)
    try:
        text = limits.read_text(name)
        if not text.strip():
            raise ValueError("it is empty")
        gates_LK = np.loadtxt(io.StringIO(text), dtype=np.float32, delimiter="\t", ndmin=2)
    except (OSError, ValueError) as error:
        raise UserError(f"{name} cannot be read ({limits.cause(error)}): name a folder with {GATES_FILE}") from None
    sink, recent = values.get("sink_size"), values.get("recent_size")
    if type(sink) is not int or type(recent) is not int or not np.isfinite(gates_LK).all():
        raise UserError(f"{path} must have finite gates, and config.json sink_size and recent_size: copy it again")
    return np.clip(gates_LK, 0, 1), StreamingHeads(sink_tokens=sink, recent_window=recent)


def streaming(gates_LK: np.ndarray, *, share: float | None, threshold: float | None) -> tuple[tuple[int, ...], ...]:
    """The streaming heads of each layer.

    Args:
      gates_LK: trained gates; nan for heads that cannot stream.
      share: of all heads with a gate, those that retrieve, with the largest gates; of equal ones the first.
      threshold: in its place, the smallest gate of a head that retrieves.

    Raises:
      UserError: not exactly one of share and threshold is set, or it is not from 0 to 1.
    """
    if (share is None) == (threshold is None):
        raise UserError("exactly one of --share and --threshold is needed: try --share=0.5")
    name, value = ("--share", share) if threshold is None else ("--threshold", threshold)
    if value is None or not 0 <= value <= 1:
        raise UserError(f"{name} is {value}, must be from 0 to 1: try 0.5")
    gated = ~np.isnan(gates_LK)
    if threshold is not None:
        retrieves = gates_LK >= threshold
    else:
        order = np.argsort(-np.where(gated, gates_LK, -np.inf), axis=None, kind="stable")
        retrieves = np.zeros(gates_LK.size, bool)
        retrieves[order[: round(value * int(gated.sum()))]] = True
        retrieves = retrieves.reshape(gates_LK.shape)
    return tuple(tuple(np.flatnonzero(row).tolist()) for row in gated & ~retrieves)


def _json(path: str) -> dict[str, Any]:
    try:
        return limits.read_json(path, limits.SMALL_BYTES)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: name a file of `capibara prepare streaming_heads`") from None
