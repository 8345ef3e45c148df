"""A line chart in characters: braille dots, eight to a character, with axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

# Bit of the dot in row r (top first), column c of a braille character: Unicode 15, block U+2800.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
MARK = "●"
Values = Sequence[float] | np.ndarray


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten) from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def draw(
    line: tuple[Values, Values],
    marks: tuple[Values, Values] = ((), ()),
    *,
    level: float | None = None,
    width: int = 72,
    height: int = 12,
) -> list[str]:
    """Draws a line of dots, marks on top of it and a dashed level.

    Args:
      line: x (ascending) and y of the line.
      marks: x and y of single points, each one character.
      level: y of a horizontal dashed line; None: none.
      width, height: characters of the area inside the axes.

    Returns:
      The lines of text, top first, including axes and labels; empty if there is nothing to draw.
    """
    xs, ys = np.concatenate([line[0], marks[0]]), np.concatenate([line[1], marks[1]])
    if not len(xs):
        return []
    x_low, x_high = float(xs.min()), float(xs.max())
    y_all = ys if level is None else np.append(ys, level)
    y_low, y_high = float(y_all.min()), float(y_all.max())
    y_low, y_high = (y_low, y_high) if y_high > y_low else (y_low - 0.5, y_high + 0.5)
    x_span = (x_high - x_low) or 1.0

    def column(x: ArrayLike, cells: int) -> np.ndarray:
        return np.round((np.asarray(x, float) - x_low) / x_span * (cells - 1)).astype(int)

    def row(y: ArrayLike, cells: int) -> np.ndarray:
        return np.round((y_high - np.asarray(y, float)) / (y_high - y_low) * (cells - 1)).astype(int)

    dots = np.zeros((height * 4, width * 2), bool)
    if level is not None:
        dashes = np.arange(width * 2)
        dots[row(level, height * 4), dashes[dashes % 8 < 4]] = True
    _line_dots(dots, column(line[0], width * 2), row(line[1], height * 4))
    canvas = _characters(dots)
    for r, c in zip(row(marks[1], height), column(marks[0], width), strict=True):
        canvas[r][c] = MARK
    labels = {int(row(y, height)): f"{y:g}" for y in ticks(y_low, y_high, max(2, height // 3))}
    margin = max(map(len, labels.values()), default=0)
    rows = [
        f"{labels.get(r, ''):>{margin}} {'┤' if r in labels else '│'}{''.join(cells).rstrip()}"
        for r, cells in enumerate(canvas)
    ]
    return [*rows, f"{'':>{margin}} └{'─' * width}", " " * (margin + 2) + _x_labels(x_low, x_high, width, column)]


def _line_dots(dots: np.ndarray, columns: np.ndarray, rows: np.ndarray) -> None:
    """Sets the dots from each point to the next."""
    if len(columns) == 1:
        dots[rows[0], columns[0]] = True
    for c0, r0, c1, r1 in zip(columns[:-1], rows[:-1], columns[1:], rows[1:]):
        count = max(abs(c1 - c0), abs(r1 - r0)) + 1
        dots[np.round(np.linspace(r0, r1, count)).astype(int), np.round(np.linspace(c0, c1, count)).astype(int)] = True


def _characters(dots: np.ndarray) -> list[list[str]]:
    height, width = dots.shape[0] // 4, dots.shape[1] // 2
    bits = (dots.reshape(height, 4, width, 2) * np.array(_DOTS)[None, :, None, :]).sum(axis=(1, 3))
    return [[chr(0x2800 + int(b)) if b else " " for b in cells] for cells in bits]


def _x_labels(low: float, high: float, width: int, column: Callable[[float, int], np.ndarray]) -> str:
    """Labels of the x axis: round numbers, each centred below its tick, as many as fit."""
    text = ""
    for x in ticks(low, high, max(2, width // 10)):
        label = f"{x:,.0f}" if x == round(x) else f"{x:g}"
        start = min(max(0, int(column(x, width)) - len(label) // 2), width - len(label))
        if start >= len(text) + (1 if text else 0):
            text = text.ljust(start) + label
    return text
