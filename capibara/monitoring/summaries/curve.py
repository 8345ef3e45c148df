"""The loss curve of a run: a PNG in the run folder and a small chart in the terminal, from metrics.jsonl."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.monitoring.metrics_file.loggers import folder_error
from capibara.monitoring.reading.run import start_value
from capibara.monitoring.reading.tables import View
from capibara.monitoring.reading.whole import whole
from capibara.monitoring.summaries import chart
from capibara.monitoring.summaries.progress import make_console, quantity
from capibara.storage import outputs
from capibara.training.base.callbacks import Callback, RunInfo

if TYPE_CHECKING:
    from rich.console import Console

CURVE_FILE = "loss_curve.png"
_REWARDS = ("reward", "reward_margin")  # of objectives whose loss is no cross entropy

_TRAIN, _EVAL, _INK, _FAINT = "#4a6fa5", "#c8553d", "#333333", "#8a8a8a"
_TERMINAL_TRAIN, _TERMINAL_EVAL = "cyan", "red"  # named colours follow the terminal's own palette


@configurable
class LossCurve(Callback):
    """Draws loss_curve.png and a terminal chart when a run ends; put it after MetricsFile, whose file it reads.

    Args:
      baseline_bits_per_byte: a dashed line, if evaluations report bits per byte; None: their `unigram_bits_per_byte`.
      baseline_label: the line's label.
      terminal: whether to print the chart.
      console: where to print it; None: standard output.
    """

    def __init__(
        self,
        *,
        baseline_bits_per_byte: float | None = None,
        baseline_label: str = "unigram",
        terminal: bool = True,
        console: Console | None = None,
    ):
        if baseline_bits_per_byte is not None and not baseline_bits_per_byte > 0:
            raise UserError(
                f"LossCurve.baseline_bits_per_byte is {baseline_bits_per_byte}, must be above 0, or None for none"
            )
        self._baseline, self._label = baseline_bits_per_byte, baseline_label
        self._terminal, self._console = terminal, console
        self._model_dir = ""

    def on_train_begin(self, run: RunInfo) -> None:
        self._model_dir = run.model_dir
        path = os.path.join(run.model_dir, CURVE_FILE)
        if os.path.isdir(path):  # raise now, not after the last step
            raise folder_error(path)

    def on_train_end(self, step: int, reason: str) -> None:
        curves = read_curves(self._model_dir, self._baseline, self._label)
        if not len(curves.train_steps) and not len(curves.eval_steps):
            return
        save_png(curves, os.path.join(self._model_dir, CURVE_FILE))
        if self._terminal:
            print_chart(curves, self._console or make_console())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curves:
    """Data of the chart: finite losses by step, usually in nats per token, and numbers for the title.

    Attributes:
      train_steps, train_loss, eval_steps, eval_loss: [points] each.
      bits_per_byte: of the last evaluation; None: unknown.
      bits_per_nat: bits per byte on the validation text for a loss of one nat per token; None: unknown.
      baseline: loss of the baseline in nats per token; None: none.
      baseline_label: label of the baseline.
      resumed: steps at which the run resumed.
      param_count, tokens: parameters of the model, tokens trained on so far; None: not in the file.
      unit: the end of the loss's label; empty for a loss that is not a cross entropy.
    """

    train_steps: np.ndarray
    train_loss: np.ndarray
    eval_steps: np.ndarray
    eval_loss: np.ndarray
    bits_per_byte: float | None = None
    bits_per_nat: float | None = None
    baseline: float | None = None
    baseline_label: str = ""
    resumed: tuple[int, ...] = ()
    param_count: int | None = None
    tokens: int | None = None
    unit: str = ", nats per token"


def read_curves(folder: str, baseline_bits_per_byte: float | None = None, baseline_label: str = "unigram") -> Curves:
    """Reads the curves of a run folder, over all its starts, from its metrics.jsonl.

    Raises:
      UserError: the file does not exist.
    """
    try:
        run = whole(folder)
    except UserError as error:
        raise UserError(f"{error}; a loss curve needs MetricsFile() among the callbacks, before LossCurve()") from None
    train_steps, train_loss = run.view("train").points("loss")
    eval_steps, eval_loss = run.view("eval").points("loss")
    last = _last_in_bytes(run.view("eval"))
    bits_per_nat = last["bits_per_byte"] / last["loss"] if last else None
    baseline = baseline_bits_per_byte or last.get("unigram_bits_per_byte")
    final_step = max([*train_steps[-1:].tolist(), *eval_steps[-1:].tolist()], default=0)
    tokens, param_count = start_value(run, "tokens_per_step"), start_value(run, "param_count")
    is_rewarded = any(name in table.view().columns for table in run.tables.values() for name in _REWARDS)
    return Curves(
        unit="" if is_rewarded else Curves.unit,
        train_steps=train_steps,
        train_loss=train_loss,
        eval_steps=eval_steps,
        eval_loss=eval_loss,
        bits_per_byte=last.get("bits_per_byte"),
        bits_per_nat=bits_per_nat,
        baseline=baseline / bits_per_nat if baseline and bits_per_nat else None,
        baseline_label=baseline_label,
        resumed=run.attempts.resumed,
        param_count=None if param_count is None else int(param_count),
        tokens=int(tokens * final_step) if tokens else None,
    )


def _last_in_bytes(evaluations: View) -> dict[str, float]:
    """The newest evaluation with a loss and bits per byte: its finite metrics; empty: there is none."""
    columns = evaluations.columns
    if not {"loss", "bits_per_byte"} <= columns.keys():
        return {}
    loss, bits = columns["loss"], columns["bits_per_byte"]
    result = np.flatnonzero(np.isfinite(loss) & np.isfinite(bits) & (loss != 0) & (bits != 0))
    if not len(result):
        return {}
    return {name: float(column[result[-1]]) for name, column in columns.items() if np.isfinite(column[result[-1]])}


def smooth(values: np.ndarray) -> np.ndarray:
    """Centred running mean over about 5% of the points; the window narrows towards both ends to avoid a lag."""
    count = len(values)
    index = np.arange(count)
    half = np.minimum(count // 40, np.minimum(index, count - 1 - index))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[index + half + 1] - sums[index - half]) / (2 * half + 1)


def save_png(curves: Curves, path: str) -> None:
    """Writes the curves to a PNG file atomically.

    Raises:
      UserError: `path` is a folder.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture = io.BytesIO()
    FigureCanvasAgg(_figure(curves)).print_png(picture)
    try:
        outputs.replace(path, picture.getvalue())
    except IsADirectoryError as error:
        raise folder_error(error.filename2 or error.filename) from None


def print_chart(curves: Curves, console: Console) -> None:
    """Prints the curves as a chart of characters."""
    from rich.text import Text

    width = max(20, min(72, console.width - 14))
    train = (curves.train_steps, smooth(curves.train_loss))
    rows = chart.draw(train, (curves.eval_steps, curves.eval_loss), level=curves.baseline, width=width)
    legend = Text.assemble(f"loss{curves.unit}:  ", ("⠤⠤ training", _TERMINAL_TRAIN))
    if len(curves.eval_loss):
        legend.append("  ").append(f"{chart.MARK} validation", _TERMINAL_EVAL)
    if curves.baseline is not None:
        legend.append(f"  ⠒ ⠒ {curves.baseline_label}")
    console.print(legend)
    rows[-1] = f"{rows[-1]:<{len(rows[-2])}} step"
    for row in rows:
        text = Text(row, no_wrap=True)
        text.highlight_regex(chart.MARK, _TERMINAL_EVAL)
        text.highlight_regex("[⠁-⣿]+", _TERMINAL_TRAIN)
        console.print(text)
    if curves.bits_per_byte is not None:
        line = f"validation: {curves.bits_per_byte:.4f} bits per byte"
        if curves.baseline is not None and curves.bits_per_nat is not None:
            line += f" ({curves.baseline_label}: {curves.baseline * curves.bits_per_nat:.4f})"
        console.print(Text(line))


def _figure(curves: Curves) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure(figsize=(9, 5), dpi=150, facecolor="white")
    axes = figure.add_axes((0.075, 0.12, 0.735, 0.72))
    _draw_lines(axes, curves)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
    axes.tick_params(colors=_INK, labelsize=9.5, length=3, color=_FAINT)
    axes.grid(axis="y", color="#000000", alpha=0.07, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.set_xlabel("step", color=_INK, fontsize=10)
    axes.margins(x=0, y=0.06)
    left = min([*curves.train_steps[:1], *curves.eval_steps[:1]])
    right = axes.get_xlim()[1]
    left = 0 if left <= 0.1 * right else left
    axes.set_xlim(left, max(right, left + 1))  # a single point after a resumption has no extent
    _label_ends(axes, curves)
    figure.text(0.075, 0.93, f"Loss{curves.unit}", fontsize=13, color=_INK, weight="bold", va="center")
    figure.text(0.075, 0.878, _subtitle(curves), fontsize=9.5, color=_FAINT, va="center")
    return figure


def _draw_lines(axes: Any, curves: Curves) -> None:
    if len(curves.train_steps):
        axes.plot(curves.train_steps, curves.train_loss, color=_TRAIN, alpha=0.3, linewidth=0.7)
        axes.plot(curves.train_steps, smooth(curves.train_loss), color=_TRAIN, linewidth=1.8, solid_capstyle="round")
    if len(curves.eval_steps):
        style = dict(marker="o", markersize=4.5, markeredgecolor="white", markeredgewidth=0.8)
        axes.plot(curves.eval_steps, curves.eval_loss, color=_EVAL, linewidth=1.2, clip_on=False, zorder=4, **style)
    if curves.baseline is not None:
        axes.axhline(curves.baseline, color=_FAINT, linewidth=1.1, dashes=(5, 4))
    for step in curves.resumed:
        axes.axvline(step, color=_FAINT, linewidth=0.8, alpha=0.7, dashes=(1, 2))
        offset = dict(xytext=(3, -2), textcoords="offset points", va="top")
        axes.annotate("resumed", (step, 1), xycoords=("data", "axes fraction"), fontsize=8, color=_FAINT, **offset)


def _label_ends(axes: Any, curves: Curves) -> None:
    """Labels each line at its right end, in its colour; labels that would overlap are moved apart."""
    labels: list[tuple[float, str, str]] = []
    if len(curves.eval_loss):
        labels.append((curves.eval_loss[-1], f"validation {curves.eval_loss[-1]:.3f}", _EVAL))
    if len(curves.train_loss):
        end = smooth(curves.train_loss)[-1]
        labels.append((end, f"training {end:.3f}", _TRAIN))
    if curves.baseline is not None:
        labels.append((curves.baseline, f"{curves.baseline_label} {curves.baseline:.3f}", _INK))
    low, high = axes.get_ylim()
    heights = spread([(y - low) / (high - low) for y, _, _ in labels], gap=0.05)
    for height, (_, text, colour) in zip(heights, labels, strict=True):
        axes.annotate(
            text, (1, height), xycoords="axes fraction", xytext=(8, 0), textcoords="offset points", color=colour,
            fontsize=10, va="center", annotation_clip=False,
        )  # fmt: skip


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Moves heights apart to at least `gap`; overlapping ones stay centred as a group. Keeps their order."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    groups: list[list[int]] = []
    centre = lambda group: sum(heights[i] for i in group) / len(group)
    for i in order:
        groups.append([i])
        while len(groups) > 1:
            below, above = groups[-2], groups[-1]
            if centre(above) - centre(below) >= gap * (len(above) + len(below)) / 2:
                break
            groups[-2:] = [below + above]
    result = [0.0] * len(heights)
    for group in groups:
        for rank, i in enumerate(group):
            result[i] = centre(group) + gap * (rank - (len(group) - 1) / 2)
    return result


def _subtitle(curves: Curves) -> str:
    parts = []
    if curves.param_count:
        parts.append(f"{quantity(curves.param_count)} parameters")
    if curves.tokens:
        parts.append(f"{quantity(curves.tokens)} tokens read")
    if curves.bits_per_byte is not None:
        text = f"validation {curves.bits_per_byte:.3f} bits per byte"
        if curves.baseline is not None and curves.bits_per_nat is not None:
            text += f" ({curves.baseline_label} {curves.baseline * curves.bits_per_nat:.3f})"
        parts.append(text)
    return "   ·   ".join(parts)
