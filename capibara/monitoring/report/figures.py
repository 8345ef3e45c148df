"""The curves of a report as SVG, with all runs in one picture."""

from __future__ import annotations

import colorsys
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from capibara.monitoring.report.facts import RunFacts
from capibara.monitoring.summaries.curve import smooth

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
_INK, _FAINT = "#333333", "#999999"
_GOLDEN = 0.618034
_MOST_POINTS, _LEAST_POINTS, _ALL_POINTS = 2000, 300, 8000  # of a curve: more cannot be seen; of all in a picture
_MOST, _MOST_LOG = 1e300, 1e100  # of a value: axes have margins
# Title, metric and scale of each picture; training curves are thin, evaluations have dots.
_PICTURES = (
    ("Loss", "loss", "linear"),
    ("Learning rate", "learning_rate", "linear"),
    ("Gradient norm", "grad_norm", "log"),
    ("Tokens a second", "tokens_per_s", "linear"),
    ("MFU", "mfu", "linear"),
    ("Consensus score", "consensus_score", "linear"),
    ("Router entropy", "router_entropy", "linear"),
)


def colour_of(number: int) -> str:
    """The colour of a run, by its number in the report."""
    if number < len(COLOURS):
        return COLOURS[number]
    red, green, blue = colorsys.hls_to_rgb(number * _GOLDEN % 1, 0.42, 0.6)  # hues that are far from those before
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


# A run's number, steps and values of training, and of evaluations.
_Line = tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def pictures(runs: Sequence[RunFacts]) -> list[tuple[str, str]]:
    """(title, SVG) of the metrics that any of the runs has."""
    result = []
    for title, metric, scale in _PICTURES:
        lines = [(number, *run.points("train", metric), *run.points("eval", metric)) for number, run in enumerate(runs)]
        if any(len(steps) or len(evaluated) for _, steps, _, evaluated, _ in lines):
            result.append((title, _svg(title, scale, lines)))
    return result


def _svg(title: str, scale: str, lines: Sequence[_Line]) -> str:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure(figsize=(7.2, 3.4))
    axes = figure.add_axes((0.1, 0.14, 0.88, 0.82))
    most = min(_MOST_POINTS, max(_LEAST_POINTS, _ALL_POINTS // len(lines)))
    for number, steps, values, evaluated, of_evaluations in lines:
        colour = colour_of(number)
        if len(steps):
            x, y = steps.astype(float), np.clip(values, -_MOST, _MOST)
            dot = "o" if len(x) == 1 else None  # a line of one point cannot be seen
            retained = _thinned(y, most)
            even = np.unique(np.linspace(0, len(x) - 1, most).astype(int))
            axes.plot(x[retained], y[retained], color=colour, alpha=0.25, linewidth=0.7)
            axes.plot(x[even], smooth(y)[even], color=colour, linewidth=1.6, marker=dot, markersize=4)
        if len(evaluated):
            y = np.clip(of_evaluations, -_MOST, _MOST)
            axes.plot(evaluated, y, color=colour, linewidth=1, marker="o", markersize=4, linestyle="--")
    shown = np.concatenate([values for _, _, *both in lines for values in (both[0], both[2])])
    if scale == "log" and 1 / _MOST_LOG < shown.min() <= shown.max() < _MOST_LOG:
        axes.set_yscale("log")
    _styled(axes)
    axes.set_xlabel("step", color=_INK, fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    # Text as text, and no ids of chance: the same runs make the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = out.getvalue()
    return text[text.index("<svg") :]


def _styled(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
    axes.tick_params(colors=_INK, labelsize=8.5, length=3, color=_FAINT, which="both")
    axes.grid(axis="y", color=_FAINT, alpha=0.25, linewidth=0.7)
    axes.margins(x=0.01, y=0.06)


def _thinned(y: np.ndarray, most: int) -> np.ndarray:
    """Indices of at most so many points: of each part the lowest and the highest value, so that spikes are seen."""
    if len(y) <= most:
        return np.arange(len(y))
    parts = np.array_split(np.arange(len(y)), most // 2)
    return np.unique([index for part in parts for index in (part[np.argmin(y[part])], part[np.argmax(y[part])])])
